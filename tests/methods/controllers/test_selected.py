"""The neural selector of delayed trees: the comb's parts, exact expectations, what it reads, losslessness."""

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from asking import tiny_target
from enumeration import drawn_trees, first_token, target_law
from methods.controllers.test_predicted import Features, saved_pair
from table_models import TableDrafter, hashed_laws
from tiny_models import HIDDEN, prompt, tiny_drafter, tiny_head

from opt_tree import CausalLM, CausalLMDrafter, Decoder, EagleDrafter, Sampling, Tree, generate_batch
from opt_tree.children import LogProbs
from opt_tree.generation import Outcome
from opt_tree.methods.controllers.selected import SelectedTree, entropy
from opt_tree.methods.controllers.selector import SCALARS, Action, RootFacts, Selector, TreeMenu
from opt_tree.methods.drafters.seen import Noted, Seen
from opt_tree.methods.policies.costs import Costs
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.walks import block_efficiency
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.target import Output
from opt_tree.tools.presets import make_preset, plain
from opt_tree.training.controllers import tree_values
from opt_tree.training.controllers.tree_values import (
    Comb,
    Survey,
    Surveyed,
    TreeValuesPlan,
    actions_of,
    best_single,
    expectations,
    fit,
    loss_of,
    part_of,
    save,
    speed_of,
)

COSTS = Costs.straight(plain=5e-3, step=5e-3, row=1e-4, layer=1e-3, draft_row=2e-5)
ACTIONS = (Action(1, 0, 0), Action(1, 1, 0), Action(2, 0, 1), Action(2, 1, 1))
CHOICE = TreeMenu(ACTIONS, "multi_round", COSTS)


def selector_of(seed: int = 0, hidden: tuple[int, ...] = (HIDDEN,) * 3, choice: TreeMenu = CHOICE) -> Selector:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        selector = Selector(hidden, choice, 4, (8, 4)).eval().requires_grad_(False)
        selector.leave.weight.mul_(9)
        return selector


def test_actions_are_every_delayed_tree_once():
    found = actions_of(TreeValuesPlan(branches=2, trunk=1, length=2))
    assert found == (*(Action(1, n, 0) for n in range(4)), *(Action(2, a, b) for a in (0, 1) for b in (1, 2)))
    assert (
        len({(action.branches, action.trunk, action.length) for action in actions_of(TreeValuesPlan())})
        == 17 + 3 * 9 * 8
    )


def test_what_a_step_costs():
    """By hand: rows of the target's forward, layers, and the rows of the draft forwards behind the first."""
    shapes = {
        Action(1, 0, 0): (0, 1, 0),
        Action(1, 2, 0): (2, 2, 1),
        Action(2, 0, 1): (2, 1, 0),
        Action(2, 1, 2): (5, 3, 3),
    }
    for action, (nodes, layers, rows) in shapes.items():
        assert action.seconds(COSTS) == pytest.approx(COSTS.score(1 + nodes) + COSTS.draft(layers, rows))


@pytest.mark.parametrize(("trunk", "branches", "part"), [(0, 2, Sampled.chains(2, 1)), (1, 1, Sampled.chain(2))])
def test_a_part_of_a_comb_is_a_drawn_tree(trunk, branches, part):
    """By enumeration: the law of the part is the law of the smaller policy's trees."""
    comb, laws, sampling = Comb(2, 1, 1), hashed_laws(3, 2), Sampling(1.0)
    found = defaultdict(float)
    for tree, probability in drawn_trees(comb, laws, (0, 1), sampling):
        starts, ranks = comb.places(tree.parents, tree.depths)
        rows = ((starts < 0) & (tree.depths <= trunk)) | ((starts == trunk) & (ranks < branches))
        smaller = part_of(tree, rows)
        found[(*smaller.tokens, *smaller.parents)] += probability
    expected = {
        (*tree.tokens, *tree.parents): probability for tree, probability in drawn_trees(part, laws, (0, 1), sampling)
    }
    assert found == pytest.approx(expected)


