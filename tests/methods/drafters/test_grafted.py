"""A model above and a table below: who answers for what, and that the model's cache holds its own rows only."""

import warnings

import numpy as np
import pytest
import torch
from asking import begin, below, root_of, tiny_lm_drafter
from methods.drafters.test_ngram import probs_of
from table_models import TableDrafter, TableTarget, hashed_laws, written_laws
from tiny_models import prompt, tiny, tiny_head

from opt_tree import Decoder, OptTree, Static, generate_batch
from opt_tree.children import LogProbs, TopK
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.combined.copying import Copying
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.combined.rasd import BothTrees, ExpandedRows, Rasd
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.tables.lookup import Lookup
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.methods.drafters.tables.recycling import TokenRecycling
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.sampling import Sampling
from opt_tree.models.causal_lm import CausalLM
from opt_tree.pool import CandidatePool
from opt_tree.tools.presets import PRESETS


class Fixed(Lookup):
    """A table that names the same tokens behind every tail, and remembers what it was asked."""

    def __init__(self, probs: dict[int, float], order: int = 3) -> None:
        super().__init__(order)
        self.probs, self.asked, self.calls = probs, [], []

    def law(self, tail):
        self.asked.append(tail)
        return self.probs

    def begin(self, prompt, kept, prefill, sampling):
        self.calls.append("begin")

    def accept(self, outcome):
        self.calls.append(outcome.tree.draft_rows.tolist())


class Spy(TableDrafter):
    """Remembers the frontiers and the outcomes that it was shown."""

    def begin(self, *text):
        super().begin(*text)
        self.frontiers, self.outcomes = [], []

    def expand(self, frontier):
        self.frontiers.append(frontier)
        return super().expand(frontier)

    def accept(self, outcome):
        self.outcomes.append(outcome)
        super().accept(outcome)


def step_of(drafter, policy, laws=None, vocab=5):
    target = TableTarget(laws or hashed_laws(1, vocab), vocab)
    return next(Decoder(target, drafter, policy).steps([0, 1, 2], 9))


class TestWhoAnswers:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_the_model_for_the_first_layers_and_the_table_below(self, depth):
        model, table = TableDrafter(hashed_laws(2, 5)), Fixed({3: 0.6, 4: 0.3})
        step = step_of(Grafted(model, table, depth), Static.kary(2, 4))
        assert step.draft_forwards == depth == model.forwards
        assert [len(layer[0]) for layer in model.expanded] == list(range(1, depth))
        tree = step.tree
        assert tree.depths.max() == 4
        for row in range(1, len(tree)):
            if tree.depths[row] > depth:
                assert tree.tokens[row] in (3, 4)
                own = np.exp(tree.path_log_probs[row] - tree.path_log_probs[tree.parents[row]])
                assert own == pytest.approx({3: 0.6, 4: 0.3}[tree.tokens[row]])

    def test_the_table_is_asked_by_the_text_and_the_path(self):
        table = Fixed({3: 0.6})
        tree = step_of(Grafted(TableDrafter(hashed_laws(2, 5)), table, 2), Static.chain(4)).tree
        one, two, three = tree.tokens[1:4].tolist()
        assert table.asked == [(2, one, two), (one, two, three)]

    def test_both_begin_and_both_learn(self):
        model, table = Spy(hashed_laws(2, 5)), Fixed({3: 0.6})
        step = step_of(Grafted(model, table, 1), Static.chain(3))
        assert table.calls == ["begin", step.tree.draft_rows.tolist()]
        assert [outcome.tokens for outcome in model.outcomes] == [step.tokens]
        assert step.tree.draft_rows.tolist() == [0, 1, 2, -1]
        assert model.outcomes[0].tree.draft_rows.tolist() == [0, -1, -1, -1]

    def test_no_layer_for_the_model_and_no_top_are_refused(self):
        with pytest.raises(ValueError, match="got top 0"):
            Rasd(TableDrafter(hashed_laws(2, 5)), NGramDrafter(), 0)
        with pytest.raises(ValueError, match="at least one layer, got depth 0"):
            Grafted(TableDrafter(hashed_laws(2, 5)), NGramDrafter(), 0)

    def test_wants_what_either_wants(self):
        model, table = TableDrafter(hashed_laws(2, 5)), TokenRecycling(5)
        model.features, model.max_context = (-1,), 40
        for drafter in (Grafted(model, table), Rasd(model, table)):
            assert (drafter.features, drafter.reads_logits, drafter.max_context) == ((-1,), True, 40)

    def test_the_model_is_calibrated_at_temperature_0_only(self):
        model, table = TableDrafter(hashed_laws(2, 5)), NGramDrafter()
        for drafter in (Grafted(model.calibrated(0.5), table, 2), Rasd(model.calibrated(0.5), table, 3)):
            for temperature, scale in ((0.0, 2.0), (0.7, 1.0)):
                begin(drafter, [0], sampling=Sampling(temperature))
                assert model.scale == scale

    def test_says_what_drafts_where(self):
        model, table = TableDrafter(hashed_laws(2, 5)), NGramDrafter()
        said = [Grafted(model, table, depth).describe() for depth in (1, 2)]
        assert " for 1 layer, " in said[0] and " for 2 layers, " in said[1]


