"""Children: how siblings are picked from what a drafter said. A verifier is valid for some kinds only."""

from opt_tree.core.children.base import Best, Children, Few, Layer, Picked, Picking, Reduced
from opt_tree.core.children.best_and_draw import BestAndDraw
from opt_tree.core.children.equal import EqualSiblings
from opt_tree.core.children.iid import IID
from opt_tree.core.children.top_k import TopK
from opt_tree.core.children.without_replacement import WithoutReplacement

__all__ = [
    "IID",
    "Best",
    "BestAndDraw",
    "Children",
    "EqualSiblings",
    "Few",
    "Layer",
    "Picked",
    "Picking",
    "Reduced",
    "TopK",
    "WithoutReplacement",
]
