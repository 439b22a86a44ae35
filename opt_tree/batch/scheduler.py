"""Several sequences side by side: each runs the loop as it is, and waits where it needs what others have a part in.

Owns who runs when. A sequence is a greenlet: a forward of its models switches to the hub (`side_by_side`), which waits
until every lane asks for something, runs the forwards of one model together (`shared_forwards.py`) and switches back
with the answers. Verifiers, policies, drafters and the loop know nothing of it.
"""

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import greenlet
import torch

from opt_tree.batch.shared_forwards import Ask
from opt_tree.engines.kv_cache import inference

T = TypeVar("T")


_abandoned: "list[_Hub]" = []
"""Those that another thread than their own ended. Their lanes are kept for that one: only it can unwind them."""


def side_by_side(
    jobs: Iterable[Callable[[int], T]],
    lanes: int,
    turn: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[tuple[int, T]]:
    """Run jobs, each in a lane of its own as long as it lasts; yield each one's place and result as it ends.

    A job is told the number of its lane, from 0; another one begins there as soon as it is free. An error in one ends
    all, and says which it was in a note; closing the iterator ends them, too. Jobs run inside a `turn`, which is over
    while a result is out. RuntimeError in another thread than the one that they began in, which ends them as well.
    """
    _unwind_abandoned()
    hub = _Hub(jobs, lanes)
    try:
        under_way = True
        while under_way:
            with turn():
                under_way = hub.fill()
                if under_way:
                    hub.forward()
            for found in hub.ended():
                yield found
                if not hub.here:
                    return  # which closes the hub: it says so
    finally:
        hub.close()


def _unwind_abandoned() -> None:
    """End the lanes that others abandoned for this thread, and forget those of threads that are over."""
    for hub in list(_abandoned):
        if hub.here:
            hub.close()
    _abandoned[:] = [hub for hub in _abandoned if hub.live and hub.thread.is_alive()]


class _Hub:
    """Jobs under way and what they wait for.

    Lanes go on in inference mode: they take turns inside theirs, which would otherwise be left out of order.
    """

    def __init__(self, jobs: Iterable[Callable[[int], Any]], lanes: int) -> None:
        self._jobs = enumerate(jobs)
        self._free = list(range(lanes))[::-1]
        self.thread = threading.current_thread()
        """The one that its lanes can run in."""
        self.live: dict[int, tuple[int, greenlet.greenlet]] = {}
        """By lane, the job's place and what runs it."""
        self._asked: dict[int, Ask] = {}
        self._ended: list[tuple[int, Any]] = []

    @property
    def here(self) -> bool:
        """Whether this is the lanes' thread."""
        return threading.current_thread() is self.thread

    @inference
    def fill(self) -> bool:
        """Begin jobs while there are lanes for them; whether any is under way then."""
        while self._free and (new := next(self._jobs, None)) is not None:
            place, job = new
            thread = greenlet.greenlet(job)
            thread.gr_context = contextvars.copy_context()
            lane = self._free.pop()
            self.live[lane] = place, thread
            self._resume(lane, lane)
        return bool(self.live)

    @inference
    def forward(self) -> None:
        """Run the forwards of one model that lanes wait for, and let these go on. A target waits for all others."""
        asks = list(self._asked.values())
        models = [ask.engine.shared for ask in asks]
        chosen = max(models, key=lambda model: (not model.last, models.count(model)))
        lanes = {id(ask): lane for lane, ask in self._asked.items()}
        for part in chosen.parts([ask for ask in asks if ask.engine.shared is chosen]):
            outputs = chosen.run(part)
            for ask, output in zip(part, outputs, strict=True):
                self._resume(lanes[id(ask)], output)

    def _resume(self, lane: int, answer: Any) -> None:
        """Let a lane go on until it asks for a forward or ends."""
        place, thread = self.live[lane]
        self._asked.pop(lane, None)
        try:
            found = thread.switch(answer)
        except BaseException as error:
            error.add_note(f"(sequence {place} of those side by side)")
            raise
        if not thread.dead:
            self._asked[lane] = found
            return
        self._ended.append((place, found))
        del self.live[lane]
        self._free.append(lane)

    def ended(self) -> list[tuple[int, Any]]:
        """What has ended since the last time."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End what is under way. In another thread that is left to the lanes' own: RuntimeError."""
        if not self.here:
            _abandoned.append(self)
            raise RuntimeError(
                f"sequences side by side belong to the thread that began them ({self.thread.name}): go on and close "
                "there; they end now"
            )
        for _, thread in self.live.values():
            while not thread.dead:
                with torch.inference_mode():
                    thread.throw()
        self.live.clear()
