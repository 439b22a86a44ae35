"""Generations and trees as text, ANSI and HTML."""

from opt_tree.display.advice import draw_advice
from opt_tree.display.explorer import explore
from opt_tree.display.notebook import in_notebook
from opt_tree.display.page import summary, telling_steps, to_html
from opt_tree.display.transcripts import IncrementalText, Piece, paint, pieces, token_label, transcript
from opt_tree.display.trees import draw_tree, svg_tree

__all__ = [
    "IncrementalText",
    "Piece",
    "draw_advice",
    "draw_tree",
    "explore",
    "in_notebook",
    "paint",
    "pieces",
    "summary",
    "svg_tree",
    "telling_steps",
    "to_html",
    "token_label",
    "transcript",
]
