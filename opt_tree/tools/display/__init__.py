"""Generations and trees as text, ANSI and HTML."""
