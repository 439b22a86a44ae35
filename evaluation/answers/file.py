"""Answer files: a line a question, resumed after any death, never mixed with another configuration's.

Beside `a.jsonl` lie `a.jsonl.run.json`, the header that says what made it, and `a.jsonl.failed`, the questions that
failed and why (not among the answers, so that no reader averages over them). A file has one writer, which holds
`a.jsonl.lock` meanwhile; each of several processes writes a file of its own, `a.jsonl.part<rank>`. `read` sees them
all, `join` makes one file of them. Knows of a line its `question_id` only.
"""

import json
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from evaluation.answers.header import Record, differences, read_header
from opt_tree.system.files import write_text

_BEGINNING = b'{"question_id"'
"""Of every line. Where a death has left another beginning, the file is somebody else's, and would be cut."""


class Busy(ValueError):
    """Another process writes the file."""


class AnswerFile:
    """One line a question. A line is there whole or, after a death in the middle of it, not at all.

    Args:
        path: The file, which need not be there. ValueError for a folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.name:
            raise ValueError(f"{self.path} is a folder: name an answer file")
        self.header_path = self._beside(".run.json")
        self.failed_path = self._beside(".failed")
        self._begun: tuple[Record, Record, list[AnswerFile]] | None = None

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def part(self, rank: int) -> "AnswerFile":
        """The file that one of several processes writes."""
        return AnswerFile(self._beside(f".part{rank}"))

    def parts(self) -> list["AnswerFile"]:
        """The parts that exist, by rank, whichever run left them."""
        if not self.path.parent.is_dir():
            return []
        form = re.compile(re.escape(self.path.name) + r"\.part(\d+)(\.failed)?")
        found = (form.fullmatch(path.name) for path in self.path.parent.iterdir())
        return [self.part(rank) for rank in sorted({int(match[1]) for match in found if match})]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one writer of this file. Raises Busy, which names the other one, at once."""
        lock = filelock.FileLock(self._beside(".lock"))
        told = Path(lock.lock_file)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            who = (told.read_text().strip() if told.is_file() else "") or "another process"
            raise Busy(f"{self.path} is being written by {who}; wait for it, or name another file") from error
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            with suppress(OSError):  # a full disk: the lock holds without its note
                told.write_text(f"process {os.getpid()} on {platform.node()} since {since}\n")
            yield
        finally:
            told.unlink(missing_ok=True)  # before the release: who waits for this lock sees that its file is gone
            lock.release()

    def header(self) -> Record | None:
        """What made the answers here and in the parts, or None; ValueError where two configurations did."""
        headers: list[Record] = []
        for file in [self, *self.parts()]:
            if file.header_path.is_file() and read_lines(file.path):
                headers.append(read_header(file.header_path))
                if apart := differences(headers[0]["settings"], headers[-1]["settings"], "in other parts", "here"):
                    raise ValueError(f"{file.path} is of another configuration than the rest ({apart})")
        sessions: list[Record] = []
        for header in headers:  # a part may have what the file has already
            sessions += [session for session in header["sessions"] if session not in sessions]
        return {"settings": headers[0]["settings"], "sessions": sessions} if headers else None

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError if there are answers, here or in the parts, that were not made with these settings."""
        advice = "name another answer file or pass --overwrite"
        for file in [self, *self.parts()]:
            if read_lines(file.path) and not file.header_path.is_file():
                absent = f"{file.path} has answers but no header {file.header_path.name}"
                raise ValueError(f"{absent}: what made them is unknown; {advice}")
        header = self.header()
        if header is not None and (apart := differences(header["settings"], settings, "there", "now")):
            raise ValueError(f"{self.path} belongs to another configuration ({apart}); {advice}")

    def begin(
        self, settings: Mapping[str, Any], session: Mapping[str, Any], replaces: Sequence["AnswerFile"] = ()
    ) -> list[str]:
        """Begin a session; return what of its environment differs from the session before, a text each.

        Nothing is written yet. The first answer (`append`) writes the header and removes the files that the session
        `replaces`: a run that answers nothing takes nothing away.
        """
        self._begun = dict(settings), dict(session), list(replaces)
        before = None if replaces else self.header()
        if before is None or not before["sessions"]:
            return []
        then, now = before["sessions"][-1].get("environment", {}), session["environment"]
        return [f"{key} {then.get(key)} then, {now[key]} now" for key in now if then.get(key) != now[key]]

    def append(self, record: Record) -> None:
        """Write one answer; it is on disk when this returns."""
        if self._begun is not None:
            (settings, session, replaces), self._begun = self._begun, None
            for file in replaces:
                file.remove()
            there = self.header()
            self._write_header({"settings": settings, "sessions": [*(there["sessions"] if there else []), session]})
        _append(self.path, record)

    def append_failed(self, record: Record) -> None:
        """Write down that a question failed, and why; not while an answer is awaited that replaces others."""
        if self._begun is None or not self._begun[2]:
            _append(self.failed_path, record)

    def _write_header(self, header: Record) -> None:
        write_text(self.header_path, json.dumps(header, indent=1) + "\n")

    def read(self) -> list[Record]:
        """The answers here and in the parts, each once. Half-written lines are ignored, other broken lines named."""
        # The parts first: whoever joins them meanwhile has put their answers into the file before.
        parts = [record for part in self.parts() for record in read_lines(part.path)]
        found: dict[int | str, Record] = {}
        for record in [*read_lines(self.path), *parts]:
            found.setdefault(record["question_id"], record)
        return list(found.values())

    def read_failed(self) -> list[Record]:
        """The questions that failed and have no answer since; the newest record of each."""
        paths = [self.failed_path, *(part.failed_path for part in self.parts())]
        newest = {record["question_id"]: record for path in paths for record in read_lines(path)}
        answered = {record["question_id"] for record in self.read()}
        return [record for key, record in newest.items() if key not in answered]

    @property
    def torn(self) -> bool:
        """Whether a death left the last line half-written; nobody reads it."""
        return self.path.is_file() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0

    def join(self, order: Sequence[int | str] = ()) -> None:
        """Make one file of this one and its parts: no half-written lines, each question once, in order.

        Whatever the moment of a death, all answers are in the file or in a part: the file is replaced in one go, and
        only then are the parts removed. Raises Busy while somebody writes one of them, ValueError where two
        configurations made them; nothing changes then.
        """
        with ExitStack() as locks:
            for file in [self, *(parts := self.parts())]:
                locks.enter_context(file.lock())
            if parts and (header := self.header()) is not None:
                self._write_header(header)
            answers, failed = self.read(), self.read_failed()
            if answers or self.path.exists():
                rank = {key: place for place, key in enumerate(order)}
                _replace(self.path, sorted(answers, key=lambda record: rank.get(record["question_id"], len(rank))))
            _replace(self.failed_path, failed)
            for part in parts:
                part.remove()

    def remove(self) -> None:
        """Delete the file, its header and its failures."""
        for path in (self.path, self.header_path, self.failed_path):
            path.unlink(missing_ok=True)


def read_lines(path: Path) -> list[Record]:
    """Parse JSONL with a `question_id` in every line; a last line without its line end is a death's, and skipped."""
    if not path.exists():
        return []
    records = []
    *whole, torn = path.read_bytes().split(b"\n")
    if not _BEGINNING.startswith(torn[: len(_BEGINNING)]):
        raise ValueError(f"{path} is no answer file: its end is no part of an answer")
    for number, raw in enumerate(whole, 1):
        if not raw.strip():
            continue
        try:
            record = json.loads(raw)
            hash(record["question_id"])  # by which answers are told apart
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = error if isinstance(error, ValueError) else "no question_id"
            raise ValueError(f"{path}, line {number}: not an answer: {why}") from error
        records.append(record)
    return records


def _append(path: Path, record: Record) -> None:
    """Add a line, behind the last whole one."""
    line = json.dumps(record).encode() + b"\n"
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.truncate(path.read_bytes().rfind(b"\n") + 1)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk's error names no file
        raise


def _replace(path: Path, records: Iterable[Record]) -> None:
    """Write these lines in one go; no file where there are none."""
    if text := "".join(json.dumps(record) + "\n" for record in records):
        write_text(path, text)
    else:
        path.unlink(missing_ok=True)
