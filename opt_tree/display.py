"""Generations and trees as text, ANSI and HTML. Pure functions that return strings; nothing here prints.

Two owners everywhere: accepted *draft* tokens and the *target's own* token that ends each step.
"""

import html
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from opt_tree.decode import Generation
from opt_tree.step import Step
from opt_tree.tree import Tree

# A model may emit escape sequences: control characters become visible signs, only tabs and new lines keep their sense.
_VISIBLE = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    | {127: 0x2421}
    | dict.fromkeys(range(128, 160), 0xFFFD)
)
_ANSI_DRAFTED, _ANSI_END = "\x1b[36m", "\x1b[0m"


class IncrementalText:
    """The text of a growing list of tokens; bytes of an unfinished character wait for the token that ends it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """Return what `token` adds to the text: special tokens add nothing, nor does an unfinished character."""
        self._held.append(token)
        text = self._grown()
        if text.endswith("\ufffd"):
            return ""
        # What was just completed is the context in which the next token's spaces are decoded.
        self._before, self._held = self._held, []
        return text.translate(_VISIBLE)

    def rest(self) -> str:
        """Return what is still held back, once no more tokens follow: a replacement sign for a broken character."""
        text, self._held = self._grown(), []
        return text.translate(_VISIBLE)

    def _grown(self) -> str:
        return self._decode(self._before + self._held)[len(self._decode(self._before)) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


@dataclass(frozen=True)
class Piece:
    """Text of one owner within one step."""

    text: str
    drafted: bool
    """True for accepted draft tokens, False for the target's own."""
    step: int


