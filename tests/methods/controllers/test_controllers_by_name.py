"""Controllers by name: each decodes plain decoding's text, and what is not understood is one line."""

import pytest

from evaluation.demo.options import Options as DemoOptions
from evaluation.run.models import _decoder
from evaluation.run.options import Options
from opt_tree import CheckpointError, Decoder, OptTree, Static, load_pair
from opt_tree.methods.controllers.beta_length import BetaLength
from opt_tree.methods.controllers.registry import CONTROLLERS, parse_controller
from opt_tree.methods.policies.costs import Costs
from opt_tree.models import DEMO
from opt_tree.tools import presets

TREE = OptTree(24, 0.3, 8)
# Those whose folder the package does not have are made in tests of their own.
EMBEDDED = [name for name, method in CONTROLLERS.items() if method.part is None or (DEMO / method.part).is_dir()]


@pytest.fixture(scope="module")
def pair():
    return load_pair("demo", "eagle:demo", dtype="float32")


@pytest.fixture(scope="module")
def plain_answer(pair):
    return Decoder(pair.target, None, Static.empty()).generate(pair.encode("Why is the sky blue?"), 16)


@pytest.fixture(autouse=True)
def costs(monkeypatch):
    """Written down, so that nothing is measured and every run chooses alike."""
    straight = Costs.straight(5.4e-3, 5.5e-3, 1e-4, 1e-3, 3e-5)
    monkeypatch.setattr(presets, "costs_of", lambda target, drafter: straight)


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_controller_by_name_changes_no_text(name, pair, plain_answer):
    spec = name if CONTROLLERS[name].part is None else f"{name}:demo"
    controller = presets.controller(spec, pair.target, pair.drafter, TREE)
    answer = Decoder(pair.target, pair.drafter, controller).generate(plain_answer.prompt, 16)
    assert answer.tokens == plain_answer.tokens
    assert 0 < max(step.tree.nodes for step in answer.steps) <= TREE.nodes
    assert max(policy.max_depth for policy in controller.policies) <= TREE.max_depth


def test_auto_by_its_name_has_the_budget_it_was_given(pair):
    controller = presets.controller("auto", pair.target, pair.drafter, TREE)
    assert str(controller) == "Auto, at most 24 nodes and 8 layers"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("autom", "unknown controller 'autom'; there are auto, beta, calibrated"),
        ("auto:demo", "controller auto reads no files, got 'auto:demo'"),
        ("predicted", "controller predicted reads a folder: predicted:PATH, got 'predicted'"),
    ],
)
def test_what_is_not_understood_is_one_line(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_controller(spec)


def test_a_folder_that_holds_nothing_is_refused(pair):
    with pytest.raises(CheckpointError, match="nowhere"):
        presets.controller("predicted:nowhere", pair.target, pair.drafter, TREE)
    with pytest.raises(CheckpointError, match="the package has no trees for demo"):
        presets.make_preset("delayed_selected:demo", pair.target, pair.drafter)


@pytest.mark.quick("adaeagle:demo-eagle:demo")
@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("rasd", "rasd:eagle:demo+store:demo"),
        ("adaeagle:demo", "eagle:demo"),
        ("adaeagle_ddd:demo", "eagle:demo"),
        ("eesd", "exit:demo"),
        ("eesd_beta", "exit:demo"),
        ("parallelspec_eagle", "parallelspec:demo"),
        ("parallelspec_medusa", "parallelspec:demo"),
    ],
)
def test_a_whole_system_on_its_own_drafter_says_what_plain_decoding_says(name, drafter, plain_answer):
    pair = load_pair("demo", drafter, dtype="float32")
    answer = presets.make_preset(name, pair.target, pair.drafter).generate(plain_answer.prompt, 16)
    assert answer.tokens == plain_answer.tokens and answer.mean_acceptance_length > 1


def test_commands_take_the_name(pair):
    decoder = _decoder("opt", Options(controller="beta", max_depth=3), pair)
    assert isinstance(decoder.policy, BetaLength) and len(decoder.policy.policies) == 3
    with pytest.raises(ValueError, match="leave out --method chain"):
        Options(controller="beta", method="chain")
    with pytest.raises(ValueError, match="leave it out beside --controller beta"):
        Options(controller="beta", nodes="auto")
    with pytest.raises(ValueError, match="unknown controller 'bet'"):
        DemoOptions(controller="bet")
