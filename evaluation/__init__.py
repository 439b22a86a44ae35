"""Thin scripts around the library: question sets, answer files, reports, comparisons, demos.

In a notebook `figures` sums answer files up as a pandas table.
"""

from typing import Any

import opt_tree  # noqa: F401  first of all: Ctrl-C while the rest is imported is no traceback


def __getattr__(name: str) -> Any:
    """Import `figures` when it is asked for: a command imports its own module alone."""
    if name != "figures":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from evaluation.report import figures

    return figures
