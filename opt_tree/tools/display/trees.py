"""Draft trees drawn as text and as SVG.

Owns where a node stands in a drawing. Both drawings list the best sibling first and mark the accepted path.
"""

import html
import itertools
from collections.abc import Iterator, Sequence
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
    places = _places(step, tokenizer, own)
    edges = [_edge(places[place.parent], place) for place in places[1:]]
    nodes = [_node(place, _node_title(step, tokenizer, row)) for row, place in enumerate(places)]
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

    @property
    def right(self) -> float:
        """Where its edges begin: behind the label, and behind the probability where there is one."""
        return self.x + 12 + _LETTER * len(self.label) + (0 if self.prob is None else 28)


def _places(step: Step | Tree, tokenizer: Texts, with_own: bool) -> list[_Place]:
    """Return the places of all rows of the tree and, of a step, last that of the target's own token, if it is drawn."""
    tree = step.tree if isinstance(step, Step) else step
    own, parents, depths = len(tree), tree.parents.tolist(), tree.depths.tolist()
    path_log_probs, tokens, accepted = tree.path_log_probs.tolist(), tree.tokens.tolist(), set[int]()
    if isinstance(step, Step):
        accepted = set(step.path)
    if isinstance(step, Step) and with_own:
        last = step.path[-1]
        parents, depths = [*parents, last], [*depths, depths[last] + 1]
        path_log_probs, tokens = [*path_log_probs, -np.inf], [*tokens, step.tokens[-1]]
    labels = [shorten(token_label(tokenizer, token)) for token in tokens]
    widths = [0] * (max(depths) + 1)
    for label, depth in zip(labels, depths, strict=True):
        widths[depth] = max(widths[depth], len(label))
    left = list(itertools.accumulate((_LETTER * width + _GAP for width in widths[:-1]), initial=12.0))
    height = [_ROW * (line + 0.5) for line in lines_of(children_of(parents, path_log_probs))]
    places = []
    for row, depth in enumerate(depths):
        kind = "own" if row == own else "root" if row == 0 else "drafted" if row in accepted else "missed"
        prob = float(np.exp(path_log_probs[row])) if 0 < row < own else None
        places.append(_Place(left[depth], height[row], parents[row], labels[row], kind, prob))
    return places


def _edge(above: _Place, place: _Place) -> str:
    bend = (above.right + place.x) / 2
    curve = f"{bend:.1f} {above.y:.1f} {bend:.1f} {place.y:.1f} {place.x:.1f} {place.y:.1f}"
    return f'<path class="{place.kind}" d="M{above.right:.1f} {above.y:.1f}C{curve}"/>'


def _node(place: _Place, title: str) -> str:
    size, opacity, shown = 1.5 + 5 * 0.5**0.5, 1.0, ""
    if place.prob is not None:
        size, opacity = 1.5 + 5 * place.prob**0.5, 0.3 + 0.7 * place.prob
        shown = f'<tspan class="prob" dx="5">{place.prob:.2f}</tspan>'
    return (
        f'<g class="{place.kind}"><title>{escape(title)}</title>'
        f'<circle cx="{place.x:.1f}" cy="{place.y:.1f}" r="{size:.1f}" fill-opacity="{opacity:.2f}"/>'
        f'<text x="{place.x + 9:.1f}" y="{place.y + 4:.1f}">{escape(place.label)}{shown}</text></g>'
    )


def lines_of(below: list[list[int]]) -> list[float]:
    """Return every row's line: leaves one below the other from 0, a parent halfway between its first and last child."""
    line_of, line = [0.0] * len(below), 0
    for row in _depth_first(below):
        if not below[row]:
            line_of[row] = line
            line += 1
        else:
            line_of[row] = (line_of[below[row][0]] + line_of[below[row][-1]]) / 2
    return line_of


def _depth_first(below: list[list[int]]) -> Iterator[int]:
    """Yield rows with all children before their parent, first child first."""
    order, stack = [], [0]
    while stack:
        order.append(row := stack.pop())
        stack += below[row]
    return reversed(order)


def _node_title(step: Step | Tree, tokenizer: Texts, row: int) -> str:
    tree = step.tree if isinstance(step, Step) else step
    if isinstance(step, Step) and row == len(tree):
        return f"{token_label(tokenizer, step.tokens[-1])}: the target's own token"
    label = token_label(tokenizer, int(tree.tokens[row]))
    if row == 0:
        return f"{label}: the root, the last token of the context"
    path, above = (
        np.exp(tree.path_log_probs[row]),
        np.exp(tree.path_log_probs[row] - tree.path_log_probs[tree.parents[row]]),
    )
    return f"{label}: path probability {path:.3f}, {above:.3f} after its parent"


def shorten(label: str) -> str:
    """Return a label that fits into a drawing."""
    return label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…"


def escape(text: str) -> str:
    """Return text for HTML. The sign of a new line is drawn by the style sheet, so that it is not copied with it."""
    return html.escape(text.translate(VISIBLE)).replace("\n", '<i class="newline"></i>\n')
