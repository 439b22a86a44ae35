"""The two pictures of an advice: what steps cost and what each budget would bring; what is accepted. Needs matplotlib.

Owns the drawing only; the figures are those of `opt_tree.tools.advice`.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from opt_tree.system.files import whole
from opt_tree.tools.advice import Advice

COLOURS = ("#2b6cb0", "#d9730d", "#5a9367", "#7a5aa6", "#b5473c", "#17a2a2")
LIGHT = "#90b8e0"
"""Of bars that a line crosses."""
ROWS = 33
FEWEST = 5
"""Steps behind a point of E(A) against A."""


def draw_advice(advice: Advice, folder: str | Path) -> list[Path]:
    """Write `costs` and `accepted` to a folder, which is made, each as PNG and as SVG; return the paths of the former.

    Raises ValueError where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install 'opt_tree[plots]'") from error
    folder = Path(folder).expanduser()
    drawn = []
    for name, halves in (("costs", (_costs, _speed_ups)), ("accepted", (_accepted, _expected))):
        figure = Figure(figsize=(9, 3.4), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, draw in zip(figure.subplots(1, 2), halves, strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            draw(axes, advice)
        drawn.append(folder / f"{name}.png")
        for kind in (".png", ".svg"):
            with whole(drawn[-1].with_suffix(kind)) as partial:
                figure.savefig(partial, format=kind[1:])
    return drawn


def _costs(axes: Any, advice: Advice) -> None:
    """Milliseconds of a step by the rows of its tree, side by side in parts of a sequence."""
    rows = np.arange(1, ROWS + 1)
    for colour, (name, prospect) in zip(COLOURS, advice.prospects.items(), strict=False):
        plain = prospect.costs.plain
        axes.plot(rows, prospect.costs.scores(ROWS) / plain, color=colour, label=f"{name}: 1 = {1e3 * plain:.3g} ms")
    _finish(axes, "What a tree costs", "rows of the tree, the root included", "scoring, in plain steps")


def _speed_ups(axes: Any, advice: Advice) -> None:
    """The best threshold of each budget."""
    for colour, (name, prospect) in zip(COLOURS, advice.prospects.items(), strict=False):
        best = dict[int, float]()
        for setting, rate in prospect.grid.items():
            if found := re.fullmatch(r"OptTree\((\d+), .*\)", setting):
                best[int(found[1])] = max(best.get(int(found[1]), 0.0), rate)
        axes.plot(list(best), list(best.values()), "o-", color=colour, markersize=3, label=name)
        axes.axhline(prospect.auto.speed_up, color=colour, linestyle=":", linewidth=1)
    axes.axhline(1, color="#8a8f98", linewidth=1)
    _finish(axes, "What a budget brings", "nodes, at their best threshold (dotted: auto)", "expected speed-up")


def _accepted(axes: Any, advice: Advice) -> None:
    """By position, of the best tree and of a chain."""
    shares = np.cumprod(advice.chain)
    axes.bar(np.arange(1, len(advice.accepted) + 1), advice.accepted, color=LIGHT, label=advice.here.best.name)
    axes.plot(np.arange(1, len(shares) + 1), shares, "o-", color=COLOURS[1], markersize=3, label="a chain")
    axes.set_ylim(top=1)
    _finish(axes, "Accepted by position", "position of the drafted token", "share of steps that accept it")


def _expected(axes: Any, advice: Advice) -> None:
    """Means of A over steps of like E(A)."""
    expected, found = np.array(advice.expected), np.array(advice.found)
    top = max(float(expected.max(initial=1)), 1.0)
    parts = np.minimum((expected / top * 8).astype(int), 7)
    groups = [parts == part for part in range(8) if (parts == part).sum() >= FEWEST]
    axes.plot([0, top], [0, top], color="#8a8f98", linewidth=1, label="as promised")
    for group in groups:
        spread = 1.96 * found[group].std() / np.sqrt(group.sum())
        axes.errorbar(expected[group].mean(), found[group].mean(), spread, fmt="o", color=COLOURS[0], markersize=4)
    promised = "E(A): what the drafter's probabilities promise"
    _finish(axes, "Promised and accepted", promised, "A: accepted tokens a step (95 %)")


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
