"""What steps cost here: measured once in the decoding loop itself, kept beside the compiled packages.

Owns the measuring and the fit. Forwards timed on their own, one after another, are faster than those between which a
tree is drafted, judged and committed, and say nothing of what happens between them; so whole steps are timed.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import nnls

from opt_tree.chain_lm import AnyLM
from opt_tree.controllers import Auto, Scheduled
from opt_tree.decode import Decoder
from opt_tree.drafters import Drafter
from opt_tree.engines.packages import facts_of, remember, remembered
from opt_tree.lm import CausalLM
from opt_tree.policies import Costs, OptTree, Static, TreePolicy

SHAPES: tuple[TreePolicy, ...] = (
    Static.empty(),
    *(OptTree(nodes, 0.0, depth) for nodes, depth in ((1, 1), (4, 3), (8, 2), (16, 6), (24, 1), (32, 4), (48, 8))),
)
"""What is decoded with by turns: trees of different nodes, layers and rows a layer, and none."""
CONTEXTS = (32, 384)
ROUNDS, LEAST_ROUNDS = 12, 3
SECONDS = 40.0
"""After which no further round is begun, once each shape was met `LEAST_ROUNDS` times."""
_VERSION = 1


class Timed(NamedTuple):
    """One measured step."""

    shape: int
    """Its place in `SHAPES`."""
    context: int
    rows: int
    layers: int
    draft_rows: int
    draft: float
    """Seconds of growing the tree."""
    rest: float
    """Seconds of everything behind it."""


def auto(target: AnyLM, drafter: Drafter, nodes: int = 64, max_depth: int = 10) -> Auto:
    """The tree for this machine: costs that were measured once, and what the steps teach.

    decoder = Decoder(pair.target, pair.drafter, auto(pair.target, pair.drafter))
    """
    return Auto(costs_of(target, drafter), nodes, max_depth)


def costs_of(target: AnyLM, drafter: Drafter) -> Costs:
    """What steps of this pair cost here: remembered for weights, engine, dtype, threads and machine; else measured.

    Measuring takes some seconds, a minute at most on models that answer in a second. The target's context is forgotten.
    """
    facts = _facts(target, drafter)
    known = remembered(facts)
    if known is not None:
        try:
            return Costs(**json.loads(known))
        except (ValueError, TypeError):
            pass  # damaged: measured again
    costs = measure_costs(target, drafter)
    remember(facts, json.dumps(dataclasses.asdict(costs)))
    return costs


def _facts(target: AnyLM, drafter: Drafter) -> dict[str, Any]:
    """All that decides how long a step takes."""
    return {
        "costs": _VERSION,
        "models": [facts_of(lm.model) | {"engine": _engine(lm)} for lm in (target, *drafter.models)],
        "drafter": [type(drafter).__name__, drafter.describe()],
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type,
    }


def _engine(lm: AnyLM) -> str:
    return lm.engine.name if isinstance(lm, CausalLM) else "path by path"


def measure_costs(target: AnyLM, drafter: Drafter) -> Costs:
    """Decode behind a short and a longer context with trees of several shapes by turns, and fit `Costs`."""
    fitting = [size for size in CONTEXTS if size + 200 <= min(target.max_context, drafter.max_context)]
    steps: list[Timed] = []
    for size in fitting or [max(2, min(target.max_context, drafter.max_context) // 4)]:
        steps += _time_steps(target, drafter, size, SECONDS / max(1, len(fitting)))
    return fit(steps)


def _time_steps(target: AnyLM, drafter: Drafter, size: int, limit: float) -> list[Timed]:
    """Steps behind a context of `size` arbitrary tokens, shape after shape."""
    decoder = Decoder(target, drafter, Scheduled(SHAPES))
    prompt = [(7 * i + 3) % min(target.vocab, 1000) for i in range(size)]
    begin, timed, context = time.perf_counter(), list[Timed](), size
    for turn, step in enumerate(decoder.steps(prompt, 8 * ROUNDS * len(SHAPES))):
        rounds, shape = divmod(turn, len(SHAPES))
        if rounds > ROUNDS or (rounds > LEAST_ROUNDS and time.perf_counter() - begin > limit):
            break
        if rounds:  # the first one pays for cold memory
            times, forwards = step.times, step.draft_forwards
            layers = max(forwards, int(step.tree.depths.max()))  # a table drafts without forwards
            timed.append(
                Timed(
                    shape, context, len(step.tree), layers, step.draft_tokens, times.draft, times.verify + times.commit
                )
            )
        context += len(step.tokens)
    return timed


def fit(steps: Sequence[Timed]) -> Costs:
    """Fit seconds that are linear in rows and in the context, no part below 0, to medians over steps of one shape.

    Errors count relative to what was measured: a wide tree is no more important than a narrow one.
    """
    medians = [
        np.median([step[1:] for step in steps if (step.shape, step.context < near) == key], axis=0)
        for near in [np.mean([step.context for step in steps])]
        for key in sorted({(step.shape, step.context < near) for step in steps})
    ]
    cells = np.array(medians)
    context, rows, layers, draft_rows, draft, rest = cells.T
    tree, ones = rows > 1, np.ones(len(rows))
    step, row, more = _linear(np.stack([ones, rows, context], 1)[tree], rest[tree])
    layer, draft_row, draft_more = _linear(np.stack([layers, draft_rows, layers * context], 1)[tree], draft[tree])
    growth = more / (step + row * rows[tree].mean())
    plain = float(np.mean(rest[~tree] / (1 + growth * context[~tree])))
    return Costs(plain, step, row, layer, draft_row, growth, draft_more / layer if layer else 0.0)


def _linear(parts: Float[np.ndarray, "cells parts"], seconds: Float[np.ndarray, " cells"]) -> list[float]:
    """Coefficients, none below 0, of the least relative squares."""
    return nnls(parts / seconds[:, None], np.ones(len(seconds)))[0].tolist()
