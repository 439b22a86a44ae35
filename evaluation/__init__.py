"""Thin scripts around the library: baselines, demos, and later question sets, answer files and reports."""
