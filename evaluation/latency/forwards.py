"""How long a forward takes: measured, tabulated, interpolated, drawn.

Owns the measuring of one forward through `opt_tree.CausalLM`, mask and cache included, as decoding runs it.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from evaluation.latency.budget import Curve
from opt_tree import CausalLM

_WARM_UP = 2
_LEAST = 3


@dataclass(frozen=True)
class Cell:
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
) -> list[Cell]:
    """Time every model at every size, `repeats` times each after a warm-up, in a new order every round.

    So a machine that drifts or a neighbour that wakes up hurts all sizes and models alike. A size whose forwards have
    taken `patience` seconds together is not repeated further (three times it always is).
    """
    cells = []
    with tqdm(total=len(contexts) * (_WARM_UP + repeats), desc="measuring", disable=None) as progress:
        for context in contexts:
            places = [(probe, count) for probe in probes for count in tokens if probe.fits(context, count)]
            for probe in probes:
                if probe.fits(context, 1):
                    probe.fill(context)
            seconds: dict[tuple[Probe, int], list[float]] = {place: [] for place in places}
            order = random.Random(0)
            for _ in range(_WARM_UP + repeats):
                order.shuffle(places)
                for probe, count in places:
                    times = seconds[probe, count]
                    if len(times) < _WARM_UP + _LEAST or sum(times) < patience:
                        times.append(probe.time(count))
                progress.update()
            for (probe, count), times in seconds.items():
                low, middle, high = (1000 * float(q) for q in np.percentile(times[_WARM_UP:], (25, 50, 75)))
                cells.append(Cell(probe.name, context, count, middle, low, high, len(times) - _WARM_UP))
    return cells


def curve(cells: Sequence[Cell], model: str, context: int) -> Curve:
    """Seconds of a forward against its tokens, linear between the measured sizes and behind the last two."""
    found = sorted((cell.tokens, cell.ms / 1000) for cell in cells if (cell.model, cell.context) == (model, context))
    sizes, seconds = (np.array(column) for column in zip(*found, strict=True))

    def at(tokens: float) -> float:
        if tokens > sizes[-1] and len(sizes) > 1:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            return float(seconds[-1] + max(0.0, slope) * (tokens - sizes[-1]))
        return float(np.interp(tokens, sizes, seconds))

    return at


def draw(cells: Sequence[Cell], title: str, path: Path) -> None:
    """Draw time against tokens, as the paper's figure 3 does (arXiv:2406.17276): axes logarithmic, quartiles shaded."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    contexts = sorted({cell.context for cell in cells})
    colours = {"target": plt.get_cmap("Blues"), "drafter": plt.get_cmap("Oranges")}
    figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=150)
    for model in ("target", "drafter"):
        for place, context in enumerate(contexts):
            line = sorted((c.tokens, c.ms, c.low, c.high) for c in cells if (c.model, c.context) == (model, context))
            if line:
                tokens, ms, low, high = zip(*line, strict=True)
                colour = colours[model](0.45 + 0.45 * (place + 1) / len(contexts))
                axes.plot(tokens, ms, marker="o", markersize=3, color=colour, label=f"{model}, context {context}")
                axes.fill_between(tokens, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="tokens in the forward", ylabel="milliseconds")
    axes.set_title(title, fontsize=6.5, loc="left", wrap=True)
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
