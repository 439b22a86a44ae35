"""Engines: how one forward is computed."""

from opt_tree.engines.base import Engine, Inputs
from opt_tree.engines.compiled import Compiled, CompileError
from opt_tree.engines.cuda_graphs import Captured
from opt_tree.engines.eager import Eager

__all__ = ["Captured", "CompileError", "Compiled", "Eager", "Engine", "Inputs"]
