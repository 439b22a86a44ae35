"""Predicted draft lengths: labels are what drafting does, choices are the best ones, the text never changes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from asking import begin, draft, tiny_target
from enumeration import first_token, target_law
from methods.drafters.test_eagle3 import KNOWN, LAYERS, target_of, tiny_head3
from table_models import TableDrafter, TableTarget, hashed_laws
from tiny_models import ARCHITECTURES, HIDDEN, build, prompt, publish, tiny_head, tiny_tokenizer

from opt_tree import CausalLM, Decoder, EagleDrafter, Sampling, Static, generate_batch
from opt_tree.generation import Outcome
from opt_tree.methods.controllers.predicted import LengthPredictor, PredictedLength
from opt_tree.methods.drafters.heads.eagle3 import Eagle3Drafter
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.threshold_chain import ThresholdChain
from opt_tree.methods.verifiers.naive_tree import naive
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.target import Forward, Output
from opt_tree.tools.presets import plain
from opt_tree.training.controllers import draft_length
from opt_tree.training.controllers.draft_length import (
    Labels,
    LengthPlan,
    chain_lengths,
    constant,
    fit,
    judge,
    loss_of,
    save,
)

LONGEST = 4


def predictor_of(hidden: int = HIDDEN, seed: int = 0) -> LengthPredictor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LengthPredictor(hidden, LONGEST, 8).eval().requires_grad_(False)


def chain_behind(drafter: EagleDrafter, lm: CausalLM, context: list[int]) -> list[int]:
    """The head's best chain, drafted as the loop does."""
    lm.reset()
    lm.watch(drafter.features)
    with torch.inference_mode():
        begin(drafter, context, lm.append(context[:-1]))
        return draft(drafter, Static.chain(LONGEST), context, LONGEST).tokens[1:].tolist()


@pytest.mark.quick("eagle")
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_labels_are_the_lengths_that_drafting_reaches(kind):
    """On a text that follows the drafter for 0 to 4 tokens at a time, at every place of it."""
    lm = tiny_target() if kind == "eagle" else target_of()
    drafter = (
        EagleDrafter(tiny_head(lm.model), lm)
        if kind == "eagle"
        else Eagle3Drafter(tiny_head3(lm), lm, tokens=KNOWN, layers=LAYERS)
    )
    text, random = prompt(4), np.random.default_rng(0)
    while len(text) < 36:
        text = text + chain_behind(drafter, lm, text)[: int(random.integers(0, 5))] + [int(random.integers(0, 61))]
    expected = []
    for end in range(3, len(text)):
        equal = [a == b for a, b in zip(chain_behind(drafter, lm, text[:end]), text[end:], strict=False)]
        expected.append(([*equal, False]).index(False))
    lm.reset()
    with torch.inference_mode():
        features = {layer: states[None] for layer, states in lm.append(text).features.items()}
        found = chain_lengths(drafter, features, torch.tensor(text), 2, LONGEST)
    assert found.tolist() == expected
    assert set(expected) == set(range(LONGEST + 1))


class Told(LengthPredictor):
    """A predictor that says what it was told."""

    def __init__(self, length: float) -> None:
        super().__init__(4, LONGEST, 2)
        self.told = torch.tensor([length])

    def forward(self, embedded, features):
        return self.told


@pytest.mark.parametrize(("told", "length"), [(-3.0, 0), (0.4, 0), (0.6, 1), (2.4, 2), (3.6, 4), (9.0, 4)])
def test_the_length_is_the_number_rounded_within_bounds(told, length):
    """The paper's equation 3; beyond it the threshold goes on."""
    lm = tiny_target()
    for chain in (Static.chain, lambda least: ThresholdChain(4, 0.5, least)):
        controller = PredictedLength(Told(told), lm, chain)
        controller._feature = torch.zeros(1, 4)
        assert controller.choose([1, 2], None) == chain(length)


