"""Backends: how one forward is computed."""

from opt_tree.engines.base import Backend, Inputs
from opt_tree.engines.compiled import Compiled, CompileError
from opt_tree.engines.cuda_graphs import Captured
from opt_tree.engines.packed import Buckets, Packed

__all__ = ["Backend", "Buckets", "Captured", "CompileError", "Compiled", "Inputs", "Packed"]
