"""Generations, steps and trees as a notebook shows them: pieces of HTML without a script.

Owns what stands in the `_repr_html_` of the three. They know no tokenizer, so tokens are numbers, until a notebook says
`in_notebook(tokenizer)`.
"""

from opt_tree.errors import counted
from opt_tree.generation import Generation, Step
from opt_tree.tools.display.page import STYLE, answer_spans, step_figures, summary, table
from opt_tree.tools.display.transcripts import Ids, Texts
from opt_tree.tools.display.trees import svg_tree
from opt_tree.tree import Tree


def rich(shown: Generation | Step | Tree, tokenizer: Texts | None = None) -> str:
    """Return a generation as its coloured text and figures, a step or a tree as a drawing, with a line of figures."""
    texts = tokenizer or Ids()
    if isinstance(shown, Generation):
        inside = f'<p class="answer">{answer_spans(shown, texts)}</p>{table(summary(shown))}'
    else:
        if isinstance(shown, Step):
            said = step_figures(shown)
        else:
            layers = counted(int(shown.depths.max()), "layer")
            said = f"{counted(shown.nodes, 'node')}, {layers}, E(A) {shown.expected_accepted:.2f}"
        inside = f'<p class="legend">{said}</p><div class="tree">{svg_tree(shown, texts)}</div>'
    return f'<style>{STYLE}</style><div class="opt-tree">{inside}</div>'


def in_notebook(tokenizer: Texts) -> None:
    """Have this notebook show generations, steps and trees with the texts of `tokenizer` from now on.

    Raises RuntimeError outside IPython.
    """
    from IPython import get_ipython  # there is one wherever there is a notebook

    shell = get_ipython()
    if shell is None:
        raise RuntimeError("this is no notebook: opt_tree.transcript and opt_tree.to_html show a generation elsewhere")
    formatter = shell.display_formatter.formatters["text/html"]
    for kind in (Generation, Step, Tree):
        formatter.for_type(kind, lambda shown: rich(shown, tokenizer))


# Whoever decodes needs no display: the three learn to show themselves when this module is imported.
for _kind in (Generation, Step, Tree):
    setattr(_kind, "_repr_html_", rich)  # noqa: B010
