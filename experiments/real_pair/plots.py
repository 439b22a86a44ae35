"""The pictures: tokens a step by nodes, and A against E(A), as in the paper's figures 5 and 4. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from evaluation.answers import plots
from experiments.real_pair.tables import REPEATED, Along, having, pairs, rate
from experiments.real_pair.ways import SIZES

COLOURS = ("#2b6cb0", "#5a9367", "#7a5aa6", "#b5473c", "#8a8f98")
_FEWEST = 8
"""Steps below which a mean is not drawn."""


def draw_all(texts: Sequence[Along], folder: Path) -> list[Path]:
    """Draw both pictures and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(plots.STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6), layout="constrained")
        _by_nodes(left, texts)
        _expected(right, [text for text in texts if text.set != REPEATED])
        return [plots.save(figure, folder / "real_pair")]


def _by_nodes(axes: Axes, texts: Sequence[Along]) -> None:
    """A line a set, with the interval over texts; sizes that were drafted along all of its texts."""
    drawn: set[int] = set()
    for one, colour in zip(dict.fromkeys(text.set for text in texts), COLOURS, strict=False):
        of_set = [text for text in texts if text.set == one]
        there = [nodes for nodes in SIZES if len(having(of_set, f"opt {nodes}")) == len(of_set)]
        drawn |= set(there)
        found = [rate(of_set, f"opt {nodes}") for nodes in there]
        axes.plot(there, [value for value, _ in found], "o-", color=colour, markersize=3, label=one)
        ends = [interval or (value, value) for value, interval in found]
        axes.fill_between(there, *zip(*ends, strict=True), color=colour, alpha=0.12, linewidth=0)
    axes.axhline(10, color="#8a8f98", linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log",
        xlabel="nodes",
        ylabel="tokens a step",
        title="OPT-Tree at threshold 0, ten layers",
        ylim=(1, None),
    )
    axes.set_xticks(sorted(drawn), map(str, sorted(drawn)))  # no size that no line reaches
    axes.minorticks_off()
    axes.legend(fontsize=7)


def _expected(axes: Axes, texts: Sequence[Along]) -> None:
    """Every step, and the mean of A with its standard error by the E(A) of the tree; bare and fitted."""
    drawn, random = [], np.random.default_rng(0)
    for name, label, colour in (("opt 60", "bare", "#d9730d"), ("opt 60, fitted", "fitted temperature", "#2b6cb0")):
        expected, accepted = pairs(texts, name)
        if not len(expected):  # `--bare`
            continue
        axes.plot(expected, accepted + random.uniform(-0.2, 0.2, len(accepted)), ".", color=colour, ms=3, alpha=0.25)
        column = np.round(expected)
        values = [value for value in np.unique(column) if (column == value).sum() >= min(_FEWEST, len(column))]
        means = [accepted[column == value].mean() for value in values]
        errors = [accepted[column == value].std() / (column == value).sum() ** 0.5 for value in values]
        axes.errorbar(values, means, errors, fmt="o", color=colour, markersize=5, capsize=2, label=label)
        drawn += [expected.max(), accepted.max()]
    axes.plot([0, max(drawn)], [0, max(drawn)], color="#8a8f98", linewidth=0.8, linestyle=":")
    axes.set(xlabel="E(A) of the tree", ylabel="A: steps, and their mean", title="OPT-Tree of 60 nodes")
    axes.legend(fontsize=7)
