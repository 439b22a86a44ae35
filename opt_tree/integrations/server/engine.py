"""Texts that strangers ask for at any time, decoded side by side in one thread.

Owns the queue, the lanes and the thread. What a text is (`Job`) and who is told of it is the caller's; forwards are
merged as for `side_by_side`.
"""

import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from opt_tree.backends.batch import scheduler, shared_forwards
from opt_tree.decoder import Decoder
from opt_tree.drafter import Drafter
from opt_tree.errors import counted
from opt_tree.generation import Generation
from opt_tree.methods.recorder import Recorder
from opt_tree.methods.sampling import Sampling
from opt_tree.policy import TreePolicy
from opt_tree.target import Asking, Target
from opt_tree.tools.stop_strings import Stop


class Full(RuntimeError):
    """No more requests are taken in now."""


class _Gone(Exception):
    """Nobody wants the text any more."""


@dataclass(frozen=True)
class NewText:
    """What one step added to a text."""

    tokens: list[int]
    log_probs: list[float]
    """Of each token, where they are asked for (see `Recorder`); else none."""
    top_log_probs: list[dict[int, float]]
    """Of each place, the likeliest tokens, where they are asked for; else none."""


@dataclass(frozen=True)
class Read(NewText):
    """What the target says of a prompt's tokens, before the first part: of all but the first token of it."""


@dataclass(eq=False)
class Job:
    """One text that is asked for."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop: Stop
    seed: int
    drafter: str | None
    """One of those that the engine has; None: decoded plainly."""
    policy: TreePolicy
    likeliest: int | None = None
    """How many of the likeliest tokens are told at each place; None: no log-probabilities at all."""
    echo: bool = False
    """Whether the prompt is told of, too."""
    tell: Callable[[NewText | Generation | Exception], None] = print
    """Told each part, then the generation; or an error. Called in the engine's thread."""
    gone: bool = False
    """Whether nobody wants it any more."""


@dataclass
class _JobStream:
    """Where a decoder puts the tokens of a job's steps: behind its prompt, as transformers' streamers are told."""

    job: Job
    recorder: Recorder | None
    told: int | None = None
    """How many tokens were told of; None: not even the prompt was."""

    def put(self, tokens: Tensor) -> None:
        if self.job.gone:
            raise _Gone
        if self.told is None:
            self.told = 0
            return
        start, self.told = self.told, self.told + len(tokens)
        own, top = ([], None) if self.recorder is None else self.recorder.told(self.told)
        self.job.tell(NewText(tokens.tolist(), own[start:], (top or [])[start:]))

    def end(self) -> None:
        """The generation itself says so."""


class Engine:
    """A target and its drafters, for as many texts at a time as there are lanes.

    Arguments:
        target: whose distribution every text has.
        drafters: by the name that a job calls each.
        lanes: how many texts are decoded at a time at most. Where the models take one only, a warning says why.
        waiting: how many more may wait.
    """

    def __init__(self, target: Target, drafters: Mapping[str, Drafter], lanes: int, waiting: int) -> None:
        for drafter in drafters.values():
            target.watch(tuple(sorted(drafter.features)))
        parts = (target, dict(drafters))
        self._lanes = [parts]
        if lanes > 1:
            models = [target, *(model for drafter in drafters.values() for model in drafter.models)]
            alone = next((drafter.alone for drafter in drafters.values() if drafter.alone), None)
            made, why = shared_forwards.in_lanes(models, parts, lanes, alone)
            self._lanes = made or self._lanes
            if why is not None:
                warnings.warn(f"one request after the other: {why}", stacklevel=2)
        self.most = len(self._lanes) + waiting
        self._waiting: deque[Job] = deque()
        self._live: set[Job] = set()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="opt-tree engine", daemon=True)
        self._thread.start()

    @property
    def open(self) -> int:
        """How many texts are decoded or wait."""
        return len(self._waiting) + len(self._live)

    def submit(self, jobs: list[Job]) -> None:
        """Take in jobs, all or none. Raises Full where there is no room for them."""
        with self._changed:
            if self._closed:
                raise Full("the server is shutting down")
            if self.open + len(jobs) > self.most:
                there = f"{counted(self.open, 'text')} under way or waiting of {self.most} at most"
                raise Full(f"the queue is full: {there}, and {len(jobs)} more asked for; try again later")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Let jobs end: those that wait at once, those under way before their next step."""
        with self._changed:
            for job in jobs:
                job.gone = True
                if job in self._waiting:
                    self._waiting.remove(job)

    def close(self) -> None:
        """End what is under way or waits, and the thread."""
        with self._changed:
            self._closed = True
            given_up = [*self._waiting, *self._live]
            self._changed.notify()
        self.cancel(given_up)
        self._thread.join()

    def _work(self) -> None:
        while not self._closed:
            try:
                for _ in scheduler.side_by_side(self._jobs(), len(self._lanes)):
                    pass
            except Exception:  # of a forward of several texts: they were told, and others come
                logging.getLogger(__name__).exception("a forward failed, and ended what was under way")

    def _jobs(self) -> Iterator[Callable[[int], Asking[None]] | None]:
        """What to begin next; None where nothing waits and something is under way."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._live or self._closed)
                job = self._waiting.popleft() if self._waiting else None
                if job is not None:
                    self._live.add(job)
                elif not self._live:
                    return
            yield None if job is None else partial(self._decode, job)

    def _decode(self, job: Job, lane: int) -> Asking[None]:
        """Decode one text in a lane."""
        target, drafters = self._lanes[lane]
        recorder = None if job.likeliest is None else Recorder(job.likeliest)
        try:
            decoder = Decoder(target, None if job.drafter is None else drafters[job.drafter], job.policy)
            decoder.lanes = len(self._lanes)
            if job.echo:
                job.tell((yield from _read(target, job)))
            stream = _JobStream(job, recorder)
            prompt, most, sampling, stop, seed = job.prompt, job.max_new_tokens, job.sampling, job.stop, job.seed
            job.tell((yield from decoder.answer(prompt, most, sampling, stop, stream, seed, recorder=recorder)))
        except _Gone:
            pass
        except GeneratorExit:
            job.tell(RuntimeError("the server could not go on with this text"))
            raise
        except Exception as error:
            job.tell(error)
        finally:
            with self._changed:
                self._live.discard(job)


def _read(target: Target, job: Job) -> Asking[Read]:
    """Ask the target about a prompt's own tokens, where somebody wants to know."""
    if job.likeliest is None or len(job.prompt) == 1:
        return Read(job.prompt, [], [])
    target.reset()
    logits = (yield target.text(job.prompt[:-1], all_logits=True)).logits
    recorder = Recorder(job.likeliest)
    recorder.add(logits, logits, list(range(len(logits))), job.prompt[1:])
    own, top = recorder.told(len(logits))
    return Read(job.prompt, own, top or [])
