"""Draft trees drawn as text and as SVG.

Owns where a node stands in a drawing. Both drawings list the best sibling first and mark the accepted path.
"""

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opt_tree.errors import counted, require
from opt_tree.generation import Step
from opt_tree.tools.display.transcripts import VISIBLE, Texts, token_label
from opt_tree.tree import Tree


def draw_tree(tree: Tree, tokenizer: Texts, path: Sequence[int] | None = None) -> str:
    """Draw a tree as text: each node's token and path probability, best sibling first; `path` rows carry a star.

    ␣the                 4 nodes, E(A) 1.35, accepted 2 (*)
    ├─ ␣cat 0.62 *
    │  ├─ ␣sat 0.40 *
    │  └─ ␣ran 0.12
    └─ ␣dog 0.21
    """
    require(Tree, tree=tree)
    accepted = set(path or [])
    total = f"{counted(tree.nodes, 'node')}, E(A) {tree.expected_accepted:.2f}"
    if path is not None:
        total += f", accepted {len(path) - 1} (*)"
    lines = [f"{token_label(tokenizer, int(tree.tokens[0]))}    {total}"]
    below = children_of(tree.parents, tree.path_log_probs)
    stack = [(row, "", row == below[0][-1]) for row in reversed(below[0])]
    while stack:
        row, indent, last = stack.pop()
        star = " *" if row in accepted else ""
        label = token_label(tokenizer, int(tree.tokens[row]))
        lines.append(f"{indent}{'└─' if last else '├─'} {label} {np.exp(tree.path_log_probs[row]):.2f}{star}")
        indent += "   " if last else "│  "
        stack += [(child, indent, child == below[row][-1]) for child in reversed(below[row])]
    return "\n".join(lines)


def children_of(parents: Sequence[int] | np.ndarray, values: Sequence[float] | np.ndarray) -> list[list[int]]:
    """List every row's children, largest value first."""
    below: list[list[int]] = [[] for _ in parents]
    for row in sorted(range(1, len(parents)), key=lambda row: -values[row]):
        below[int(parents[row])].append(row)
    return below


_ROW, _LETTER, _GAP, _LONGEST = 22, 7.3, 62, 16  # pixels, pixels, pixels; letters of a label


def svg_tree(step: Step | Tree, tokenizer: Texts, own: bool = True) -> str:
    """Draw a tree from left to right; a node's disc grows with its path probability.

    Of a step, the accepted path is highlighted and ends in the target's own token, which is not part of the tree.
    `own`: whether that token is drawn; False where the text ended before it.
    """
    tree, path = (step.tree, step.path) if isinstance(step, Step) else (step, [])
    places = _places(tree, path, step.tokens[-1] if isinstance(step, Step) and own else None, tokenizer)
    edges = [_edge(places[place.parent], place) for place in places[1:]]
    nodes = [_node(place) for place in places]
    width = max(place.x + _LETTER * len(place.label) for place in places) + 50
    height = max(place.y for place in places) + _ROW / 2
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
        f"{''.join(edges)}{''.join(nodes)}</svg>"
    )


@dataclass(frozen=True)
class _Place:
    """One node of a drawing."""

    x: float
    y: float
    parent: int
    label: str
    kind: str
    """Its class in the style sheet: root, drafted (and accepted), missed, own (the target's)."""
    prob: float | None
    """Path probability; None for the root and the target's own token, which were not drafted."""
    title: str
    """What is said of it where it is pointed at."""

    @property
    def right(self) -> float:
        """Where its edges begin: behind the label, and behind the probability where there is one."""
        return self.x + 12 + _LETTER * len(self.label) + (0 if self.prob is None else 28)


def _places(tree: Tree, path: Sequence[int], own: int | None, tokenizer: Texts) -> list[_Place]:
    """Return the places of all rows; last, where it is drawn, that of the target's `own` token, below the `path`."""
    parents, depths, tokens = tree.parents.tolist(), tree.depths.tolist(), tree.tokens.tolist()
    path_log_probs = tree.path_log_probs.tolist()
    if own is not None:
        parents, depths, tokens = [*parents, path[-1]], [*depths, depths[path[-1]] + 1], [*tokens, own]
        path_log_probs.append(-np.inf)
    whole = [token_label(tokenizer, token) for token in tokens]
    labels = [label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…" for label in whole]
    widths = [max(len(labels[row]) for row, at in enumerate(depths) if at == depth) for depth in range(max(depths))]
    left = list(itertools.accumulate((_LETTER * width + _GAP for width in widths), initial=12.0))
    height = [_ROW * (line + 0.5) for line in lines_of(children_of(parents, path_log_probs))]
    places = []
    for row, (depth, parent) in enumerate(zip(depths, parents, strict=True)):
        prob = None
        if row == 0:
            kind, said = "root", "the root, the last token of the context"
        elif row == len(tree):
            kind, said = "own", "the target's own token"
        else:
            kind, (prob, above) = "drafted" if row in path else "missed", np.exp(tree.path_log_probs[[row, parent]])
            said = f"path probability {prob:.3f}, {prob / above:.3f} after its parent"
        places.append(_Place(left[depth], height[row], parent, labels[row], kind, prob, f"{whole[row]}: {said}"))
    return places


def _edge(above: _Place, place: _Place) -> str:
    bend = (above.right + place.x) / 2
    curve = f"{bend:.1f} {above.y:.1f} {bend:.1f} {place.y:.1f} {place.x:.1f} {place.y:.1f}"
    return f'<path class="{place.kind}" d="M{above.right:.1f} {above.y:.1f}C{curve}"/>'


def _node(place: _Place) -> str:
    size, opacity, shown = 1.5 + 5 * 0.5**0.5, 1.0, ""
    if place.prob is not None:
        size, opacity = 1.5 + 5 * place.prob**0.5, 0.3 + 0.7 * place.prob
        shown = f'<tspan class="prob" dx="5">{place.prob:.2f}</tspan>'
    return (
        f'<g class="{place.kind}"><title>{escape(place.title)}</title>'
        f'<circle cx="{place.x:.1f}" cy="{place.y:.1f}" r="{size:.1f}" fill-opacity="{opacity:.2f}"/>'
        f'<text x="{place.x + 9:.1f}" y="{place.y + 4:.1f}">{escape(place.label)}{shown}</text></g>'
    )


def lines_of(below: list[list[int]]) -> list[float]:
    """Return every row's line: leaves one below the other from 0, a parent halfway between its first and last child."""
    line_of, leaves, order, stack = [0.0] * len(below), itertools.count(), list[int](), [0]
    while stack:
        order.append(row := stack.pop())
        stack += below[row]
    for row in reversed(order):  # all children before their parent, the first child first
        children = below[row]
        line_of[row] = (line_of[children[0]] + line_of[children[-1]]) / 2 if children else next(leaves)
    return line_of


def escape(text: str) -> str:
    """Return text for HTML. The sign of a new line is drawn by the style sheet, so that it is not copied with it."""
    return html.escape(text.translate(VISIBLE)).replace("\n", '<i class="newline"></i>\n')
