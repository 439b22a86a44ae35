"""The tables of the stored steps, with intervals over texts. Arithmetic over `steps.jsonl` alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from evaluation.answers.metrics import estimate
from experiments.real_pair.lockstep import Taken
from experiments.real_pair.ways import CHAINS, EQUAL, SIZES, THRESHOLDS

REPEATED = "humaneval_repeated"
"""Its answers begin with the prompt's code: in a row of its own, and in no mean."""
TREES = {
    "opt": "OPT-Tree",
    "eagle2": "EAGLE-2's tree",
    "sequoia": "Sequoia's tree",
    "medusa": "Medusa's rule",
    "eagle1_list": "EAGLE-1's list",
    "binary": "binary tree",
    "chain": "chain",
}
MANY = 10
"""Tokens in a step that the paper's abstract speaks of."""


@dataclass(frozen=True)
class Along:
    """The steps of every policy along one text."""

    set: str
    id: str
    steps: dict[str, list[Taken]]

    @classmethod
    def all_of(cls, lines: Iterable[dict[str, Any]]) -> "list[Along]":
        """The texts of a file; what a later line adds to a text is joined to it."""
        found: dict[tuple[str, str], Along] = {}
        for line in lines:
            text = found.setdefault((line["set"], line["id"]), cls(line["set"], line["id"], {}))
            text.steps.update({name: [Taken(*row) for row in rows] for name, rows in line["steps"].items()})
        return list(found.values())

    def sums(self, name: str) -> list[float]:
        """Tokens, steps, draft forwards, rows in them, and steps of `MANY` tokens or more."""
        taken = self.steps[name]
        many = sum(one.emitted >= MANY for one in taken)
        work = sum(one.forwards for one in taken), sum(one.drafted for one in taken)
        return [sum(one.emitted for one in taken), len(taken), *work, many]


Rate = tuple[float, list[float] | None]


def rate(texts: Sequence[Along], name: str, of: int = 0) -> Rate:
    """Tokens a step, or another of the sums, of all texts together, and its 95 % interval over texts."""
    return estimate([text.sums(name) for text in texts], lambda sums: sums[..., of] / sums[..., 1])


def more(texts: Sequence[Along], name: str, than: str) -> Rate:
    """By how many tokens a step the first is ahead, on the same texts."""
    both = [[*text.sums(name)[:2], *text.sums(than)[:2]] for text in texts]
    return estimate(both, lambda sums: sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3])


def rounded(found: Rate) -> list[Any]:
    """The cells of a rate: the number and its interval."""
    value, interval = found
    return [round(value, 2), None if interval is None else [round(end, 2) for end in interval]]


def work(texts: Sequence[Along], name: str) -> list[Any]:
    """Draft forwards a step, and rows in them."""
    return [round(rate(texts, name, 2)[0], 2), round(rate(texts, name, 3)[0], 1)]


def titled(name: str) -> str:
    """A policy's name for a reader, its size left out."""
    return TREES[name.split()[0]] + (", fitted" if name.endswith(", fitted") else "")


def equal_trees(texts: Sequence[Along]) -> dict[str, Any]:
    """Every tree beside OPT-Tree of as many nodes and layers."""
    groups: list[tuple[int, int, str, list[str]]] = []
    for nodes, layers in EQUAL:
        own = "opt 60" if (nodes, layers) == (60, 10) else f"opt {nodes}/{layers}"
        others = [f"{kind} {nodes}/{layers}" for kind in ("eagle2", "sequoia", "medusa", "eagle1_list")]
        binary = [f"binary {nodes}"] if layers < 10 else []
        groups.append((nodes, layers, own, [*others, *binary]))
    groups += [(length, length, f"opt {length}/{length}", [f"chain {length}"]) for length in CHAINS]
    rows = []
    for nodes, layers, own, others in groups:
        for name in (own, *others):
            if name in texts[0].steps:
                behind = [None, None] if name == own else rounded(more(texts, name, own))
                rows.append([titled(name), nodes, layers, *rounded(rate(texts, name)), *behind, *work(texts, name)])
    columns = ["tree", "nodes", "layers at most", "tokens a step", "95 % interval", "more than OPT-Tree"]
    columns += ["95 % interval of the difference", "draft forwards a step", "rows drafted a step"]
    return {"title": "Trees at equal nodes and equal layers", "columns": columns, "rows": rows}


def by_size(texts: Sequence[Along], sets: Sequence[str]) -> dict[str, Any]:
    """OPT-Tree at threshold 0 by its nodes (the paper's figure 5)."""
    rows = []
    for nodes in SIZES:
        name = f"opt {nodes}"
        parts = [round(rate([text for text in texts if text.set == one], name)[0], 2) for one in sets]
        mean = [text for text in texts if text.set != REPEATED]
        rows.append([nodes, *rounded(rate(mean, name)), *parts, *work(mean, name)])
    columns = ["nodes", "tokens a step", "95 % interval", *sets, "draft forwards a step", "rows drafted a step"]
    return {"title": "OPT-Tree by its nodes", "columns": columns, "rows": rows}


