"""Pearson's chi-square test: whether texts were drawn from the distribution that they should have been drawn from."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2

Text = tuple[int, ...]

LEAST = 5.0
"""Draws that a cell must expect: fewer are too coarse for the chi-square distribution. Rarer texts share a cell."""


@dataclass(frozen=True)
class Fit:
    """How well draws agree with a distribution."""

    statistic: float
    """Pearson's chi-square over the cells; cells - 1 degrees of freedom."""
    cells: int
    impossible: int
    """Draws that have probability 0: one of them refutes the distribution."""
    p_value: float
    """How often chance alone gives a statistic as large."""


def cells(target: Mapping[Text, float], draws: int) -> list[list[Text]]:
    """Group texts so that each group expects `LEAST` of the draws or more: the rare ones together, all others alone.

    Raises ValueError where that leaves fewer than two.
    """
    texts = sorted(target, key=target.__getitem__, reverse=True)
    common = sum(draws * target[text] >= LEAST for text in texts)
    groups, rare = [[text] for text in texts[:common]], texts[common:]
    if draws * sum(target[text] for text in rare) >= LEAST:
        groups.append(rare)
    elif groups:
        groups[-1] += rare  # too rare even together
    if len(groups) < 2:
        raise ValueError(
            f"{draws} draws over {len(texts)} texts make fewer than two cells that expect {LEAST:g} of them: "
            "more --draws, or other --temperature, --top-k and --top-p"
        )
    return groups


def fit(drawn: Counter[Text], target: Mapping[Text, float]) -> Fit:
    """Test draws against the distribution they should have."""
    draws = drawn.total()
    groups = cells(target, draws)
    expected = np.array([draws * sum(target[text] for text in group) for group in groups])
    seen = np.array([sum(drawn[text] for text in group) for group in groups])
    impossible = draws - int(seen.sum())
    statistic = float(((seen - expected) ** 2 / expected).sum())
    return Fit(statistic, len(groups), impossible, 0.0 if impossible else float(chi2.sf(statistic, len(groups) - 1)))
