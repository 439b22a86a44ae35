"""How long a forward takes: one through `opt_tree.CausalLM`, mask and cache included, as decoding runs it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import trange

from evaluation.command_line import table
from evaluation.timing import schedule, shuffled
from opt_tree import CausalLM

_WARM_UP = 2
_LEAST = 3


@dataclass(frozen=True)
class ForwardTime:
    """One measurement: a forward of so many tokens behind so many committed ones; median and quartiles."""

    model: str
    """"target" or "drafter"."""
    context: int
    tokens: int
    ms: float
    low: float
    high: float
    repeats: int


class Probe:
    """Times forwards of one model behind a committed context of random tokens. An EAGLE head `reads_features`."""

    def __init__(self, name: str, lm: CausalLM, reads_features: bool = False) -> None:
        self.name, self.lm, self._reads = name, lm, reads_features
        self._random = np.random.default_rng(0)
        self._vocab = min(lm.vocab, lm.model.get_input_embeddings().weight.shape[0])

    def fits(self, context: int, tokens: int) -> bool:
        return context + tokens <= self.lm.max_context

    @torch.inference_mode()
    def fill(self, context: int) -> None:
        """Begin anew with a context of this length."""
        self.lm.reset()
        self.lm.append(self._tokens(context).tolist(), features=self._features(context))

    @torch.inference_mode()
    def time(self, tokens: int) -> float:
        """Seconds of one forward of `tokens` rows, until its results are there. Its rows are dropped again."""
        ids, features = self._tokens(tokens), self._features(tokens)
        positions, visible = self.lm.length + np.arange(tokens), np.tri(tokens, dtype=bool)
        self._finish()
        begin = time.perf_counter()
        self.lm.extend(ids, positions, visible, features)
        self._finish()
        seconds = time.perf_counter() - begin
        self.lm.commit([])
        return seconds

    def _tokens(self, count: int) -> np.ndarray:
        return self._random.integers(0, self._vocab, count)

    def _features(self, count: int) -> torch.Tensor | None:
        """An EAGLE head's other input; any numbers do."""
        if not self._reads:
            return None
        return torch.zeros(count, self.lm.hidden, dtype=self.lm.dtype, device=self.lm.device)

    def _finish(self) -> None:
        if self.lm.device.type != "cpu":
            torch.accelerator.synchronize(self.lm.device)


def measure(
    probes: Sequence[Probe], contexts: Sequence[int], tokens: Sequence[int], repeats: int, patience: float
) -> list[ForwardTime]:
    """Time every model at every size, `repeats` times each after a warm-up, in a new order every round.

    A size whose forwards have taken `patience` seconds together is not repeated further (three times it always is).
    """
    measured = []
    for context in contexts:
        for probe in probes:
            if probe.fits(context, 1):
                probe.fill(context)
        places = [(probe, count) for probe in probes for count in tokens if probe.fits(context, count)]
        seconds: dict[tuple[Probe, int], list[float]] = {place: [] for place in places}
        rounds = trange(_WARM_UP + repeats, desc=f"context {context}", unit="round", leave=False, disable=None)
        for place, _ in schedule(places, rounds, order=shuffled):
            if len(seconds[place]) < _WARM_UP + _LEAST or sum(seconds[place]) < patience:
                seconds[place].append(place[0].time(place[1]))
        for (probe, count), times in seconds.items():
            low, middle, high = (1000 * float(q) for q in np.percentile(times[_WARM_UP:], (25, 50, 75)))
            measured.append(ForwardTime(probe.name, context, count, middle, low, high, len(times) - _WARM_UP))
    return measured


def forwards_table(measured: Sequence[ForwardTime]) -> str:
    """Milliseconds, a line for each number of tokens, a column for each model and context."""
    columns = list(dict.fromkeys((one.model, one.context) for one in measured))
    columns.sort(key=lambda column: (column[0] != "target", column[1]))
    ms = {(one.model, one.context, one.tokens): one.ms for one in measured}
    sizes = sorted({one.tokens for one in measured})
    heads = {column: f"{column[0]} @{column[1]}" for column in columns}
    return table([{"tokens": n} | {head: ms.get((*column, n)) for column, head in heads.items()} for n in sizes])
