"""Is a canonical text what one prefill of it says, bit for bit? Owns the count; knows nothing of files.

A text is computed anew in two ways: in one prefill, and by trees of one to six of its tokens, each beside another
token. In a canonical target every row of a tree has the bits of the prefill's, and every greedy token is the one that
its logits choose.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from opt_tree import CausalLM, Tree

_MOST = 6


class Certificate(NamedTuple):
    """What was counted in some texts."""

    tokens: int = 0
    chosen: int = 0
    """Tokens that the logits of one prefill choose."""
    rows: int = 0
    equal: int = 0
    """Rows of trees that have the bits of one prefill's."""

    @property
    def whole(self) -> bool:
        """Whether nothing differs."""
        return self.chosen == self.tokens and self.equal == self.rows


@torch.inference_mode()
def certify(target: CausalLM, prompt: list[int], tokens: list[int]) -> Certificate:
    """Compute a greedy text behind `prompt` in both ways. Forgets the target's context."""
    text = [*prompt, *tokens]
    first = len(prompt) - 1
    target.reset()
    whole = target.append(text[:-1], all_logits=True).logits[first:].clone()
    chosen = int((whole.argmax(-1) == torch.tensor(tokens)).sum())
    target.reset()
    if first:
        target.append(text[:first])
    equal, place = 0, 0
    while place < len(tokens):
        count = min(place % _MOST + 1, len(tokens) - place)
        tree, path = _beside(text[first + place : first + place + count], target.vocab)
        rows = target.score(tree).logits[path]
        equal += int((_bits(rows) == _bits(whole[place : place + count])).all(-1).sum())
        target.commit(path)
        place += count
    target.reset()
    return Certificate(len(tokens), chosen, len(tokens), equal)


def _beside(tokens: list[int], vocab: int) -> tuple[Tree, list[int]]:
    """A tree with these tokens on one path, each behind another child of the same parent; and the rows of the path."""
    drafted, parents, path = tokens[:1], [-1], [0]
    for token in tokens[1:]:
        parents += [path[-1], path[-1]]
        drafted += [(token + 1) % vocab, token]
        path.append(len(drafted) - 1)
    zeros = np.zeros(len(drafted))
    return Tree(np.array(drafted), np.array(parents), zeros, zeros.astype(np.int64)), path


def _bits(logits: Tensor) -> Tensor:
    return logits.contiguous().view(torch.int16 if logits.element_size() == 2 else torch.int32)
