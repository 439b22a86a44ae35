"""Trees and verifiers chosen by a network: parts of drawn trees, exact expectations, the choice, losslessness."""

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from enumeration import drawn_trees, target_law
from methods.controllers.test_predicted import emitted_law
from table_models import hashed_laws
from tiny_models import ARCHITECTURES, HIDDEN, build, prompt, publish, tiny_head, tiny_tokenizer

from opt_tree import CausalLM, Decoder, EagleDrafter, Sampling, generate_batch
from opt_tree.answers import LogProbs
from opt_tree.methods.controllers.selected import FACTS, Action, Choice, SelectedTree, TreeValues
from opt_tree.methods.policies.costs import Costs
from opt_tree.methods.policies.delayed import Delayed
from opt_tree.methods.verifiers.traversal_verification import traversal
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.tools.presets import plain
from opt_tree.training.controllers import tree_values
from opt_tree.training.controllers.tree_values import Plan, Surveyed, error_of, fit, inside, loss_of, part_of, save

COSTS = Costs.straight(plain=5e-3, step=5e-3, row=1e-4, layer=1e-3, draft_row=2e-5)
JUDGING = {"traversal": (1e-3, 1e-4), "multi_round": (2e-4, 1e-5)}
ACTIONS = (
    Action(1, 0, 0, "traversal"),
    Action(1, 1, 0, "multi_round"),
    Action(2, 0, 1, "traversal"),
    Action(2, 0, 1, "multi_round"),
    Action(2, 1, 1, "traversal"),
)
CHOICE = Choice(ACTIONS, JUDGING)


def values_of(seed: int = 0, hidden: int = HIDDEN) -> TreeValues:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TreeValues(hidden, CHOICE, 8).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("whole", "action", "part"),
    [
        (Delayed(1, 3, 2), (2, 1, 1), Delayed(1, 2, 1)),
        (Delayed(0, 3, 2), (2, 0, 2), Delayed(0, 2, 2)),
        (Delayed(1, 2, 2), (1, 2, 0), Delayed(2, 1, 0)),
        (Delayed(3, 1, 0), (1, 2, 0), Delayed(2, 1, 0)),
    ],
)
def test_a_part_of_a_drawn_tree_is_a_smaller_drawn_tree(whole, action, part):
    """By enumeration: the law of the part is the law of the smaller policy's trees."""
    laws, sampling = hashed_laws(3, 2), Sampling(1.0)
    found = defaultdict(float)
    for tree, probability in drawn_trees(whole, laws, (0, 1), sampling):
        rows = inside(tree, whole.trunk, Action(*action, "traversal"))
        smaller = part_of(tree, rows)
        found[(*smaller.tokens, *smaller.parents)] += probability
    expected = {
        (*tree.tokens, *tree.parents): probability for tree, probability in drawn_trees(part, laws, (0, 1), sampling)
    }
    assert found == pytest.approx(expected)


def test_what_a_tree_does_not_contain():
    tree, _ = drawn_trees(Delayed(1, 2, 1), hashed_laws(3, 2), (0, 1), Sampling(1.0))[0]
    for action in ((3, 1, 1), (2, 0, 1), (2, 1, 2), (1, 3, 0)):
        assert inside(tree, 1, Action(*action, "traversal")) is None
    assert inside(tree, 1, Action(1, 0, 0, "traversal")).tolist() == [True, False, False, False]


def test_the_action_is_the_one_of_most_tokens_for_its_seconds():
    values = values_of()
    values.forward = lambda facts, features: torch.tensor([[1.0, 1.7, 1.9, 1.8, 2.3]])
    controller = SelectedTree(values, COSTS)
    # Of a tree of so many nodes, drafted in so many forwards with so many rows: by hand.
    shapes = [(0, 1, 1), (1, 1, 1), (2, 1, 1), (2, 1, 1), (3, 2, 2)]
    judged = [0.0, 2.1e-4, 1.2e-3, 2.2e-4, 1.3e-3]
    seconds = [
        (5e-3 if not nodes else 5e-3 + 1e-4 * (nodes + 1)) + 1e-3 * layers + 2e-5 * rows + judge
        for (nodes, layers, rows), judge in zip(shapes, judged, strict=True)
    ]
    assert [action.seconds(COSTS, JUDGING) for action in ACTIONS] == pytest.approx(seconds)
    taken = set()
    for rate in (1.0, 150.0, 350.0, 1000.0, 9000.0):
        controller._tokens, controller._seconds = rate, 1.0
        best = int(np.argmax(np.array([1.0, 1.7, 1.9, 1.8, 2.3]) - rate * np.array(seconds)))
        chosen = controller.choose([1, 2], LogProbs.of(torch.zeros(1, 9)))
        assert chosen == ACTIONS[best].policy and chosen.verifier is ACTIONS[best].judge
        taken.add(best)
    assert len(taken) > 2


def test_by_enumeration_it_keeps_the_distribution():
    """The tree and its verifier are chosen by the drafter's law at the root and by what the target said before."""
    chosen = set()
    for seed in range(8):
        controller = SelectedTree(values_of(seed), Costs.straight(5e-3, 5e-3, 1e-5, 1e-5, 0.0))
        found = emitted_law(controller, traversal, chosen)
        assert found == pytest.approx(target_law(hashed_laws(1, 3), (0, 2), 1), abs=1e-12)
    assert len(chosen) > 1 and {judge for _, judge in chosen} == {"traversal", "multi_round"}


