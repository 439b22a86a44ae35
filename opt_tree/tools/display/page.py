"""A generation as one self-contained HTML page: the coloured transcript, a table of figures, the trees of some steps.

Owns the page, its style and the choice of steps worth drawing.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence

from opt_tree.errors import counted, require
from opt_tree.generation import Generation, Step
from opt_tree.tools.display.transcripts import Texts, pieces
from opt_tree.tools.display.trees import escape, svg_tree


def to_html(
    generation: Generation,
    tokenizer: Texts,
    steps: Sequence[int] | None = None,
    facts: Mapping[str, str] | None = None,
) -> str:
    """Return a self-contained page: the coloured transcript, a summary, and the drawn trees of some `steps` (indices).

    Without `steps`: the one that accepted most, a median one, and one that accepted least. `facts` are further rows of
    the summary. In a notebook: `IPython.display.HTML(to_html(generation, tokenizer))`. Raises ValueError for a step
    that the generation does not have.
    """
    require(Generation, generation=generation)
    if steps is None:
        steps = telling_steps(generation)
    for index in steps:
        if not 0 <= index < len(generation.steps):
            raise ValueError(f"there is no step {index}: the generation has {counted(len(generation.steps), 'step')}")
    prompt = escape(asked(generation.prompt, tokenizer))
    drawings = "".join(_figure(generation, tokenizer, index) for index in steps)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>OPT-Tree transcript</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<style>{STYLE}</style></head><body><div class="opt-tree">'
        f'<p class="prompt">{prompt}</p><p class="answer">{answer_spans(generation, tokenizer)}</p>'
        '<p class="legend"><span class="drafted">drafted and accepted</span> <span class="own">the target\'s own</span>'
        " Point at the text to see its step.</p>"
        f"{table(summary(generation) | dict(facts or {}))}{_DRAWN if steps else ''}{drawings}</div></body></html>"
    )


_DRAWN = (
    '<p class="legend">The trees of some steps. The number behind a token is the drafter\'s probability of the path to '
    "it, and the disc grows with it. The accepted path is thick and ends in the target's own token. A is the number of "
    "accepted draft tokens, E(A) the number that the drafter expected.</p>"
)


def asked(prompt: Sequence[int], tokenizer: Texts) -> str:
    """Return a prompt's text without special tokens. What they part, such as a chat's turns, has lines of its own."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    parts = [list(part) for apart, part in itertools.groupby(prompt, key=special.__contains__) if not apart]
    texts = (str(tokenizer.decode(part, clean_up_tokenization_spaces=False)) for part in parts)
    return "\n".join(text for text in (text.strip() for text in texts) if text)


def table(rows: Mapping[str, str]) -> str:
    """Return names and texts as the rows of an HTML table."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(lines)}</table>"


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
        "tokens": f"{total} in {counted(len(steps), 'step')}, {drafted} of them drafted; "
        f"ended by {generation.finish_reason}",
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


def answer_spans(generation: Generation, tokenizer: Texts) -> str:
    """Return the answer as HTML: a span a step, in it a span an owner."""
    spans = []
    for index, group in itertools.groupby(pieces(generation, tokenizer), key=lambda piece: piece.step):
        texts = "".join(
            f'<span class="{"drafted" if piece.drafted else "own"}">{escape(piece.text)}</span>' for piece in group
        )
        told = escape(caption(generation.steps[index], index))
        spans.append(f'<span class="step" data-step="{index}" title="{told}">{texts}</span>')
    return "".join(spans)


def caption(step: Step, index: int) -> str:
    """Say in a line which step it is and what became of it."""
    return f"step {index + 1}: {step_figures(step)}"


def step_figures(step: Step) -> str:
    """Say in a line what became of a step."""
    return (
        f"A {step.accepted}, E(A) {step.expected_accepted:.2f}, "
        f"{counted(step.tree.nodes, 'node')}, {1000 * step.times.total:.1f} ms"
    )


def _figure(generation: Generation, tokenizer: Texts, index: int) -> str:
    """One step: what stood before it, its figures, its tree."""
    before = "".join(piece.text for piece in pieces(generation, tokenizer) if piece.step < index)
    context = "…" + before[-70:] if len(before) > 70 else before or "the answer begins"
    step = generation.steps[index]
    whole = generation.accept_lengths[index] == len(step.tokens)
    return (
        f'<figure><figcaption><span class="context">{escape(context)}</span>'
        f"{escape(caption(step, index))}</figcaption>"
        f'<div class="tree">{svg_tree(step, tokenizer, own=whole)}</div></figure>'
    )


LIGHT = """--paper: #ffffff; --ink: #24292f; --faint: #6e7781; --line: #d0d7de;
  --drafted: #0550ae; --drafted-paper: #ddeeff; --own: #953800; --own-paper: #ffe3cc; --hover: #fff3b0;"""
DARK = """--paper: #0d1117; --ink: #d9dfe6; --faint: #8b949e; --line: #30363d;
  --drafted: #8ec5ff; --drafted-paper: #10294a; --own: #ffb77c; --own-paper: #47290f; --hover: #4b4413;"""
# Everything hangs below .opt-tree, so that a notebook's own styles stay as they are; body only where it is our page.
STYLE = f"""
.opt-tree, body:has(> .opt-tree) {{ {LIGHT} }}
@media (prefers-color-scheme: dark) {{ .opt-tree, body:has(> .opt-tree) {{ {DARK} }} }}"""
STYLE += """
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