def test_it_reads_the_token_before_the_root_and_its_feature():
    """Not the root itself, the paper's bonus token."""
    lm, read = tiny_target(), []
    predictor = Told(1.0)
    predictor.forward = lambda *known: read.append(known) or torch.ones(1)
    controller = PredictedLength(predictor, lm)
    controller.begin([5, 9, 3], Output(torch.zeros(1, 3), {-1: torch.tensor([[6.0] * 4, [7.0] * 4])}))
    controller.choose([5, 9, 3], None)
    path = torch.tensor([[8.0] * 4, [9.0] * 4])
    controller.observe(None, Outcome(None, [0, 2], [1, 4], {-1: path}, torch.zeros(3, 3)))
    controller.choose([5, 9, 3, 1, 4], None)
    controller.begin([3], None)  # another text, of which nothing was run
    controller.choose([3], None)
    (embedded, feature), (_, newest), (_, nothing) = read
    assert torch.equal(embedded[0], lm.model.get_input_embeddings().weight[9]) and feature[0].tolist() == [7.0] * 4
    assert newest[0].tolist() == [9.0] * 4 and not nothing.any()


def test_it_changes_no_text_and_reads_the_feature_before_the_root():
    lm = tiny_target()
    head = tiny_head(lm.model)
    text = plain(lm).generate(prompt(9), 16).tokens
    sampled = plain(lm).generate(prompt(9), 12, Sampling(0.9), seed=3).tokens
    controller = PredictedLength(predictor_of(), lm)
    decoder = Decoder(lm, EagleDrafter(head, lm), controller)
    assert decoder.generate(prompt(9), 16).tokens == text
    context = prompt(9)
    for step in decoder.steps(prompt(9), 16):  # what it reads is the state of the last token that the target has run
        context += step.tokens
        with torch.inference_mode():
            state = lm.model.base_model(torch.tensor([context])).last_hidden_state[0, -2]
        assert controller._feature[0].tolist() == pytest.approx(state.tolist(), abs=1e-9)
    assert decoder.generate(prompt(9), 12, Sampling(0.9), seed=3).tokens == sampled
    assert decoder.generate(prompt(1), 6).tokens == plain(lm).generate(prompt(1), 6).tokens
    batch = generate_batch(decoder, [prompt(9), prompt(5), prompt(7)], 7, width=2)
    assert [one.tokens for one in batch] == [plain(lm).generate(prompt(n), 7).tokens for n in (9, 5, 7)]


class Features(TableTarget):
    """A table that shows a hidden state for every token: a function of the context alone."""

    def watch(self, layers: tuple[int, ...]) -> None:
        assert layers == (-1,)

    def _states(self, ends: list[int], tokens: list[int]) -> dict[int, torch.Tensor]:
        rows = [
            np.random.default_rng((end, token)).standard_normal(HIDDEN) for end, token in zip(ends, tokens, strict=True)
        ]
        return {-1: torch.tensor(np.array(rows))}

    def run(self, forward: Forward) -> Output:
        states = self._states(forward.positions.tolist(), forward.tokens.tolist())
        return super().run(forward)._replace(features=states)


@pytest.mark.slow
def test_by_enumeration_it_keeps_the_distribution():
    """Chains are drawn; their length is predicted from what the target said before."""
    chosen, lm = set(), tiny_target()
    for seed in range(6):
        predictor = predictor_of(seed=seed)
        predictor.leave.bias.fill_(seed % LONGEST)
        controller = PredictedLength(predictor, lm, lambda k: Sampled.chain(k) if k else Static.empty())
        decoder = Decoder(Features(hashed_laws(1, 3), 3), TableDrafter(hashed_laws(2, 3)), controller, naive)
        found = first_token(lambda random, decoder=decoder: decoder, (0, 2), 8, chosen)
        assert found == pytest.approx(target_law(hashed_laws(1, 3), (0, 2), 1), abs=1e-12)
    assert len(chosen) > 1


def labels_of(rows: int = 600) -> tuple[Labels, torch.nn.Embedding]:
    """Lengths that follow from the first number of the feature."""
    random = torch.Generator().manual_seed(0)
    features = torch.randn(rows, 8, generator=random)
    lengths = (features[:, 0] > 0).long() * LONGEST
    return Labels(features, torch.randint(0, 5, (rows,), generator=random), lengths), torch.nn.Embedding(5, 8)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 3.0])