def pieces(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """Return the text of a generation in order, at most two pieces a step; a split character goes to its last token."""
    decoder, tokens, found = IncrementalText(tokenizer), iter(generation.tokens), []
    for index, (step, length) in enumerate(zip(generation.steps, generation.accept_lengths, strict=True)):
        # The last step may have been cut: then even its last token can be a drafted one.
        owned = [(place < step.accepted, decoder.add(next(tokens))) for place in range(length)]
        for drafted, group in itertools.groupby(owned, key=lambda pair: pair[0]):
            found.append(Piece("".join(text for _, text in group), drafted, index))
    if found:
        found[-1] = Piece(found[-1].text + decoder.rest(), found[-1].drafted, found[-1].step)
    return [piece for piece in found if piece.text]


def paint(text: str, drafted: bool, color: bool = True) -> str:
    """Mark accepted draft text: cyan, or without colour in square brackets. The target's own stays as it is."""
    if not drafted or not text:
        return text
    return f"{_ANSI_DRAFTED}{text}{_ANSI_END}" if color else f"[{text}]"


def transcript(generation: Generation, tokenizer: PreTrainedTokenizerBase, color: bool = True) -> str:
    """Return the generated text, accepted draft tokens in colour or in brackets: `[ the quick] fox[ jumps] over`."""
    return "".join(paint(piece.text, piece.drafted, color) for piece in pieces(generation, tokenizer))


def token_label(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return a token's text on one line: a space shows as an open box, a part of a character as the token's number."""
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    raw = tokenizer.convert_ids_to_tokens(token)
    if isinstance(raw, str) and raw.startswith("\u2581") and not text.startswith(" "):
        text = " " + text  # sentencepiece drops the space of a first token
    if not text or "\ufffd" in text:
        return f"#{token}"
    return text.translate(_VISIBLE).replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")


def draw_tree(tree: Tree, tokenizer: PreTrainedTokenizerBase, path: Sequence[int] | None = None) -> str:
    """Draw a tree as text: each node's token and path probability, best sibling first; `path` rows carry a star.

    ␣the                 4 nodes, E(A) 1.35, accepted 2 (*)
    ├─ ␣cat 0.62 *
    │  ├─ ␣sat 0.40 *
    │  └─ ␣ran 0.12
    └─ ␣dog 0.21
    """
    accepted = set(path or [])
    total = f"{tree.nodes} nodes, E(A) {tree.expected_accepted:.2f}"
    if path is not None:
        total += f", accepted {len(path) - 1} (*)"
    lines = [f"{token_label(tokenizer, int(tree.tokens[0]))}    {total}"]
    below = _children(tree.parents, tree.path_log_probs)
    stack = [(row, "", row == below[0][-1]) for row in reversed(below[0])]
    while stack:
        row, indent, last = stack.pop()
        star = " *" if row in accepted else ""
        label = token_label(tokenizer, int(tree.tokens[row]))
        lines.append(f"{indent}{'└─' if last else '├─'} {label} {np.exp(tree.path_log_probs[row]):.2f}{star}")
        indent += "   " if last else "│  "
        stack += [(child, indent, child == below[row][-1]) for child in reversed(below[row])]
    return "\n".join(lines)


def _children(parents: Sequence[int] | np.ndarray, values: Sequence[float] | np.ndarray) -> list[list[int]]:
    """List every row's children, largest value first."""
    below: list[list[int]] = [[] for _ in parents]
    for row in sorted(range(1, len(parents)), key=lambda row: -values[row]):
        below[int(parents[row])].append(row)
    return below


def to_html(
    generation: Generation,
    tokenizer: PreTrainedTokenizerBase,
    steps: Sequence[int] | None = None,
    facts: Mapping[str, str] | None = None,
) -> str:
    """Return a self-contained page: the coloured transcript, a summary, and the drawn trees of some `steps` (indices).

    Without `steps`: the one that accepted most, a median one, and one that accepted least. `facts` are further rows of
    the summary. In a notebook: `IPython.display.HTML(to_html(generation, tokenizer))`. Raises ValueError for a step
    that the generation does not have.
    """
    if steps is None:
        steps = telling_steps(generation)
    for index in steps:
        if not 0 <= index < len(generation.steps):
            raise ValueError(f"there is no step {index}: the generation has {len(generation.steps)} steps")
    prompt = tokenizer.decode(generation.prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(prompt, str)
    rows = "".join(
        f"<tr><th>{_escape(name)}</th><td>{_escape(value)}</td></tr>"
        for name, value in (summary(generation) | dict(facts or {})).items()
    )
    drawings = "".join(_figure(generation, tokenizer, index) for index in steps)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>OPT-Tree transcript</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<style>{_CSS}</style></head><body><div class="opt-tree">'
        f'<p class="prompt">{_escape(prompt)}</p><p class="answer">{_answer(generation, tokenizer)}</p>'
        '<p class="legend"><span class="drafted">drafted and accepted</span> <span class="own">the target\'s own</span>'
        " Point at the text to see its step.</p>"
        f"<table>{rows}</table>{_DRAWN if steps else ''}{drawings}</div></body></html>"
    )


_DRAWN = (
    '<p class="legend">The trees of some steps: a disc is as large as the drafter\'s probability of the path to it, '
    "the number behind the token. The accepted path is thick and ends in the target's own token. A: accepted draft "
    "tokens, E(A): how many the drafter expected.</p>"
)


def summary(generation: Generation) -> dict[str, str]:
    """Return the figures of a generation as rows of a table: name and text. Times are medians over the steps."""
    steps = generation.steps
    if not steps:
        return {"steps": "0"}
    drafted = sum(min(s.accepted, n) for s, n in zip(steps, generation.accept_lengths, strict=True))
    total = len(generation.tokens)
    draft, verify, commit = (
        1000 * statistics.median(getattr(step.times, part) for step in steps) for part in ("draft", "verify", "commit")
    )
    return {
        "tokens per step": f"{generation.mean_acceptance_length:.2f} (mean of accepted + 1)",
        "E(A) + 1": f"{statistics.fmean(generation.expected_lengths):.2f} expected by the drafter",
        "tokens": f"{total} in {len(steps)} steps, {drafted} of them drafted; ended by {generation.finish_reason}",
        "tree": f"{statistics.fmean(s.tree.nodes for s in steps):.1f} nodes, "
        f"{statistics.fmean(int(s.tree.depths.max()) for s in steps):.1f} layers a step (means)",
        "a step": f"{draft:.1f} ms draft, {verify:.1f} ms verify, {commit:.2f} ms commit (medians)",
        "tokens per second": f"{generation.tokens_per_second:.0f}, prefill included",
    }


def telling_steps(generation: Generation) -> list[int]:
    """Return the steps worth drawing: most accepted, median, least accepted; none where nothing was drafted."""
    steps = generation.steps
    drafted = [index for index, step in enumerate(steps) if step.tree.nodes]
    if not drafted:
        return []
    ranked = sorted(drafted, key=lambda index: steps[index].accepted)
    # Among equals the larger tree has more to show.
    most = max(drafted, key=lambda index: (steps[index].accepted, steps[index].tree.nodes))
    least = max(drafted, key=lambda index: (-steps[index].accepted, steps[index].tree.nodes))
    return list(dict.fromkeys([most, ranked[len(ranked) // 2], least]))


def _answer(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> str:
    spans = []
    for index, group in itertools.groupby(pieces(generation, tokenizer), key=lambda piece: piece.step):
        texts = "".join(f'<span class="{_owner(p.drafted)}">{_escape(p.text)}</span>' for p in group)
        spans.append(f'<span class="step" title="{_escape(_caption(generation.steps[index], index))}">{texts}</span>')
    return "".join(spans)


def _owner(drafted: bool) -> str:
    return "drafted" if drafted else "own"


def _caption(step: Step, index: int) -> str:
    return (
        f"step {index + 1}: A {step.accepted}, E(A) {step.expected_accepted:.2f}, "
        f"{step.tree.nodes} nodes, {1000 * step.times.total:.1f} ms"
    )


def _figure(generation: Generation, tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    """One step: what stood before it, its figures, its tree."""
    before = "".join(piece.text for piece in pieces(generation, tokenizer) if piece.step < index)
    context = "…" + before[-70:] if len(before) > 70 else before or "the answer begins"
    return (
        f'<figure><figcaption><span class="context">{_escape(context)}</span>'
        f"{_escape(_caption(generation.steps[index], index))}</figcaption>"
        f'<div class="tree">{svg_tree(generation.steps[index], tokenizer)}</div></figure>'
    )


_ROW, _LETTER, _GAP, _LONGEST = 22, 7.3, 62, 16  # pixels; letters of a label


def svg_tree(step: Step, tokenizer: PreTrainedTokenizerBase) -> str:
    """Draw a step's tree from left to right; a node's disc grows with its path probability.

    The accepted path is highlighted and ends in the target's own token, which is not part of the tree.
    """
    tree, own = step.tree, len(step.tree)
    parents = [*tree.parents.tolist(), step.path[-1]]
    path_log_probs = [*tree.path_log_probs.tolist(), -np.inf]
    depths = [*tree.depths.tolist(), int(tree.depths[step.path[-1]]) + 1]
    labels = [_shorten(token_label(tokenizer, token)) for token in [*tree.tokens.tolist(), step.tokens[-1]]]
    below = _children(parents, path_log_probs)
    height = _heights(below)
    widths = [0] * (max(depths) + 1)
    for label, depth in zip(labels, depths, strict=True):
        widths[depth] = max(widths[depth], len(label))
    left = list(itertools.accumulate((_LETTER * width + _GAP for width in widths[:-1]), initial=12.0))
    accepted = {*step.path, own}
    edges, nodes = [], []
    for row, depth in enumerate(depths):
        x, y, above = left[depth], height[row], parents[row]
        kind = "own" if row == own else "root" if row == 0 else _owner(True) if row in accepted else "missed"
        drafted = 0 < row < own
        prob = float(np.exp(path_log_probs[row])) if drafted else 0.5  # the size of the two that were not drafted
        size, opacity = 1.5 + 5 * prob**0.5, 0.3 + 0.7 * prob if drafted else 1.0
        shown = f'<tspan class="prob" dx="5">{prob:.2f}</tspan>' if drafted else ""
        if above >= 0:
            start = left[depths[above]] + 12 + _LETTER * len(labels[above]) + (28 if above else 0)
            bend = (start + x) / 2
            edge = f"M{start:.1f} {height[above]:.1f}C{bend:.1f} {height[above]:.1f} {bend:.1f} {y:.1f} {x:.1f} {y:.1f}"
            edges.append(f'<path class="{kind}" d="{edge}"/>')
        nodes.append(
            f'<g class="{kind}"><title>{_escape(_node_title(step, tokenizer, row))}</title>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" fill-opacity="{opacity:.2f}"/>'
            f'<text x="{x + 9:.1f}" y="{y + 4:.1f}">{_escape(labels[row])}{shown}</text></g>'
        )
    width, tall = left[-1] + _LETTER * widths[-1] + 50, max(height) + _ROW / 2
    return (
        f'<svg width="{width:.0f}" height="{tall:.0f}" viewBox="0 0 {width:.0f} {tall:.0f}" role="img">'
        f"{''.join(edges)}{''.join(nodes)}</svg>"
    )


def _heights(below: list[list[int]]) -> list[float]:
    """Return every row's height: leaves one below the other, a parent halfway between its first and last child."""
    height, line = [0.0] * len(below), 0
    for row in _depth_first(below):
        if not below[row]:
            height[row] = _ROW * (line + 0.5)
            line += 1
        else:
            height[row] = (height[below[row][0]] + height[below[row][-1]]) / 2
    return height


def _depth_first(below: list[list[int]]) -> Iterator[int]:
    """Yield rows with all children before their parent, first child first."""
    order, stack = [], [0]
    while stack:
        order.append(row := stack.pop())
        stack += below[row]
    return reversed(order)


def _node_title(step: Step, tokenizer: PreTrainedTokenizerBase, row: int) -> str:
    tree = step.tree
    if row == len(tree):
        return f"{token_label(tokenizer, step.tokens[-1])}: the target's own token"
    label = token_label(tokenizer, int(tree.tokens[row]))
    if row == 0:
        return f"{label}: the root, the last token of the context"
    log_probs = tree.path_log_probs
    path, above = np.exp(log_probs[row]), np.exp(log_probs[row] - log_probs[tree.parents[row]])
    return f"{label}: path probability {path:.3f}, {above:.3f} after its parent"


def _shorten(label: str) -> str:
    return label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…"


def _escape(text: str) -> str:
    # The sign of a new line is drawn by the style sheet, so that it is not copied with the text.
    return html.escape(text.translate(_VISIBLE)).replace("\n", '<i class="newline"></i>\n')


# Everything hangs below .opt-tree, so that a notebook's own styles stay as they are; body only where it is our page.
_CSS = """
.opt-tree, body:has(> .opt-tree) { --paper: #ffffff; --ink: #24292f; --faint: #6e7781; --line: #d0d7de;
  --drafted: #0550ae; --drafted-paper: #ddeeff; --own: #953800; --own-paper: #ffe3cc; --hover: #fff3b0; }
@media (prefers-color-scheme: dark) { .opt-tree, body:has(> .opt-tree) { --paper: #0d1117; --ink: #d9dfe6;
  --faint: #8b949e; --line: #30363d; --drafted: #8ec5ff; --drafted-paper: #10294a; --own: #ffb77c;
  --own-paper: #47290f; --hover: #4b4413; } }
body:has(> .opt-tree) { margin: 0; background: var(--paper); }
.opt-tree { max-width: 60rem; margin: 0 auto; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
.opt-tree p { margin: 0 0 1rem; }
.opt-tree .prompt { color: var(--faint); white-space: pre-wrap; border-left: 3px solid var(--line);
  padding-left: .8rem; }
.opt-tree .answer { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.75; font-size: 16px; }
.opt-tree .drafted { color: var(--drafted); background: var(--drafted-paper); }
.opt-tree .own { color: var(--own); background: var(--own-paper); }
.opt-tree .answer span span, .opt-tree .legend span { border-radius: 3px; padding: 1px 0; }
.opt-tree .legend span { padding: 1px 6px; margin-right: .4rem; }
.opt-tree .step:hover span { background: var(--hover); }
.opt-tree .newline::before { content: "↵"; font-style: normal; opacity: .45; }
.opt-tree .legend, .opt-tree figcaption { color: var(--faint); font-size: 13px; }
.opt-tree table { border-collapse: collapse; margin: 0 0 1rem; font-size: 14px; }
.opt-tree th, .opt-tree td { text-align: left; font-weight: normal; padding: .25rem 1rem .25rem 0;
  border-bottom: 1px solid var(--line); background: none; color: var(--ink); }
.opt-tree th { color: var(--faint); white-space: nowrap; vertical-align: top; }
.opt-tree figure { margin: 1.6rem 0 0; }
.opt-tree figcaption .context { display: block; color: var(--ink); white-space: pre-wrap; }
.opt-tree .tree { overflow-x: auto; padding: .4rem 0; }
.opt-tree svg { display: block; }
.opt-tree svg path { fill: none; stroke: var(--line); stroke-width: 1; background: none; }
.opt-tree svg path.drafted { stroke: var(--drafted); stroke-width: 2.5; }
.opt-tree svg path.own { stroke: var(--own); stroke-width: 2; stroke-dasharray: 4 3; }
.opt-tree svg text { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; fill: var(--faint); }
.opt-tree svg circle { fill: var(--faint); }
.opt-tree svg .prob { font-size: 9.5px; font-weight: normal; fill: var(--faint); }
.opt-tree svg .root circle, .opt-tree svg .root text { fill: var(--ink); }
.opt-tree svg .drafted circle { fill: var(--drafted); }
.opt-tree svg .own circle { fill: var(--own); }
.opt-tree svg .drafted text { fill: var(--drafted); font-weight: 600; }
.opt-tree svg .own text { fill: var(--own); font-weight: 600; }
"""
