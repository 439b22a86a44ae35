"""What steps cost here: measured once in the decoding loop itself, kept beside the compiled packages.

Owns the measuring and the fit. Forwards timed on their own, one after another, are faster than those between which a
tree is drafted, judged and committed, and say nothing of what happens between them; so whole steps are timed.
"""

import copy
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from scipy.optimize import isotonic_regression

from opt_tree.backends.batch.side_by_side import side_by_side
from opt_tree.backends.package_cache import facts_of, remember, remembered
from opt_tree.decode import Run, prefill
from opt_tree.decoder import Decoder
from opt_tree.drafter import Drafter
from opt_tree.generation import Step
from opt_tree.methods.controllers.auto import Auto
from opt_tree.methods.controllers.scheduled import Scheduled
from opt_tree.methods.drafters.around import described
from opt_tree.methods.policies.costs import Costs, Curve
from opt_tree.methods.policies.static import Static
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.policy import OptTree, TreePolicy
from opt_tree.pool import CandidatePool
from opt_tree.sampling import Random, Temperature
from opt_tree.target import Asking
from opt_tree.verify import greedy

SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 17, 18, 23, 24, 32, 48, 64)
"""Nodes of the trees that are decoded with: each size where small trees are cut, and both sides of a kernel's blocks of
six rows. Up and down, so that each follows one about as large, as in use."""
DEPTH, CONTEXTS, ROUNDS = 4, (32, 384), 12
SECONDS = 40.0
"""After which no further step is begun: a large model on a CPU is known by fewer rounds, or by small trees alone."""
QUARTILE, _VERSION = 0.25, 6
Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Timed:
    """One measured step."""

    context: int
    rows: int
    scoring: float
    """Seconds of everything but the draft, what passes between two steps included."""
    first: float = 0.0
    """Seconds of the root's layer, and of selecting the tree."""
    layers: tuple[tuple[int, float], ...] = ()
    """Of each further layer: the rows of its forward, and its seconds."""


class Clocked(TreePolicy):
    """OPT-Tree's trees of `nodes`, and when each of their layers was there."""

    children: Any
    max_depth = DEPTH

    def __init__(self, nodes: int, clock: Clock = time.perf_counter) -> None:
        self._policy, self._clock = OptTree(nodes, 0.0, DEPTH), clock
        self.children = self._policy.children
        self.marks: list[tuple[float, int]] = []
        """Of each layer of the newest tree: when it was there, and how many rows the forward below it has."""
        self.selected = 0.0
        """When that tree was there."""

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        if pool.depth == 1:
            self.marks.clear()
        rows = self._policy.expand(pool)
        self.marks.append((self._clock(), 0 if rows is None else len(rows)))
        return rows

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        if len(self.marks) < pool.depth:  # the deepest layer is not asked for another one
            self.marks.append((self._clock(), 0))
        rows = self._policy.select(pool)
        self.selected = self._clock()
        return rows


def auto(target: AnyLM, drafter: Drafter, nodes: int = 64, max_depth: int = 10, lanes: int = 1) -> Auto:
    """The tree for this machine, of a batch in so many `lanes`: costs measured once, and what the steps teach."""
    return Auto(costs_of(target, drafter, lanes), nodes, max_depth)


def costs_of(target: AnyLM, drafter: Drafter, lanes: int = 1) -> Costs:
    """What steps of this pair cost here: remembered for weights, engine, dtype, threads and machine; else measured.

    With several `lanes`, a step of all of them, by the rows of one. Measuring takes `SECONDS` and what steps are under
    way then, at most. The target's context is forgotten.
    """
    facts = _facts(target, drafter) | ({"lanes": lanes} if lanes > 1 else {})
    known = remembered(facts)
    if known is not None:
        with suppress(ValueError, TypeError):  # damaged: measured again
            return Costs.read(json.loads(known))
    costs = measure_costs(target, drafter, lanes)
    remember(facts, json.dumps(dataclasses.asdict(costs)))
    return costs


def _facts(target: AnyLM, drafter: Drafter) -> dict[str, Any]:
    """All that decides how long a step takes."""
    return {
        "costs": _VERSION,
        "models": [facts_of(lm.model) | {"engine": _engine(lm)} for lm in (target, *drafter.models)],
        "drafter": [type(drafter).__name__, described(drafter)],
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type,
    }


def _engine(lm: AnyLM) -> str:
    if not isinstance(lm, CausalLM):
        return "path by path"
    return "packed" if lm.backend is lm.eager and lm.eager.packed else lm.backend.name


