"""Engines: how one forward is computed."""

from opt_tree.engines.base import Engine, Forward
from opt_tree.engines.eager import Eager

__all__ = ["Eager", "Engine", "Forward"]