@pytest.mark.slow
def test_a_comb_holds_nothing_else_and_its_expectations_are_those_of_its_parts():
    comb, plan, laws = Comb(2, 1, 1), TreeValuesPlan(branches=2, trunk=1, length=1), hashed_laws(3, 2)
    for tree, _ in drawn_trees(comb, laws, (0, 1), Sampling(1.0))[:40]:
        assert tree.nodes == 2 + 1 + 2 and tree.depths.max() == 2
        paths = [(0, 1, *tree.tokens[tree.path_to(row)][1:].tolist()) for row in range(len(tree))]
        probs = torch.tensor(np.array([hashed_laws(1, 2)(path) for path in paths]))
        found = expectations(comb, tree, probs, multi_round)
        assert found.keys() == set(actions_of(plan))
        starts, ranks = comb.places(tree.parents, tree.depths)
        for (branches, trunk, length), tokens in found.items():
            chain = length == 0
            rows = (starts < 0) & (tree.depths <= trunk)
            if chain and trunk == 2:
                rows = (starts < 0) | ((starts == 1) & (ranks == 0))
            elif not chain:
                rows |= (starts == trunk) & (ranks < branches)
            part = part_of(tree, rows)
            assert tokens == pytest.approx(block_efficiency(part, probs[torch.from_numpy(rows)], multi_round))


class Shown(TableDrafter):
    """A table whose model shows hidden states, as far as `Seen` is concerned."""

    class Model:
        hidden, room = HIDDEN, staticmethod(lambda length: 99)

        def watch(self, layers):
            assert layers == (-1,)

    def __init__(self, laws):
        super().__init__(laws)
        self.models = (self.Model(),)


class SeenTable(Seen):
    """Notes a state of the text alone, which a table has not, as `Seen` does of a model."""

    def root(self, context):
        state = torch.tensor(np.random.default_rng(context).standard_normal((1, HIDDEN)), dtype=torch.float32)
        self.before, self.rows = Noted(state, torch.tensor([[0.1, 0.2, 0.3]])), [Noted(-state, torch.zeros(1, 3))]
        return self.drafter.root(context)


@pytest.mark.slow
def test_by_enumeration_it_keeps_the_distribution():
    """The tree is chosen by what the models said before anything is drawn; its verifier is exact for each of them."""
    chosen = set()
    for seed in range(8):
        controller = SelectedTree(selector_of(seed), SeenTable(Shown(hashed_laws(2, 3))))
        decoder = Decoder(Features(hashed_laws(1, 3), 3), controller.seen, controller, multi_round)
        found = first_token(lambda random, decoder=decoder: decoder, (0, 2), 8, chosen)
        assert found == pytest.approx(target_law(hashed_laws(1, 3), (0, 2), 1), abs=1e-12)
    assert len(chosen) > 1


def test_it_reads_what_was_said_of_the_token_before_the_root():
    """By hand: two of four rows were accepted, the drafter ran the root and a node. Another text knows none of it."""
    seen = SeenTable(Shown(hashed_laws(2, 3)))
    controller = SelectedTree(selector_of(), seen)
    tree = Tree(np.array([0, 1, 2, 1]), np.array([-1, 0, 0, 2]), np.zeros(4), np.array([0, -1, 1, -1]))
    states = torch.arange(5.0)[:, None].expand(5, HIDDEN)
    logits = torch.tensor([[0.0, 0, 1], [0, 0, 2], [0, 0, 3], [0, 0, 4]])
    law = LogProbs(torch.zeros(1, 3))
    controller.begin([0, 1], Output(logits[3:], {-1: states[:2]}))
    seen.before, *seen.rows = (Noted(states[row : row + 1], law.values) for row in (2, 3, 4))

    def read():
        found = controller.known([0, 1, 2], law)
        return [int(state[0, 0]) for state in found.states], found.scalars[0, 0].item()

    entropies = [entropy(row.log_softmax(-1)) for row in logits]
    assert read() == ([1, 2, 3], pytest.approx(entropies[3]))
    controller.observe(None, Outcome(tree, [0, 2], [2, 0], {-1: states[3:]}, logits))
    assert read() == ([4, 2, 3], pytest.approx(entropies[2]))
    controller.begin([2], None)
    assert controller.known([2], law) is None


