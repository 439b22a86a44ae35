"""The picture of forward times. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, ScalarFormatter

from evaluation.latency.forwards import ForwardTime


def draw(measured: Sequence[ForwardTime], title: str, path: Path) -> None:
    """Draw time against tokens, as the paper's figure 3 does (arXiv:2406.17276): axes logarithmic, quartiles shaded."""
    contexts = sorted({one.context for one in measured})
    colours = {"target": plt.get_cmap("Blues"), "drafter": plt.get_cmap("Oranges")}
    figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=150)
    for model in ("target", "drafter"):
        for place, context in enumerate(contexts):
            line = sorted((c.tokens, c.ms, c.low, c.high) for c in measured if (c.model, c.context) == (model, context))
            if line:
                tokens, ms, low, high = zip(*line, strict=True)
                colour = colours[model](0.45 + 0.45 * (place + 1) / len(contexts))
                axes.plot(tokens, ms, marker="o", markersize=3, color=colour, label=f"{model}, context {context}")
                axes.fill_between(tokens, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="tokens in the forward", ylabel="milliseconds")
    axes.set_title(title, fontsize=6.5, loc="left", wrap=True)
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
