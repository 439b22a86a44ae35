"""The registries: a policy is listed once, and whatever is listed is lossless."""

import dataclasses

import pytest
from tiny_models import ARCHITECTURES, build, prompt, tiny_drafter

from opt_tree import (
    CausalLM,
    CausalLMDrafter,
    Decoder,
    OptTree,
    Sampling,
)
from opt_tree.children import TopK
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.policies.acceptance_rates import HALVING, AcceptanceRates
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.registry import POLICIES, make_policy, takes
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.sequoia import sequoia_tree
from opt_tree.methods.policies.static import Static
from opt_tree.tools.presets import PRESETS, make_preset, plain
from opt_tree.verify import match

SAMPLINGS = (Sampling(), Sampling(1.0))
NEW = 8


@pytest.fixture(scope="module")
def target():
    return CausalLM(build(ARCHITECTURES["llama"]()))


@pytest.fixture(scope="module")
def drafter():
    return CausalLMDrafter(CausalLM(tiny_drafter("llama")))


@pytest.fixture(scope="module")
def plain_texts(target):
    """What plain decoding says, greedy and drawn."""
    decoder = plain(target)
    return {sampling: decoder.generate(prompt(12), NEW, sampling, seed=3).tokens for sampling in SAMPLINGS}


UNTRAINED = [name for name, method in PRESETS.items() if method.part is None]
"""The others are made in tests of their own, with what was trained for them."""


@pytest.mark.parametrize("name", [*POLICIES, *(name for name in UNTRAINED if name not in POLICIES)])
def test_whatever_is_listed_decodes_as_plain_decoding_does(name, target, drafter, plain_texts):
    """Policies under nine nodes, by the verifier of their children; presets with what each is made of."""
    if name in POLICIES:
        decoder = Decoder(target, drafter, make_policy(name, nodes=9))
    else:
        decoder = make_preset(name, target, drafter)
    for sampling in SAMPLINGS:
        answer = decoder.generate(prompt(12), NEW, sampling, seed=3)
        if decoder.verifier is match or not sampling.temperature:  # the others draw for themselves, by the same law
            assert answer.tokens == plain_texts[sampling]
        sizes = {step.tree.nodes for step in answer.steps}
        assert (max(sizes) <= 9 or name not in POLICIES) and (name == "plain" or max(sizes) > 0)
        if not sampling.temperature and name != "plain":
            assert answer.mean_acceptance_length > 1
    if decoder.verifier is not match:
        again, other = (decoder.generate(prompt(12), NEW, SAMPLINGS[1], seed=seed).tokens for seed in (3, 4))
        assert again == answer.tokens != other


def test_parameters_follow_the_name():
    assert make_policy("opt:0.2", 30) == OptTree(30, 0.2)
    assert make_policy("opt:0.2:4", 30) == OptTree(30, 0.2, 4)
    assert make_policy("delayed:3:1", 10) == Sampled.delayed(trunk=1, branches=3, length=3)
    rates = AcceptanceRates((0.6, 0.3, 0.1))
    assert make_policy("sequoia:2", 5, rates=rates) == sequoia_tree(rates, 5, 2)
    assert make_policy("kary:3", 12, siblings=IID) == Static(Static.kary(3, 2).paths, IID)
    assert dataclasses.replace(make_policy("eagle2:4:3", 20), nodes=1).top_k == 4


@pytest.mark.parametrize(
    ("spec", "nodes", "message"),
    [
        ("medusa_tree", 8, "unknown policy 'medusa_tree'; there are binary, chain"),
        ("opt:a", 8, "opt:a: what follows opt must be numbers: threshold, max_depth"),
        ("binary:2", 8, "binary:2: binary takes no parameters, got 1 numbers"),
        ("chains:9", 8, "9 chains need at least 9 nodes, the budget is 8"),
        ("delayed:3:2:9", 8, "delayed:3:2:9 has 29 nodes, the budget is 8"),
        ("opt:-1", 8, "threshold must be 0 or more, got -1"),
    ],
)
def test_what_is_not_understood_is_said(spec, nodes, message):
    with pytest.raises(ValueError, match=message):
        make_policy(spec, nodes)


def test_fixed_shapes_take_any_kind_of_children():
    for name in POLICIES:
        if takes(name, "siblings"):
            for siblings in (TopK, IID, WithoutReplacement):
                assert isinstance(make_policy(name, 8, siblings).children, siblings)


def test_drawn_siblings_skip_no_rank():
    """By these rates the third child of the root pays before the second, which cannot be drawn without it."""
    rates = AcceptanceRates((0.6, 0.1, 0.5), ((0.5, 0.05, 0.4),))
    for siblings in (IID, WithoutReplacement):
        paths = make_policy("medusa", 8, siblings, rates).paths
        assert all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths for path in paths)


def test_presets_use_the_same_names(target, drafter):
    """One name each: a tree that both know is called alike; presets add verifiers, the registry shapes and batches."""
    common = set(POLICIES) & set(PRESETS)
    assert {"medusa", "delayed"} <= common
    for name in common:
        (policy,) = PRESETS[name].make(target, drafter).policy.policies
        assert type(policy) is type(make_policy(name, 60)), name


def test_a_preset_by_name(target, drafter):
    for spec, policy in (("opt", OptTree()), ("eagle2", Eagle2()), ("sequoia:8", sequoia_tree(HALVING, 60, 8))):
        made = make_preset(spec, target, drafter)
        assert (made.policy, made.verifier) == (policy, match)
    with pytest.raises(ValueError, match="preset rasd reads no path and no parameters, got 'rasd:demo'"):
        make_preset("rasd:demo", target, drafter)
    with pytest.raises(ValueError, match="preset delayed_selected reads a folder: delayed_selected:PATH"):
        make_preset("delayed_selected", target, drafter)
    with pytest.raises(ValueError, match=r"unknown preset 'rasp'; there are .*; did you mean rasd"):
        make_preset("rasp", target, drafter)
