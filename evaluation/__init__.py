"""Thin scripts around the library: baselines, demos, and later question sets, answer files and reports."""

import opt_tree  # noqa: F401  first of all: Ctrl-C while the rest is imported is no traceback