@pytest.mark.quick("head")
@pytest.mark.parametrize("kind", ["draft model", "head"])
def test_it_reads_the_states_and_the_laws_that_the_models_have_there(kind):
    """Against forwards over the whole text: of the token before the root and of the root."""
    target = tiny_target()
    lm = CausalLM(tiny_drafter("llama"))
    inner = CausalLMDrafter(lm) if kind == "draft model" else EagleDrafter(tiny_head(target.model), target)
    seen = Seen(inner)
    wide = (target.hidden, *[seen.models[0].hidden] * 2)
    controller = SelectedTree(selector_of(1, wide), seen)
    read = []
    known = controller.known
    controller.known = lambda *given: read.append((list(given[0]), known(*given))) or read[-1][1]
    decoder = Decoder(target, seen, controller)
    assert len({step.policy for step in decoder.steps(prompt(9), 24, Sampling(1.0))}) > 1
    checked = 0
    for context, found in read:
        if found is None:
            continue
        checked += 1
        with torch.inference_mode():
            states = target.model.base_model(torch.tensor([context])).last_hidden_state[0]
            assert found.states[0][0].tolist() == pytest.approx(states[-2].tolist(), abs=1e-5)
            law = target.model(torch.tensor([context])).logits[0, -2].float().log_softmax(-1)
            assert found.scalars[0, 0].item() == pytest.approx(-(law.exp() * law).sum().item(), abs=1e-4)
            if kind == "draft model":
                own = tiny_drafter("llama")
                states = own.base_model(torch.tensor([context])).last_hidden_state[0]
                assert found.states[1][0].tolist() == pytest.approx(states[-2].tolist(), abs=1e-5)
                assert found.states[2][0].tolist() == pytest.approx(states[-1].tolist(), abs=1e-5)
                laws = own(torch.tensor([context])).logits[0, -2:].float().log_softmax(-1)
                entropies = (-(laws.exp() * laws).sum(-1)).tolist()
                assert found.scalars[0, 1:3].tolist() == pytest.approx(entropies, abs=1e-4)
    assert checked > 4


def test_at_temperature_0_the_text_is_plain_decodings():
    target = tiny_target()
    seen = Seen(EagleDrafter(tiny_head(target.model), target))
    decoder = Decoder(target, seen, SelectedTree(selector_of(), seen))
    assert decoder.generate(prompt(9), 14).tokens == plain(target).generate(prompt(9), 14).tokens
    batch = generate_batch(decoder, [prompt(9), prompt(5)], 10, width=2)
    assert [one.tokens for one in batch] == [plain(target).generate(prompt(n), 10).tokens for n in (9, 5)]


def test_no_comb_is_drawn_where_it_has_no_room():
    """Its two layers and the target's token behind them stand before the end of the text, or it is not drawn."""
    plan = TreeValuesPlan(branches=2, trunk=1, length=1, tokens=4)
    watching = Survey(selector_of(), SeenTable(Shown(hashed_laws(2, 3))), plan)
    watching.known = lambda context, root: context
    watching.begin([0, 1], None)
    law = LogProbs(torch.zeros(1, 3))
    drawn = [watching.choose([0] * length, law) is watching.policies[0] for length in range(2, 6)]
    assert drawn == [True, True, False, False]


def surveyed(rows: int, seed: int) -> Surveyed:
    """One fact of the target's state tells which of two actions is worth more."""
    random = torch.Generator().manual_seed(seed)
    states = tuple(torch.randn(rows, 6, generator=random) for _ in range(3))
    tokens = torch.full((rows, len(ACTIONS)), 1.5)
    tokens[:, 1] += (states[0][:, 0] > 0).float()
    tokens[:, 2] += (states[0][:, 0] <= 0).float()
    seconds = torch.full((rows, len(ACTIONS)), 1.0)
    return Surveyed(RootFacts(states, torch.randn(rows, SCALARS, generator=random)), tokens, seconds)


