"""The picture that says which drafter to take: tokens a step against milliseconds of drafting, the frontier drawn.

Needs matplotlib.
"""

import itertools
from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from evaluation.answers.file import Record
from evaluation.compare.panels import legend, panels_of
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
    """A panel for each temperature, a colour for each drafter, a point for each tree and budget."""
    timed = [record for record in records if "draft_ms_per_step" in record["figures"]]
    drafters = list(dict.fromkeys(record["cell"]["drafter"] for record in timed))
    if len(drafters) < FEWEST:
        return
    colours = dict(zip(drafters, itertools.cycle(COLOURS), strict=False))
    marks = dict(zip(drafters, itertools.cycle(MARKS), strict=False))
    temperatures = sorted({record["cell"]["temperature"] for record in timed})
    figure, panels = panels_of(len(temperatures), share=False)
    for temperature, axes in zip(temperatures, panels, strict=True):
        points: list[Point] = []
        for drafter in drafters:
            own = [
                r["figures"]
                for r in timed
                if (r["cell"]["temperature"], r["cell"]["drafter"]) == (temperature, drafter)
            ]
            found = [(known["draft_ms_per_step"], known["tokens_per_step"]) for known in own]
            if found:
                axes.plot(*zip(*found, strict=True), marks[drafter], ms=4, color=colours[drafter], label=drafter)
            points += found
        axes.plot(
            *zip(*best_of(points), strict=True), color=plots.GREY, linewidth=1, zorder=0, label="none is better in both"
        )
        axes.set(xlabel="milliseconds of drafting a step", ylabel="tokens a step", title=f"temperature {temperature:g}")
    legend(panels)
    yield "frontier", figure
