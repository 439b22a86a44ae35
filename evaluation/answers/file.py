"""Answer files: written line by line, resumed after any death, never mixed with another configuration's.

Beside `a.jsonl` lie `a.jsonl.run.json`, the header that says what made it, `a.jsonl.failed`, the questions that failed
and why (not among the answers, so that no reader averages over them), and, while several processes work, one
`a.jsonl.part<rank>` for each. During a run `a.jsonl.lock` and `a.jsonl.holder` keep others away; while one that
overwrites has no answer yet, what was there lies in `a.jsonl.old`. Knows of a line its `question_id`, and `refused`.
"""

import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

Record = dict[str, Any]

_ASIDE = ".old"


class AnswerFile:
    """One line a question. A line is there whole or, after a death in the middle of it, ignored."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.name:
            raise ValueError(f"{self.path} is a folder: name an answer file")
        self.header_path = self._beside(".run.json")
        self.failed_path = self._beside(".failed")

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def part(self, rank: int) -> "AnswerFile":
        """The file that one of several processes writes; `fold` takes it in."""
        return AnswerFile(self._beside(f".part{rank}"))

    def parts(self) -> list["AnswerFile"]:
        """The parts that exist, whichever run left them."""
        if not self.path.parent.is_dir():
            return []
        form = re.compile(re.escape(self.path.name) + r"(\.part\d+)(\.failed)?")
        found = (form.fullmatch(path.name) for path in self.path.parent.iterdir())
        return [AnswerFile(self._beside(suffix)) for suffix in sorted({match[1] for match in found if match})]

    def check_writable(self) -> None:
        """Raise OSError with the path in it if nothing can be written there; leave no trace."""
        existed = self.path.exists()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab"), self.header_path.open("ab"):
                pass
        except OSError as error:
            raise OSError(f"cannot write the answer file {self.path}: {error.strerror or error}") from error
        if not existed:
            self.path.unlink()
        if self.header_path.stat().st_size == 0:
            self.header_path.unlink()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs away from this file; raise ValueError that names the one which has it."""
        self.check_writable()
        holder, lock = self._beside(".holder"), filelock.FileLock(self._beside(".lock"))
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            who = holder.read_text().strip() if holder.is_file() else "another process"
            raise ValueError(f"{self.path} is being written by {who}; wait for it, or name another file") from error
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            with _written(holder):
                holder.write_text(f"process {os.getpid()} on {platform.node()} since {since}\n")
            yield
        finally:
            holder.unlink(missing_ok=True)
            lock.release()
            self._beside(".lock").unlink(missing_ok=True)

    def set_aside(self) -> None:
        """Make room for answers that are to take this file's place; until there is one, `restore` brings these back."""
        if self.parts():
            self.fold([])
        for path in self._files():
            if path.exists():
                path.replace(path.with_name(path.name + _ASIDE))

    def drop_aside(self) -> None:
        """Forget what was set aside."""
        for path in self._files():
            path.with_name(path.name + _ASIDE).unlink(missing_ok=True)

    def restore(self) -> None:
        """Bring back what was set aside, unless there are new answers by now."""
        if self.answered:
            return self.drop_aside()
        for path in self._files():
            if (aside := path.with_name(path.name + _ASIDE)).exists():
                aside.replace(path)

    def _files(self) -> tuple[Path, Path, Path]:
        return self.path, self.header_path, self.failed_path

    @property
    def answered(self) -> bool:
        """Whether there is an answer, here or in a part. A line that says `refused` is none."""
        return any("refused" not in record for file in (self, *self.parts()) for record in file.read())

    @property
    def torn(self) -> bool:
        """Whether a death left the last line half-written; nobody reads it."""
        return self.path.is_file() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0

    def remove(self) -> None:
        """Delete the file and everything beside it."""
        for file in [self, *self.parts()]:
            for path in (file.path, file.header_path, file.failed_path):
                path.unlink(missing_ok=True)

    def read(self) -> list[Record]:
        """The answers. A line that a death left half-written is ignored; any other broken line is named."""
        return read_lines(self.path)

    def read_failed(self) -> list[Record]:
        """The questions that failed and have no answer since; the newest record of each."""
        answered = {record["question_id"] for record in self.read()}
        newest = {record["question_id"]: record for record in read_lines(self.failed_path)}
        return [record for key, record in newest.items() if key not in answered]

    def append(self, record: Record) -> None:
        """Write one answer; it is on disk when this returns."""
        _append(self.path, record)

    def append_failed(self, record: Record) -> None:
        _append(self.failed_path, record)

    def fold(self, order: Sequence[int | str], others: Sequence[tuple[list[Record], list[Record]]] = ()) -> None:
        """Take in every part, drop half-written lines and doubled questions, and put the rest in order.

        `others`: answers and failures that lie in parts elsewhere. Whatever the moment of a death, all answers are in
        the file or in a part: the file is replaced in one go, and only then are the parts removed.
        """
        rank = {key: index for index, key in enumerate(order)}
        answers: dict[int | str, Record] = {}
        failed: dict[int | str, Record] = {}
        here = [(file.read(), read_lines(file.failed_path)) for file in [self, *self.parts()]]
        for answered, failures in [*here, *others]:
            for record in answered:
                answers.setdefault(record["question_id"], record)
            failed.update((record["question_id"], record) for record in failures)
        ordered = sorted(answers.values(), key=lambda record: rank.get(record["question_id"], len(rank)))
        if ordered or self.path.exists():
            _replace(self.path, ordered)
        _replace(self.failed_path, [record for key, record in failed.items() if key not in answers])
        if not self.failed_path.stat().st_size:
            self.failed_path.unlink()
        self.remove_parts()

    def remove_parts(self) -> None:
        for part in self.parts():
            part.remove()

    def header(self) -> Record | None:
        """What made the file, or None."""
        if not self.header_path.is_file():
            return None
        try:
            header = json.loads(self.header_path.read_text())
            header["settings"], header["sessions"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.header_path} is not a header of an answer file: {error}") from error
        return header

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError unless the answers already here were made with these settings, or there are none."""
        header = self.header()
        if header is not None and not self.answered:
            return  # of a run that never answered anything: it binds nobody
        if header is None:
            if read_lines(self.path) or self.parts():
                raise ValueError(
                    f"{self.path} has answers but no header {self.header_path.name}: what made them is unknown; "
                    "name another answer file or pass --overwrite"
                )
            return
        differences = [
            f"{key} {_brief(header['settings'].get(key))} there, {_brief(value)} now"
            for key, value in settings.items()
            if header["settings"].get(key) != value
        ]
        if differences:
            raise ValueError(
                f"{self.path} belongs to another configuration ({'; '.join(differences)}); name another answer file or "
                "pass --overwrite"
            )

    def write_header(self, settings: Mapping[str, Any], session: Mapping[str, Any]) -> list[str]:
        """Record the settings and one more session; return what of its environment differs from the one before."""
        header = (self.header() if self.answered else None) or {"settings": dict(settings), "sessions": []}
        before = header["sessions"][-1]["environment"] if header["sessions"] else session["environment"]
        header["settings"] = dict(settings)
        header["sessions"].append(dict(session))
        _write_whole(self.header_path, json.dumps(header, indent=1) + "\n")
        now = session["environment"]
        return [f"{key} {before.get(key)} then, {now[key]} now" for key in now if before.get(key) != now[key]]


@dataclass(frozen=True)
class AnswerSet:
    """An answer file as read, with what its header says of it; no header for a file that others made."""

    path: Path
    answers: list[Record]
    failed: list[Record]
    header: Record | None

    @classmethod
    def read(cls, path: str | Path) -> "AnswerSet":
        """Read an answer file and what lies beside it. Raises OSError without the file, ValueError without answers."""
        file = AnswerFile(path)
        if not file.path.is_file():
            raise FileNotFoundError(f"no answer file {path}")
        answers = file.read()
        if file.torn:
            print(f"note: the last line of {path} is half-written and left out", file=sys.stderr)
        if not answers:
            raise ValueError(f"{path} has no answers")
        return cls(file.path, answers, file.read_failed(), file.header())

    def require(self, keys: Sequence[str], why: str) -> "AnswerSet":
        """Return this set; ValueError, with `why`, unless every choice has these fields."""
        for answer in self.answers:
            for choice in answer.get("choices") or [{}]:
                for key in keys:
                    if not choice.get(key):
                        raise ValueError(f"{self.path}: question {answer['question_id']} has no {key}: {why}")
        return self

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".jsonl")

    @property
    def settings(self) -> Record:
        """What the answers were made with; empty without a header."""
        return self.header["settings"] if self.header else {}

    @property
    def session(self) -> Record:
        """The newest session of the header; empty without one."""
        return self.header["sessions"][-1] if self.header and self.header["sessions"] else {}


def read_timed(path: str | Path) -> AnswerSet:
    """Read an answer file; ValueError where a line lacks tokens and times."""
    return AnswerSet.read(path).require(("turns", "new_tokens", "wall_time"), "nothing to report")


def read_lines(path: Path) -> list[Record]:
    """Parse JSONL with a `question_id` in every line; a last line without its line end is a death's, and skipped."""
    if not path.exists():
        return []
    records = []
    *whole, _ = path.read_bytes().split(b"\n")
    for number, raw in enumerate(whole, 1):
        if not raw.strip():
            continue
        try:
            record = json.loads(raw)
            record["question_id"]
        except (ValueError, KeyError, TypeError) as error:
            why = error if isinstance(error, ValueError) else "no question_id"
            raise ValueError(f"{path}, line {number}: not an answer: {why}") from error
        records.append(record)
    return records


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Name the file in an error of a write; a full disk's does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _append(path: Path, record: Record) -> None:
    with _written(path), path.open("ab") as file:
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, records: Iterable[Record]) -> None:
    _write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def _brief(value: Any) -> str:
    """A setting as part of one line: a list of all questions or a checksum would fill a screen."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that a death leaves the old one or the new one."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with _written(path), partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
