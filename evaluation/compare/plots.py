"""The pictures of a comparison, from its lines alone; each is drawn where the lines have data for it.

Needs matplotlib. The figures are those of `figures` and of `evaluation.answers`.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from evaluation.answers import plots
from evaluation.answers.file import Record
from evaluation.answers.steps import acceptance_by_depth, calibration, steps_of
from evaluation.compare.combinations import Combination
from evaluation.compare.figures import grouped, mean_efficiency, of_opt_tree, of_policy, series
from opt_tree.policies.registry import POLICIES
from opt_tree.verifiers import VERIFIERS

COLOURS = {
    **{"opt": "#d9730d", "eagle2": "#2b6cb0", "sequoia": "#5a9367", "eagle1": "#7a5aa6", "binary": "#8a8f98"},
    **{"dynamic_depth": "#90b8e0", "talon": "#b5473c", "medusa": "#c39bd3", "chain": "#444b55", "chains": "#8a6d3b"},
    **{"delayed": "#17a2a2", "dyspec": "#e377a2", "rheo": "#e0a800", "kary": "#b8bcc4", "threshold_chain": "#1b4d3e"},
    **{"shared": "#7f9c00", "published": "#5c2018"},
    **{"traversal": "#b5473c", "khisti": "#7a5aa6", "k_seq": "#2b6cb0", "multi_round": "#5a9367", "naive": "#8a8f98"},
    **{"match": "#d9730d", "block": "#444b55", "without_replacement": "#17a2a2", "typical": "#c39bd3"},
    **{"greedy": "#90b8e0"},
}
"""Of policies and of verifiers: the same in every picture. Those that are not named here share out the rest."""
for _methods in (POLICIES, VERIFIERS):
    _spare = ("#6b8e23", "#8b4789", "#00688b", "#ff8c69", "#2f4f4f", "#cd5c5c", "#4169e1", "#9acd32")
    COLOURS |= dict(zip([name for name in _methods if name not in COLOURS], _spare, strict=False))
MANY_COLOURS = (
    "#2b6cb0",
    "#d9730d",
    "#5a9367",
    "#7a5aa6",
    "#b5473c",
    "#17a2a2",
    "#e0a800",
    "#444b55",
    "#c39bd3",
    "#90b8e0",
)
MARKS = "os^vDPX*<>hdp"
"""More than there are colours, and no multiple: whatever shares a colour differs in its mark."""
FEWEST = 60
"""Steps below which no map of E(A) and A is drawn."""
Pictures = Iterator[tuple[str, Figure]]


def draw_all(records: Sequence[Record], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    makers = (lengths, expectations, thresholds, temperatures, structures, depths, efficiencies, rollouts, frontiers)
    with plt.rc_context(plots.STYLE):
        for maker in makers:
            for name, figure in maker(records):
                drawn.append(plots.save(figure, folder / f"compare_{name}"))
    return drawn


def lengths(records: Sequence[Record]) -> Pictures:
    """Acceptance length against the budget (the paper's Fig. 5): a panel for each drafter."""
    greedy = [r for r in records if r["cell"]["temperature"] == 0 and r["cell"]["children"] in ("TopK", "LayerBest")]
    curves = series(greedy, "budget", "drafter", "policy", "sharpening")
    if drafters := sorted({drafter for drafter, _, _ in curves}):
        figure, panels = panels_of(len(drafters))
        for drafter, axes in zip(drafters, panels, strict=True):
            own = {key[1:]: curve for key, curve in curves.items() if key[0] == drafter}
            for ((policy, sharpening), curve), mark in zip(own.items(), itertools.cycle(MARKS), strict=False):
                line = "--" if sharpening == "bare" else "-"
                _curve(axes, curve, _label(policy, sharpening), _colour(policy), f"{line}{mark}")
            axes.set(xscale="log", xlabel="nodes", title=f"{drafter}, temperature 0", ylabel="tokens a step")
            ticks(axes, [record["cell"]["budget"] for record in greedy])
        legend(panels)
        yield "length_by_budget", figure


def expectations(records: Sequence[Record]) -> Pictures:
    """E(A) against A (the paper's Fig. 4), for OPT-Tree under each drafter, bare and fitted."""
    for (drafter, sharpening), members in grouped(of_opt_tree(records), "drafter", "sharpening").items():
        greedy = [record for record in members if record["cell"]["temperature"] == 0]
        if greedy:
            record = min(greedy, key=lambda r: abs(r["cell"]["budget"] - 60))
            taken = steps_of(record["answers"])
            if taken is not None and taken.whole.sum() >= FEWEST and calibration(taken) is not None:
                title = f"{record['cell']['policy']}, {record['cell']['budget']} nodes, {drafter}, {sharpening}"
                yield f"expected_{_slug(drafter)}_{sharpening}", plots.expected_against_accepted(taken, title)


def thresholds(records: Sequence[Record]) -> Pictures:
    """Acceptance length and speed against OPT-Tree's threshold (the paper's Fig. 6)."""
    swept = [record for record in of_opt_tree(records) if ":" in record["cell"]["policy"]]
    groups = grouped(swept, "drafter", "sharpening", "temperature", "budget")
    if groups := {key: members for key, members in groups.items() if len(members) >= 3}:
        yield "thresholds", _lengths_and_speeds(groups, lambda r: float(r["cell"]["policy"].split(":")[1]), "threshold")


def temperatures(records: Sequence[Record]) -> Pictures:
    """Acceptance length and speed against the temperature (the paper's Fig. 7)."""
    own = [record for record in records if record["cell"]["verifier"] in ("match", "greedy")]
    own.sort(key=lambda record: record["cell"]["sharpening"])  # of two at temperature 0, the fitted one
    groups = series(of_opt_tree(own), "temperature", "drafter", "policy", "budget")
    if groups := {key: curve for key, curve in groups.items() if len(curve) >= 3}:
        yield "temperatures", _lengths_and_speeds(groups, lambda r: r["cell"]["temperature"], "temperature")


def _lengths_and_speeds(groups: dict[tuple, list[Record]], place: Callable[[Record], float], name: str) -> Figure:
    """Two panels over one quantity, tokens a step and speed-up: a curve for each group, named by its key."""
    figure, panels = panels_of(2, share=False)
    drafters = list(dict.fromkeys(key[0] for key in groups))
    lines = {drafter: itertools.cycle(("-", "--", ":", "-.")) for drafter in drafters}
    colours = dict(zip(drafters, itertools.cycle(MANY_COLOURS), strict=False))
    for key, members in groups.items():
        members.sort(key=place)
        places = [place(record) for record in members]
        figures = [record["figures"] for record in members]
        label = ", ".join([key[0], *(str(part) for part in key[1:-1] if part != 0.0), f"{key[-1]} nodes"])
        lengths = [(known["tokens_per_step"], known["interval"]) for known in figures]
        unknown = {"micro": math.nan, "interval": None}  # of a batch
        told = [known["speed_up"] or unknown for known in figures]
        speeds = [(known["micro"], known["interval"]) for known in told]
        colour, line = colours[key[0]], next(lines[key[0]])
        for axes, values in zip(panels, (lengths, speeds), strict=True):
            axes.plot(places, [value for value, _ in values], line, marker="o", ms=4, label=label, color=colour)
            band(axes, places, [edges for _, edges in values], colour)
    panels[0].set(xlabel=name, ylabel="tokens a step")
    panels[1].set(xlabel=name, ylabel="speed-up over plain decoding")
    panels[1].axhline(1, color=plots.GREY, linestyle=":", linewidth=1)
    legend(panels)
    return figure


def structures(records: Sequence[Record]) -> Pictures:
    """Trees of 25 nodes for one context, side by side (the paper's Fig. 1): the first step of the first question."""
    wanted = ("binary", "eagle1", "sequoia", "eagle2", "opt")
    greedy = [r for r in records if r["cell"]["temperature"] == 0 and r["cell"]["budget"] == 25]
    greedy.sort(key=lambda record: record["cell"]["sharpening"] == "bare")  # of two the fitted one
    for (drafter,), members in grouped(greedy, "drafter").items():
        chosen = {name: record for name in wanted if (record := next(of_policy(members, name), None)) is not None}
        if len(chosen) < 2:
            continue
        figure, panels = plt.subplots(
            1, len(chosen), figsize=(2.6 * len(chosen), 2.8), sharey=True, layout="constrained"
        )
        for record, axes in zip(chosen.values(), panels, strict=True):
            cell, first = record["cell"], record["first_tree"]
            tree(axes, first)
            nodes, accepted = len(first["parents"]) - 1, len(first["path"]) - 1
            axes.set_title(f"{_label(cell['policy'], cell['sharpening'])}\n{nodes} nodes, {accepted} accepted")
        panels[0].invert_yaxis()
        yield f"structures_{_slug(drafter)}", figure


def depths(records: Sequence[Record]) -> Pictures:
    """How many steps accept a path of each depth, a curve for each tree of one budget."""
    greedy = [record for record in records if record["cell"]["temperature"] == 0]
    greedy.sort(key=lambda record: record["cell"]["sharpening"] == "bare")  # of two the fitted one
    groups = {key: members for key, members in grouped(greedy, "drafter", "budget").items() if len(members) >= 3}
    if not groups:
        return
    budget = min({key[1] for key in groups}, key=lambda b: abs(b - 60))
    shown = [key for key in groups if key[1] == budget]
    figure, panels = panels_of(len(shown))
    for key, axes in zip(shown, panels, strict=True):
        firsts: dict[str, Record] = {}
        for record in groups[key]:
            firsts.setdefault(record["cell"]["policy"].partition(":")[0], record)
        for policy, record in firsts.items():
            taken = steps_of(record["answers"])
            assert taken is not None
            rows = acceptance_by_depth(taken)
            label = _label(record["cell"]["policy"], record["cell"]["sharpening"])
            reach = [row["reach"] for row in rows]
            axes.plot(range(1, len(rows) + 1), reach, marker="o", markersize=3, color=_colour(policy), label=label)
        axes.set(xlabel="depth", ylabel="steps that accept as deep", title=f"{key[0]}, {budget} nodes")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(plots.PERCENT)
    legend(panels)
    yield "depth", figure


def efficiencies(records: Sequence[Record]) -> Pictures:
    """Exact block efficiency of every verifier on the same trees, against the temperature: a panel for each tree."""
    curves = series(_expecting(records), "temperature", "drafter", "policy", "children", "budget")
    if curves:
        figure, panels = panels_of(len(curves))
        for ((drafter, policy, children, budget), curve), axes in zip(curves.items(), panels, strict=True):
            _judges(axes, curve, [record["cell"]["temperature"] for record in curve])
            title = f"{policy}, {budget} nodes,\n{children}, {drafter}"
            axes.set(xlabel="temperature", ylabel="expected tokens a step", title=title)
        legend(panels)
        yield "verifiers_by_temperature", figure


def rollouts(records: Sequence[Record]) -> Pictures:
    """Exact block efficiency of every verifier against the length L of K independent rollouts: a panel for each K."""
    chains = [record for record in _expecting(records) if record["cell"]["policy"].startswith("chains:")]
    curves = series(chains, "budget", "drafter", "temperature", "policy")
    if curves:
        figure, panels = panels_of(len(curves))
        for ((drafter, temperature, policy), curve), axes in zip(sorted(curves.items()), panels, strict=True):
            k = int(policy.split(":")[1])
            _judges(axes, curve, [record["cell"]["budget"] // k for record in curve])
            title = f"K = {k}, {drafter}, temperature {temperature:g}"
            axes.set(xlabel="L", ylabel="expected tokens a step", title=title)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(panels)
        yield "verifiers_by_rollout", figure


def _expecting(records: Iterable[Record]) -> list[Record]:
    """Cells whose trees several verifiers can judge; those that differ in their own judge are pooled."""
    pooled: list[Record] = []
    for members in grouped(records, *(key for key in Combination.__annotations__ if key != "verifier")).values():
        means = mean_efficiency([question for record in members for question in record["efficiency"]])
        if len(means) > 1:
            pooled.append({**members[0], "figures": {"block_efficiency": means}})
    return pooled


def _judges(axes: Axes, curve: Sequence[Record], places: Sequence[float]) -> None:
    for name in curve[0]["figures"]["block_efficiency"]:
        values = [record["figures"]["block_efficiency"].get(name, np.nan) for record in curve]
        axes.plot(places, values, marker="o", markersize=3, color=_colour(name), label=name)


def _curve(axes: Axes, curve: Sequence[Record], label: str, colour: str, line: str) -> None:
    """Tokens a step against the budget, with its interval."""
    places = [record["cell"]["budget"] for record in curve]
    values = [record["figures"]["tokens_per_step"] for record in curve]
    axes.plot(places, values, line, markersize=3, color=colour, label=label)
    band(axes, places, [record["figures"]["interval"] for record in curve], colour)


def _label(policy: str, sharpening: str) -> str:
    return policy if sharpening == "either" else f"{policy}, {sharpening}"


def _slug(drafter: str) -> str:
    """A drafter's spec as part of a file's name."""
    return re.sub(r"\W+", "_", drafter)


def _colour(name: str) -> str:
    return COLOURS.get(name.partition(":")[0], "#000000")


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
        axes.fill_between(places, *np.transpose(edges), color=colour, alpha=0.1, linewidth=0)


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


Point = tuple[float, float]
FEWEST_DRAFTERS = 3
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
    if len(drafters) < FEWEST_DRAFTERS:
        return
    looks = dict(zip(drafters, zip(itertools.cycle(MANY_COLOURS), itertools.cycle(MARKS), strict=False), strict=False))
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
