"""Answer files between runs: who may write one, what becomes of what was there, what a death leaves."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from evaluation.answers.file import AnswerFile, AnswerSet, read_lines

SESSION = {"environment": {"machine": "here"}}


def answers(*keys: int) -> list[dict]:
    return [{"question_id": key, "choices": []} for key in keys]


@pytest.fixture
def file(tmp_path: Path) -> AnswerFile:
    """Two answers with their header."""
    file = AnswerFile(tmp_path / "a.jsonl")
    file.write_header({"nodes": 60}, SESSION)
    for record in answers(1, 2):
        file.append(record)
    return file


def _hold(path: Path, ready, leave) -> None:
    with AnswerFile(path).lock():
        ready.set()
        leave.wait(30)


@pytest.fixture
def holder(file: AnswerFile):
    """Another process that has the file, and the event that lets it go."""
    context = multiprocessing.get_context("fork")  # everything is imported there already
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(file.path, ready, leave))
    process.start()
    assert ready.wait(60)
    yield process, leave
    process.kill()
    process.join(30)


def test_a_second_process_is_kept_away_and_told_by_whom(file, holder):
    process, leave = holder
    with (
        pytest.raises(ValueError, match=f"a.jsonl is being written by process {process.pid} on .* since 20"),
        file.lock(),
    ):
        pytest.fail("two at once")
    leave.set()
    process.join(30)
    with file.lock():
        file.append(answers(3)[0])
    assert [path.name for path in sorted(file.path.parent.iterdir())] == ["a.jsonl", "a.jsonl.run.json"]


def test_a_dead_process_holds_nothing(file, holder):
    holder[0].kill()
    holder[0].join(30)
    with file.lock():
        pass


def test_what_is_overwritten_stays_until_there_is_an_answer(file):
    file.set_aside()
    assert not file.path.exists() and file.header() is None
    file.check_settings({"nodes": 8})
    file.write_header({"nodes": 8}, SESSION)
    file.restore()  # the run failed before its first answer
    assert [r["question_id"] for r in file.read()] == [1, 2] and file.header()["settings"] == {"nodes": 60}

    file.set_aside()
    file.write_header({"nodes": 8}, SESSION)
    file.part(1).append(answers(7)[0])
    file.restore()  # it failed after an answer, in one of its processes
    file.fold([])
    assert [r["question_id"] for r in file.read()] == [7] and file.header()["settings"] == {"nodes": 8}
    assert not list(file.path.parent.glob("*.old"))


def test_a_header_without_answers_binds_nobody(tmp_path):
    file = AnswerFile(tmp_path / "a.jsonl")
    file.write_header({"nodes": 60}, SESSION)
    file.check_settings({"nodes": 8})
    file.write_header({"nodes": 8}, SESSION)
    assert len(file.header()["sessions"]) == 1
    file.append(answers(1)[0])
    with pytest.raises(ValueError, match=r"another configuration \(nodes 8 there, 60 now"):
        file.check_settings({"nodes": 60})


def test_a_torn_line_is_left_out_with_a_note(file, capsys):
    with file.path.open("a") as stream:
        stream.write(json.dumps(answers(3)[0])[:20])
    assert len(AnswerSet.read(file.path).answers) == 2
    assert f"note: the last line of {file.path} is half-written and left out" in capsys.readouterr().err
    file.fold([])
    assert not file.torn and len(read_lines(file.path)) == 2


def test_a_lock_is_asked_for_once(file):
    """No waiting: the second run says so at once."""
    with file.lock():
        begin = time.monotonic()
        with pytest.raises(ValueError, match="is being written by"), AnswerFile(file.path).lock():
            pass
        assert time.monotonic() - begin < 5
