"""Draws the picture of docs/algorithm.md: `python docs/algorithm.py`.

It runs the page's block and draws what the block computed: pool, tree, mask, and the cache before and after the
verdict.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

PAGE = Path(__file__).with_name("algorithm.md")
PICTURE = PAGE.parents[1] / "results" / "figures" / "algorithm.png"
BLUE, ORANGE, GREY = "#2b6cb0", "#d9730d", "#8a8f98"
PLACES = {"the": (0, 2), "cat": (-1, 1), "dog": (1, 1), "sat": (-1.5, 0)}
"""Where the nodes of the tree are drawn."""


def computed() -> dict[str, Any]:
    """The names of the page's block, after it has run."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    names: dict[str, Any] = {"__name__": "algorithm"}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def draw(path: Path = PICTURE) -> Path:
    """Draw the picture and return where it lies."""
    names = computed()
    with plt.rc_context({"font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left"}):
        figure, axes = plt.subplots(1, 4, figsize=(13, 3.1), width_ratios=(2.9, 2.4, 3, 3.1), layout="constrained")
        for axis, part in zip(axes, (_pool, _tree, _mask, _cache), strict=True):
            part(axis, names)
            axis.set_frame_on(False)
            axis.set_xticks([])
            axis.set_yticks([])
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return path


def _pool(axis: Axes, names: dict[str, Any]) -> None:
    """The candidates in the order they were drafted, as bars; those that go to the target in blue."""
    pool, chosen = names["pool"], set(names["policy"].select(names["pool"]).tolist())
    rows, values = np.arange(1, pool.size), np.exp(pool.path_log_probs[1:])
    words = [names["WORDS"][token] for token in pool.tokens]
    axis.barh(rows, values, color=[BLUE if row in chosen else GREY for row in rows], height=0.6)
    for row, value in zip(rows.tolist(), values.tolist(), strict=True):
        above = f" below {words[pool.parents[row]]}" if pool.depths[row] > 1 else ""
        axis.text(value + 0.02, row, f"{value:.2f}  {words[row]}{above}", va="center")
    for depth, (_, gain, size) in enumerate(names["layers"], start=1):
        axis.text(1.0, size - 1, f"gain {gain:.2f}", va="center", ha="right", color=ORANGE)
        if depth > 1:
            axis.axhline(names["layers"][depth - 2][2] - 0.5, color=GREY, linewidth=0.8, linestyle=":")
    axis.set_xlim(0, 1.02)
    axis.invert_yaxis()
    axis.set_title("1. The pool, two layers; the three best are blue")


def _tree(axis: Axes, names: dict[str, Any]) -> None:
    """The tree; what the verifier kept in blue, the target's own token in orange."""
    tree, verdict = names["tree"], names["verdict"]
    words = [names["WORDS"][token] for token in tree.tokens]
    places = [PLACES[word] for word in words]
    own = (places[verdict.path[-1]][0], places[verdict.path[-1]][1] - 1)
    edges = [(places[parent], places[row], row) for row, parent in enumerate(tree.parents.tolist()) if row]
    for (x, y), (to_x, to_y), row in edges:
        axis.plot([x, to_x], [y, to_y], color=BLUE if row in verdict.path else GREY, zorder=1)
    axis.plot([places[verdict.path[-1]][0], own[0]], [own[1] + 1, own[1]], color=ORANGE, linestyle=":", zorder=1)
    positions = names["forward"].positions.tolist()
    for row, (word, (x, y)) in enumerate(zip(words, places, strict=True)):
        chance = f"\n{np.exp(tree.path_log_probs[row]):.2f}" if row else ""
        _node(axis, x, y, f"{word}{chance}", BLUE if row in verdict.path else GREY)
        axis.text(x + 0.45, y, f"row {row}\nposition {positions[row]}", va="center", fontsize=8)
    _node(axis, *own, names["WORDS"][verdict.token], ORANGE)
    axis.text(own[0] + 0.45, own[1], "the target's own", va="center", fontsize=8)
    axis.set_xlim(-2.0, 2.4)
    axis.set_ylim(-1.5, 2.5)
    axis.set_title("2. The tree, and the accepted path")


def _node(axis: Axes, x: float, y: float, text: str, color: str) -> None:
    box = {"boxstyle": "round,pad=0.3", "facecolor": color, "edgecolor": "none"}
    axis.text(x, y, text, ha="center", va="center", color="white", bbox=box)


def _mask(axis: Axes, names: dict[str, Any]) -> None:
    """Who sees whom: rows of the tree against the slots of the cache."""
    mask, words = np.array(names["mask"]), [names["WORDS"][token] for token in names["tree"].tokens]
    slots = [names["WORDS"][token] for token in names["context"][:-1]] + words
    for row, column in np.ndindex(mask.shape):
        seen = mask[row, column]
        axis.add_patch(plt.Rectangle((column, row), 0.94, 0.94, color=BLUE if seen else "#e6e8eb"))
    for column, word in enumerate(slots):
        axis.text(column + 0.47, -0.3, word, ha="center")
    for row, word in enumerate(words):
        axis.text(-0.15, row + 0.47, word, ha="right", va="center")
    axis.axvline(len(slots) - len(words) - 0.03, color=ORANGE)
    axis.set_xlim(-0.9, mask.shape[1] + 0.1)
    axis.set_ylim(len(words) + 0.3, -0.9)
    axis.set_title("3. The mask: a row sees the blue slots")


def _cache(axis: Axes, names: dict[str, Any]) -> None:
    """The slots of the cache, before the verdict and after the commit."""
    words, committed = [names["WORDS"][token] for token in names["tree"].tokens], names["context"][:-1]
    before = [(names["WORDS"][token], "#1a365d") for token in committed] + [(word, GREY) for word in words]
    kept = [names["WORDS"][token] for token in names["fresh"]._tokens]
    after = [(word, "#1a365d") for word in kept]
    lines = ((0, "scored: 4 rows are pending", before), (2, f"committed: length {names['target'].length}", after))
    for line, said, slots in lines:
        axis.text(0, line - 0.2, said)
        for slot, (word, color) in enumerate(slots):
            axis.add_patch(plt.Rectangle((slot, line), 0.94, 0.7, color=color))
            axis.text(slot + 0.47, line + 0.36, word, ha="center", va="center", color="white")
            axis.text(slot + 0.47, line + 0.95, str(slot), ha="center", va="center", color=GREY, fontsize=8)
    moved = names["verdict"].path[-1] + len(committed), len(after) - 1
    arrow = {"arrowstyle": "->", "color": ORANGE}
    axis.annotate("", (moved[1] + 0.47, 1.98), (moved[0] + 0.47, 1.1), arrowprops=arrow)
    axis.set_xlim(-0.1, len(before) + 0.1)
    axis.set_ylim(3.2, -0.8)
    axis.set_title("4. The target's cache, slot by slot")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(draw())