class TestRasd:
    def fused(self, model_law, found, top=10):
        """The fused answer behind the root, and the drafter."""
        drafter = Rasd(TableDrafter(written_laws({(): model_law})), Fixed(found), top)
        begin(drafter, [0], None)
        return probs_of(root_of(drafter, [0]))[0], drafter

    def test_branches_that_the_model_does_not_begin_with_are_pruned(self):
        law = (0.5, 0.3, 0.1, 0.06, 0.04)
        answer, drafter = self.fused(law, {1: 0.7, 4: 0.3}, top=2)
        assert answer == pytest.approx(dict(enumerate(law)))
        assert drafter._retrieved == [{1: 0.7}], "4 is pruned, 1 goes on"

    def test_both_trees_are_merged(self):
        """The model proposes 0 and 1. Both stay its own, also 1, which the retrieval thinks more of."""
        law = (0.5, 0.3, 0.1, 0.06, 0.04)
        _, drafter = self.fused(law, {1: 0.7, 3: 0.2}, top=2)
        alone, merged = dict(enumerate(law)), {0: 0.5, 1: 0.3, 2: 0.1, 3: 0.2, 4: 0.04}
        pool = CandidatePool(0, TopK(per_node=5))
        begin(drafter, [0], None)
        pool.add(root_of(drafter, [0]))
        found = below(drafter, pool.frontier(np.array([row_of(pool, path) for path in ((0,), (1,), (2,))])))
        assert drafter.drafter.expanded[-1] == [(0,), (1,), (2,)]
        # Nothing that was retrieved goes on below 0 and 2. Below 1 the branch does, with 3 beside the model's own.
        assert probs_of(found) == [pytest.approx(expected) for expected in (alone, merged, alone)]
        pool.add(found)
        found = below(drafter, pool.frontier(np.array([row_of(pool, path) for path in ((1, 1), (1, 3))])))
        assert drafter.drafter.expanded[-1] == [(1, 1)], "3 hangs there at no forward"
        assert probs_of(found) == [pytest.approx(expected) for expected in (merged, {1: 0.7, 3: 0.2})]


