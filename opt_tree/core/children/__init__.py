"""Children: how siblings are picked from what a drafter said. A verifier is valid for some kinds only."""

from opt_tree.core.children.base import Children
from opt_tree.core.children.best_and_draw import BestAndDraw
from opt_tree.core.children.drawn import DrawnPool, EqualSiblings, Layer
from opt_tree.core.children.iid import IID
from opt_tree.core.children.top_k import TopK
from opt_tree.core.children.without_replacement import WithoutReplacement
from opt_tree.core.pool import Picked

__all__ = [
    "IID",
    "BestAndDraw",
    "Children",
    "DrawnPool",
    "EqualSiblings",
    "Layer",
    "Picked",
    "TopK",
    "WithoutReplacement",
]
