"""The tables of the stored steps, with intervals over texts. Arithmetic over `steps.jsonl` alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from evaluation.answers.metrics import Estimate, estimate
from experiments.real_pair.taken import Taken
from experiments.real_pair.ways import CHAINS, DEEP, EQUAL, SIZES, THRESHOLDS

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


def having(texts: Sequence[Along], *names: str) -> list[Along]:
    """The texts along which all of these were drafted."""
    return [text for text in texts if text.steps.keys() >= set(names)]


def rate(texts: Sequence[Along], name: str, of: int = 0) -> Estimate:
    """Tokens a step, or another of the sums, of all texts together, and its 95 % interval over texts."""
    return estimate([text.sums(name) for text in having(texts, name)], lambda sums: sums[..., of] / sums[..., 1])


def more(texts: Sequence[Along], name: str, than: str) -> Estimate:
    """By how many tokens a step the first is ahead, on the same texts."""
    both = [[*text.sums(name)[:2], *text.sums(than)[:2]] for text in having(texts, name, than)]
    return estimate(both, lambda sums: sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3])


def rounded(found: Estimate) -> list[Any]:
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
        groups.append((nodes, layers, own, [*others, *([f"binary {nodes}"] if layers < 10 else [])]))
    groups += [(length, length, f"opt {length}/{length}", [f"chain {length}"]) for length in CHAINS]
    rows = []
    for nodes, layers, own, others in groups:
        for name in (own, *others):
            if some := having(texts, name, own):
                behind = [None, None] if name == own else rounded(more(some, own, name))
                first = [titled(name), nodes, layers, len(some)]
                rows.append([*first, *rounded(rate(some, name)), *work(some, name), *behind])
    columns = ["tree", "nodes", "layers at most", "texts", "tokens a step", "95 % interval", "draft forwards a step"]
    columns += ["rows drafted a step", "OPT-Tree of as many nodes and layers less this tree", "its 95 % interval"]
    return {"title": "Trees at equal nodes and equal layers", "columns": columns, "rows": rows}


def by_size(texts: Sequence[Along], sets: Sequence[str]) -> dict[str, Any]:
    """OPT-Tree at threshold 0 by its nodes (the paper's figure 5)."""
    rows = []
    for name in (*(f"opt {nodes}" for nodes in SIZES), f"opt 60/{DEEP}"):
        if some := having(texts, name):
            parts = [_in_set(some, one, name) for one in sets]
            mean = [text for text in some if text.set != REPEATED]
            nodes, _, layers = name.removeprefix("opt ").partition("/")
            first = [int(nodes), int(layers or 10), len(mean)]
            if mean:
                beside = round(rate(mean, "opt 60")[0], 2)
                rows.append([*first, *rounded(rate(mean, name)), beside, *parts, *work(mean, name)])
    columns = ["nodes", "layers at most", "texts", "tokens a step", "95 % interval"]
    columns += ["60 nodes and ten layers, same texts", *sets, "draft forwards a step", "rows drafted a step"]
    return {"title": "OPT-Tree by its nodes", "columns": columns, "rows": rows}


def _in_set(texts: Sequence[Along], one: str, name: str) -> float | None:
    """Tokens a step on one set; None where nothing was drafted along its texts."""
    of_set = [text for text in having(texts, name) if text.set == one]
    return round(rate(of_set, name)[0], 2) if of_set else None


def by_threshold(texts: Sequence[Along]) -> dict[str, Any]:
    """OPT-Tree of 60 nodes by its threshold, bare and by the fitted temperature."""
    names = ["opt 60", *(f"opt 60 at {threshold}" for threshold in THRESHOLDS)]
    rows = []
    for fitted in ("", ", fitted"):
        for threshold, name in zip((0, *THRESHOLDS), names, strict=True):
            if some := having(texts, whole := name + fitted):
                first = [f"{threshold:g}", "fitted" if fitted else "bare", len(some)]
                rows.append([*first, *rounded(rate(some, whole)), *work(some, whole), *agreement(some, whole)[:3]])
    columns = ["threshold", "drafter", "texts", "tokens a step", "95 % interval", "draft forwards a step"]
    columns += ["rows drafted a step", "E(A)", "A", "A / E(A)"]
    return {"title": "Thresholds at 60 nodes", "columns": columns, "rows": rows}


def pairs(texts: Sequence[Along], name: str) -> Float[np.ndarray, "2 steps"]:
    """E(A) and A of the steps whose accepted path is known to its end."""
    taken = [one for text in having(texts, name) for one in text.steps[name] if one.known and one.nodes]
    return np.array([(one.expected, one.accepted) for one in taken], dtype=float).reshape(-1, 2).T


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
        if some := having(texts, name):
            nodes = int(name.split()[1].split("/")[0].strip(","))
            rows.append([titled(name), nodes, len(some), len(pairs(some, name)[0]), *agreement(some, name)])
    columns = ["tree", "nodes", "texts", "steps", "E(A)", "A", "A / E(A)", "slope of A on E(A)", "rank correlation"]
    return {"title": "E(A) against A", "columns": columns, "rows": rows}


def ten_in_a_step(texts: Sequence[Along], sets: Sequence[str]) -> dict[str, Any]:
    """How many steps emit ten tokens or more, by set and nodes."""
    rows = []
    for one in sets:
        for name in (*(f"opt {nodes}" for nodes in SIZES), f"opt 60/{DEEP}"):
            if of_set := [text for text in having(texts, name) if text.set == one]:
                nodes, _, layers = name.removeprefix("opt ").partition("/")
                _, steps, *_, many = np.array([text.sums(name) for text in of_set]).sum(0).tolist()
                first = [one, int(nodes), int(layers or 10), len(of_set)]
                longest = max(taken.emitted for text in of_set for taken in text.steps[name])
                rows.append([*first, *rounded(rate(of_set, name)), steps, many, f"{100 * many / steps:.0f} %", longest])
    columns = ["set", "nodes", "layers at most", "texts", "tokens a step", "95 % interval", "steps"]
    columns += ["of ten tokens or more", "share", "most in a step"]
    return {"title": "Ten tokens in a step", "columns": columns, "rows": rows}


def by_set(texts: Sequence[Along], sets: Sequence[str]) -> dict[str, Any]:
    """Every policy on every set, tokens a step."""
    names = list(dict.fromkeys(name for text in texts for name in text.steps))
    rows = [[name, len(having(texts, name)), *(_in_set(texts, one, name) for one in sets)] for name in names]
    return {"title": "Every tree on every set", "columns": ["tree, nodes/layers", "texts", *sets], "rows": rows}


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
