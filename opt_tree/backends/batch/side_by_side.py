"""Several prompts at a time: each has a decoder of its own, and their forwards are packed into one.

Owns the copies of a decoder and when there is one prompt after the other instead. The scheduler (`scheduler.py`)
runs them; the loop knows nothing of it.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from opt_tree.backends.batch import scheduler, shared_forwards
from opt_tree.decoder import Decoder
from opt_tree.errors import counted, require
from opt_tree.generation import Generation
from opt_tree.request import (
    StopRule,
    StopTokens,
    check_ids,
    check_new_tokens,
    check_others,
    check_prompt,
    check_recorder,
    rule_for,
)
from opt_tree.sampling import Temperature
from opt_tree.target import Asking, run_alone

T = TypeVar("T")


def generate_batch(
    decoder: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    max_new_tokens: int = 128,
    sampling: Temperature = Temperature(),
    stop: StopRule | Sequence[StopRule | None] | None = StopTokens(),
    seed: int | Sequence[int] = 0,
    recorder: Any = None,
    *,
    width: int = 8,
    **others: Any,
) -> list[Generation]:
    """Generate after each prompt what `generate` would have, `width` of them at a time: their forwards are one.

    Arguments:
        prompts: token ids of each prompt. All are checked before anything is decoded.
        max_new_tokens: see `generate`.
        sampling: see `generate`.
        stop: one for all prompts, or a list with one for each; see `generate`.
        seed: one for all prompts, or a list with one for each; see `generate`.
        recorder: see `generate`; each prompt has a copy of it, and what is told of it is in the `Generation`.
        width: how many sequences are decoded at a time at most, at least 1.

    An error in one ends all; its note says which prompt it was. See `side_by_side` for the rest.
    """
    check_others(others)
    check_ids(prompts, "prompts")
    require((Sequence, Tensor, np.ndarray), prompts=prompts)
    rules, seeds = _of_each(len(prompts), stop, seed, decoder.target.ends)
    recorders = _copies(recorder, len(prompts), decoder.target.vocab)
    jobs, most = [], check_new_tokens(max_new_tokens)
    decoder.target.about_to_decode(sampling)
    for number, (prompt, rule, own, kept) in enumerate(zip(prompts, rules, seeds, recorders, strict=True)):
        try:
            context = check_prompt(prompt, decoder.target)
        except ValueError as error:
            raise ValueError(f"prompt {number} of the batch: {error}") from None
        options = (context, most, sampling, rule, None, own, False, kept)
        jobs.append(lambda decoder, options=options: decoder.answer(*options))

    def answers() -> list[Generation]:
        found = dict(side_by_side(decoder, jobs, width))
        return [found[number] for number in range(len(jobs))]

    return decoder.led(answers)


def _copies(recorder: Any, count: int, vocab: int) -> list[Any]:
    """A recorder for each prompt, without what the given one has recorded."""
    check_recorder(recorder)
    if recorder is not None:
        recorder.begin(vocab)
    return [copy.deepcopy(recorder) for _ in range(count)]


def _of_each(count: int, stop: Any, seed: Any, ends: frozenset[int]) -> tuple[list[Any], list[Any]]:
    """Return a stop rule, for a target with these ends, and a seed for each prompt. ValueError for other lengths."""
    rules = list(stop) if isinstance(stop, Sequence) and not isinstance(stop, str) else [stop] * count
    seeds = list(seed) if isinstance(seed, Sequence) else [seed] * count
    if not count == len(rules) == len(seeds):
        there = f"{counted(len(rules), 'stop rule')} and {counted(len(seeds), 'seed')}"
        raise ValueError(f"{counted(count, 'prompt')}, but {there}")
    return [rule_for(rule, ends) for rule in rules], seeds


def side_by_side(
    decoder: Decoder, jobs: Iterable[Callable[[Decoder], Asking[T]]], width: int = 8
) -> Iterator[tuple[int, T]]:
    """Run jobs, `width` at a time, each with a decoder of its own; yield each one's place and result as it ends.

    A job is a generator function of a decoder, which may decode as often as it likes, by `answer`:

        def turns(own):
            first = yield from own.answer(prompt)
            return (yield from own.answer([*prompt, *first.tokens, *more], reuse=True))

    Forwards of all jobs are packed into one; each has a context, a drafter and a policy of its own, copied from
    the decoder's, and what they learn ends with this call. Where the models do not take several sequences, the
    jobs run one after the other, and a warning says why. The times of a generation then have the others' work in
    them: see `Generation.lanes`.

    Between two results other threads may decode with the decoder.
    """
    require(Integral, width=width)
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    jobs = iter(jobs)
    # As many lanes as there are jobs: a lane has a cache of its own.
    first = list(islice(jobs, min(int(width), sys.maxsize)))
    jobs, width = chain(first, jobs), max(len(first), 1)
    alone = decoder.drafter.alone if decoder.drafter is not None else None
    parts = (decoder.target, decoder.drafter, decoder.policy)
    made: list[Any] = []
    why = None
    if width > 1:
        with decoder.locked():
            made, why = shared_forwards.in_lanes(decoder.models, parts, width, alone)
    if not made:
        if why is not None:
            warnings.warn(f"one sequence after the other: {why}", stacklevel=2)
        for place, job in enumerate(jobs):
            with decoder.locked(), torch.inference_mode():
                found = run_alone(job(decoder))
            yield place, found
        return
    decoders = [_of_parts(decoder, own, width) for own in made]
    bound = ((lambda lane, job=job: job(decoders[lane])) for job in jobs)
    yield from scheduler.side_by_side(bound, width, decoder.locked)


def _of_parts(decoder: Decoder, parts: tuple[Any, Any, Any], lanes: int) -> Decoder:
    """The same decoder for one lane."""
    twin = copy.copy(decoder)
    twin.target, twin.drafter, twin.policy = parts
    twin.lanes = lanes
    return twin
