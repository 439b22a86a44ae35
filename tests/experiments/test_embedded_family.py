"""Training code on tiny models and a synthetic corpus: seconds on a CPU."""

import importlib
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from evaluation.questions.sets import load_set
from experiments.embedded_family import plans, recipe, sizes
from experiments.embedded_family.data import Document, draw_prompts, read_corpus, read_prompts, render
from experiments.embedded_family.distil import distillation_loss, load_teacher
from experiments.embedded_family.distil import make_loss as distil_loss
from experiments.embedded_family.lm import new_llama, save_model
from experiments.embedded_family.outputs import load_documents
from experiments.embedded_family.plans import OWN, Schedule, Shape
from experiments.embedded_family.stream import Blocks, Mixture, build_stream, collate
from experiments.embedded_family.tokenizer import train_tokenizer, training_texts
from experiments.embedded_family.trainer import (
    Examples,
    Run,
    Streams,
    fit,
    last_checkpoint,
    load_streams,
    parse_epochs,
)
from experiments.embedded_family.unlikelihood import Contrast, repeats
from experiments.embedded_family.unlikelihood import make_loss as unlikelihood
from opt_tree.system.command_line import from_fields
from opt_tree.training.answers import TokenDocuments
from opt_tree.training.optimizer import Float32Muon, MuonAdamW
from opt_tree.training.outputs import answer, save_documents

