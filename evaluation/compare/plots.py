"""The pictures of a comparison, from its lines alone; each is drawn where the lines have data for it.

Needs matplotlib. The figures are those of `figures` and of `evaluation.answers`.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from evaluation.answers import plots
from evaluation.answers.comparison import REFERENCE
from evaluation.answers.file import Record
from opt_tree.errors import counted
from opt_tree.methods.policies.registry import POLICIES
from opt_tree.tools.display.trees import children_of, lines_of

COLOURS = {
    **{"opt": "#d9730d", "eagle2": "#2b6cb0", "sequoia": "#5a9367", "eagle1": "#7a5aa6", "binary": "#8a8f98"},
    **{"dynamic_depth": "#90b8e0", "talon": "#b5473c", "medusa": "#c39bd3", "chain": "#444b55", "chains": "#8a6d3b"},
    **{"delayed": "#17a2a2", "dyspec": "#e377a2", "rheo": "#e0a800", "kary": "#d8c3a5", "threshold_chain": "#1b4d3e"},
    **{"published": "#5c2018", "plain": "#000000"},
}
"""Of policies: the same in every picture. Those that are not named here share out the rest."""
_SPARE = ("#d0006f", "#6b8e23", "#00688b", "#ff8c69", "#2f4f4f", "#cd5c5c", "#4169e1", "#9acd32")
COLOURS |= dict(zip([name for name in POLICIES if name not in COLOURS], _SPARE, strict=False))
MARKS = "os^vDPX*<>hdp"
Pictures = Iterator[tuple[str, Figure]]


def draw_all(records: Sequence[Record], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with plt.rc_context(plots.STYLE):
        for maker in (lengths, structures):
            for name, figure in maker(records):
                drawn.append(plots.save(figure, folder / f"compare_{name}"))
    return drawn


def lengths(records: Sequence[Record]) -> Pictures:
    """Acceptance length against the budget (the paper's Fig. 5): a panel for each drafter, an interval for OPT-Tree."""
    greedy = [r for r in records if r["cell"]["temperature"] == 0 and r["cell"]["children"] in ("TopK", "LayerBest")]
    curves: dict[tuple, list[Record]] = {}
    for key, members in grouped(greedy, "drafter", "policy", "sharpening").items():
        by_budget = {record["cell"]["budget"]: record for record in members}  # verifiers of one tree emit the same here
        if len(by_budget) > 1:
            curves[key] = [by_budget[budget] for budget in sorted(by_budget)]
    shades = _shades([policy for _, policy, _ in curves])
    marks = dict(zip(dict.fromkeys(key[1:] for key in curves), itertools.cycle(MARKS), strict=False))
    if drafters := sorted({drafter for drafter, _, _ in curves}):
        figure, panels = panels_of(len(drafters))
        for drafter, axes in zip(drafters, panels, strict=True):
            own = {key[1:]: curve for key, curve in curves.items() if key[0] == drafter}
            ours = [key for key in own if key[0].partition(":")[0] == REFERENCE]
            banded = min(ours, key=lambda key: key[1] == "bare", default=None)  # several would hide one another
            for (policy, sharpening), curve in own.items():
                line = ("--" if sharpening == "bare" else "-") + marks[policy, sharpening]
                places = [record["cell"]["budget"] for record in curve]
                values = [record["figures"]["tokens_per_step"] for record in curve]
                axes.plot(places, values, line, markersize=3, color=shades[policy], label=_label(policy, sharpening))
                edges = [record["figures"]["interval"] for record in curve]
                if (policy, sharpening) == banded and None not in edges:
                    axes.fill_between(places, *np.transpose(edges), color=shades[policy], alpha=0.15, linewidth=0)
            axes.set(xscale="log", xlabel="nodes", title=drafter, ylabel="tokens a step, temperature 0")
            axes.set_xticks(sorted({record["cell"]["budget"] for record in greedy}))
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_locator(NullLocator())
        legend(panels)
        yield "length_by_budget", figure


def structures(records: Sequence[Record]) -> Pictures:
    """Trees of 25 nodes for one context, side by side (the paper's Fig. 1): the first step of the first question."""
    wanted = ("binary", "eagle1", "sequoia", "eagle2", "opt")
    greedy = [r for r in records if r["cell"]["temperature"] == 0 and r["cell"]["budget"] == 25]
    greedy.sort(key=lambda record: record["cell"]["sharpening"] == "bare")  # of two the fitted one
    for (drafter,), members in grouped(greedy, "drafter").items():
        kinds = {record["cell"]["policy"].partition(":")[0]: record for record in reversed(members)}
        chosen = {name: kinds[name] for name in wanted if name in kinds}
        if len(chosen) < 2:
            continue
        figure, panels = plt.subplots(
            1, len(chosen), figsize=(2.6 * len(chosen), 2.8), sharey=True, layout="constrained"
        )
        for record, axes in zip(chosen.values(), panels, strict=True):
            cell, first = record["cell"], record["first_tree"]
            tree(axes, first)
            nodes, accepted = len(first["parents"]) - 1, len(first["path"]) - 1
            title = f"{_label(cell['policy'], cell['sharpening'])}\n{counted(nodes, 'node')}, {accepted} accepted"
            axes.set_title(title)
        panels[0].invert_yaxis()
        yield "structures_" + re.sub(r"\W+", "_", drafter), figure


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple, list[Record]]:
    """Records that agree in these parts of their cells."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record["cell"][key] for key in keys), []).append(record)
    return groups


def _label(policy: str, sharpening: str) -> str:
    return policy if sharpening == "either" else f"{policy}, {sharpening}"


def _shades(policies: Sequence[str]) -> dict[str, str]:
    """Return a colour for each: several of one kind, as opt:0.2 and opt:0.7, grow darker."""
    kinds: dict[str, list[str]] = {}
    for policy in dict.fromkeys(policies):
        kinds.setdefault(policy.partition(":")[0], []).append(policy)
    return {
        policy: to_hex(np.array(to_rgb(COLOURS.get(kind, "#000000"))) * (1 - 0.7 * place / len(own)))
        for kind, own in kinds.items()
        for place, policy in enumerate(own)
    }


def panels_of(count: int) -> tuple[Figure, list[Axes]]:
    """Panels side by side, at most four a row, as many in each as can be."""
    rows = -(-count // 4)
    columns = -(-count // rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.4 * columns, 2.9 * rows), sharey=True, layout="constrained", squeeze=False
    )
    for spare in axes.flat[count:]:
        spare.remove()
    return figure, list(axes.flat[:count])


def legend(panels: Sequence[Axes]) -> None:
    """One legend for all panels, below them. Of panels that share an axis, the left one says what it shows."""
    labels: dict[str, Any] = {}
    for axes in panels:
        if panels[0].get_shared_y_axes().joined(panels[0], axes) and not axes.get_subplotspec().is_first_col():
            axes.set_ylabel("")
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    columns = 4 if len(panels) > 1 else 2
    panels[0].figure.legend(labels.values(), labels, loc="outside lower center", ncols=columns)


def tree(axes: Axes, drawn: dict[str, Any]) -> None:
    """A tree, the likeliest child left, its accepted path in colour."""
    parents, path = drawn["parents"], set(drawn["path"])
    depth = [0] * len(parents)
    for row, parent in enumerate(parents[1:], 1):
        depth[row] = depth[parent] + 1
    across = lines_of(children_of(parents, drawn["log_probs"]))
    for row, parent in enumerate(parents[1:], 1):
        own = row in path
        look = {"color": plots.ORANGE if own else "#c4c8ce", "linewidth": 1.6 if own else 0.8, "zorder": 1 + own}
        axes.plot((across[parent], across[row]), (depth[parent], depth[row]), **look)
    colours = [plots.ORANGE if row in path else plots.BLUE for row in range(len(parents))]
    axes.scatter(across, depth, s=14, c=colours, zorder=3)
    axes.set(xlim=(-1, max(*across, 3) + 1), xticks=[])
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["bottom", "left"]].set_visible(False)
