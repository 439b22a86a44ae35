"""Thin scripts around the library: question sets, answer files, reports, comparisons, demos.

In a notebook `evaluate` answers questions, `load` reads answer files and `figures` sums them up, as pandas tables.
"""

import importlib
from typing import Any

import opt_tree  # noqa: F401  first of all: Ctrl-C while the rest is imported is no traceback

_HOMES = {"evaluate": "notebook", "figures": "report", "load": "answers.frames"}


def __getattr__(name: str) -> Any:
    """Import one of the three when it is asked for: a command imports its own module alone."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