TINY = Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48)
SCHEDULE = Schedule(
    batch=128, micro_batch=128, block=64, rows="0.5:32,0.5:64", lr=1e-2, warmup=2,
    save_steps=4, eval_blocks=2,
)  # fmt: skip
ANIMALS = ["cat", "dog", "owl", "fox", "cow", "hen", "bee", "ant", "elk", "yak"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    things = [(animal, i) for i in range(60) for animal in ANIMALS]
    question, reply = "What does {} number {} eat?", "A {} eats {} cakes.{}"
    chat = [
        [("user", question.format(animal, i)), ("assistant", reply.format(animal, i % 7, " Yes." * (i % 3)))]
        for animal, i in things
    ]
    # The same prompt with another answer, and with other spelling: both sides of a split must not see it.
    more = [("user", "Why?"), ("assistant", "Who knows.")]
    chat += [[("user", turns[0][1].upper()), turns[1], *more] for turns in chat[:200]]
    with lzma.open(folder / "chat_oasst_sampled.jsonl.xz", "wt") as lines:
        for turns in chat:
            lines.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    with lzma.open(folder / "text_tales.jsonl.xz", "wt") as lines:
        for i in range(200):
            tale = f"Tale {i}. Once a {ANIMALS[i % 10]} met a {ANIMALS[i // 10 % 10]}. "
            lines.write(json.dumps({"text": tale * 3}) + "\n")
    return folder


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> PreTrainedTokenizerFast:
    return train_tokenizer(training_texts(corpus), 400)


@pytest.fixture(scope="module")
def streams(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> Streams:
    return load_streams(tokenizer, corpus, Mixture(parse_epochs("", _names())), corpus / "cache")


@pytest.fixture(scope="module")
def target(tokenizer: PreTrainedTokenizerFast, streams: Streams, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    model = new_llama(TINY, tokenizer)
    fit(model, streams.blocks(_steps(40)), _steps(40), Run(folder))
    save_model(model, tokenizer, folder / "final")
    return folder / "final"


def _names() -> list[str]:
    return ["chat_oasst_sampled", "text_tales"]


def _steps(count: int) -> Schedule:
    return Schedule(**{**vars(SCHEDULE), "tokens": count * SCHEDULE.batch})


def test_a_corpus_without_a_heldout_document_is_told_why(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with lzma.open(tmp_path / "text_mine.jsonl.xz", "wt") as lines:
        lines.write(json.dumps({"text": "A cat sat. " * 40}) + "\n")
        lines.write((json.dumps({"text": "A dog ran. " * 40}) + "\n") * 6)
    told = r"no heldout documents .* text_mine: 0 of its 7 are heldout\. A hash .* 15 in 1000: give some hundreds"
    with pytest.raises(ValueError, match=told):
        load_streams(tokenizer, tmp_path, Mixture({"text_mine": 1.0}), tmp_path / "cache")


def test_split_puts_a_prompt_on_one_side_whatever_its_answers_and_spelling(corpus: Path) -> None:
    sides: dict[str, set[str]] = {}
    for document in read_corpus(corpus, "chat_oasst_sampled"):
        assert document.messages
        sides.setdefault(document.messages[0]["content"].lower(), set()).add(document.split)
    assert all(len(side) == 1 for side in sides.values())
    held_out = sum("heldout" in side for side in sides.values())
    assert 0 < held_out < 0.06 * len(sides)


def test_prompts_to_train_on_are_repeatable_and_distinct(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts, again = (draw_prompts(tokenizer, read_prompts(corpus), 5) for _ in range(2))
    assert prompts == again
    assert len(set(prompts)) == len(prompts) > 0
    for prompt in prompts:
        assert Document(messages=({"role": "user", "content": prompt},)).split == "train"


def test_the_held_out_questions_are_of_the_held_out_side() -> None:
    questions = load_set("heldout").questions
    assert {Document(messages=({"role": "user", "content": q.turns[0]},)).split for q in questions} == {"heldout"}


@pytest.mark.slow
def test_a_stream_holds_every_token_of_every_document_once(corpus, tokenizer, streams):
    documents = [document for name in _names() for document in read_corpus(corpus, name) if document.split == "train"]
    texts = [tokenizer(render(document, tokenizer), add_special_tokens=False)["input_ids"] for document in documents]
    starts = np.flatnonzero(streams.train == tokenizer.bos_token_id)
    cut = sorted(piece.tolist() for piece in np.split(np.asarray(streams.train), starts)[1:])
    assert cut == sorted(texts)


def test_slope_moves_prose_to_the_front(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    mixture = Mixture(dict.fromkeys(_names(), 1.0), slope=1.0)
    stream = build_stream(tokenizer, corpus, "train", mixture, corpus / "cache")
    first, last = np.array_split(np.asarray(stream), 2)
    assert (first == tokenizer.eos_token_id).sum() < 0.7 * (last == tokenizer.eos_token_id).sum()


def test_own_outputs_join_a_mixture_in_whole_passes(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    own = TokenDocuments(np.array([0, 390, 0, 391, 392], np.uint16), np.array([0, 2, 5]))
    stream = build_stream(tokenizer, corpus, "train", Mixture({OWN: 2.5}), corpus / "cache", own)
    assert (stream == 390).sum() + (stream == 391).sum() == 5


def test_blocks_cover_a_stream_whose_length_is_no_multiple() -> None:
    stream = np.arange(1000, dtype=np.uint16)
    blocks = Blocks(stream, 64, [(0.5, 16), (0.5, 64)])
    assert {int(token) for block in blocks for token in block["input_ids"].flatten()} == set(range(1000))
    assert blocks[0]["input_ids"].shape == (4, 16)
    assert blocks[len(blocks) - 1]["input_ids"].shape == (1, 64)
    with pytest.raises(ValueError, match="divide the block length"):
        Blocks(stream, 64, [(1.0, 48)])


def test_chat_template_opens_the_user_turn_with_the_system_message(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 42"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|user|>Be brief.\n\nHi 42<|end|><|assistant|>"
    ids = tokenizer("Hi 42")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["4", "2"]


@pytest.mark.slow
def test_training_lowers_the_loss(target: Path, streams: Streams) -> None:
    history = json.loads((target.parent / "checkpoint-40" / "trainer_state.json").read_text())["log_history"]
    losses = [row["loss"] for row in history if "loss" in row]
    assert losses[-1] < 0.75 * losses[0]
    assert {"eval_chat_loss", "eval_prose_loss"} <= {key for row in history for key in row}
    reloaded = AutoModelForCausalLM.from_pretrained(target)
    assert reloaded.dtype == torch.bfloat16
    assert reloaded.generation_config.eos_token_id == 1


@pytest.mark.slow
def test_a_resumed_run_ends_like_an_unbroken_one(tokenizer, streams, tmp_path):
    def build() -> LlamaForCausalLM:
        torch.manual_seed(1)
        return new_llama(TINY, tokenizer)

    whole = build()
    fit(whole, streams.blocks(_steps(8)), _steps(8), Run(tmp_path / "whole"))
    (tmp_path / "broken").mkdir()
    with pytest.raises(ValueError, match=r"no checkpoint in .*broken to go on from"):
        fit(build(), streams.blocks(_steps(8)), _steps(8), Run(tmp_path / "broken", resume=True))
    (tmp_path / "whole" / "checkpoint-4").rename(tmp_path / "broken" / "checkpoint-4")
    (tmp_path / "broken" / "checkpoint-6").mkdir()  # killed while it was written: the Trainer's state comes last
    assert last_checkpoint(tmp_path / "broken") == tmp_path / "broken" / "checkpoint-4"
    with pytest.raises(ValueError, match="checkpoint-4 is another run's: --resume goes on from it"):
        fit(build(), streams.blocks(_steps(8)), _steps(8), Run(tmp_path / "broken"))
    again = build()
    fit(again, streams.blocks(_steps(8)), _steps(8), Run(tmp_path / "broken", resume=True))
    for (name, expected), got in zip(whole.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(got, expected, msg=name)


def test_the_optimizer_gives_matrices_to_muon_and_follows_the_scheduler(tokenizer: PreTrainedTokenizerFast) -> None:
    model = new_llama(TINY, tokenizer)
    optimizer = MuonAdamW(model, 1e-2)
    counts = [sum(len(group["params"]) for group in inner.param_groups) for inner in (optimizer.muon, optimizer.adamw)]
    assert counts == [7 * TINY.layers, 2 + 2 * TINY.layers]
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    assert {group["lr"] for inner in (optimizer.muon, optimizer.adamw) for group in inner.param_groups} == {0.5}


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_muon_in_float32_is_torch_s_but_for_its_rounding(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    first = torch.randn(shape)
    own, theirs = (torch.nn.Parameter(first.clone()) for _ in range(2))
    ours = Float32Muon([own], lr=0.1, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    torchs = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        own.grad = torch.randn(shape)
        theirs.grad = own.grad.clone()
        ours.step()
        torchs.step()
    moved = (own - first).norm()
    assert moved > 0.3 and (own - theirs).norm() < 0.02 * moved  # bfloat16 has eight bits


def test_uneven_batches_are_named(tokenizer: PreTrainedTokenizerFast, streams: Streams, tmp_path: Path) -> None:
    uneven = Schedule(**{**vars(SCHEDULE), "batch": 100})
    with pytest.raises(ValueError, match="batch 100 must be a multiple"):
        fit(new_llama(TINY, tokenizer), streams.blocks(uneven), uneven, Run(tmp_path))
    with pytest.raises(ValueError, match="no such corpus: chat_x"):
        parse_epochs("chat_x=1", _names())


@pytest.mark.slow
def test_own_outputs_are_the_targets_greedy_answers(target, tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    prompts = ["What does cat number 3 eat?", "Why?", "What does the very old yak number 15 eat on Sundays?"]
    documents = answer(model, tokenizer, prompts, 12, batch=2)
    for prompt, document in zip(prompts, documents, strict=True):
        start = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        assert document[: len(start)] == start
        greedy = model(torch.tensor([document])).logits[0].argmax(-1).tolist()
        assert document[len(start) :] == greedy[len(start) - 1 : -1]
    save_documents(documents[:1], tmp_path / "part-0-of-2.npz")
    save_documents(documents[1:], tmp_path / "part-1-of-2.npz")
    assert [row.tolist() for row in map(load_documents(tmp_path).__getitem__, range(3))] == documents


def test_tokens_beyond_16_bits_are_kept(tmp_path: Path) -> None:
    for last, size in ((65_535, 2), (151_935, 4)):
        save_documents([[3, last], [65_535]], tmp_path / f"{last}" / "part.npz")
        documents = load_documents(tmp_path / f"{last}")
        assert documents[0].tolist() == [3, last] and documents.tokens.itemsize == size


def test_distillation_loss_is_least_at_the_targets_law() -> None:
    # Every row has a clear argmax: sharpening a near tie would leave the hard loss near log 2.
    target = torch.stack([torch.randperm(7).double() for _ in range(5)])
    entropy = torch.distributions.Categorical(logits=target).entropy().mean()
    assert distillation_loss(target, target, 0.0).item() == pytest.approx(entropy.item(), rel=1e-5)
    assert distillation_loss(target + torch.randn_like(target), target, 0.0) > entropy
    assert distillation_loss(target * 100, target, 1.0) < 0.1 * distillation_loss(target, target, 1.0)


@pytest.mark.slow
def test_distilling_brings_the_drafter_to_the_target(target, tokenizer, streams, tmp_path):
    teacher = load_teacher(target, compiled=False)
    torch.manual_seed(2)
    drafter = new_llama(Shape(layers=1, hidden=16, heads=1, kv_heads=1, head_dim=16, intermediate=32), tokenizer)
    loss = distil_loss(teacher, 0.5, compiled=False)
    rows = {"input_ids": torch.from_numpy(streams.heldout["chat"][:64].astype(np.int64))[None]}
    before = loss(drafter, rows).item()
    fit(drafter, streams.blocks(_steps(40)), _steps(40), Run(tmp_path), loss)
    assert loss(drafter, rows).item() < 0.8 * before


def test_repeats_marks_what_completes_an_earlier_ngram_of_the_answer() -> None:
    assistant = 3
    document = np.array([0, 7, 8, 7, 8, assistant, 7, 8, 9, 7, 8, 5], np.uint16)
    assert np.flatnonzero(repeats(document, assistant, 2)).tolist() == [10]
    loop = np.array([0, 7, assistant, *[assistant] * 5], np.uint16)
    assert np.flatnonzero(repeats(loop, assistant, 2)).tolist() == [5, 6, 7]


@pytest.mark.slow
def test_unlikelihood_unlearns_a_loop_and_keeps_the_corpus(target, tokenizer, streams, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    start = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why?"}], add_generation_prompt=True, return_dict=False
    )
    document = start + [300, 301, 302] * 12
    own = TokenDocuments(np.array(document * 2, np.uint16), np.array([0, len(document), 2 * len(document)]))
    blocks = streams.blocks(SCHEDULE)
    contrast = Contrast(blocks.train, own, start[-1], 3)
    assert contrast[0]["unwanted"].sum() > 0
    loss = unlikelihood(compiled=False)

    def probability() -> float:
        with torch.no_grad():
            logits = model(torch.tensor([document])).logits[0, len(start) + 8 : -1]
        return logits.softmax(-1).gather(-1, torch.tensor(document[len(start) + 9 :])[:, None]).mean().item()

    fit(model, Examples(_Loop(document), {}), _steps(30), Run(tmp_path / "loop"))
    looping, known = probability(), loss(model, collate([blocks.train[0]])).item()
    fit(model, Examples(contrast, {}), _steps(20), Run(tmp_path / "cured"), loss)
    assert looping > 0.2  # the loop is there to be unlearnt: an untrained model gives its tokens less than 0.01
    assert probability() < 0.5 * looping
    assert loss(model, collate([blocks.train[0]])).item() < known


class _Loop(Dataset):
    """Thirty batches of one looping document."""

    def __init__(self, document: list[int]) -> None:
        self.row = torch.tensor(document * 4)[: SCHEDULE.block][None]

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.row}


@pytest.mark.parametrize("preset", recipe.SIZES)
def test_every_stage_of_a_preset_is_a_command_line_that_its_command_takes(preset: str, tmp_path: Path) -> None:
    made: set[Path] = set()
    for stage in recipe.stages(recipe.SIZES[preset], tmp_path):
        command = importlib.import_module(f"{recipe.__package__}.{stage.module}")
        args = command.new_parser().parse_args([*stage.arguments.split(), "--data", corpora(tmp_path)])
        read = [getattr(args, name) for name in ("tokenizer", "model", "target") if hasattr(args, name)]
        assert set(read) <= made, stage.name
        if hasattr(args, "own"):
            assert any(product.parent == args.own for product in made), stage.name
        assert args.output in (stage.product, stage.product.parent)
        if stage.trains:
            schedule = from_fields(Schedule, args)
            assert (
                schedule.batch % (schedule.micro_batch * recipe.PROCESSES) == schedule.micro_batch % schedule.block == 0
            )
            assert sum(share for share, _ in schedule.row_lengths) == pytest.approx(1)
            assert all(schedule.block % length == 0 for _, length in schedule.row_lengths)
        made.add(stage.product)


def test_a_recipe_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    plan = recipe.stages(sizes.TINY, tmp_path)
    commands: list[list[str]] = []
    dies: set[str] = {"cured-1"}

    def fake(command: list[str], _: object) -> int:
        commands.append(command)
        stage = plan[[stage.arguments.split() for stage in plan].index(_own_arguments(command))]
        if stage.name in dies:
            for name, files in (("checkpoint-2", ["trainer_state.json"]), ("checkpoint-4", [])):
                (stage.product.parent / name).mkdir(parents=True)
                for file in files:
                    (stage.product.parent / name / file).touch()
            return -9
        stage.product.mkdir(parents=True)
        (stage.product / "made-by").write_text(stage.name)
        return 0

    monkeypatch.setattr(recipe, "_status_of", fake)
    line = ["--data", corpora(tmp_path), "--work", str(tmp_path), "--preset", "tiny"]
    assert recipe.main(line) == 2
    assert "stage cured-1 failed with exit status -9" in capsys.readouterr().err
    assert [("--resume" in command, "--nproc-per-node" in command) for command in commands] == [
        (False, False), (False, True), (False, False), (False, True)
    ]  # fmt: skip
    commands.clear()
    dies.clear()
    assert recipe.main(line) == 0
    assert len(commands) == len(plan) - 3
    assert [stage.name for stage, command in zip(plan[3:], commands, strict=True) if "--resume" in command] == [
        "cured-1"
    ]
    assert all((stage.product / "made-by").read_text() == stage.name for stage in plan)
    commands.clear()
    assert recipe.main(line) == 0
    assert commands == []


def _own_arguments(command: list[str]) -> list[str]:
    """The part of a stage's command that the plan wrote: between the module and what the recipe adds."""
    start = next(index for index, word in enumerate(command) if word.startswith("experiments."))
    return command[start + 1 : command.index("--data")]


def corpora(folder: Path) -> str:
    """A folder that looks like one of corpora."""
    (folder / "corpora").mkdir(exist_ok=True)
    (folder / "corpora" / "chat_x.jsonl.xz").touch()
    return str(folder / "corpora")


def test_corpora_that_are_not_here_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(plans.VARIABLE, raising=False)
    assert recipe.main(["--work", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "opt_tree/models/embedded/README.md" in error and "error: " in error
    monkeypatch.setenv(plans.VARIABLE, str(tmp_path))
    assert recipe.main(["--work", str(tmp_path)]) == 2
    assert f"no chat_*.jsonl.xz or text_*.jsonl.xz in {tmp_path}" in capsys.readouterr().err
