"""What the target said of the tokens that it emitted: whether they could be drawn at all, and their log-probabilities.

Both read the rows of a step's path, after it was judged. A row without a choice is refused: a verifier answers some
token for any row of numbers. What somebody asks for stays where the logits lie until the generation is over, so that no
step waits for it.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from math import inf, isnan
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree.errors import require
from opt_tree.processors import History, named
from opt_tree.sampling import LazyLogits, Logits, Sampling
from opt_tree.tree import Tree, fetch, on_host, send


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
    sampling: Sampling, logits: Float[Tensor, "rows vocab"], tree: Tree, history: History, row: int
) -> ValueError:
    """Say who leaves nothing to draw from at a row: the model, or the first processor behind which there is nothing.

    `logits` are the model's own. `transformers.generate` raises likewise above temperature 0, without the name.
    """
    here = logits[row : row + 1]
    steps: list[Callable] = [*sampling.processors, *sampling.warpers()]
    why = "its probability is 0"
    if bool(here.isnan().any()):
        why, steps = "the model's logits are not numbers (NaN), so some of its weights or inputs are not", []
    for count, process in enumerate(steps, 1):
        # Exactly these steps: at temperature 0 no warper joins them.
        own = replace(sampling, temperature=0.0, processors=tuple(steps[:count]))
        found = own.process_rows(here, tree, history, [row])
        if bool(found.isnan().any()) or bool((found == -inf).all()):
            why = f"{named(process)} {'answers NaN' if found.isnan().any() else 'allows no token'}"
            break
    return ValueError(f"no token can be drawn at row {row} of a tree of {len(tree)}: {why}")


class Recorder:
    """Keeps what the target said of each emitted token.

    The log-probability of a token is that of the target's processed distribution behind the text before it: the
    log-softmax of its logits after processors, temperature, top-k and top-p. At temperature 0 nothing is divided or
    cut: it is that of the logits after the processors. So are the scores of `transformers.generate`, and
    `compute_transition_scores(..., normalize_logits=True)` there gives the same numbers.

    Arguments:
        likeliest: how many of the likeliest tokens are kept at each place.
        rows: which whole rows are kept as well, in float32: "logits", as the model gave them, or "scores", the
            processed ones. Each row has a number for every token of the vocabulary.
    """

    def __init__(self, likeliest: int = 0, rows: Collection[str] = ()) -> None:
        self._likeliest = likeliest
        self._rows: dict[str, list[Tensor]] = {kind: [] for kind in rows}
        self._own: list[Tensor] = []
        self._values: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def add(self, logits: Float[Tensor, "rows vocab"], scores: Logits, path: list[int], tokens: list[int]) -> None:
        """Take in a step: the logits of its tree, the processed ones, the accepted rows, and the tokens behind them."""
        rows = send(np.array(path), logits.device)
        processed = torch.stack([scores[row] for row in path]) if isinstance(scores, LazyLogits) else scores[rows]
        processed = processed.to(torch.promote_types(processed.dtype, torch.float32))
        log_probs = processed.log_softmax(-1)
        self._own.append(log_probs.gather(1, send(np.array(tokens), logits.device)[:, None])[:, 0])
        if self._likeliest:
            best = log_probs.topk(min(self._likeliest, log_probs.shape[1]))
            self._values.append(best.values)
            self._tokens.append(best.indices)
        for kind, kept in self._rows.items():
            kept.append((logits[rows] if kind == "logits" else processed).float())

    def told(self, length: int) -> tuple[list[float], list[dict[int, float]] | None]:
        """Log-probabilities of the first `length` tokens, and the likeliest at each place, the likeliest first.

        The host waits once. A place where fewer tokens are possible has fewer.
        """
        if not self._likeliest:
            return fetch(torch.cat(self._own))[0][:length].tolist() if self._own else [], None
        if not self._own:
            return [], []
        own, values, tokens = fetch(*map(torch.cat, (self._own, self._values, self._tokens)))
        places = [
            {token: value for token, value in zip(*place, strict=True) if value > -inf}
            for place in zip(tokens[:length].tolist(), values[:length].tolist(), strict=True)
        ]
        return own[:length].tolist(), places

    def rows(self, kind: str, length: int) -> Float[Tensor, "length vocab"]:
        """The rows from which the first `length` tokens were drawn, where they lie."""
        return torch.cat(self._rows[kind])[:length]


def recorder_of(asked: Any, vocab: int) -> Recorder | None:
    """Return what keeps the log-probabilities that `generate` was asked for. TypeError, ValueError for a bad number."""
    if isinstance(asked, Recorder):
        return asked
    if asked is None or asked is False:
        return None
    require(Integral, log_probs=asked)
    if not 1 <= asked <= vocab:
        raise ValueError(f"log_probs: True, or how many of the likeliest of {vocab} tokens at each place, got {asked}")
    return Recorder(0 if asked is True else int(asked))
