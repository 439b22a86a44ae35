"""What the target said of the tokens that a generation emitted: their log-probabilities, and the likeliest beside them.

It stays where the logits lie until the generation is over, so that no step waits for it.
"""

from collections.abc import Collection
from math import inf
from numbers import Integral

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree.errors import require
from opt_tree.sampling import LazyLogits, Logits
from opt_tree.tree import fetch, send


class Recorder:
    """Keeps what the target said of each emitted token; for one generation at a time.

        decoder.generate(prompt, recorder=Recorder(5)).top_log_probs

    The log-probability of a token is that of the target's processed distribution behind the text before it: the
    log-softmax of its logits after processors, temperature, top-k and top-p. At temperature 0 nothing is divided or
    cut: it is that of the logits after the processors. So are the scores of `transformers.generate`, and
    `compute_transition_scores(..., normalize_logits=True)` there gives the same numbers.

    Arguments:
        likeliest: how many of the likeliest tokens are kept at each place; 0: the emitted token's number alone.
        rows: which whole rows are kept as well, in float32: "logits", as the model gave them, or "scores", the
            processed ones. Each row has a number for every token of the vocabulary.

    Raises TypeError or ValueError for a bad number or kind of rows, ValueError when a text begins whose target has a
    smaller vocabulary than `likeliest`.
    """

    def __init__(self, likeliest: int = 0, rows: Collection[str] = ()) -> None:
        require(Integral, likeliest=likeliest)
        if likeliest < 0:
            raise ValueError(f"likeliest must be how many tokens are kept at each place, 0 or more, got {likeliest}")
        if isinstance(rows, str) or not {"logits", "scores"}.issuperset(rows):
            raise ValueError(f'rows: a list of "logits" and "scores", got {rows!r}')
        self._likeliest, self._kinds = int(likeliest), tuple(rows)
        self.begin(self._likeliest)

    def begin(self, vocab: int) -> None:
        """Forget what was kept: a text begins, of a target with so many logits a row."""
        if self._likeliest > vocab:
            raise ValueError(f"likeliest: {self._likeliest} of a vocabulary of {vocab} at each place")
        self._rows: dict[str, list[Tensor]] = {kind: [] for kind in self._kinds}
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
            best = log_probs.topk(self._likeliest)
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
        """The rows from which the first `length` tokens were drawn, where they lie. ValueError if none were kept."""
        if not self._rows.get(kind):
            raise ValueError(f"no {kind} were kept: Recorder(rows=[{kind!r}]) keeps those of one text")
        return torch.cat(self._rows[kind])[:length]
