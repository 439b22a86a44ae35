"""The picture that says which drafter to take: tokens a step against milliseconds of drafting, the frontier drawn.

Needs matplotlib.
"""

import itertools
from collections.abc import Iterator, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from evaluation.answers.file import Record
from evaluation.compare.groups import of_opt_tree
from evaluation.report import plots

Point = tuple[float, float]
COLOURS = ("#2b6cb0", "#d9730d", "#5a9367", "#7a5aa6", "#b5473c", "#17a2a2", "#e0a800", "#444b55", "#c39bd3", "#90b8e0")
MARKS = "os^vDPX*<>hdp"
"""More than there are colours, and no multiple: whatever shares a colour differs in its mark."""
FEWEST = 3
"""Drafters below which there is nothing to choose from."""


def best_of(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both: from the left, each higher than all before it."""
    found: list[Point] = []
    for place, height in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or height > found[-1][1]:
            found.append((place, height))
    return found


def frontiers(records: Sequence[Record]) -> Iterator[tuple[str, Figure]]:
    """A panel for each temperature; OPT-Tree's points are joined by budget, another tree's are hollow."""
    timed = [record for record in records if "draft_ms_per_step" in record["figures"]]
    drafters = list(dict.fromkeys(record["cell"]["drafter"] for record in timed))
    if len(drafters) < FEWEST:
        return
    looks = dict(zip(drafters, zip(itertools.cycle(COLOURS), itertools.cycle(MARKS), strict=False), strict=False))
    temperatures = sorted({record["cell"]["temperature"] for record in timed})
    figure, panels = plt.subplots(
        1, len(temperatures), figsize=(5.2 * len(temperatures), 4.4), layout="constrained", squeeze=False
    )
    for temperature, axes in zip(temperatures, panels.flat, strict=True):
        own = [record for record in timed if record["cell"]["temperature"] == temperature]
        for drafter, look in looks.items():
            _draw(axes, [record for record in own if record["cell"]["drafter"] == drafter], look)
        best = best_of([_point(record) for record in own])
        axes.plot(*zip(*best, strict=True), color=plots.GREY, linewidth=5, alpha=0.3, zorder=0)
        axes.set(
            xscale="log",
            xlabel="milliseconds of drafting a step (fewer is better)",
            ylabel="tokens a step (more is better)",
            title=f"temperature {temperature:g}",
        )
        axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda place, _: f"{place:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    handles = [
        Line2D([], [], color=colour, marker=mark, markersize=5, linewidth=1, label=drafter)
        for drafter, (colour, mark) in looks.items()
    ]
    budgets = ", ".join(map(str, sorted({record["cell"]["budget"] for record in timed})))
    handles += [
        Line2D(
            [], [], color="black", marker="o", markersize=5, linewidth=1, label=f"filled: OPT-Tree, {budgets} nodes"
        ),
        Line2D([], [], color="black", marker="o", markersize=5, linewidth=0, mfc="none", label="hollow: another tree"),
        Line2D([], [], color=plots.GREY, linewidth=5, alpha=0.3, label="frontier: none is better in both"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    yield "frontier", figure


def _point(record: Record) -> Point:
    return record["figures"]["draft_ms_per_step"], record["figures"]["tokens_per_step"]


def _draw(axes: Axes, records: Sequence[Record], look: tuple[str, str]) -> None:
    """One drafter: OPT-Tree's points from the smallest budget on, joined; those of other trees."""
    colour, mark = look
    opt = sorted(of_opt_tree(records), key=lambda record: record["cell"]["budget"])
    others = [record for record in records if record not in opt]
    for members, more in ((opt, {"linewidth": 1}), (others, {"linewidth": 0, "mfc": "none"})):
        if members:
            axes.plot(*zip(*map(_point, members), strict=True), color=colour, marker=mark, markersize=5, **more)
