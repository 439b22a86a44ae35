"""Answer files between runs: who may write one, what becomes of what was there, what a death leaves."""

import json
import multiprocessing
from pathlib import Path

import pytest

from evaluation.answers.file import AnswerFile, Busy, read_lines
from evaluation.answers.reading import AnswerSet

SESSION = {"environment": {"machine": "here"}}


def answers(*keys: int) -> list[dict]:
    return [{"question_id": key, "choices": []} for key in keys]


@pytest.fixture
def file(tmp_path: Path) -> AnswerFile:
    """Two answers with their header."""
    file = AnswerFile(tmp_path / "a.jsonl")
    file.begin({"nodes": 60}, SESSION)
    for record in answers(1, 2):
        file.append(record)
    return file


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ([], "list indices"),
        ({"sessions": []}, "no settings"),
        ({"settings": "x", "sessions": []}, "its settings are no object"),
        ({"settings": {}, "sessions": None}, "its sessions are no list of objects"),
        ({"settings": {}, "sessions": [5]}, "its sessions are no list of objects"),
    ],
)
def test_a_header_that_is_none_is_one_line_for_every_reader(file, header, why):
    file.header_path.write_text(json.dumps(header))
    for read in (file.header, lambda: file.check_settings({"nodes": 60}), lambda: AnswerSet.read(file.path)):
        with pytest.raises(ValueError, match=f"a.jsonl.run.json is not a header of an answer file: {why}"):
            read()


@pytest.mark.parametrize("text", ['{"speed": 1.2}', "notes without a line end", "[" * 100_000])
def test_somebody_elses_file_is_refused_and_not_cut(tmp_path, text):
    """Its end without a line end is not what a death left of an answer."""
    file = AnswerFile(tmp_path / "figures.json")
    file.path.write_text(text)
    with pytest.raises(ValueError, match=r"figures.json is no answer file"):
        file.check_settings({})
    assert file.path.read_text() == text


def _hold(path: Path, ready, leave) -> None:
    with AnswerFile(path).lock():
        ready.set()
        leave.wait()


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
    """Whoever waited would wait for ever."""
    process, leave = holder
    refusal = f"a.jsonl is being written by process {process.pid} on .* since 20"
    with pytest.raises(ValueError, match=refusal), file.lock():
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
    """A run that fails before its first answer leaves no trace, whatever it had to say of failures."""
    old = file.path.read_bytes()
    new = AnswerFile(file.path)
    new.begin({"nodes": 8}, SESSION, replaces=[new])
    new.append_failed({"question_id": 7, "failed": "OSError"})
    assert file.path.read_bytes() == old and file.header()["settings"] == {"nodes": 60} and not file.read_failed()

    new.append(answers(8)[0])
    assert [r["question_id"] for r in file.read()] == [8] and file.header()["settings"] == {"nodes": 8}
    assert not file.read_failed() and len(file.header()["sessions"]) == 1


def test_a_session_is_in_the_header_from_its_first_answer_on(file):
    again = AnswerFile(file.path)
    assert again.begin({"nodes": 60}, {"environment": {"machine": "there"}}) == ["machine here then, there now"]
    assert len(file.header()["sessions"]) == 1
    again.append(answers(3)[0])
    again.append(answers(4)[0])
    assert [session["environment"]["machine"] for session in file.header()["sessions"]] == ["here", "there"]


def test_a_header_without_answers_binds_nobody(tmp_path):
    file = AnswerFile(tmp_path / "a.jsonl")
    file.begin({"nodes": 60}, SESSION)
    assert not file.header_path.exists()
    file.append(answers(1)[0])
    with pytest.raises(ValueError, match=r"another configuration \(nodes 60 there, 8 now"):
        file.check_settings({"nodes": 8})
    file.path.unlink()
    file.check_settings({"nodes": 8})


def test_parts_are_read_as_one_file_and_joined_into_one(file):
    part = file.part(1)
    part.begin({"nodes": 60}, {"environment": {"machine": "there"}})
    part.append(answers(7)[0])
    part.append(answers(1)[0] | {"choices": ["another"]})
    part.append_failed({"question_id": 9, "failed": "OSError"})
    assert [r["question_id"] for r in AnswerSet.read(file.path).answers] == [1, 2, 7]
    assert [r["question_id"] for r in file.read_failed()] == [9] and len(file.header()["sessions"]) == 2
    with part.lock(), pytest.raises(Busy, match="part1 is being written"):
        file.join()
    assert file.parts(), "nothing changed"
    file.join()
    assert read_lines(file.path) == answers(1, 2, 7), "the first answer to a question stands"
    assert [r["question_id"] for r in file.read_failed()] == [9] and len(file.header()["sessions"]) == 2
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["a.jsonl", "a.jsonl.failed", "a.jsonl.run.json"]


def test_parts_of_two_configurations_are_not_joined(file):
    part = file.part(0)
    part.begin({"nodes": 8}, SESSION)
    part.append(answers(7)[0])
    for action in (file.join, file.header):
        with pytest.raises(ValueError, match=r"part0 is of another configuration than the rest \(nodes 60 in other"):
            action()
    assert read_lines(file.path) == answers(1, 2) and read_lines(part.path) == answers(7)


def test_a_torn_line_is_left_out_with_a_note(file, capsys):
    with file.path.open("a") as stream:
        stream.write(json.dumps(answers(3)[0])[:20])
    assert len(AnswerSet.read(file.path).answers) == 2
    assert f"note: the last line of {file.path} is half-written and left out" in capsys.readouterr().err
    file.append(answers(4)[0])
    assert not file.torn and read_lines(file.path) == answers(1, 2, 4), "the next line takes its place"