def measure_costs(target: AnyLM, drafter: Drafter, lanes: int = 1) -> Costs:
    """Decode behind a short and a longer context by turns, with trees of several sizes by turns, and fit `Costs`.

    One thread is timed by the seconds that it had the processor: a neighbour's turns belong to no step.
    A drafter that learns is measured as a copy: what it knows does not depend on whether it was measured here.
    """
    if drafter.learns:
        drafter = copy.deepcopy(drafter, {id(model): model for model in (target, *drafter.models)})
    room = min(target.max_context, drafter.max_context)
    contexts = [size for size in CONTEXTS if size + 200 <= room] or [max(2, room // 4)]
    end, rounds = time.perf_counter() + SECONDS, list[list[Timed]]()
    while not rounds or (len(rounds) <= ROUNDS and time.perf_counter() < end):
        number = len(rounds)
        # Arbitrary tokens, others at each turn.
        texts = [[(7 * i + 3 + number) % min(target.vocab, 1000) for i in range(size)] for size in contexts]
        turns = [_Turn(text, SIZES[:: -1 if number % 2 else 1], end) for text in texts]
        rounds.append([step for turn in turns for step in _time_steps(target, drafter, turn, lanes)])
    kept = rounds[1:] if len(rounds) > 2 else rounds  # the first one pays for cold memory; the last may be cut short
    return fit([step for timed in kept for step in timed])


class _Turn(NamedTuple):
    """One of several behind one context."""

    prompt: list[int]
    sizes: Sequence[int]
    """Of its trees, in nodes; each once."""
    end: float
    """When no further step is begun, by the clock."""


def _time_steps(target: AnyLM, drafter: Drafter, turn: _Turn, lanes: int) -> list[Timed]:
    """Time a step of each size. Lanes are alike, and the first is timed: the others' work is in its times."""
    alone = target.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    # The first step takes in the prompt.
    shapes = [Clocked(1), *(Clocked(nodes, clock) if nodes else Static.empty() for nodes in turn.sizes)]

    def follow(own: Decoder) -> Asking[list[Timed]]:
        timed, begin = list[Timed](), 0.0
        text = Run(own.target, own.drafter, greedy, Temperature(), Random(), [*turn.prompt], own.target.max_context)
        yield from prefill(text, own.policy)
        for _ in shapes:
            step = yield from own.step(text)
            timed.append(_timed(step, len(text.context) - len(step.tokens), begin, clock()))
            if len(timed) > 2 and time.perf_counter() > turn.end:
                break
            begin = clock()
        return timed[1:]

    return dict(side_by_side(Decoder(target, drafter, Scheduled(shapes)), [follow] * lanes, lanes))[0]


def _timed(step: Step, context: int, begin: float, end: float) -> Timed:
    """What a step of so many seconds says of its parts."""
    if not (isinstance(step.policy, Clocked) and step.tree.nodes):
        return Timed(context, len(step.tree), end - begin)
    marks, selected = step.policy.marks, step.policy.selected
    layers = tuple((rows, end - begin) for (begin, rows), (end, _) in pairwise(marks))
    return Timed(context, len(step.tree), end - selected, selected - begin - (marks[-1][0] - marks[0][0]), layers)


def fit(steps: Sequence[Timed]) -> Costs:
    """Seconds by rows: lower quartiles of what was measured, as curves (`_curve`).

    Both parts grow with the context in proportion to themselves, at the median over all sizes. What disturbs a step
    makes it longer, never shorter: hence quartiles.
    """
    scored = [(step.context, step.rows, step.scoring) for step in steps]
    layers = [(step.context, rows, seconds) for step in steps for rows, seconds in step.layers]
    drafted = [step for step in steps if step.rows > 1]
    growth, draft_growth = _growth(scored), _growth(layers)
    firsts = [step.first / (1 + draft_growth * step.context) for step in drafted]
    first = float(np.quantile(firsts, QUARTILE)) if firsts else 0.0
    drafting = _curve(layers, draft_growth, math.inf) or ((1, first),)
    return Costs(_curve(scored, growth, 2.0), first, drafting, growth, draft_growth)


def _growth(measured: Sequence[tuple[int, int, float]]) -> float:
    """By which part of itself what takes (context, rows, seconds) grows with each token of context; 0 at least."""
    if not measured:
        return 0.0
    contexts, sizes, seconds = np.array(measured).T
    far = contexts > contexts.mean()
    ratios = [
        np.quantile(seconds[far & (sizes == size)], QUARTILE) / np.quantile(seconds[~far & (sizes == size)], QUARTILE)
        for size in set(sizes[far]) & set(sizes[~far])
    ]
    if not ratios:
        return 0.0
    ratio, short, long = np.median(ratios), contexts[~far].mean(), contexts[far].mean()
    return float(max(ratio - 1, 0.0) / (long - ratio * short)) if long > ratio * short else 0.0


def _curve(measured: Sequence[tuple[int, int, float]], growth: float, doubt: float) -> Curve:
    """The curve through (context, rows, seconds), behind no context.

    It rises (isotonic regression, by the counts) but where it falls by more than `doubt` times the noise: a large model
    may score six rows sooner than one, which has another kernel.
    """
    by_rows: dict[int, list[float]] = {}
    for context, rows, taken in measured:
        by_rows.setdefault(rows, []).append(taken / (1 + growth * context))
    known = sorted(by_rows)
    if not known:
        return ()
    counts, both = np.array([len(by_rows[rows]) for rows in known]), (QUARTILE, 0.5)
    seconds, medians = np.maximum([np.quantile(by_rows[rows], both) for rows in known], 1e-9).T
    rising = isotonic_regression(seconds, weights=counts).x
    # A step's standard deviation in parts of it: a normal quartile lies 0.67 of them off. Of one step alone: unknown.
    noise = float(np.median(medians / seconds - 1)) / 0.67 or math.inf
    # How far a point is off the rising curve, squared, and how far it would be by chance: the more, the more it counts.
    off, by_chance = np.square(seconds / rising - 1), (doubt * noise) ** 2 / counts
    believed = np.where(counts > 2, off / (off + by_chance), 0.0)
    return tuple(zip(known, (rising + believed * (seconds - rising)).tolist(), strict=True))
