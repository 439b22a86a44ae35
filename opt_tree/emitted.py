"""Whether the tokens of a step could be drawn at all: they could not where nothing is allowed, or logits are NaN.

Owns the refusal. A verifier answers some token for any row of numbers; the one it names tells whether it had a choice.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf, isnan

from jaxtyping import Float
from torch import Tensor

from opt_tree.history import History
from opt_tree.sampling import Histories, LazyLogits, Logits, Sampling, named
from opt_tree.tree import Tree, on_host


def without_choice(scores: Logits, drawn: Iterable[tuple[int, int]], greedy: bool) -> int | None:
    """Return the first row whose emitted token had no probability; None: all had one.

    Arguments:
        scores: the processed logits of a tree's rows.
        drawn: of each emitted token, the row it was drawn at, and the token.
        greedy: whether temperature is 0: a row without an allowed token is then answered by some token, as by
            transformers, and NaN alone counts.

    On a device a look at the numbers would wait for it: there is none.
    """
    if not isinstance(scores, LazyLogits) and not on_host(scores):
        return None
    for row, token in drawn:
        value = float(scores[row][token])
        if isnan(value) or (value == -inf and not greedy):
            return row
    return None


def refusal(
    sampling: Sampling, logits: Float[Tensor, "rows vocab"], tree: Tree, context: list[int] | History, row: int
) -> ValueError:
    """Say who leaves nothing to draw from at a row: the model, or the first processor behind which there is nothing.

    `logits` are the model's own. `transformers.generate` raises likewise above temperature 0, without the name.
    """
    here, histories = logits[row : row + 1], Histories(tree, context, logits.device)
    steps: list[Callable] = [*sampling.processors, *sampling.warpers()]
    why = "its probability is 0"
    if bool(here.isnan().any()):
        why, steps = "the model's logits are not numbers (NaN), so some of its weights or inputs are not", []
    for count, process in enumerate(steps, 1):
        # Exactly these steps: at temperature 0 no warper joins them.
        own = replace(sampling, temperature=0.0, processors=tuple(steps[:count]))
        found = own._process(here, histories, [row])
        if bool(found.isnan().any()) or bool((found == -inf).all()):
            why = f"{named(process)} {'answers NaN' if found.isnan().any() else 'allows no token'}"
            break
    return ValueError(f"no token can be drawn at row {row} of a tree of {len(tree)}: {why}")
