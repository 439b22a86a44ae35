"""The evaluation commands on tiny random models: what they write, that a death loses nothing, and what they refuse."""

import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from process import free_port
from tiny_models import publish
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from evaluation import eval_opt_classic, eval_opt_eagle, report
from evaluation.answers.file import AnswerFile
from evaluation.answers.record import seed_of
from evaluation.command_line import parse
from evaluation.questions import sets as questions
from evaluation.questions.prompts import Prompter
from evaluation.run import models as loading
from evaluation.run import processes as launching
from evaluation.run import work
from evaluation.run.options import EagleOptions, Options
from evaluation.run.processes import Processes
from opt_tree import EagleHead, OptTree, Stop

CONTEXT, NEW = 160, 8
CHAT = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
PER_TURN = (
    *("idxs", "new_tokens", "wall_time", "decoding_steps", "draft_forwards", "draft_tokens", "verified_tokens"),
    *("draft_time", "verify_time", "prefill_time", "finish_reason"),
)
PER_STEP = ("accept_lengths", "expected_lengths", "tree_nodes", "tree_depths", "step_times")
TIMES = {
    "wall_time",
    "step_times",
    "tstamp",
    "draft_time",
    "verify_time",
    "commit_time",
    "draft_forward_time",
    "target_forward_time",
    "prefill_time",
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target, drafter (its first layer) and EAGLE head, three questions of one or two turns."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer(chat_template=CHAT)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(3)
    target = LlamaForCausalLM(config)
    drafter = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1}))
    weights = target.state_dict()
    drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
    for name, model in (("target", target), ("draft", drafter)):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    head = EagleHead(LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1}))
    (root / "eagle").mkdir()
    publish(root / "eagle", head, "model.safetensors")
    write_questions(root / "q.jsonl", 3)
    return root