def test_at_temperature_0_the_text_is_plain_decodings():
    target = CausalLM(build(ARCHITECTURES["llama"]()))
    drafter = EagleDrafter(tiny_head(target.model), target)
    decoder = Decoder(target, drafter, SelectedTree(values_of(), COSTS), traversal)
    assert decoder.generate(prompt(9), 30).tokens == plain(target).generate(prompt(9), 30).tokens
    batch = generate_batch(decoder, [prompt(9), prompt(5)], 20, width=2)
    assert [one.tokens for one in batch] == [plain(target).generate(prompt(n), 20).tokens for n in (9, 5)]


def test_training_learns_what_there_is_to_learn():
    """One action's worth is told by the first fact, another's by nothing; some are not seen at every step."""
    random = torch.Generator().manual_seed(0)
    facts, features = torch.randn(800, FACTS, generator=random), torch.randn(800, 8, generator=random)
    tokens = torch.full((800, len(ACTIONS)), 2.0)
    tokens[:, 1] = 1.5 + (facts[:, 0] > 0).float()
    tokens[::2, 2] = float("nan")
    seen = Surveyed(facts, features, tokens)
    kept, heldout = (Surveyed(*(part[rows] for part in seen)) for rows in (slice(0, 600), slice(600, 800)))
    values = fit(kept, heldout, CHOICE, Plan(width=16, epochs=40, lr=1e-2))
    with torch.no_grad():
        error = loss_of(values(facts, features), tokens)
    assert error < 0.3 * loss_of(tokens.nanmean(0).expand_as(tokens), tokens)
    # Where nothing can be known, it does not pretend to: no worse on other steps than the means.
    chance = seen._replace(tokens=2 + torch.randn(800, len(ACTIONS), generator=random).abs())
    kept, heldout = (Surveyed(*(part[rows] for part in chance)) for rows in (slice(0, 600), slice(600, 800)))
    means = kept.tokens.mean(0).expand_as(heldout.tokens)
    assert error_of(fit(kept, heldout, CHOICE, Plan(width=16)), heldout) < 1.01 * loss_of(means, heldout.tokens)


def test_the_command_trains_and_the_controller_loads(tmp_path, capsys):
    target = CausalLM(build(ARCHITECTURES["llama"]()))
    build(ARCHITECTURES["llama"]()).float().save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "head").mkdir()
    publish(tmp_path / "head", tiny_head(target.model))
    starts = np.arange(0, 61, 10)
    np.savez(tmp_path / "answers.npz", tokens=np.array(prompt(60), dtype=np.uint16), starts=starts)
    given = ["--target", str(tmp_path / "target"), "--drafter", f"eagle:{tmp_path / 'head'}", "--trunks", "0,1"]
    given += ["--branches", "2", "--lengths", "1", "--chains", "0,1,2"]
    given += ["--steps", "24", "--tokens", "12", "--epochs", "1"]
    output = ["--answers", str(tmp_path / "answers.npz"), "--output", str(tmp_path / "trees")]
    assert tree_values.main([*given, *output, "--verifiers", "without_replacement"]) == 2
    assert "without_replacement is not exact for children of type IID" in capsys.readouterr().err
    assert tree_values.main([*given, *output]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["steps"] >= 24 and facts["error"] >= 0 and set(facts["judging"]) == {"traversal", "multi_round"}
    values = TreeValues.load(str(tmp_path / "trees"), target)
    shapes = {action[:3] for action in values.choice.actions}
    assert shapes == {(1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 0, 1), (2, 1, 1)} and len(values.choice.actions) == 9
    assert facts["means"][0] == 1.0 and min(facts["means"]) >= 1.0
    decoder = Decoder(target, EagleDrafter(tiny_head(target.model), target), SelectedTree(values, COSTS), traversal)
    assert len(decoder.generate(prompt(5), 12, Sampling(1.0)).tokens) == 12


def test_other_files_are_refused_in_one_line(tmp_path):
    target = CausalLM(build(ARCHITECTURES["llama"]()))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config.json is not the config of"):
        TreeValues.load(str(tmp_path), target)
    (tmp_path / "config.json").write_text('{"kind": "a head"}')
    with pytest.raises(CheckpointError, match=r"holds no values of trees: config.json names a head"):
        TreeValues.load(str(tmp_path), target)
    save(values_of(hidden=HIDDEN + 1), {}, tmp_path / "foreign")
    with pytest.raises(CheckpointError, match=f"it reads features {HIDDEN + 1} wide, .* has {HIDDEN}"):
        TreeValues.load(str(tmp_path / "foreign"), target)
    with pytest.raises(ValueError, match="nothing is known of what verifier multi_round costs"):
        Choice(ACTIONS, {"traversal": (0.0, 0.0)})
    with pytest.raises(TypeError, match="this drafter names a few tokens only"):
        few = LogProbs(torch.zeros(1, 2), torch.tensor([[0, 1]]))
        SelectedTree(values_of(), COSTS).choose([1, 2], few)
