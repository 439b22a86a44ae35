"""Is this drafter worth it, and with which tree? Answered from plain decoding's texts and from what steps cost.

Every tree of a grid is walked along the texts (`along.py`), which takes the steps that decoding with it would take. The
steps are priced: by what they cost here, side by side, and on machines whose costs are given.
"""

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from opt_tree.errors import require
from opt_tree.generation import Generation
from opt_tree.methods.controllers.auto import Auto
from opt_tree.methods.drafters.around import described
from opt_tree.methods.policies.costs import Costs
from opt_tree.methods.policies.static import Static
from opt_tree.policy import OptTree, TreePolicy
from opt_tree.request import check_prompt
from opt_tree.tools.advice import AUTO, HERE, Advice, Choice, Prospect
from opt_tree.tools.along import along
from opt_tree.tools.pair import Pair
from opt_tree.tools.step_costs import costs_of
from opt_tree.tools.stored_text import StoredText, written

LARGEST = 32
NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, LARGEST)
THRESHOLDS = (0.05, 0.12, 0.2, 0.3, 0.45, 0.6)
CHAINS = (2, 3, 4, 6, 8)
LONGEST = f"the chain of {max(CHAINS)}"
RESAMPLES = 2000
FEWEST = 2
"""Texts: an interval is over texts."""
PARTS = 1 << 30
"""Steps in which a share is looked for."""


def grid() -> dict[str, TreePolicy]:
    """Every fixed setting that is tried, by the name that the advice gives it."""
    found: dict[str, TreePolicy] = {f"Static.chain({n})": Static.chain(n) for n in CHAINS}
    for nodes in NODES:
        # A single node has one layer, whatever the threshold.
        found |= {f"OptTree({nodes}, {t:g})": OptTree(nodes, t) for t in (THRESHOLDS if nodes > 1 else THRESHOLDS[:1])}
    return found


def advise(
    pair: Pair,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int = 64,
    seconds: float = 120.0,
    side_by_side: int = 8,
    costs: Mapping[str, Costs] | None = None,
) -> Advice:
    """Say whether a pair's drafter is worth it at temperature 0, and with which tree.

        print(opt_tree.advise(opt_tree.load_pair("demo"), ["Why is the sky blue?", "What is rain?"]))

    The prompts are the kind of text that will be asked for. What steps cost is measured once for a pair and a machine,
    in 40 seconds at most (`opt_tree.tools.step_costs`). A drafter that learns from the target's logits (Token
    Recycling) is shown those of the text alone, so it is judged too low.

    Args:
        pair: Compiled or not, as it will be used.
        prompts: Texts, which are encoded as a user's message, or token ids; two at least.
        max_new_tokens: Of each text, at most.
        seconds: After which no further text is begun.
        side_by_side: Also price so many sequences in one forward; 1: do not.
        costs: Other machines' costs by name (`opt_tree.tools.cost_files.read_costs`).

    Raises ValueError for fewer than two prompts and for what is no prompt.
    """
    require(Pair, pair=pair)
    if side_by_side < 1 or max_new_tokens < 2:
        raise ValueError(f"side_by_side >= 1 and max_new_tokens >= 2, got {side_by_side} and {max_new_tokens}")
    asked = _encoded(pair, prompts)
    lanes = {HERE: 1} | ({f"{side_by_side} side by side": side_by_side} if side_by_side > 1 else {})
    bar = tqdm(lanes.items(), desc="what steps cost", leave=False, disable=None)
    tables = {name: costs_of(pair.target, pair.drafter, count) for name, count in bar}
    texts = (written(pair.target, prompt, max_new_tokens, pair.stop) for prompt in asked)
    known = tqdm(texts, desc="trees along texts", total=len(asked), unit="text", leave=False, disable=None)
    return weigh(pair, iter(known), {**tables, **(costs or {})}, seconds)