@pytest.mark.slow
def test_training_learns_what_there_is_to_learn():
    kept, heldout = surveyed(600, 0), surveyed(300, 1)
    selector = fit(kept, heldout, CHOICE, TreeValuesPlan(width=8, inner=16, epochs=40, lr=1e-2))
    assert speed_of(selector, heldout) > 0.9 * 2.5 and best_single(kept) in (1, 2)


def test_the_loss_is_the_papers():
    """Equation 12 by hand: two roots, the second one slower than the single tree."""
    some = surveyed(2, 0)._replace(tokens=torch.tensor([[1.0, 4, 0, 0], [1.0, 2, 0, 0]]), seconds=torch.ones(2, 4))
    logits = torch.tensor([[0.0, 0.0, -99, -99], [0.0, 0.0, -99, -99]])
    plan = TreeValuesPlan(penalty=3.0, worst=0.5)
    ratios = np.array([2.5 / 4, 1.5 / 2])
    expected = -np.log(ratios).mean() + 3.0 * (1 - ratios.min()) ** 2
    assert loss_of(logits, some, 1, plan).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_command_trains_and_the_controller_loads(tmp_path, capsys):
    target = tiny_target()
    starts = np.arange(0, 61, 10)
    np.savez(tmp_path / "answers.npz", tokens=np.array(prompt(60), dtype=np.uint16), starts=starts)
    (tmp_path / "costs.json").write_text('{"scoring": [[1, 0.005]], "first": 0.001, "drafting": [[1, 0.001]]}')
    given = saved_pair(tmp_path)
    given += ["--branches", "2", "--trunk", "1", "--length", "1", "--costs", str(tmp_path / "costs.json")]
    given += ["--roots", "8", "--every", "2", "--tokens", "16", "--epochs", "1", "--width", "4", "--inner", "8"]
    output = ["--answers", str(tmp_path / "answers.npz"), "--output", str(tmp_path / "trees")]
    assert tree_values.main([*given, *output, "--verifier", "without_replacement"]) == 2
    assert "without_replacement is not exact for children of type IID" in capsys.readouterr().err
    assert tree_values.main([*given, *output, "--verifier", "traversal"]) == 2
    assert "verifiers that walk down a tree, which traversal does not" in capsys.readouterr().err
    assert tree_values.main([*given, *output]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["roots"] >= 8 and facts["of_single"] > 0
    drafter = EagleDrafter(tiny_head(target.model), target)
    decoder = make_preset(f"delayed_selected:{tmp_path / 'trees'}", target, drafter)
    assert len(decoder.generate(prompt(5), 12, Sampling(1.0)).tokens) == 12
    assert decoder.generate(prompt(5), 12).tokens == plain(target).generate(prompt(5), 12).tokens
    with pytest.raises(ValueError, match="preset delayed_selected reads a folder: delayed_selected:PATH"):
        make_preset("delayed_selected", target, drafter)


def test_other_files_are_refused_in_one_line(tmp_path):
    target = tiny_target()
    drafter = EagleDrafter(tiny_head(target.model), target)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config.json is not the config of"):
        Selector.load(str(tmp_path), target, drafter.models[0])
    (tmp_path / "config.json").write_text('{"kind": "a head"}')
    with pytest.raises(CheckpointError, match=r"holds no selector of trees: config.json names a head"):
        Selector.load(str(tmp_path), target, drafter.models[0])
    save(selector_of(hidden=(HIDDEN + 1,) * 3), {}, tmp_path / "foreign")
    with pytest.raises(CheckpointError, match=rf"it reads states \({HIDDEN + 1}, .* have \({HIDDEN}, "):
        Selector.load(str(tmp_path / "foreign"), target, drafter.models[0])
    with pytest.raises(ValueError, match="there must be actions"):
        TreeMenu((), "multi_round", COSTS)
    with pytest.raises(CheckpointError, match="runs 0 models"):
        Seen(TableDrafter(hashed_laws(2, 3)))
