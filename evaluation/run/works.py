"""The answer files of a run, one a method: held, begun, brought together from all machines, put in order.

Owns what lies where while several processes answer. Decodes nothing.
"""

import contextlib
import functools
import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.answers.file import AnswerFile, Record
from evaluation.command_line import print_json
from evaluation.report.command import print_report
from evaluation.run.options import DRAFTER_FLAGS
from evaluation.run.processes import Processes

DRAFTING = {
    *("nodes", "threshold", "max_depth", "draft_dtype", "sharpening", "drafter"),
    *(flag.removeprefix("--").replace("-", "_") for flag in DRAFTER_FLAGS),
}
"""Settings that plain decoding has no use for."""


@dataclass(frozen=True)
class Work:
    """One method's part of a run: its name, where its answers go and what must agree for them to be of one kind."""

    method: str
    file: AnswerFile
    settings: dict[str, Any]

    def resolve(self, found: dict[str, Any]) -> "Work":
        """Add the settings that are known once the models are loaded."""
        known = {key: value for key, value in found.items() if self.method in ("opt", "chain") or key not in DRAFTING}
        return Work(self.method, self.file, self.settings | known)

    def answer_id(self, question: int | str) -> str:
        """The same for the same question and settings, and of the length of FastChat's ids."""
        digest = hashlib.sha256(f"{json.dumps(self.settings, sort_keys=True)}/{question}".encode()).hexdigest()
        return digest[:22]


@contextlib.contextmanager
def held(works: Sequence[Work], processes: Processes) -> Iterator[None]:
    """Keep other runs away from the files; whatever happens, what was set aside and not replaced comes back."""
    with contextlib.ExitStack() as locks:
        processes.lead(lambda: [locks.enter_context(work.file.lock()) for work in works] and None)
        try:
            yield
        finally:
            if processes.leads:
                for work in works:
                    work.file.restore()


def check_parts(works: Sequence[Work], rank: int) -> None:
    """Raise OSError where this process cannot write its part, on its own machine."""
    for work in works:
        work.file.part(rank).check_writable()


def prepare(works: Sequence[Work], order: Sequence[int | str], overwrite: bool) -> None:
    """Find out before any model is loaded whether the answer files can be written and go on."""
    for work in works:
        work.file.restore()  # what a death left aside
        work.file.check_writable()
        if not overwrite:
            work.file.check_settings(work.settings)
    for work in works:
        if not overwrite and (work.file.path.exists() or work.file.parts()):
            work.file.fold(order)


def begin(works: Sequence[Work], overwrite: bool, session: dict[str, Any], questions: str) -> None:
    """Write the headers and say what runs where. What is overwritten is set aside, now that the models are there."""
    for work in works:
        if overwrite:
            work.file.set_aside()
        work.file.check_settings(work.settings)
    for work in works:
        for difference in work.file.write_header(work.settings, session):
            print(f"note: {work.file.path} goes on elsewhere ({difference}): times are not comparable", file=sys.stderr)
    place = session["environment"]
    print(
        f"{session['target']}, {works[0].settings['target_dtype']}; {place['device']}, {place['threads']} threads, "
        f"{session['processes']} processes; {questions}",
        file=sys.stderr,
    )


def check_same(works: Sequence[Work], settings: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless this process would answer with the leader's settings."""
    for work, theirs in zip(works, settings, strict=True):
        differences = [f"{key} {value!r}" for key, value in work.settings.items() if theirs.get(key) != value]
        if differences:
            raise ValueError(f"it would answer with other settings than the leader: {', '.join(differences)}")


def collect(works: Sequence[Work], order: Sequence[int | str], processes: Processes, drop: bool = False) -> None:
    """Bring the leader the parts that lie where the others are; only then are they removed there.

    Raises ValueError for answers of another configuration, which a killed run may have left. `drop`: these have no
    place in a run that overwrites, nor has anything else that was there before it.
    """
    if processes.size == 1:
        return
    for work in works:
        parts = [] if processes.leads or drop else work.file.parts()
        own = [(f"{part.path} on {platform.node()}", part.read(), part.read_failed()) for part in parts]
        brought = [found for each in processes.gather(own) for found in each]
        processes.lead(functools.partial(take_in, work, order, brought))
        if not processes.leads:
            work.file.remove_parts()


def take_in(work: Work, order: Sequence[int | str], brought: Sequence[tuple[str, list[Record], list[Record]]]) -> None:
    """Put what others wrote into the leader's file; ValueError, and nothing changes, where other settings made it."""
    for place, answers, failures in brought:
        if any(record["answer_id"] != work.answer_id(record["question_id"]) for record in [*answers, *failures]):
            raise ValueError(f"{place} has answers of another configuration; remove it, or pass --overwrite")
    if brought:
        work.file.fold(order, [(answers, failures) for _, answers, failures in brought])


def finish(works: Sequence[Work], order: Sequence[int | str], asked: set[int | str], json_line: bool = False) -> int:
    """Put the files in order, count what failed or is missing, print the table. Returns how many of those asked.

    Missing is what nobody brought: the answers of a process that was lost.
    """
    failed = 0
    for work in works:
        work.file.fold(order)
        failures = [record for record in work.file.read_failed() if record["question_id"] in asked]
        recorded = {record["question_id"] for record in [*work.file.read(), *failures]}
        missing = [str(key) for key in order if key in asked - recorded]
        failed += len(failures) + len(missing)
        print(f"{len(work.file.read())} answers in {work.file.path}", file=sys.stderr)
        if failures:
            print(
                f"{len(failures)} failed ({work.file.failed_path}); the same command tries them again", file=sys.stderr
            )
        if missing:
            print(
                f"{len(missing)} have no answer in {work.file.path}: {', '.join(missing)}; the same command goes on",
                file=sys.stderr,
            )
    paths = [work.file.path for work in works if work.file.read()]
    if paths:
        print_json(json_line, print_report(paths, paths[1] if len(paths) > 1 else None))
    return failed
