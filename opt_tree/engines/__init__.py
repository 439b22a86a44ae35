"""Engines: how one forward is computed."""

from opt_tree.engines.aot import Compiled, CompileError
from opt_tree.engines.base import Engine, Forward
from opt_tree.engines.captured import Captured
from opt_tree.engines.eager import Eager

__all__ = ["Captured", "CompileError", "Compiled", "Eager", "Engine", "Forward"]
