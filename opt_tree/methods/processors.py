"""How a logits processor is asked about the rows of a tree: each with its own history, where it needs one.

Owns the token ids that processors and stopping criteria are shown, the refusal of processors that keep state, and top-p
without sorting the vocabulary. Knows nothing of verification.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import TopPLogitsWarper
from transformers.generation import logits_process

from opt_tree.tree import Tree, on_host

# Processors whose output depends on the logits row alone; everything else is shown the row's own history.
_MEMORYLESS = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "TopHLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    )
    if hasattr(logits_process, name)
)
# These keep state between calls (a second model's cache, a random seed per call): one call a node would corrupt it.
_STATEFUL = tuple(
    getattr(logits_process, name)
    for name in ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
    if hasattr(logits_process, name)
)
# Read and found to advance one state a call. What is not listed is caught by its answers, see `row_by_row`.
_STATEFUL_MODULES = ("xgrammar.contrib.hf",)
_EXACT = "FromHistory makes a grammar exact (docs/limits.md)"


class History:
    """The ids of a text as a tensor that grows with it: a new token costs the same after 100 tokens and 100 thousand.

    `tokens` is the text, a list that is appended to and otherwise left alone.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._ids: Int[Tensor, " room"] = torch.empty(0, dtype=torch.long)
        self._known = 0

    def ids(self, device: torch.device, branch: Sequence[int] = ()) -> Int[Tensor, "1 length"]:
        """Return the ids of the text so far and of `branch` below it, on a device.

        They are a view: those of the branch are valid until the next call.
        """
        length = len(self.tokens)
        end = length + len(branch)
        if end > len(self._ids) or device != self._ids.device:
            known, self._ids = self._ids[: self._known], torch.empty(2 * end, dtype=torch.long, device=device)
            self._ids[: self._known] = known
        new = [*self.tokens[self._known :], *branch]
        if new:
            self._ids[self._known : end] = torch.tensor(new)
        self._known = length
        return self._ids[None, :end]

    def at(self, tree: Tree, row: int, device: torch.device) -> Int[Tensor, "1 length"]:
        """Return the ids of the text and of the path down to a row of a tree whose root is the text's last token."""
        return self.ids(device, tree.tokens[tree.path_to(row)[1:]].tolist())


def history_of(context: list[int] | History) -> History:
    """A text's history; one that is there already is used on."""
    return context if isinstance(context, History) else History(context)


def check_stateless(process: Callable) -> None:
    """Raise ValueError for a processor that is known to keep state from call to call."""
    if isinstance(process, _STATEFUL):
        raise ValueError(f"{type(process).__name__} keeps state between calls: it cannot judge a tree of nodes")
    if type(process).__module__.startswith(_STATEFUL_MODULES):
        raise ValueError(f"{named(process)} advances one state a call, and a tree asks about many rows: {_EXACT}")


def is_foreign(process: Callable) -> bool:
    """Whether nothing is known of a processor: the caller's own, or transformers' around a function of the caller's.

    One that says `of_history` is a function of the ids and the scores, whatever it was asked before.
    """
    if isinstance(process, logits_process.PrefixConstrainedLogitsProcessor):
        return True
    return not (getattr(process, "of_history", False) or (type(process).__module__ or "").startswith("transformers."))


def named(process: Callable) -> str:
    """A processor by its module and class, for a message."""
    return f"{type(process).__module__}.{type(process).__name__}"


def by_row(process: Callable, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Ask a processor that needs no history; the rows are ours to overwrite."""
    return cut(process, logits) if type(process) is TopPLogitsWarper else process(None, logits)


def row_by_row(
    process: Callable, logits: Float[Tensor, "rows vocab"], tree: Tree, history: History, rows: Sequence[int]
) -> Float[Tensor, "rows vocab"]:
    """Return what a processor makes of the logits of these rows of the tree, which are ours to overwrite.

    Raises ValueError for a processor that answers the same question in two ways.
    """
    if isinstance(process, _MEMORYLESS):
        return by_row(process, logits)
    foreign = is_foreign(process) and len(rows) > 1
    first = logits[:1].clone() if foreign else None
    answers: list[Tensor] = []
    try:
        for place, row in enumerate(rows):
            answers.append(process(history.at(tree, row, logits.device), logits[place : place + 1]))
        again = process(history.at(tree, rows[0], logits.device), first) if foreign else answers[0]
    except Exception as error:
        if not foreign:
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{named(process)} failed on row {rows[len(answers)]} of a tree ({why}); "
            f"if it keeps state between calls: {_EXACT}"
        ) from error
    if not bool(((again == answers[0]) | (again.isnan() & answers[0].isnan())).all()):
        raise ValueError(f"{named(process)} answers the same history in two ways: it keeps state; {_EXACT}")
    return answers[0] if len(answers) == 1 else torch.cat(answers)


_BAND = 1e-6
"""A sum of probabilities this near to the border might fall on its other side in the warper's order of adding."""
_COARSE = (4096.0, 64.0, 1.0)
"""How much more than its share of what top-p drops a token must have to be looked at; the least one never fails."""


def cut(warper: TopPLogitsWarper, scores: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Return what the warper returns, without sorting the vocabulary, at a fortieth of its cost.

    The rows are ours to overwrite.

    The tokens of less than (1 - p) / vocabulary have less than 1 - p together: all of them are dropped, and only the
    others, a few hundred of 128 thousand in a language model, have to be sorted. A row that is nearly flat, or so
    near to a border that rounding decides, goes through the warper itself. Of equal tokens at the border those of
    higher numbers stay; the warper leaves that to the order of its sort.
    """
    if not on_host(scores) or scores.dtype.itemsize < 4:
        return warper(None, scores)  # type: ignore[arg-type]
    rows = scores.numpy()
    for row, probs in enumerate(scores.softmax(-1).numpy()):
        kept = _nucleus(rows[row], probs, 1 - warper.top_p, warper.min_tokens_to_keep)
        if kept is None:
            scores[row : row + 1] = warper(None, scores[row : row + 1])  # type: ignore[arg-type]
        else:
            values = rows[row, kept]
            rows[row] = warper.filter_value
            rows[row, kept] = values
    return scores


def _nucleus(
    scores: Float[np.ndarray, " vocab"], probs: Float[np.ndarray, " vocab"], dropped: float, least: int
) -> np.ndarray | None:
    """The tokens of a row that stay: those that, with all less probable ones, have more than `dropped`, which is 1 - p.

    None where only the warper can tell. `probs` are the softmax of `scores`.
    """
    share, total = dropped / len(probs), float(probs.sum())  # the tokens below the share have less than `dropped`
    for coarse in _COARSE:
        tokens = np.flatnonzero(probs >= share * coarse)
        if len(tokens) > len(probs) // 2:
            return None
        unseen = total - float(probs[tokens].sum(dtype=np.float64))
        if unseen < dropped - _BAND:  # what is not looked at is dropped as a whole
            break
    else:
        return None
    tokens = tokens[scores[tokens].argsort(kind="stable")]  # the least probable first
    sums = unseen + probs[tokens].cumsum(dtype=np.float64)
    if len(tokens) <= least or (np.abs(sums - dropped) < _BAND).any():
        return None
    return tokens[min(int(sums.searchsorted(dropped, "right")), len(tokens) - least) :]