def _encoded(pair: Pair, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
    require(Sequence, prompts=prompts)
    if isinstance(prompts, str) or len(prompts) < FEWEST:
        got = "one text" if isinstance(prompts, str) else len(prompts)
        raise ValueError(f"an interval is over texts: {FEWEST} prompts at least, got {got}")
    found = [pair.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    return [check_prompt(prompt, pair.target) for prompt in found]


def weigh(pair: Pair, texts: Iterable[StoredText], tables: Mapping[str, Costs], seconds: float = math.inf) -> Advice:
    """Walk the grid along texts and price it by tables of costs, of which the first is the machine's own.

    No text is begun after so many seconds; ValueError where that leaves fewer than two.
    """
    policies, begin = grid(), time.perf_counter()
    settings: dict[str, TreePolicy] = {"plain": Static.empty(), LONGEST: Static.chain(max(CHAINS)), **policies}
    settings |= {f"{AUTO} {name}": Auto(costs, LARGEST) for name, costs in tables.items()}
    made = {setting: list[Generation]() for setting in settings}
    pair.drafter.clear()
    for text in texts:
        for setting, generation in along(pair.drafter, text, settings, pair.target).items():
            made[setting].append(generation)
        if time.perf_counter() - begin > seconds:
            break
    if (count := len(made["plain"])) < FEWEST:
        raise ValueError(f"only {count} text was written in {seconds:g} s: allow more seconds, or fewer tokens")
    prospects, first = dict[str, Prospect](), list[Generation]()
    for name, costs in tables.items():
        priced = {**{one: made[one] for one in ("plain", *policies)}, AUTO: made[f"{AUTO} {name}"]}
        spent = {one: np.array([costs.of_all(text) for text in texts]) for one, texts in priced.items()}
        best = min(policies, key=lambda setting, spent=spent: float(spent[setting].sum()))  # type: ignore[misc]
        first = first or made[best]
        prospects[name] = _prospect(costs, best, spent, made[best])
    steps = _whole_steps(first)
    counts = np.array([accepted for _, accepted in steps] or [0])
    return Advice(
        pair.target.name.rstrip("/").rpartition("/")[2],
        described(pair.drafter),
        prospects,
        [float((counts >= position).mean()) for position in range(1, counts.max() + 1)],
        _chain_shares(made[LONGEST]),
        [expected for expected, _ in steps],
        counts.tolist(),
        count,
        sum(len(text.tokens) for text in made["plain"]),
    )


def _prospect(
    costs: Costs, best: str, spent: Mapping[str, Float[np.ndarray, " texts"]], generations: Sequence[Generation]
) -> Prospect:
    plain = spent["plain"]
    draws = np.random.default_rng(0).integers(len(plain), size=(RESAMPLES, len(plain)))

    def choice(setting: str) -> Choice:
        seconds = spent[setting]
        low, high = np.percentile(plain[draws].sum(1) / seconds[draws].sum(1), (2.5, 97.5))
        return Choice(setting, float(plain.sum() / seconds.sum()), float(low), float(high))

    steps = sum(len(one.steps) for one in generations)
    tokens = sum(len(one.tokens) for one in generations)
    context = round(float(np.mean([len(one.prompt) + len(one.tokens) / 2 for one in generations])))
    rates = {setting: float(plain.sum() / seconds.sum()) for setting, seconds in spent.items()}
    found = choice(best)
    emitted = tokens / steps
    return Prospect(costs, found, choice(AUTO), rates, emitted / found.speed_up, emitted, break_even(costs.at(context)))


def break_even(costs: Costs) -> float | None:
    """The share of drafted tokens, each like the others, with which the best chain is as fast as plain decoding.

    A chain of k tokens brings 1 + a + ... + a^k of them (arXiv:2211.17192, eq. 1). None: a = 1 is not enough.
    """

    seconds = {k: costs.score(k + 1) + costs.draft(k, k - 1) for k in range(1, 17)}

    def pays(part: int) -> bool:
        share = part / PARTS
        return any(sum(share**i for i in range(k + 1)) * costs.plain >= spent for k, spent in seconds.items())

    least = bisect_left(range(PARTS + 1), True, key=pays)
    return least / PARTS if least <= PARTS else None


def _whole_steps(generations: Sequence[Generation]) -> list[tuple[float, int]]:
    """E(A) and A of each step but the last of a text, which the text's end may have cut short."""
    return [(step.expected_accepted, step.accepted) for one in generations for step in one.steps[:-1]]


def _chain_shares(generations: Sequence[Generation]) -> list[float]:
    """How often the chain's first, second, ... token was accepted where those before it were."""
    counts = np.array([accepted for _, accepted in _whole_steps(generations)] or [0])
    reached = [int((counts >= position).sum()) for position in range(max(CHAINS) + 1)]
    return [after / before for before, after in itertools.pairwise(reached) if before]
