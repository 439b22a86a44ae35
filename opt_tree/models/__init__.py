"""transformers models: load one, wrap it, score a tree with it."""

from pathlib import Path

DEMO = Path(__file__).parent / "embedded"
"""The folder of the models that come with the package."""
