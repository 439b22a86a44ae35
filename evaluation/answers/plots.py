"""The pictures of an answer file: E(A) against A, and acceptance by depth.

Needs matplotlib; the figures are those of `evaluation.answers`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from evaluation.answers.reading import AnswerSet
from evaluation.answers.steps import Steps, acceptance_by_depth, calibration, steps_of
from opt_tree.system.files import whole

BLUE, ORANGE, GREY = "#2b6cb0", "#d9730d", "#8a8f98"
PERCENT = PercentFormatter(1.0, decimals=0, symbol=" %")
_FEWEST = 8
"""Steps below which a share says little."""
_SHARES_FROM = 300
"""Steps from which E(A) and A are drawn as shares; fewer are points."""
STYLE: dict[str, Any] = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def save(figure: Figure, path: Path) -> Path:
    """Write a picture as PNG and, beside it, as SVG and PDF; return the PNG's path."""
    for kind in (".png", ".svg", ".pdf"):
        with whole(path.with_name(path.name + kind)) as partial:
            figure.savefig(partial, format=kind[1:], bbox_inches="tight")
    plt.close(figure)
    return path.with_name(path.name + ".png")


def draw_all(runs: Sequence[AnswerSet], folder: Path) -> list[Path]:
    """Draw what the files have data for and return the paths. Runs that draft nothing have none."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []

    with plt.rc_context(STYLE):
        for run in runs:
            taken = steps_of(run.answers)
            if taken is None or taken.lengths.max(initial=1) == 1:
                continue
            if calibration(taken) is not None:
                drawn.append(save(expected_against_accepted(taken), folder / f"{run.name}-expected"))
            drawn.append(save(depths(taken), folder / f"{run.name}-depth"))
    return drawn


def expected_against_accepted(taken: Steps) -> Figure:
    """How often each A + 1 was emitted by steps of each E(A) + 1; of few steps, every one as a point."""
    fit = calibration(taken)
    assert fit is not None and taken.expected is not None
    expected, accepted = taken.expected[taken.whole], taken.lengths[taken.whole]
    figure, (top, axes) = plt.subplots(
        2, 1, figsize=(4.6, 5.0), sharex=True, height_ratios=(1, 5), layout="constrained"
    )
    end = max(expected.max(), accepted.max()) + 0.5
    across, up = np.arange(0.75, end + 0.5, 0.5), np.arange(0.5, end + 1)
    top.hist(expected, across, color=GREY)
    top.set(ylabel="steps")
    column = np.digitize(expected, across) - 1
    steps = np.bincount(column)[column]
    # Shares of a handful of steps would be the darkest cells of the picture: such steps are points.
    alone = np.full(len(steps), True) if len(steps) < _SHARES_FROM else steps < _FEWEST
    if not alone.all():
        shares = {"weights": 1 / steps[~alone], "cmin": 1e-9, "cmap": "Blues", "vmin": 0}
        *_, image = axes.hist2d(expected[~alone], accepted[~alone], (across, up), **shares)
        figure.colorbar(image, ax=axes, label="share of the steps with that E(A)", format=PERCENT)
    if alone.any():  # equal steps lie beside one another
        beside = np.random.default_rng(0).uniform(-0.2, 0.2, int(alone.sum()))
        axes.scatter(expected[alone], accepted[alone] + beside, s=9, color=BLUE, alpha=0.5, linewidth=0, label="a step")
    axes.plot((1, end), (1, end), color=GREY, linestyle=":", linewidth=1.2, label="A = E(A)")
    pearson = "" if fit["pearson"] is None else f": slope {fit['slope']:.2f}, Pearson {fit['pearson']:.2f}"
    ends = np.array([expected.min(), expected.max()])
    axes.plot(ends, fit["intercept"] + fit["slope"] * ends, color=ORANGE, linewidth=1.8, label=f"fit{pearson}")
    axes.set(xlabel="E(A) + 1, expected tokens of a step", ylabel="A + 1, emitted tokens of a step")
    axes.set(xlim=(0.5, end), ylim=(0.5, end))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(12, integer=True))
    figure.legend(loc="outside lower center", ncols=2 if alone.all() or not alone.any() else 3)
    return figure


def depths(taken: Steps) -> Figure:
    """How often a path of each depth is drafted, and how often accepted."""
    table = acceptance_by_depth(taken)
    depth = [row["depth"] for row in table]
    figure, axes = plt.subplots(figsize=(4.8, 3.2))
    whole = int(taken.whole.sum())
    if all(row["drafted"] is not None for row in table):
        shares = [row["drafted"] / whole for row in table]
        axes.bar(depth, shares, width=0.75, color="#dfe3e8", label="steps that drafted this deep")
        rated = [row for row in table if row["drafted"]]
        sure = [row for row in rated if row["drafted"] >= min(_FEWEST, whole)]
        look: dict[str, Any] = {"color": ORANGE, "marker": "o", "markersize": 4}
        kinds = [(rated, ":", "white", f"the same, of fewer than {_FEWEST} steps")] if len(rated) > len(sure) else []
        for rows, line, filled, label in [*kinds, (sure, "-", ORANGE, "accepted, of those that drafted it")]:
            rates = [row["rate"] for row in rows]
            axes.plot([row["depth"] for row in rows], rates, line, markerfacecolor=filled, label=label, **look)
    axes.bar(depth, [row["reach"] for row in table], width=0.45, color=BLUE, label="accepted, of all steps")
    axes.set(xlabel="depth in the tree", ylabel="share of steps", ylim=(0, 1.02), xticks=depth)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2)
    return figure