class TestBothTrees:
    """Model laws over five tokens and a table, so that both trees can be told by hand or from `Eagle2` alone."""

    def test_the_models_tree_and_the_branches_are_verified_whole(self):
        """The table's four most frequent paths behind 4, by hand: 4 (.5), 4 4 (.25), 4 4 4 (.125), 4 3 (.1)."""
        laws, rule = written_laws({(): (0.4, 0.3, 0.05, 0.1, 0.15), (4,): (0.6, 0.4, 0, 0, 0)}), Eagle2(3, 2, 8)
        model = Rasd(TableDrafter(laws), Fixed({4: 0.5, 3: 0.2}), rule.top_k, rule.max_depth)
        step = step_of(model, BothTrees(model, rule.nodes, retrieved=4, width=rule.top_k, longest=5), laws)
        alone = step_of(TableDrafter(laws), rule, laws)
        fused, own = (set(paths_of(one.tree)) for one in (step, alone))
        assert fused == own | {(4,), (4, 4), (4, 4, 4), (4, 3)} and len(own) == 8, "3 is pruned behind the root"
        assert step.draft_forwards == alone.draft_forwards == 3, "what is retrieved costs no forward"

    def test_no_branch_leaves_the_models_tree_as_it_is(self):
        laws, rule = hashed_laws(2, 5), Eagle2(3, 2, 8)
        model = Rasd(TableDrafter(laws), Fixed({}), 3, rule.max_depth)
        step = step_of(model, BothTrees(model, rule.nodes, width=rule.top_k))
        assert paths_of(step.tree) == paths_of(step_of(TableDrafter(laws), rule).tree)

    def test_branches_go_on_below_the_models_layers_and_end_where_they_are_long(self):
        laws = written_laws({(): (0.4, 0.3, 0.15, 0.1, 0.05)})
        model = Rasd(TableDrafter(laws), Fixed({4: 0.9}), 5, 2)
        step = step_of(model, BothTrees(model, 2, width=2, longest=6), laws)
        assert (4,) * 6 in paths_of(step.tree) and step.tree.depths.max() == 6 and step.draft_forwards == 2
        short = step_of(model, BothTrees(model, 2, retrieved=3, width=2), laws)
        assert max(map(len, paths_of(short.tree))) == 3

    def test_sizes_that_are_none_are_refused(self):
        model = Rasd(TableDrafter(hashed_laws(2, 5)), NGramDrafter())
        with pytest.raises(ValueError, match="nodes must be at least 1, got 0"):
            BothTrees(model, 0)
        with pytest.raises(ValueError, match="at least one layer, got depth 0"):
            Rasd(model.drafter, NGramDrafter(), depth=0)

    @pytest.mark.slow
    def test_the_text_is_plain_decodings_also_beside_others(self):
        target, inner = CausalLM(tiny("llama")), tiny_lm_drafter()
        decoder = PRESETS["rasd"].make(target, inner)
        prompts = [prompt(8) * 3, prompt(5)]
        expected = [Decoder(target, None, Static.empty()).generate(one, 30).tokens for one in prompts]
        assert [decoder.generate(one, 30).tokens for one in prompts] == expected
        assert [one.tokens for one in generate_batch(decoder, prompts, 30, width=2)] == expected


def paths_of(tree):
    """The paths of a tree's nodes, as tokens."""
    return sorted(tuple(tree.tokens[tree.path_to(row)][1:].tolist()) for row in range(1, len(tree)))


def row_of(pool, path):
    """The place of a path of tokens in a pool."""
    row = 0
    for token in path:
        (row,) = np.flatnonzero((pool.parents == row) & (pool.tokens == token))
    return int(row)


POLICIES = {"opt": OptTree(12, 0.0, 6), "eagle2": Eagle2(12, 4, 5)}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_models_cache_is_what_a_fresh_one_would_be(policy, monkeypatch):
    """Accepted rows that it ran are kept, the others are run anew: every root is answered as from a fresh prefill."""
    target, inner = CausalLM(tiny("llama")), CausalLMDrafter(CausalLM(tiny("llama")))  # long paths are accepted
    model, read, checked = CausalLM(tiny("llama")), inner.read, []
    root, asked = inner.root, []

    def noted(context):
        asked.append(list(context))
        return root(context)

    def compared(output):
        if asked:
            context = asked.pop()
            model.reset()
            assert torch.allclose(output.logits, model.append(context).logits, atol=1e-9)
            checked.append(len(context))
        return read(output)

    monkeypatch.setattr(inner, "root", noted)
    monkeypatch.setattr(inner, "read", compared)
    decoder = Decoder(target, Grafted(inner, NGramDrafter(), 2), POLICIES[policy])
    result = decoder.generate(prompt(8) * 3, 30)
    assert len(checked) >= len(result.steps) - 1 and result.mean_acceptance_length > 2


