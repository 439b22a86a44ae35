"""One budget for the trees of all lanes: against brute force over every way to split it, and the texts it must keep."""

from collections.abc import Sequence

import numpy as np
import pytest
from conftest import TableDrafter, TableTarget, hashed_laws, written_laws
from hypothesis import given
from hypothesis import strategies as st
from policies.test_policies import brute_force
from tiny_models import VOCAB, prompt, tiny, tiny_drafter

from opt_tree.core.sampling import Sampling
from opt_tree.core.tree import Tree
from opt_tree.decoding.decoder import Decoder
from opt_tree.decoding.draft import draft
from opt_tree.drafters import CausalLMDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.policies import OptTree, Shared


def trees_of(policy: Shared, laws: Sequence, context: list[int], vocab: int = 3) -> list[Tree]:
    """Draft one step in as many lanes as there are laws, each by its own; side by side, as `generate_batch` does."""
    decoder = Decoder(TableTarget(laws[0], vocab), TableDrafter(laws[0]), policy)
    jobs = [lambda own, law=law: draft(TableDrafter(law), policy, context, policy.max_depth) for law in laws]
    found = dict(decoder.side_by_side(jobs, len(jobs)))
    return [found[lane] for lane in range(len(jobs))]


@given(st.integers(0, 10_000), st.sampled_from([None, 2, 3]), st.integers(1, 2), st.integers(2, 3))
def test_trees_are_jointly_the_best_for_their_budget(seed, cells, nodes, lanes):
    """With ties, zero probabilities and drafters that are sure of everything, too."""
    laws = [hashed_laws(seed + lane, 3, cells) for lane in range(lanes)]
    policy = Shared(nodes, max_depth=nodes * lanes)
    trees = trees_of(policy, laws, [0, 1])
    values = [[brute_force(law, budget, policy.max_depth) for budget in range(nodes * lanes + 1)] for law in laws]
    best = values[0]
    for other in values[1:]:  # of the lanes so far, by their common budget
        best = [max(best[k] + other[n - k] for k in range(n + 1)) for n in range(len(best))]
    assert sum(tree.expected_accepted for tree in trees) == pytest.approx(best[-1], abs=1e-12)
    assert sum(tree.nodes for tree in trees) <= nodes * lanes


def test_a_lane_whose_drafter_knows_nothing_gets_no_tree():
    sure, unsure = written_laws({(): (0.9, 0.06, 0.04)}), written_laws({(): (0.4, 0.3, 0.3)})
    trees = trees_of(Shared(2, max_depth=4), [sure, unsure], [0])
    assert [tree.nodes for tree in trees] == [4, 0] and trees[0].depths.max() == 4
    trees = trees_of(Shared(2, max_depth=4, most=3), [sure, unsure], [0])
    assert [tree.nodes for tree in trees] == [3, 1]


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([0.0, 0.2]))
def test_alone_it_is_opt_tree(seed, nodes, threshold):
    drafter = TableDrafter(hashed_laws(seed, 4))
    ours = draft(drafter, Shared(nodes, threshold, 5), [0, 1], 5)
    tree = draft(drafter, OptTree(nodes, threshold, 5), [0, 1], 5)
    assert np.array_equal(ours.tokens, tree.tokens) and np.array_equal(ours.parents, tree.parents)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_the_prompts_alone(temperature):
    """Lanes end at different steps, and others begin in them; each round has as many lanes as are there."""
    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), VOCAB)
    decoder = Decoder(CausalLM(tiny("llama")), drafter, Shared(4, 0.05, 5))
    prompts, sampling = [prompt(length, seed=length) for length in (1, 30, 11, 5)], Sampling(temperature)
    many = decoder.generate_batch(prompts, 3, 8, sampling, seed=range(4))
    assert [one.tokens for one in many] == [
        decoder.generate(ids, 8, sampling, seed=seed).tokens for seed, ids in enumerate(prompts)
    ]
    assert len({step.tree.nodes for one in many for step in one.steps}) > 2


def test_bad_numbers_are_refused():
    for bad in ({"nodes": 0}, {"nodes": 9, "most": 8}, {"max_depth": 0}, {"threshold": float("nan")}):
        with pytest.raises(ValueError):
            Shared(**bad)
