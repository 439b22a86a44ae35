"""What the pictures of a comparison are made of: panels, their legend, ticks, bands of uncertainty, a drawn tree."""

from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from evaluation.report import plots


def panels_of(count: int, share: bool = True) -> tuple[Figure, list[Axes]]:
    """Panels side by side, four a row."""
    columns = min(count, 4)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.4 * columns, 2.9 * rows), sharey=share, layout="constrained", squeeze=False
    )
    for spare in axes.flat[count:]:
        spare.remove()
    return figure, list(axes.flat[:count])


def legend(panels: Sequence[Axes]) -> None:
    """One legend for all panels, below them."""
    labels: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    columns = 4 if len(panels) > 1 else 2
    panels[0].figure.legend(labels.values(), labels, loc="outside lower center", ncols=columns)


def ticks(axes: Axes, places: Iterable[int]) -> None:
    """A logarithmic axis that is marked where the budgets are, as far as they do not crowd."""
    kept: list[int] = []
    for place in sorted(set(places)):
        if not kept or place / kept[-1] > 1.3:
            kept.append(place)
    axes.set_xticks(kept)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(plt.NullLocator())


def band(axes: Axes, places: Sequence[float], edges: Sequence[Sequence[float] | None], colour: str) -> None:
    """The intervals, where there are any."""
    if all(edge is not None for edge in edges):
        axes.fill_between(places, *np.transpose(edges), color=colour, alpha=0.12, linewidth=0)


def tree(axes: Axes, drawn: dict[str, Any]) -> None:
    """A tree, the likeliest child left, its accepted path in colour."""
    parents, path = drawn["parents"], set(drawn["path"])
    children: dict[int, list[int]] = {row: [] for row in range(len(parents))}
    depth = [0] * len(parents)
    for row, parent in enumerate(parents[1:], 1):
        depth[row] = depth[parent] + 1
    for row in sorted(range(1, len(parents)), key=lambda row: -drawn["log_probs"][row]):
        children[parents[row]].append(row)
    across, leaves = [0.0] * len(parents), 0

    def place(row: int) -> None:
        nonlocal leaves
        for child in children[row]:
            place(child)
        if children[row]:
            across[row] = float(np.mean([across[child] for child in children[row]]))
        else:
            across[row], leaves = float(leaves), leaves + 1

    place(0)
    for row, parent in enumerate(parents[1:], 1):
        own = row in path
        axes.plot(
            (across[parent], across[row]),
            (depth[parent], depth[row]),
            color=plots.ORANGE if own else "#c4c8ce",
            linewidth=1.6 if own else 0.8,
            zorder=2 if own else 1,
        )
    colours = [plots.ORANGE if row in path else plots.BLUE for row in range(len(parents))]
    axes.scatter(across, depth, s=14, c=colours, zorder=3)
    axes.set(xlim=(-1, max(leaves, 4)), xticks=[])
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["bottom", "left"]].set_visible(False)
