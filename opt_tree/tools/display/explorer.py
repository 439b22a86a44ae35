"""A generation as a page to step through: its trees as they grew, other policies' beside them, where the time went.

Owns what the page knows: a table of labels and, for each step, numbers. `explorer.js` draws them, `explorer.css` says
how that looks. The page loads nothing, and its script is the only one that a browser runs in it.
"""

import base64
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opt_tree.errors import require
from opt_tree.generation import Generation, Step
from opt_tree.tools.beside import Beside
from opt_tree.tools.ceiling import Ceiling
from opt_tree.tools.display.page import STYLE, answer_spans, asked, summary, table
from opt_tree.tools.display.transcripts import Texts, token_label
from opt_tree.tools.display.trees import children_of, escape, lines_of
from opt_tree.tools.stored_text import follow
from opt_tree.tree import Tree

_HERE = Path(__file__).parent
RUN = "this run"


def explore(
    generation: Generation | Beside,
    tokenizer: Texts,
    facts: Mapping[str, str] | None = None,
    ceilings: Sequence[Ceiling] = (),
) -> str:
    """Return a self-contained page to step through a generation: buttons and keys, no server, no outside resource.

    At each step: the tree, layer by layer, with its path probabilities and the accepted path; E(A) against A; where the
    time went. With a `Beside` (see `generate_beside`) also the trees of other policies at the same step. `facts` are
    further rows of the summary. With `ceilings`, one a step (see `Ceilings`), also what each tree allows at most, and
    where the target leaves it; ValueError for those of another number of steps. A still picture is `to_html`.
    """
    require((Generation, Beside), generation=generation)
    beside = generation if isinstance(generation, Beside) else Beside(generation, [{}] * len(generation.steps), [])
    run = beside.generation
    limits, most = _allowed(ceilings, len(run.steps))
    labels = dict[int, int]()  # of each token: the number of its label
    data = {
        "steps": [_step(beside, index, labels) | limits[index] for index in range(len(run.steps))],
        "policies": [RUN, *dict.fromkeys(name for trees in beside.trees for name in trees)],
        "prefill": _ms(run.prefill_seconds),
        "labels": [token_label(tokenizer, token) for token in labels],
    }
    prompt = escape(asked(run.prompt, tokenizer))
    script, style = ((_HERE / f"explorer.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>OPT-Tree, step by step</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<style>{STYLE}{style}</style></head><body><div class="opt-tree explorer">'
        f'<p class="prompt">{prompt}</p><p class="answer">{answer_spans(run, tokenizer)}</p>'
        '<p class="legend"><span class="drafted">drafted and accepted</span> <span class="own">the target\'s own</span>'
        " Click on the text to go to its step.</p>"
        f"{_STAGE if run.steps else ''}{_compared(beside)}{table(summary(run) | most | dict(facts or {}))}</div>"
        f'<script type="application/json" id="data">{_inert(data)}</script><script>{script}</script></body></html>'
    )


_STAGE = """<section id="stage"><div class="bar">
<button id="back" title="key: left">&#9664; step</button><input id="step" type="range" min="0" aria-label="step">
<button id="next" title="key: right">step &#9654;</button></div>
<p id="said" aria-live="polite"></p><div class="bar" id="policies"></div>
<div class="bar"><button id="less" title="key: down">&minus; layer</button>
<button id="more" title="key: up">+ layer</button><button id="grow" title="key: g">grow</button>
<button id="view" title="key: o">overview</button><span id="layer"></span></div>
<div id="tree"></div><p id="node"></p>
<h2>E(A) against A</h2><div id="lengths"></div><p class="legend"><span class="key a"></span>A: accepted draft tokens of
each step <span class="key e"></span>E(A): what the drafter led to expect. Click on a step to go there.</p>
<h2>Where the time went</h2><div id="times"></div></section>
<p class="legend">Keys: left and right for steps, up and down for layers, digits for policies, g to watch the tree grow,
o for the overview. A disc grows with the probability of the path to its token.</p>"""


def _step(beside: Beside, index: int, labels: dict[int, int]) -> dict[str, Any]:
    """What the page knows of a step: the trees by policy, the run's first, and milliseconds."""
    run = beside.generation
    step = run.steps[index]
    rest = run.tokens[sum(run.accept_lengths[:index]) :]
    ended = run.accept_lengths[index] < len(step.tokens)  # before the target's own token
    trees = {RUN: _tree(step.tree, step.path, None if ended else step.tokens[-1], labels)}
    for name, tree in beside.trees[index].items():
        accepted = beside.accepted[index].get(name) if beside.accepted else None
        path = follow(tree, rest[:accepted]) if accepted is not None else None
        own = rest[accepted] if accepted is not None and accepted < len(rest) else None
        trees[name] = _tree(tree, path, own, labels)
    return {"trees": trees, "policy": repr(step.policy), "kept": run.accept_lengths[index], "times": _times(step)}


def _allowed(ceilings: Sequence[Ceiling], steps: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """For each step, what its tree allows and where the target leaves it, by rows; and a row of the summary."""
    if not ceilings:
        return [{} for _ in range(steps)], {}
    if len(ceilings) != steps:
        raise ValueError(f"{len(ceilings)} ceilings for {steps} steps: they are of another text")
    limits = [{"ceiling": round(c.tokens, 4), "left": [float(f"{value:.4g}") for value in c.left]} for c in ceilings]
    mean = statistics.fmean(one.tokens for one in ceilings)
    return limits, {"ceiling": f"{mean:.2f} tokens a step, of any verifier that is exact given these trees"}


def _tree(tree: Tree, path: list[int] | None, own: int | None, labels: dict[int, int]) -> dict[str, Any]:
    """A tree in numbers: labels, parents, path probabilities, lines; behind its rows the target's own token."""
    parents, falling, tokens = tree.parents.tolist(), tree.path_log_probs.tolist(), tree.tokens.tolist()
    if path is not None and own is not None:
        parents, falling, tokens = [*parents, path[-1]], [*falling, -np.inf], [*tokens, own]
    return {
        "tokens": [labels.setdefault(token, len(labels)) for token in tokens],
        "parents": parents,
        "probs": [float(f"{np.exp(value):.4g}") for value in tree.path_log_probs],
        "lines": [round(line, 3) for line in lines_of(children_of(parents, falling))],
        "path": path,
        "expected": round(tree.expected_accepted, 4),
    }


def _times(step: Step) -> list[float]:
    """Milliseconds of a step: the drafter's forwards, the rest of drafting, the target's, the rest of it, commit."""
    t = step.times
    parts = (t.draft_forward, t.draft - t.draft_forward, t.target_forward, t.verify - t.target_forward, t.commit)
    return [_ms(max(part, 0.0)) for part in parts]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _compared(beside: Beside) -> str:
    """A table of the means of every policy, over the steps at which all are known."""
    steps, trees, accepted = beside.generation.steps, beside.trees, beside.accepted
    names = list(dict.fromkeys(name for drawn in trees for name in drawn))
    common = [index for index, drawn in enumerate(trees) if names and len(drawn) == len(names)]
    told = [index for index in common if accepted and len(accepted[index]) == len(names)]
    if not (common := told or common):
        return ""
    rows = []
    for name in (RUN, *names):
        drawn = [steps[index].tree if name == RUN else trees[index][name] for index in common]
        means = [statistics.fmean(tree.nodes for tree in drawn), statistics.fmean(t.expected_accepted for t in drawn)]
        if told:
            means.append(statistics.fmean(steps[i].accepted if name == RUN else accepted[i][name] for i in told))
        rows.append(f"<tr><th>{escape(name)}</th>{''.join(f'<td>{mean:.2f}</td>' for mean in means)}</tr>")
    head = f"<tr><th></th><td>nodes</td><td>E(A)</td>{'<td>A</td>' if told else ''}</tr>"
    return (
        f"<h2>Other policies</h2><table>{head}{''.join(rows)}</table>"
        f'<p class="legend">Means over the {len(common)} of {len(steps)} steps where all are known. '
        "Every tree is drawn where this run's step began.</p>"
    )


def _inert(data: Any) -> str:
    """Return JSON that no token can break out of: it stands inside an element of a page."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
