"""Other policies' trees beside a generation: exactly those that they draw themselves, and the run stays as it is."""

import dataclasses

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, prompt, tiny, tiny_drafter, tiny_head

from opt_tree import Decoder, OptTree, Sampling
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.methods.policies.dynamic_depth import DynamicDepth
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.static import Static
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.models.causal_lm import CausalLM
from opt_tree.tools.counterfactual import generate_beside

PROMPT = prompt(12)
RUN = OptTree(nodes=6, threshold=0.1, max_depth=4)
OTHERS = {
    "the same": RUN,
    "larger": OptTree(nodes=20, threshold=0.0, max_depth=6),
    "eagle2": Eagle2(nodes=8),
    "deeper": DynamicDepth(depth=5, nodes=9),
    "chain": Static.chain(5),
    "binary": Static.kary(2, 3),
}
TREES = ("tokens", "parents", "path_log_probs")


def pair(kind: str):
    target = CausalLM(tiny("llama"))
    model = CausalLMDrafter(CausalLM(tiny_drafter("llama")))
    return target, {
        "draft": lambda: model,
        "sharpened": lambda: model.calibrated(0.5),
        "eagle": lambda: EagleDrafter(tiny_head(target.model), target),
        "reduced": lambda: EagleDrafter(tiny_head(target.model), target, tokens=torch.arange(1, VOCAB, 2)),
        "table": lambda: NGramDrafter(),
        "grafted": lambda: Grafted(model, NGramDrafter(), 1),
    }[kind]()


@pytest.mark.parametrize("kind", ["sharpened", "reduced", "table"])
def test_the_other_trees_are_those_that_the_policies_draw_themselves(kind):
    found = generate_beside(Decoder(*pair(kind), RUN), OTHERS, PROMPT, 16)
    run = Decoder(*pair(kind), RUN).generate(PROMPT, 16)
    assert found.generation.tokens == run.tokens
    context = list(PROMPT)
    for index, (step, own) in enumerate(zip(found.generation.steps, run.steps, strict=True)):
        counted = ("path", "draft_forwards", "draft_tokens")
        assert [getattr(step, name) for name in counted] == [getattr(own, name) for name in counted]
        assert (step.tree.tokens.tolist(), step.tree.parents.tolist()) == (
            own.tree.tokens.tolist(),
            own.tree.parents.tolist(),
        )
        beside = found.trees[index]
        assert set(beside) == (set(OTHERS) if step.tree.nodes or index == 0 else set(beside))
        if index in (0, 2, len(run.steps) - 2):
            for name, tree in beside.items():
                target, drafter = pair(kind)
                alone = next(Decoder(target, drafter, OTHERS[name]).steps(context, 16 - len(context) + len(PROMPT)))
                for field in TREES:
                    np.testing.assert_allclose(
                        getattr(tree, field), getattr(alone.tree, field), atol=1e-9, err_msg=name
                    )
                assert found.accepted[index].get(name, alone.accepted) == alone.accepted
        context += step.tokens
    assert any(found.accepted)


def test_a_drafter_that_cannot_go_back_leaves_out_what_it_was_not_asked():
    target, drafter = pair("grafted")
    found = generate_beside(Decoder(target, drafter, RUN), OTHERS, PROMPT, 24)
    assert found.generation.tokens == Decoder(*pair("grafted"), RUN).generate(PROMPT, 24).tokens
    assert all("the same" in beside for beside in found.trees[:-1])
    assert any("larger" not in beside for beside in found.trees)
    for step, beside in zip(found.generation.steps, found.trees, strict=True):
        if "the same" in beside:
            for field in TREES:
                np.testing.assert_array_equal(getattr(beside["the same"], field), getattr(step.tree, field))


def test_the_a_of_other_trees_is_told_only_where_the_text_does_not_depend_on_the_tree():
    warm = Sampling(temperature=1.0)
    drawn = Decoder(*pair("draft"), Sampled.chains(2, 2), verifier=multi_round)
    found = generate_beside(drawn, {"chain": Static.chain(3)}, PROMPT, 12, sampling=warm)
    assert any(found.trees) and not any(found.accepted)
    matched = generate_beside(Decoder(*pair("draft"), RUN), {"the same": RUN}, PROMPT, 16, sampling=warm)
    for step, accepted in zip(matched.generation.steps, matched.accepted, strict=True):
        assert accepted.get("the same", step.accepted) == step.accepted


def test_the_times_of_the_run_are_its_own():
    found = generate_beside(Decoder(*pair("draft"), RUN), OTHERS, PROMPT, 12).generation
    assert all(time >= 0 for step in found.steps for time in dataclasses.astuple(step.times))
    assert found.seconds > 0


def test_what_has_no_one_tree_is_refused():
    target, drafter = pair("draft")
    with pytest.raises(ValueError, match="without a drafter"):
        generate_beside(Decoder(target, None, Static.empty()), OTHERS, PROMPT)
    with pytest.raises(ValueError, match="wild draws its children"):
        generate_beside(Decoder(target, drafter, RUN), {"wild": Sampled.chains(2, 2)}, PROMPT)
