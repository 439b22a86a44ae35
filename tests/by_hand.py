"""Trees, steps and generations written by hand, of words that are a token each."""

import numpy as np
from byte_tokenizer import BYTES

from opt_tree import Generation, OptTree, Step, Tree
from opt_tree.generation import StepTimes

WORDS = ["the", " cat", " dog", " sat", " ran", "\n", "<b>&", "\x1b[31m", " ☃", "</script><b>", "&amp;\u2028"]
TIMES = StepTimes(0.004, 0.005, 0.001, 0.003, 0.0045, 0.002)


def word(text: str) -> int:
    """The token of one of WORDS."""
    return BYTES + WORDS.index(text)


def tree_of(tokens: list[str | int], parents: list[int], probs: list[float]) -> Tree:
    """A tree of words, or of tokens, with the probabilities of its paths."""
    rows = np.array([word(token) if isinstance(token, str) else token for token in tokens])
    return Tree(rows, np.array(parents), np.log(probs), np.zeros(len(rows), dtype=np.int64))


def step_of(tree: Tree, path: list[int], own: str | int) -> Step:
    """A step of 10 ms that accepts a path of the tree, with the target's own token behind it."""
    tokens = [*tree.tokens[path[1:]].tolist(), word(own) if isinstance(own, str) else own]
    return Step(tree, path, tokens, OptTree(), 1, 1, TIMES)


def generation_of(steps: list[Step], kept: int | None = None, prompt: list[int] | None = None) -> Generation:
    """A generation of these steps, the last one cut to `kept` tokens."""
    lengths = [len(step.tokens) for step in steps]
    if kept is not None:
        lengths[-1] = kept
    tokens = [token for step, length in zip(steps, lengths, strict=True) for token in step.tokens[:length]]
    return Generation(prompt or [word("the")], tokens, "length", steps, lengths, 0.5)