def write_questions(path: Path, count: int) -> Path:
    lines = [
        {
            "question_id": 81 + i,
            "category": "math" if i % 2 else "writing",
            "turns": [f"What is {i}?", "Why?"][: 1 + (i != 1)],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(folder: Path, answers: Path | str, *more: str, kind: str = "classic") -> list[str]:
    drafter = ["--draft-model-path", f"{folder}/draft"] if kind == "classic" else ["--ea-model-path", f"{folder}/eagle"]
    options = f"--dtype float64 --device cpu --max-new-token {NEW} --nodes 8 --threshold 0.1 --max_depth 4"
    asked = ["--base-model-path", f"{folder}/target", "--question-file", f"{folder}/q.jsonl"]
    return [*drafter, *asked, "--answer-file", str(answers), *options.split(), *more]


def main(given: list[str], kind: str = "classic") -> int:
    return (eval_opt_eagle if kind == "eagle" else eval_opt_classic).main(given)


def command(folder: Path, answers: Path | str, *more: str, kind: str = "classic") -> int:
    return main(arguments(folder, answers, *more, kind=kind), kind)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def but_for_times(record: Any) -> Any:
    if isinstance(record, dict):
        return {key: but_for_times(value) for key, value in record.items() if key not in TIMES}
    return [but_for_times(item) for item in record] if isinstance(record, list) else record


def in_order(path: Path) -> list[dict[str, Any]]:
    return sorted(lines_of(path), key=lambda line: line["question_id"])


def turns_of(path: Path) -> list[list[str]]:
    return [choice["turns"] for line in lines_of(path) for choice in line["choices"]]


@pytest.fixture(scope="session")
def answered(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The three questions as each command answers them, with the baselines."""
    root = tmp_path_factory.mktemp("answered")
    for kind in ("classic", "eagle"):
        assert command(folder, root / kind / "a.jsonl", "--baseline", kind=kind) == 0
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def answers(answered: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of what the classic command wrote: to go on with, and to spoil."""
    shutil.copytree(answered["classic"], tmp_path, dirs_exist_ok=True)
    return tmp_path / "a.jsonl"


DRAWN = ("--temperature", "0.8", "--seed", "5")


@pytest.fixture
def drawn(folder: Path, tmp_path: Path) -> Path:
    """Two drawn answers to each question, with the baselines."""
    assert command(folder, tmp_path / "a.jsonl", "--baseline", "--num-choices", "2", *DRAWN, kind="eagle") == 0
    return tmp_path / "a.jsonl"


# What is written


@pytest.mark.parametrize("kind", ["classic", "eagle"])
def test_the_answer_file_holds_every_field_and_the_fields_agree(folder: Path, answered: Any, kind: str) -> None:
    # What fastchat.llm_judge reads in a folder: every *.jsonl is a model's.
    assert {path.name for path in answered[kind].glob("*.jsonl")} == {
        "a.jsonl",
        "a.plain.jsonl",
        "a.transformers.jsonl",
    }
    lines = lines_of(answered[kind] / "a.jsonl")
    assert [line["question_id"] for line in lines] == [81, 82, 83]
    for line in lines:
        assert {"question_id", "answer_id", "model_id", "choices", "tstamp", "category"} == line.keys()
        assert line["model_id"] == "target-temperature-0.0"
        (choice,) = line["choices"]
        turns = 1 if line["question_id"] == 82 else 2
        assert len(choice["turns"]) == turns and all(isinstance(turn, str) for turn in choice["turns"])
        assert all(isinstance(choice[key], list) and len(choice[key]) == turns for key in PER_TURN)
        assert [i + 1 for i in choice["idxs"]] == choice["decoding_steps"]
        steps = sum(choice["decoding_steps"])
        assert all(len(choice[key]) == steps for key in PER_STEP)
        assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) == sum(map(len, choice["token_ids"]))
        assert sum(choice["verified_tokens"]) == sum(choice["tree_nodes"]) + steps
        assert (
            min(choice["expected_lengths"]) >= 1 and max(choice["tree_depths"]) <= 4 and max(choice["tree_nodes"]) <= 8
        )
    if kind == "classic":
        # The drafter is the target's first layer: something is accepted, or the test sees no trees.
        assert max(max(line["choices"][0]["accept_lengths"]) for line in lines) > 1
    for name in ("plain", "transformers"):
        baseline = lines_of(answered[kind] / f"a.{name}.jsonl")
        assert [but_for_times(line["choices"][0]["token_ids"]) for line in baseline] == [
            line["choices"][0]["token_ids"] for line in lines
        ]
        assert all(set(line["choices"][0]["accept_lengths"]) == {1} for line in baseline)


def test_the_header_says_what_made_the_file(folder: Path, answers: Path, tmp_path: Path) -> None:
    header = AnswerFile(answers).header()
    (session,) = header["sessions"]
    assert header["settings"]["target_dtype"] == "float64" and header["settings"]["draft_dtype"] == "float64"
    fields = {field.name for field in dataclasses.fields(Options)}
    assert session["options"].keys() == fields - {"draft_model_path", "ea_model_path"}
    assert {"torch", "transformers", "device", "threads", "commit"} <= session["environment"].keys()
    assert command(folder, tmp_path / "drawn.jsonl", "--limit", "1", *DRAWN, kind="eagle") == 0
    drawn = AnswerFile(tmp_path / "drawn.jsonl").header()["settings"]
    assert drawn["seed"] == 5 and drawn["temperature"] == 0.8


@pytest.mark.slow
def test_more_choices_differ_only_above_temperature_zero(folder: Path, tmp_path: Path, drawn: Path) -> None:
    assert command(folder, tmp_path / "cold.jsonl", "--num-choices", "2", "--limit", "1") == 0
    cold, warm = lines_of(tmp_path / "cold.jsonl"), lines_of(drawn)
    assert all([choice["index"] for choice in line["choices"]] == [0, 1] for line in cold + warm)
    assert all(line["choices"][0]["token_ids"] == line["choices"][1]["token_ids"] for line in cold)
    assert all(line["choices"][0]["token_ids"] != line["choices"][1]["token_ids"] for line in warm)


@pytest.mark.slow
def test_a_seed_gives_the_same_text_whatever_the_tree_and_the_order(folder: Path, tmp_path: Path, drawn: Path) -> None:
    asked = ("--temperature", "0.8", "--seed", "5", "--method", "chain", "--question-begin", "2")
    assert command(folder, tmp_path / "b.jsonl", *asked) == 0
    assert turns_of(drawn) == turns_of(tmp_path / "a.plain.jsonl")
    assert turns_of(tmp_path / "b.jsonl") == turns_of(drawn)[4:5]


@pytest.mark.slow
def test_a_batch_answers_as_its_questions_do_alone(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Questions of one and of two turns, one too long, two lanes: the file is the same but for times and `lanes`."""
    asked = write_questions(tmp_path / "q.jsonl", 4)
    with asked.open("a") as file:
        file.write(json.dumps({"question_id": 99, "turns": ["a" * CONTEXT]}) + "\n")
    more = ["--question-file", str(asked), "--temperature", "0.7"]
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert command(folder, one, *more) == 1
    capsys.readouterr()
    assert command(folder, two, *more, "--batch-size", "2", "--json") == 1
    answers = lines_of(two)
    assert [choice.pop("lanes") for line in answers for choice in line["choices"]] == [[2, 2], [2], [2, 2], [2, 2]]
    for line, alone in zip(answers, lines_of(one), strict=True):
        assert line.pop("answer_id") != alone["answer_id"]  # another setting
        assert but_for_times(line) == but_for_times({k: v for k, v in alone.items() if k != "answer_id"})
    assert [failed["question_id"] for failed in AnswerFile(two).read_failed()] == [99]
    told = capsys.readouterr().out
    assert "questions were decoded side by side; its times are a batch's, hence no speed is shown" in told
    figures = json.loads(told.splitlines()[-1])
    assert figures["overall"]["tokens_per_second"] is None is figures["step_milliseconds"]
    assert figures["overall"]["tokens_per_step"] >= 1 and "a step takes" not in told
    # Times of two kinds do not go into one file.
    assert command(folder, one, *more, "--batch-size", "2") == 2
    assert "batch_size 1 there, 2 now" in capsys.readouterr().err


@pytest.mark.slow
def test_chain_and_none_draft_what_they_say(folder: Path, tmp_path: Path) -> None:
    assert command(folder, tmp_path / "chain.jsonl", "--method", "chain") == 0
    # Without a tree no drafter is loaded.
    assert command(folder, tmp_path / "none.jsonl", "--method", "none", "--draft-model-path", "./absent") == 0
    chains = [choice for line in lines_of(tmp_path / "chain.jsonl") for choice in line["choices"]]
    assert max(max(choice["tree_nodes"]) for choice in chains) == 4
    assert all(choice["tree_nodes"] == choice["tree_depths"] for choice in chains)
    assert all(set(c["tree_nodes"]) == {0} for line in lines_of(tmp_path / "none.jsonl") for c in line["choices"])


def test_own_history_is_the_own_answer(answers: Path) -> None:
    choice = lines_of(answers)[0]["choices"][0]
    assert (
        byte_tokenizer(chat_template=CHAT).decode(choice["prompt_ids"][1])
        == f"<u>What is 0?<a>{choice['turns'][0]}<u>Why?<a>"
    )


@pytest.mark.slow
def test_slices_and_limit_choose_questions_and_extend_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that is not there yet."""
    monkeypatch.chdir(tmp_path)
    path = Path("new/folder/a.jsonl")
    assert command(folder, path, "--question-begin", "1", "--question-end", "2") == 0
    assert [line["question_id"] for line in lines_of(path)] == [82]
    assert command(folder, path, "--limit", "1") == 0
    assert [line["question_id"] for line in lines_of(path)] == [81, 82]


def test_threads_are_used_and_written_down(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file of a bare name."""
    chosen = [1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)  # a real pool of threads would not outlive a fork
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    assert command(folder, "a.jsonl", "--limit", "1", "--threads", "2") == 0
    assert chosen == [1, 2]
    header = AnswerFile(tmp_path / "a.jsonl").header()
    (session,) = header["sessions"]
    assert session["options"]["threads"] == session["environment"]["threads"] == 2
    assert "threads" not in header["settings"]  # another number goes on with the file


# Deaths and processes


def in_child(work: Callable[[], int]) -> multiprocessing.Process:
    """Run a command in a forked process: everything is imported there already."""
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(work()))
    process.start()
    return process


def lines_in(path: Path) -> int:
    """Whole lines of a file that another process writes; it comes and goes while that one tries whether it may."""
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def test_a_child_that_is_killed_while_it_draws_holds_up_nobody() -> None:
    """tqdm's usual lock is one for all forked processes; these tests would wait for ever, once in many runs."""
    ready = multiprocessing.get_context("fork").Event()

    def draw() -> int:
        with tqdm.get_lock():
            ready.set()
            time.sleep(60)
        return 0

    child = in_child(draw)
    assert ready.wait(60)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert tqdm.get_lock().acquire(timeout=5)
    tqdm.get_lock().release()


@pytest.fixture(scope="session")
def many(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve questions, q.jsonl, and their answers by one process, one.jsonl and its baselines."""
    root = tmp_path_factory.mktemp("many")
    asked = write_questions(root / "q.jsonl", 12)
    assert command(folder, root / "one.jsonl", "--question-file", str(asked), "--baseline") == 0
    return root


@pytest.mark.slow
def test_kill_9_at_three_moments_loses_and_doubles_nothing(folder: Path, tmp_path: Path, many: Path) -> None:
    killed, asked = tmp_path / "killed.jsonl", ("--question-file", f"{many}/q.jsonl", "--baseline")
    for answers in (1, 2, 4):
        child = in_child(lambda: command(folder, killed, *asked))
        give_up = time.monotonic() + 300
        while child.is_alive() and time.monotonic() < give_up:
            if lines_in(killed) >= answers:
                break
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL, "it was done before it could be killed"
    # And the death in the middle of a line, which no test can time.
    with killed.open("ab") as file:
        file.write(b'{"question_id": 90, "answer_id": "0')
    assert command(folder, killed, *asked) == 0
    for name in ("", ".plain", ".transformers"):
        assert but_for_times(lines_of(tmp_path / f"killed{name}.jsonl")) == but_for_times(
            lines_of(many / f"one{name}.jsonl")
        )
    assert len(AnswerFile(killed).header()["sessions"]) == 4


def begin(folder: Path, paths: list[Path], *more: str, own: tuple[str, ...] = ()) -> list[multiprocessing.Process]:
    """What `accelerate launch` or torchrun sets up on one machine or several: a process for each answer file.

    `own`: what only the last one is told.
    """
    port, size = free_port(), len(paths)

    def work(rank: int) -> int:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"}
        return command(folder, paths[rank], *more, *(own if rank == size - 1 else ()))

    return [in_child(lambda rank=rank: work(rank)) for rank in range(size)]


def ended(children: list[multiprocessing.Process]) -> list[int | None]:
    """The exit statuses; None for one that hangs."""
    for child in children:
        child.join(300)
    return [child.exitcode for child in children]


def launch(folder: Path, path: Path, processes: int, *more: str) -> list[int | None]:
    return ended(begin(folder, [path] * processes, *more))


@pytest.mark.slow
def test_two_processes_merge_to_what_one_writes_failures_included(folder: Path, tmp_path: Path) -> None:
    asked = write_questions(tmp_path / "q.jsonl", 5)
    with asked.open("a") as file:
        file.write(json.dumps({"question_id": 99, "turns": ["a" * CONTEXT]}) + "\n")
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert command(folder, one, "--question-file", str(asked)) == 1
    # The second process has the question that fails, and says so; the report makes one file.
    assert launch(folder, two, 2, "--question-file", str(asked)) == [0, 1]
    assert not two.exists() and report.main([str(two)]) == 0
    assert but_for_times(in_order(two)) == but_for_times(lines_of(one))
    assert but_for_times(AnswerFile(two).read_failed()) == but_for_times(AnswerFile(one).read_failed())
    beside = {path.name for path in tmp_path.iterdir() if path.name.startswith("two")}
    assert beside == {"two.jsonl", "two.jsonl.run.json", "two.jsonl.failed"}


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """Answer files on two machines that see nothing of each other; the second one's folder is not there yet."""
    (tmp_path / "first").mkdir()
    return [tmp_path / "first" / "a.jsonl", tmp_path / "second" / "a.jsonl"]


@pytest.mark.slow
def test_machines_without_a_shared_folder_keep_their_parts(folder: Path, many: Path, machines: list[Path]) -> None:
    """Brought together, the report makes one file of them; what is there is not answered again."""
    asked = ("--question-file", f"{many}/q.jsonl", "--question-end", "4")
    assert ended(begin(folder, machines, *asked, "--limit", "2")) == [0, 0]
    parts = [machines[rank].with_name(f"a.jsonl.part{rank}") for rank in (0, 1)]
    before = [lines_of(part) for part in parts]
    assert ended(begin(folder, machines, *asked)) == [0, 0]
    assert [lines_of(part)[:1] for part in parts] == before, "an answer was computed again"
    for beside in ("", ".run.json"):
        (parts[1].parent / f"{parts[1].name}{beside}").rename(machines[0].parent / f"{parts[1].name}{beside}")
    assert report.main([str(machines[0])]) == 0
    found = sorted(lines_of(machines[0]), key=lambda line: line["question_id"])
    assert but_for_times(found) == but_for_times(lines_of(many / "one.jsonl")[:4])
    assert {path.name for path in machines[0].parent.iterdir()} == {"a.jsonl", "a.jsonl.run.json"}
    assert len(AnswerFile(machines[0]).header()["sessions"]) == 4


@pytest.mark.slow
def test_what_a_machine_has_of_another_configuration_is_not_mixed_in(
    folder: Path, machines: list[Path], capfd: Any
) -> None:
    machines[1].parent.mkdir()
    other = machines[1].parent / "other.jsonl"
    assert command(folder, other, "--limit", "2", "--nodes", "5") == 0
    part = machines[1].with_name("a.jsonl.part1")
    for beside in ("", ".run.json"):
        other.with_name(f"other.jsonl{beside}").rename(part.with_name(f"{part.name}{beside}"))
    assert ended(begin(folder, machines)) == [0, 2]
    assert "belongs to another configuration (nodes 5 there, 8 now)" in capfd.readouterr().err
    assert len(lines_of(part)) == 2
    assert ended(begin(folder, machines, "--overwrite")) == [0, 0]
    assert [line["question_id"] for line in lines_of(part)] == [82]


@pytest.mark.slow
def test_processes_that_answer_otherwise_make_no_file(folder: Path, machines: list[Path], capfd: Any) -> None:
    """Such as by what "auto" comes to on another machine: their parts come together afterwards."""
    path, other = machines
    assert ended(begin(folder, machines, own=("--nodes", "9"))) == [0, 0]
    for file in other.parent.glob("a.jsonl.part1*"):
        file.rename(path.parent / file.name)
    assert len(AnswerFile(path).parts()) == 2
    assert report.main([str(path)]) == 2
    assert "is of another configuration than the rest (nodes" in capfd.readouterr().err
    assert 2 in ended(begin(folder, [path, path])) and "another configuration" in capfd.readouterr().err
    assert not path.exists()


@pytest.mark.slow
def test_a_run_alone_is_kept_away_from_a_part_that_is_written(folder: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "a.jsonl"
    part = AnswerFile(path).part(1)
    part.append({"question_id": 1})
    with part.lock():
        assert command(folder, path, "--overwrite") == 2
    assert "a.jsonl.part1 is being written by process" in error_of(capsys)
    assert part.read() == [{"question_id": 1}] and not path.exists()
    assert command(folder, path, "--overwrite") == 0
    assert len(lines_of(path)) == 3 and not part.path.exists()


@pytest.mark.slow
def test_parts_of_a_killed_parallel_run_are_taken_over(folder: Path, tmp_path: Path, many: Path) -> None:
    two, done = tmp_path / "two.jsonl", lines_of(many / "one.jsonl")[:4]
    # Rank 0 died while it wrote its second answer, of other questions than rank 0 has now.
    AnswerFile(two).part(0).append(done[1])
    with (tmp_path / "two.jsonl.part0").open("ab") as file:
        file.write(json.dumps(done[3]).encode()[:40])
    shutil.copy(many / "one.jsonl.run.json", tmp_path / "two.jsonl.part0.run.json")
    assert launch(folder, two, 3, "--question-file", f"{many}/q.jsonl", "--question-end", "4") == [0, 0, 0]
    assert report.main([str(two)]) == 0
    lines = in_order(two)
    assert but_for_times(lines) == but_for_times(done)
    assert lines[1]["tstamp"] == done[1]["tstamp"], "an answer that was there was not computed again"


def test_all_processes_refuse_what_the_leader_refuses(folder: Path, answers: Path) -> None:
    assert launch(folder, answers, 2, "--nodes", "9") == [2, 2]


def test_shares_cover_every_question_once() -> None:
    shares = [Processes(rank, rank, 3).share(list(range(10))) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == list(range(10))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# Bad input: one clear line, the right exit status, nothing lost


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is loaded: what is wrong is known before."""

    def refuse(*_: Any) -> None:
        pytest.fail("models were loaded first")

    monkeypatch.setattr(eval_opt_classic, "load_run", refuse)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No data folder, no cache, no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(questions.DATA_VARIABLE, raising=False)

    def refuse(*_: Any, **__: Any) -> None:
        raise questions.urllib.error.URLError("no network here")

    monkeypatch.setattr(questions.urllib.request, "urlopen", refuse)
    return tmp_path


def test_an_unknown_set_is_named_with_those_that_are_known(nowhere: Path, no_loading: None, capsys: Any) -> None:
    assert main(["--bench-name", "nt_bench"]) == 2
    error = error_of(capsys)
    assert "'nt_bench'" in error and "mt_bench" in error and "--question-file" in error


def test_an_absent_set_is_named_with_its_file_folder_and_source(nowhere: Path, no_loading: None, capsys: Any) -> None:
    assert main(["--bench-name", "mt_bench", "--data-dir", "benches"]) == 2
    error = error_of(capsys)
    assert "benches/mt_bench/question.jsonl" in error and "lm-sys/FastChat" in error and "--fetch" in error
    assert main(["--bench-name", "mt_bench", "--fetch"]) == 2
    error = error_of(capsys)
    assert "no network here" in error and ".cache/opt_tree/questions/mt_bench/question.jsonl" in error


def test_fetch_checks_what_it_got(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b'{"question_id": 1, "turns": ["Hello?"]}\n'
    monkeypatch.setattr(questions.urllib.request, "urlopen", lambda *_, **__: BytesIO(data))
    with pytest.raises(ValueError, match="not the file known here"):
        questions.load_set("mt_bench", fetch=True)
    source = questions.Source("https://example.org/q", questions.hashlib.sha256(data).hexdigest(), "")
    monkeypatch.setitem(questions.SOURCES, "mt_bench", source)
    assert questions.load_set("mt_bench", fetch=True).questions[0].turns == ("Hello?",)
    monkeypatch.setattr(questions.urllib.request, "urlopen", lambda *_, **__: pytest.fail("fetched twice"))
    assert questions.load_set("mt_bench", fetch=True).questions[0].category == "mt_bench"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": ["b"\n', "line 2: broken JSON"),
        ('{"turns": ["a"]}\n\n{"prompt": "b"}\n', "line 3: needs `turns`"),
        ('{"turns": []}\n', "line 1: needs `turns`"),
        ('["a"]\n', "line 1: expected a JSON object"),
        ('{"question_id": 7, "turns": ["a"]}\n' * 2, "line 2: question_id 7 is already that of line 1"),
        ('{"question_id": true, "turns": ["a"]}\n', "line 1: question_id must be a number or a text, got True"),
        ("", "the question set is empty"),
        ('{"question": "a", "turns": ["a"]}\n{"question": "b", "turns": ["a", "b"]}\n', "line 2: `question` is not"),
        ('{"question": "a"}\n{"question": "b \\ud83d"}\n', "line 2: \\ud83d is half of a character"),
    ],
)  # fmt: skip
def test_a_broken_question_file_names_the_line(
    folder: Path, tmp_path: Path, no_loading: None, capsys: Any, text: str, message: str
) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    assert command(folder, tmp_path / "a.jsonl", "--question-file", str(tmp_path / "q.jsonl")) == 2
    assert message in error_of(capsys)


def test_an_answer_file_that_cannot_be_written_is_refused_first(
    folder: Path, tmp_path: Path, no_loading: None, capsys: Any
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "a.jsonl"):
        assert command(folder, path) == 2
        error = error_of(capsys)
        assert f"cannot write to {path}" in error


def test_another_configuration_is_refused_not_mixed(folder: Path, answers: Path, capsys: Any) -> None:
    before = answers.read_bytes()
    for flag, given in (
        ("--nodes", "9"),
        ("--temperature", "1"),
        ("--max-new-token", "13"),
        ("--dtype", "float32"),
        ("--seed", "1"),
    ):
        assert command(folder, answers, flag, given) == 2
        error = error_of(capsys)
        name = "target_dtype" if flag == "--dtype" else flag.lstrip("-").replace("-", "_")
        assert f"another configuration ({name} " in error and given in error and "--overwrite" in error
        assert answers.read_bytes() == before
    assert command(folder, answers, flag, given, "--overwrite") == 0
    assert len(lines_of(answers)) == 3 and AnswerFile(answers).header()["settings"]["seed"] == 1


def test_answers_without_a_header_are_refused(folder: Path, tmp_path: Path, no_loading: None, capsys: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question_id": 81, "choices": []}\n')
    assert command(folder, path) == 2
    assert "no header a.jsonl.run.json" in error_of(capsys)
    assert path.read_text() == '{"question_id": 81, "choices": []}\n'


def test_a_broken_line_in_the_middle_of_an_answer_file_is_named(folder: Path, answers: Path, capsys: Any) -> None:
    lines = answers.read_text().splitlines()
    answers.write_text("\n".join([lines[0], lines[1][:50], lines[2]]) + "\n")
    assert command(folder, answers) == 2
    assert f"{answers}, line 2" in error_of(capsys)


@pytest.mark.slow
def test_a_question_longer_than_the_context_fails_alone(folder: Path, tmp_path: Path, capsys: Any) -> None:
    asked = tmp_path / "long.jsonl"
    long = {"question_id": 84, "category": "writing", "turns": ["a" * CONTEXT]}
    asked.write_text(json.dumps(long) + "\n" + (folder / "q.jsonl").read_text())
    path = tmp_path / "a.jsonl"
    assert command(folder, path, "--question-file", str(asked), "--baseline", "--json") == 1
    assert [line["question_id"] for line in lines_of(path)] == [81, 82, 83]
    (failure,) = AnswerFile(path).read_failed()
    assert failure["question_id"] == 84 and f"leaves no room in {CONTEXT} of context" in failure["failed"]
    output = capsys.readouterr()
    assert "failed: opt, question 84: ValueError: the prompt has" in output.err
    report = json.loads(output.out.splitlines()[-1])["reports"][0]
    assert report["failed"] == 1 and report["overall"]["questions"] == 3


@pytest.mark.slow
def test_an_exception_in_one_question_is_recorded_and_tried_again(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    make = loading.make_method

    def fragile(*args: Any) -> Callable:
        method = make(*args)

        def answer(prompt: list[int], limit: int, seed: int) -> Any:
            if seed == seed_of(0, 83, 0, 1):
                raise RuntimeError("out of\nmemory")
            return method(prompt, limit, seed)

        return answer

    with monkeypatch.context() as patch:
        patch.setattr(work, "make_method", fragile)
        assert command(folder, path) == 1
    assert [line["question_id"] for line in lines_of(path)] == [81, 82]
    assert [record["failed"] for record in AnswerFile(path).read_failed()] == ["RuntimeError: out of memory"]
    assert "1 failed" in capsys.readouterr().err
    assert command(folder, path) == 0
    assert [line["question_id"] for line in lines_of(path)] == [81, 82, 83]
    assert not AnswerFile(path).failed_path.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--limit", "0"), "--limit must be at least 1"),
        (("--num-choices", "0"), "--num-choices must be at least 1"),
        (("--question-begin", "7"), "no questions left"),
        (("--answer-file", ""), "is a folder: name an answer file"),
        (("--question-file", "absent.jsonl"), "no question file at absent.jsonl"),
        (("--through", "3b"), "--through takes FILE.py:NAME, a function that changes a pair, got 3b"),
        (("--threads", "0"), "--threads must be at least 1, got 0"),
        (("--conv-template", "vicuna"), "no FastChat conversation is called 'vicuna'"),
        (("--num-gpus-total", "3", "--num-gpus-per-model", "2"), "not a multiple"),
        (("--num-gpus-total", "2"), "but the device is cpu"),
        (("--max-gpu-memory", "20GiB"), "but the device is cpu"),
        (("--device", "tpu0"), "no device 'tpu0' here"),
        (("--nodes", "1000000000"), "--nodes must be at most 4096, got 1000000000"),
        (("--threads", "999999"), "--threads must be at most 1024, got 999999"),
        (("--temperature", "-1"), "temperature must be 0 (greedy) or more"),
        (("--temperature", "nan"), "temperature must be 0 (greedy) or more, and finite, got nan"),
        (("--threshold", "-1"), "threshold must be 0 or more"),
    ],
)
def test_options_that_cannot_be_are_refused(
    folder: Path, tmp_path: Path, no_loading: None, capsys: Any, more: tuple[str, ...], message: str
) -> None:
    """--overwrite among them: what is there goes when the first new answer is there, and no sooner."""
    wrong, answers = tmp_path / "wrong.jsonl", tmp_path / "a.jsonl"
    for file in (wrong, answers):
        file.write_text('{"question_id": 1, "choices": [{"turns": null}, {"turns": [5]}]}\n')
    asked = [word.format(wrong=wrong) for word in more]
    assert command(folder, answers, "--overwrite", *asked) == 2
    assert message in error_of(capsys)
    assert answers.read_text() == wrong.read_text() and len([*tmp_path.iterdir()]) == 2


def test_what_cannot_be_loaded_is_one_line_and_overwrites_nothing(folder: Path, answers: Path, capsys: Any) -> None:
    before = answers.read_bytes()
    for path in (answers, answers.with_name("new.jsonl")):
        assert command(folder, path, "--overwrite", "--base-model-path", "./absent") == 2
        assert "no model folder at ./absent" in error_of(capsys)
    assert command(folder, answers, "--overwrite", "--dtype", "float8_e4m3fn") == 2
    assert "unknown dtype 'float8_e4m3fn'" in error_of(capsys)
    assert answers.read_bytes() == before and not path.exists()


# Parts


def test_the_shipped_set_has_five_questions_of_two_turns_in_each_of_eight_categories() -> None:
    shipped = questions.load_set("demo").questions
    categories = [question.category for question in shipped]
    eight = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
    assert set(categories) == eight
    assert all(categories.count(category) == 5 for category in categories)
    assert all(len(question.turns) == 2 for question in shipped)


def test_the_held_out_prompts_are_those_that_figures_were_made_on() -> None:
    """The first 40 that the training data's split held out, in the order in which they were drawn."""
    heldout = questions.load_set("heldout").questions
    assert [question.id for question in heldout] == list(range(40))
    assert [question.category for question in heldout[:8]] == [question.category for question in heldout[-8:]]
    texts = "\n".join(question.turns[0] for question in heldout)
    assert (
        questions.hashlib.sha256(texts.encode()).hexdigest()
        == "f50aff55762163f883ba9f2707219c35a100ff536df6116eb3085b7f1a31e8f3"
    )


def test_sets_are_found_in_the_folders_in_order(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("home/.cache/opt_tree/questions", "data", "variable", "option"):
        (nowhere / folder / "gsm8k").mkdir(parents=True)
    monkeypatch.setenv(questions.DATA_VARIABLE, "variable")
    for folder in ("home/.cache/opt_tree/questions", "data", "variable", "option"):
        line = {"question": f"How many in {folder}?", "answer": "#### 3"}
        (nowhere / folder / "gsm8k" / "question.jsonl").write_text(json.dumps(line) + "\n")
        (question,) = questions.load_set("gsm8k", data_dir="option").questions
        assert question == questions.Question(0, "gsm8k", (f"How many in {folder}?",))


def test_every_published_flag_is_taken_in_both_spellings() -> None:
    published = (
        "--draft-model-path d --base-model-path b --bench-name mt_bench --answer-file ./a.jsonl --temperature 0 "
        "--nodes 60 --threshold 0.5 --max_depth 10 --model-id m --question-begin 1 --question-end 2 --num-choices 3 "
        "--max-new-token 4 --num-gpus-per-model 1 --num-gpus-total 1 --max-gpu-memory 20GiB --load-in-8bit"
    )
    options = parse(Options, "", None, published.split())
    assert options == parse(Options, "", None, re.sub(r"(?<=\w)-(?=\w)", "_", published).split())
    assert (options.drafter, options.max_depth, options.question_end, options.num_choices) == ("lm:d", 10, 2, 3)
    assert options.as_dict()["drafter"] == "lm:d" and "draft_model_path" not in options.as_dict()
    assert (
        options.weights
        == options.on("cpu").weights
        == parse(EagleOptions, "", None, ["--load-in-8bit"]).weights
        == "int8"
    )
    with pytest.raises(ValueError, match="--load-in-8bit and --weights int4: leave out one of them"):
        parse(Options, "", None, ["--load-in-8bit", "--weights", "int4"])
    head = parse(EagleOptions, "", None, ["--ea-model-path", "e"])
    assert head.tree() == head.on("cuda:0").tree() == OptTree()
    assert head.drafter == parse(Options, "", None, ["--drafter", "eagle:e"]).drafter == "eagle:e"
    assert parse(EagleOptions, "", None, []).as_dict()["drafter"] == "eagle:demo"
    with pytest.raises(ValueError, match="each say what drafts"):
        parse(EagleOptions, "", None, ["--draft-model-path", "d", "--ea-model-path", "e"])


@pytest.mark.parametrize(
    ("given", "device", "nodes", "threshold"),
    [
        ({}, "cpu", "auto", None),
        ({}, "cuda:1", 60, 0.5),
        ({"nodes": 25}, "cpu", 25, 0.5),
        ({"threshold": 0.2}, "cpu", 60, 0.2),
        ({"controller": "beta"}, "cpu", 60, 0.5),
        ({"method": "chain"}, "cpu", 60, 0.5),
        ({"nodes": "auto"}, "cuda", "auto", None),
    ],
)
def test_the_tree_is_the_machines_where_nobody_chose_one(
    given: dict[str, Any], device: str, nodes: int | str, threshold: float | None
) -> None:
    told = Options(**given).on(device)
    assert (told.nodes, told.threshold) == (nodes, threshold)
    assert told.on(device) == told, "a header's numbers are its run's"


def test_gpu_options_place_the_target_on_the_processes_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 + index, 200))
    options = Options(num_gpus_per_model=2, num_gpus_total=4)
    assert [launching.place(options, Processes(rank, rank, 2)) for rank in range(2)] == ["cuda:0", "cuda:2"]
    assert loading._placement(options, "cuda:2") == {"device_map": "auto", "max_memory": {2: 102, 3: 103}}
    assert loading._placement(Options(max_gpu_memory="9GiB"), "cuda:0")["max_memory"] == {0: "9GiB"}
    assert loading._placement(Options(), "cuda:0") == {}
    with pytest.raises(ValueError, match=r"means 2 processes, 1 were launched; accelerate launch .* 2 -m"):
        launching.place(options, Processes())
    with pytest.raises(ValueError, match="needs 6 GPUs on this machine, which has 4"):
        launching.place(Options(num_gpus_per_model=2), Processes(2, 2, 3))


def test_a_tokenizer_without_a_chat_template_needs_one_named() -> None:
    bare = byte_tokenizer()
    with pytest.raises(ValueError, match="--conv-template"):
        Prompter(bare, Stop())
    system = pytest.importorskip("fastchat.conversation").get_conv_template("vicuna_v1.1").system_message
    prompter = Prompter(bare, Stop(), "vicuna_v1.1")
    assert bare.decode(prompter.encode(["Who?"], [])) == f"{system} USER: Who? ASSISTANT:"
    two = bare.decode(prompter.encode(["Who?", "Why?"], ["I."]))
    assert two == f"{system} USER: Who? ASSISTANT: I.</s>USER: Why? ASSISTANT:"


def test_an_explicit_template_wins_and_brings_its_stop_strings() -> None:
    pytest.importorskip("fastchat")
    tokenizer = byte_tokenizer(chat_template=CHAT)
    prompter = Prompter(tokenizer, Stop(frozenset({tokenizer.eos_token_id})), "zero_shot")
    assert "### Human: Who?" in tokenizer.decode(prompter.encode(["Who?"], []))
    ids = tokenizer("I am.\n###  Human: more").input_ids
    kept = prompter.trim(ids)
    assert prompter.stop(kept) == "stop_string" and prompter.stop(kept[:-1]) is None
    assert prompter.text(kept) == "I am."


def test_an_answer_loses_its_stop_token_and_nothing_else() -> None:
    tokenizer = byte_tokenizer(chat_template=CHAT)
    end = tokenizer.eos_token_id
    prompter = Prompter(tokenizer, Stop(frozenset({end})))
    ids = tokenizer(" a  , b \n").input_ids
    assert prompter.trim([*ids, end, *ids]) == [*ids, end]
    assert prompter.text([*ids, end]) == prompter.text(ids) == "a  , b"


def test_thinking_is_switched_off() -> None:
    tokenizer = byte_tokenizer(chat_template=CHAT)
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}"
    assert tokenizer.decode(Prompter(tokenizer, Stop()).encode(["Who?"], [])) == "Who?!"


def test_resuming_elsewhere_is_said(folder: Path, answers: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = work.environment
    monkeypatch.setattr(work, "environment", lambda device: here(device) | {"threads": 64})
    assert command(folder, answers) == 0
    assert "threads 1 then, 64 now" in capsys.readouterr().err


def test_seeds_differ_in_every_respect() -> None:
    seeds = {seed_of(*key) for key in [(0, 81, 0, 0), (1, 81, 0, 0), (0, 82, 0, 0), (0, 81, 1, 0), (0, 81, 0, 1)]}
    assert len(seeds) == 5 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.slow
def test_fastchat_is_imported_only_for_its_templates(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastchat", types.ModuleType("fastchat"))
    monkeypatch.delitem(sys.modules, "fastchat.conversation", raising=False)
    assert command(folder, tmp_path / "a.jsonl", "--limit", "1") == 0
    assert command(folder, tmp_path / "b.jsonl", "--limit", "1", "--conv-template", "llama-2") == 2


@pytest.mark.quick("0")
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_the_ceiling_of_each_step_is_written_down(
    temperature: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in (("alone", []), ("lanes", ["--batch-size", "3"])):
        asked = ["--ceiling", "--temperature", temperature, *more]
        assert command(folder, tmp_path / f"{name}.jsonl", *asked, kind="classic") == 0
    alone, lanes = ([line["choices"][0] for line in lines_of(tmp_path / f"{n}.jsonl")] for n in ("alone", "lanes"))
    assert [choice["ceilings"] for choice in alone] == [choice["ceilings"] for choice in lanes]
    for choice in alone:
        steps = zip(choice["accept_lengths"], choice["ceilings"], choice["tree_depths"], strict=True)
        assert all(1 <= most <= 1 + depth and (temperature != "0" or most >= length) for length, most, depth in steps)
    assert report.main([str(tmp_path / "alone.jsonl"), "--json"]) == 0
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])["overall"]
    known = [most for choice in alone for most in choice["ceilings"]]
    assert figures["ceiling"] == pytest.approx(sum(known) / len(known)) and "left at last layer" in out