def by_threshold(texts: Sequence[Along]) -> dict[str, Any]:
    """OPT-Tree of 60 nodes by its threshold, bare and by the fitted temperature."""
    names = ["opt 60", *(f"opt 60 at {threshold}" for threshold in THRESHOLDS)]
    rows = []
    for fitted in ("", ", fitted"):
        for threshold, name in zip((0, *THRESHOLDS), names, strict=True):
            if (whole := name + fitted) in texts[0].steps:
                kind = "fitted" if fitted else "bare"
                kept = agreement(texts, whole)
                rows.append([threshold, kind, *rounded(rate(texts, whole)), *work(texts, whole), *kept[:3]])
    columns = ["threshold", "drafter", "tokens a step", "95 % interval", "draft forwards a step", "rows drafted a step"]
    return {"title": "Thresholds at 60 nodes", "columns": [*columns, "E(A)", "A", "A / E(A)"], "rows": rows}


def pairs(texts: Sequence[Along], name: str) -> Float[np.ndarray, "2 steps"]:
    """E(A) and A of the steps whose accepted path is known to its end."""
    known = [(one.expected, one.accepted) for text in texts for one in text.steps[name] if one.known and one.nodes]
    return np.array(known, dtype=float).reshape(-1, 2).T


def agreement(texts: Sequence[Along], name: str) -> list[Any]:
    """Means of E(A) and A, their ratio, the slope of A on E(A), and their correlation (Spearman's)."""
    expected, accepted = pairs(texts, name)
    slope = np.polyfit(expected, accepted, 1)[0]
    ratio = accepted.mean() / expected.mean()
    found = [expected.mean(), accepted.mean(), ratio, slope, stats.spearmanr(expected, accepted).statistic]
    return [round(float(value), 2) for value in found]


def expectations(texts: Sequence[Along]) -> dict[str, Any]:
    """What trees promised and what was accepted (the paper's figure 4)."""
    names = ["opt 8", "opt 25", "opt 60", "opt 140", "opt 60, fitted", "eagle2 60/6", "eagle2 60/6, fitted"]
    rows = []
    for name in names:
        if name in texts[0].steps:
            nodes = int(name.split()[1].split("/")[0].strip(","))
            rows.append([titled(name), nodes, len(pairs(texts, name)[0]), *agreement(texts, name)])
    columns = ["tree", "nodes", "steps", "E(A)", "A", "A / E(A)", "slope of A on E(A)", "rank correlation"]
    return {"title": "E(A) against A", "columns": columns, "rows": rows}


def ten_in_a_step(texts: Sequence[Along], sets: Sequence[str]) -> dict[str, Any]:
    """How many steps emit ten tokens or more, by set and nodes."""
    rows = []
    for one in sets:
        of_set = [text for text in texts if text.set == one]
        for nodes in SIZES:
            sums = np.array([text.sums(f"opt {nodes}") for text in of_set]).sum(0)
            share = f"{100 * sums[4] / sums[1]:.0f} %"
            cells = rounded(rate(of_set, f"opt {nodes}"))
            longest = max(taken.emitted for text in of_set for taken in text.steps[f"opt {nodes}"])
            rows.append([one, nodes, len(of_set), *cells, int(sums[1]), int(sums[4]), share, longest])
    columns = ["set", "nodes", "texts", "tokens a step", "95 % interval", "steps", "of ten tokens or more", "share"]
    return {"title": "Ten tokens in a step", "columns": [*columns, "most in a step"], "rows": rows}


def by_set(texts: Sequence[Along], sets: Sequence[str]) -> dict[str, Any]:
    """Every policy on every set, tokens a step."""
    rows = []
    for name in texts[0].steps:
        cells = [round(rate([text for text in texts if text.set == one], name)[0], 2) for one in sets]
        rows.append([name, *cells])
    return {"title": "Every tree on every set", "columns": ["tree, nodes/layers", *sets], "rows": rows}


def all_tables(texts: Sequence[Along]) -> list[dict[str, Any]]:
    """Every table; the means are over all sets but the repeated one."""
    sets = list(dict.fromkeys(text.set for text in texts))
    mean = [text for text in texts if text.set != REPEATED]
    return [
        equal_trees(mean),
        by_size(texts, sets),
        by_threshold(mean),
        expectations(mean),
        ten_in_a_step(texts, sets),
        by_set(texts, sets),
    ]
