"""What every kind of drafter must do: leave the text to the target, greedy and drawn, alone and side by side."""

import functools

import pytest
import torch
from enumeration import first_token
from methods.drafters.every_kind import MAKERS, ONE_PASS, TABLES, VARIANTS, kind_of, target_model
from methods.drafters.test_blocks import dspark_of
from methods.drafters.test_early_exit import deep, exit_of
from methods.drafters.test_one_pass import medusa
from side_by_side import PROMPTS, compare
from tiny_models import prompt, tiny_head

from opt_tree import Decoder, OptTree, Sampling, load_drafter, load_pair
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.heads.early_exit import EarlyExit
from opt_tree.methods.drafters.registry import KINDS, DrafterOptions
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.models import DEMO
from opt_tree.models.causal_lm import CausalLM
from opt_tree.tools.presets import plain

POLICY = OptTree(nodes=9, threshold=0.0, max_depth=6)
EVERY = MAKERS | VARIANTS
TEXTS = (prompt(7) * 3, [7])
ASKED = ((0, Sampling()), (1, Sampling(0.8)), (0, Sampling(0.8)))


@functools.cache
def plain_text(number: int, sampling: Sampling) -> list[int]:
    """What a target says that no drafter has hooked."""
    return plain(CausalLM(deep())).generate(TEXTS[number], 8, sampling, seed=1).tokens


@pytest.mark.quick(*MAKERS)
@pytest.mark.parametrize("name", EVERY)
def test_text_is_the_target_s_own(name):
    """Greedy and drawn, several prompts with the same drafter: long and of one token."""
    target = CausalLM(target_model())
    drafter = EVERY[name](target)
    decoder, steps, said = Decoder(target, drafter, POLICY), [], set()
    for number, sampling in ASKED:
        answer = decoder.generate(TEXTS[number], 8, sampling, seed=1)
        assert answer.tokens == plain_text(number, sampling)
        steps += answer.steps
        said |= {*answer.tokens}
    assert max(step.tree.nodes for step in steps) > 0
    most = 0 if kind_of(name) in TABLES else 1 if kind_of(name) in ONE_PASS else POLICY.max_depth
    assert max(step.draft_forwards for step in steps) <= most
    if (known := getattr(drafter, "tokens", None)) is not None:
        assert {token for step in steps for token in step.tree.tokens[1:].tolist()} <= {*known.tolist()}
        assert said - {*known.tolist()}, "the text should hold tokens that the drafter lacks"


# What tests/batch tries in every way, what runs in the target's own cache, and what learns from one lane for another.
ELSEWHERE = {"lm", "eagle", "exit", "recycling"}


@pytest.mark.quick("store")
@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ELSEWHERE])
def test_side_by_side_as_alone(name):
    """Each lane has a drafter's state of its own."""
    target = CausalLM(target_model())
    compare(Decoder(target, MAKERS[name](target), POLICY), Sampling(), PROMPTS[:3], (2,), 5)


WHOLE_LAWS = {
    "eagle": lambda target: EagleDrafter(tiny_head(target.model, vocab_size=3), target),
    "exit": lambda target: EarlyExit(exit_of(target), target),
    "medusa": medusa,
    "dspark": lambda target: dspark_of(target, layers=(0, 1)),
    "dspark, where it is confident": lambda target: dspark_of(target, None, 0.5, (0, 1)),
    "dspark, knowing the path": lambda target: dspark_of(target, layers=(0, 1), markov_head_type="rnn"),
}


@pytest.mark.quick("dspark, where it is confident")
@pytest.mark.parametrize("name", WHOLE_LAWS)
def test_drawn_children_keep_the_target_s_law(name):
    """Exact enumeration on a vocabulary of three tokens: two chains, judged by SpecInfer's rule."""
    model = functools.partial(deep, vocab_size=3, layers=2 if kind_of(name) == "dspark" else 4)
    target, text = CausalLM(model()), (0, 1, 2, 2, 0)
    chains = Sampled.chains(2, 2 if "," in name else 1)  # two layers where confidence cuts some of them
    decoder = Decoder(target, WHOLE_LAWS[name](target), chains, multi_round)
    law = first_token(lambda _: decoder, text, 3)
    expected = model()(torch.tensor([text])).logits[0, -1].softmax(-1)
    assert law == pytest.approx({(token,): p for token, p in enumerate(expected.tolist())}, abs=1e-9)


@pytest.fixture(scope="module")
def asked():
    """The demo target and its tokenizer, a prompt, and what plain decoding says to it."""
    pair = load_pair("demo", "ngram", dtype="float32")
    text = pair.encode("What is the capital of France?")
    return pair, text, plain(pair.target).generate(text, 20).tokens


@pytest.mark.quick("store")
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.part and (DEMO / kind.part).is_dir()])
def test_what_is_embedded_drafts_the_demo_target(kind, asked):
    """Well above one token a step, and the text is the target's own."""
    pair, text, expected = asked
    drafter = load_drafter(f"{kind}:demo", pair.target, DrafterOptions(pair.tokenizer))
    answer = Decoder(pair.target, drafter, OptTree(12, 0.05)).generate(text, 20)
    assert answer.tokens == expected
    assert answer.mean_acceptance_length > 1.4
    if kind in TABLES | ONE_PASS:
        assert {step.draft_forwards for step in answer.steps} <= {0, kind in ONE_PASS}