def test_the_loss_is_the_papers_and_a_quantile_is_the_best_constant(penalty):
    lengths = torch.tensor([0, 0, 1, 2, 2, 3, 4])
    by_hand = [penalty * (k - 2) if k > 2 else 2 - k for k in lengths.tolist()]
    assert loss_of(torch.full((7,), 2.0), lengths, penalty).tolist() == pytest.approx(by_hand)
    losses = [float(loss_of(torch.full((7,), number), lengths, penalty).mean()) for number in np.linspace(0, 4, 81)]
    best = float(loss_of(torch.full((7,), constant(lengths, penalty)), lengths, penalty).mean())
    assert best == pytest.approx(min(losses), abs=0.08) and constant(lengths, 9.0) > constant(lengths, 0.2)


@pytest.mark.slow
def test_training_learns_what_there_is_to_learn():
    labels, embed = labels_of()
    predictor = fit(labels, embed, LengthPlan(LONGEST, 2.0, 16, epochs=30, batch=100, lr=1e-2))
    simplest = loss_of(torch.tensor([constant(labels.lengths, 2.0)]), labels.lengths, 2.0).mean()
    assert judge(predictor, embed, labels, 2.0) < 0.65 * simplest  # half of what goes in is dropped in training


def saved_pair(folder: Path) -> list[str]:
    """Save the tiny target with its tokenizer, and a head; return the options that name both."""
    model = build(ARCHITECTURES["llama"]())
    (folder / "head").mkdir()
    options = ["--target", str(folder / "target"), "--drafter", f"eagle:{publish(folder / 'head', tiny_head(model))}"]
    model.float().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    return options


@pytest.mark.slow
def test_the_command_trains_and_the_controller_loads(tmp_path, capsys, monkeypatch):
    lm = tiny_target()
    documents = [plain(lm).generate(prompt(n), 20) for n in range(3, 15)]
    starts = np.cumsum([0, *(len(one.prompt + one.tokens) for one in documents)])
    tokens = np.concatenate([one.prompt + one.tokens for one in documents]).astype(np.uint16)
    np.savez(tmp_path / "answers.npz", tokens=tokens, starts=starts)
    given = [*saved_pair(tmp_path), "--answers", str(tmp_path / "answers.npz"), "--output", str(tmp_path / "length")]
    given += ["--longest", "3", "--width", "8", "--epochs", "1"]
    assert draft_length.main(given) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["labels"] > 200 and facts["heldout"] > 10 and facts["loss"] > 0
    loaded = LengthPredictor.load(str(tmp_path / "length"), lm)
    assert (loaded.longest, loaded.width) == (3, 8)
    assert draft_length.main([*given[:2], "--drafter", "ngram", *given[4:]]) == 2
    assert "is no EAGLE head" in capsys.readouterr().err


def test_other_files_are_refused_in_one_line(tmp_path):
    lm = tiny_target()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not the config of"):
        LengthPredictor.load(str(tmp_path), lm)
    (tmp_path / "config.json").write_text('{"kind": "a head"}')
    with pytest.raises(CheckpointError, match=r"is no predictor of draft lengths: config.json names a head"):
        LengthPredictor.load(str(tmp_path), lm)
    save(predictor_of(HIDDEN + 1), {}, tmp_path / "foreign")
    with pytest.raises(CheckpointError, match=f"it reads features {HIDDEN + 1} wide, .* has {HIDDEN}"):
        LengthPredictor.load(str(tmp_path / "foreign"), lm)
    save(predictor_of(), {}, tmp_path / "torn")
    file = tmp_path / "torn" / "config.json"
    file.write_text(file.read_text().replace('"width": 8', '"width": 9'))
    with pytest.raises(CheckpointError, match=r"leave.weight is \(1, 8\), expected \(1, 9\)"):
        LengthPredictor.load(str(tmp_path / "torn"), lm)
