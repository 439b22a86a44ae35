"""A text that a target wrote, and what says it again: the target that policies are walked in front of."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opt_tree.decoder import Decoder
from opt_tree.methods.policies.static import Static
from opt_tree.request import StopRule, StopTokens, ends_of, rule_for
from opt_tree.target import Forward, Output, Target
from opt_tree.tree import Tree


@dataclass(frozen=True)
class StoredText:
    """A text that a target wrote: the prompt, the tokens behind it, and how long it might have become."""

    prompt: list[int]
    tokens: list[int]
    limit: int
    """New tokens that were asked for; the text may have ended before."""
    ends: frozenset[int] = frozenset()
    """The tokens at which it stops: nothing is drafted below them."""


def written(target: Target, prompt: list[int], max_new_tokens: int, stop: StopRule | None = StopTokens()) -> StoredText:
    """Decode plainly and greedily, a token a step."""
    made = Decoder(target, None, Static.empty()).generate(prompt, max_new_tokens, stop=stop)
    return StoredText(prompt, made.tokens, max_new_tokens, ends_of(rule_for(stop, target.ends)))


class Said(Target):
    """A target that says a stored text again. The context of `like` ends where its own does."""

    name = "a stored text"

    def __init__(self, text: StoredText, like: Target | None) -> None:
        self._text, self._like = [*text.prompt, *text.tokens], like
        self.vocab, self.max_context = max(self._text) + 1, 1 << 30 if like is None else like.max_context

    def reset(self) -> None:
        super().reset()
        self.length = 0

    def run(self, forward: Forward) -> Output:
        if forward.tree is None:
            self.length += len(forward.tokens)
            return Output(torch.zeros(1, 1))
        rest = self._text[self.length + 1 :]
        logits = torch.zeros(len(forward.tree), self.vocab)
        for row, token in zip(follow(forward.tree, rest), rest, strict=False):
            logits[row, token] = 1
        return Output(logits)

    def commit(self, path: list[int]) -> None:
        self.length += len(path)


class Until:
    """Stops where the stored text does."""

    def __init__(self, text: StoredText) -> None:
        self.tokens, self._end = text.ends, len(text.tokens)

    def __call__(self, generated: list[int]) -> str | None:
        return "end" if len(generated) >= self._end else None


def follow(tree: Tree, tokens: Sequence[int]) -> list[int]:
    """Return the rows of the path, root first, that these tokens take down a tree of distinct siblings."""
    child = {(int(tree.parents[row]), int(tree.tokens[row])): row for row in range(1, len(tree))}
    path = [0]
    for token in tokens:
        if (row := child.get((path[-1], token))) is None:
            break
        path.append(row)
    return path
