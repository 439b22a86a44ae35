"""Several texts side by side: each is a generator of the forwards that it needs, and forwards of one model run as one.

Owns who runs when. A text is driven until it needs a forward, and goes on when that was computed together with those of
others (`shared_forwards.py`). The loop, verifiers and drafters know nothing of it.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from opt_tree.backend import Inputs
from opt_tree.backends.batch.shared_forwards import Ask, LaneBackend
from opt_tree.target import Forward, Output

T = TypeVar("T")
Asking = Generator[Forward, Output, T]
"""Asks for forwards, is sent what came of each, and returns a T in the end."""


@dataclass
class _Text:
    """A job under way in a lane."""

    place: int
    job: Asking[Any]
    running: Generator[tuple[Inputs, int], Output, Output] | None = None
    """The forward that it waits for, part by part."""
    backend: Any = None
    """The lane's backend of the model that runs."""
    asked: Ask | None = None

    def go_on(self, answer: Any) -> None:
        """Go on until the next inputs are to be computed. Raises StopIteration with the result where the job ends.

        What goes wrong with a forward before it is computed, goes wrong in the job, which may go on all the same.
        """
        error: Exception | None = None
        while True:
            if self.running is None:
                forward: Any = self.job.send(answer) if error is None else self.job.throw(error)
                answer = error = None
                backend = getattr(forward.model, "backend", None)
                self.backend = backend if isinstance(backend, LaneBackend) else None
                # Alone runs a model that other texts have no part in.
                self.running = forward.model.running(forward) if self.backend else _alone(forward)
            try:
                inputs, rows = self.running.send(answer)
            except StopIteration as end:
                self.running, answer = None, end.value
            except Exception as failed:
                self.running, answer, error = None, None, failed
            else:
                self.asked = Ask(self.backend, inputs, rows)
                return


def _alone(forward: Forward) -> Generator[Any, Any, Output]:
    """Run a forward by itself."""
    return forward.model.run(forward)
    yield


def side_by_side(
    jobs: Iterable[Callable[[int], Asking[T]] | None],
    lanes: int,
    turn: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[tuple[int, T]]:
    """Run jobs, each in a lane of its own as long as it lasts; yield each one's place and result as it ends.

    A job is told the number of its lane, from 0, and returns a generator of forwards; another one begins there as soon
    as it is free. None in place of a job: none is there yet; the next one is asked for after a forward of those under
    way, and while none is, there must be one or an end. An error in one ends all, and says which it was in a note;
    closing the iterator ends them, too. Jobs run inside a `turn`, which is over while a result is out.
    """
    hub = _Hub(jobs, lanes)
    try:
        under_way = True
        while under_way:
            with turn(), torch.inference_mode():
                under_way = hub.fill()
                if under_way:
                    hub.forward()
            yield from hub.ended()
    finally:
        hub.close()


class _Hub:
    """Jobs under way and what they wait for."""

    def __init__(self, jobs: Iterable[Callable[[int], Asking[Any]] | None], lanes: int) -> None:
        self._jobs = enumerate(jobs)
        self._free = list(range(lanes))[::-1]
        self._live: dict[int, _Text] = {}
        """By lane."""
        self._ended: list[tuple[int, Any]] = []

    def fill(self) -> bool:
        """Begin jobs while there are lanes for them; whether any is under way then."""
        while self._free and (new := next(self._jobs, None)) is not None:
            place, job = new
            if job is None:
                break
            lane = self._free.pop()
            self._live[lane] = _Text(place, job(lane))
            self._resume(lane, None)
        return bool(self._live)

    def forward(self) -> None:
        """Run the forwards of one model that lanes wait for, and let these go on. A target waits for all others."""
        asks = {lane: text.asked for lane, text in self._live.items() if text.asked is not None}
        models = [ask.backend.shared for ask in asks.values()]
        chosen = max(models, key=lambda model: (not model.last, models.count(model)))
        lanes = {id(ask): lane for lane, ask in asks.items()}
        for part in chosen.parts([ask for ask in asks.values() if ask.backend.shared is chosen]):
            outputs = chosen.run(part)
            for ask, output in zip(part, outputs, strict=True):
                self._resume(lanes[id(ask)], output)

    def _resume(self, lane: int, answer: Any) -> None:
        """Let a lane go on until it waits for a forward or ends."""
        text = self._live[lane]
        text.asked = None
        try:
            text.go_on(answer)
        except StopIteration as end:
            self._ended.append((text.place, end.value))
            del self._live[lane]
            self._free.append(lane)
        except BaseException as error:
            error.add_note(f"(sequence {text.place} of those side by side)")
            raise

    def ended(self) -> list[tuple[int, Any]]:
        """What has ended since the last time."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End what is under way."""
        with torch.inference_mode():  # as they were driven
            for text in self._live.values():
                text.job.close()
        self._live.clear()