def test_a_frontier_is_described_to_the_model_as_it_would_have_met_it():
    """The pool's own numbering, if only the model's nodes had ever been expanded: the even tokens are the model's."""
    full, alone, rows = CandidatePool(0, TopK(per_node=4)), CandidatePool(0, TopK(per_node=2)), ExpandedRows()
    even, every = torch.tensor([[0.3, 0.0, 0.2, 0.0]]).log(), torch.tensor([[0.3, 0.1, 0.2, 0.05]]).log()
    full.add(LogProbs(every))
    alone.add(LogProbs(even))
    for layer in range(3):
        newest, known = full.newest, alone.newest
        frontier = full.frontier(newest)
        parents = np.array([all(full.tokens[node] % 2 == 0 for node in lineage(full, row)) for row in newest])
        expected = alone.frontier(known)
        taken = rows.take(frontier, parents)
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(taken, expected, strict=True))
        assert len(taken.tokens) == 2 ** (layer + 1)
        full.add(LogProbs(every.expand(len(newest), -1)))
        alone.add(LogProbs(even.expand(len(known), -1)))


def lineage(pool, row):
    """A candidate and what is above it, the root apart."""
    while row > 0:
        yield row
        row = pool.parents[row]


@pytest.mark.quick("Rasd-False-24")
@pytest.mark.parametrize(
    ("join", "head", "length"),
    [
        (join, head, (15, 24, 40)[(place + head) % 3])
        for place, join in enumerate((Grafted, Rasd, lambda model, _: Copying(model)))
        for head in (False, True)
    ],
)
def test_behind_the_model_s_last_position_the_table_goes_on(join, head, length):
    """With one warning, and the text of plain decoding; a shorter prompt has the model back."""
    target = CausalLM(tiny("llama"))
    if head:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}  # another head drafts on
        model = EagleDrafter(tiny_head(target.model, max_position_embeddings=24, rope_parameters=rope), target)
    else:
        model = tiny_lm_drafter()
        model.max_context = 24
    decoder = Decoder(target, join(model, Fixed({7: 0.6, 8: 0.2})), OptTree(6, 0.0, 3))
    if join not in (Grafted, Rasd):
        decoder.drafter.text.law = lambda tail: {7: 0.6, 8: 0.2}
    for _ in range(2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            result = decoder.generate(prompt(length), 20)
        assert [str(one.message).partition(": behind the former ")[2] for one in told] == ["the table drafts alone"]
        model.ended = False
        assert result.tokens == Decoder(target, None, Static.empty()).generate(prompt(length), 20).tokens
        begin = length
        for step in result.steps[:-4]:
            assert step.tree.nodes > 0 and (step.draft_forwards > 0) == (begin < 24)
            begin += len(step.tokens)
        assert begin > 24
    assert decoder.generate(prompt(5), 5).steps[0].draft_forwards > 0


@pytest.mark.slow
def test_a_drafter_s_end_is_told_once_and_only_where_it_matters():
    target = CausalLM(tiny("llama"))
    decoder = Decoder(target, tiny_lm_drafter(), OptTree(6, 0.0, 3))
    decoder.drafter.max_context = 24
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            decoder.generate(prompt(15), 20)
    (one,) = told
    assert str(one.message).endswith(
        "24 tokens of context (max_position_embeddings), LlamaForCausalLM for 256: behind the former nothing is drafted"
    )
    decoder.drafter.ended, target.max_context = False, 60
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder.generate(prompt(15), 20)
