"""A target and a drafter that run every path once: thousands of generations from one prompt for some hundred forwards.

For questions about randomness alone, such as `draws`: pools, policies, verifiers and the loop stay what they
are. Rows are kept as they first came, on the host; in half precision another tree would have rounded them otherwise.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree import CausalLM, Drafter, Tree
from opt_tree.core.pool import Frontier
from opt_tree.core.step import Outcome
from opt_tree.core.target import Output, Target

Text = tuple[int, ...]


class MemoisedTarget(Target):
    """A target that knows the rows of a tree by the tokens that lead to them.

    A tree with a path not seen before is scored by the real target, as a whole; rows that are known already stay.
    """

    def __init__(self, real: CausalLM) -> None:
        self.real, self.name, self.vocab, self.max_context = real, real.name, real.vocab, real.max_context
        self._context: list[int] = []
        self._scored: list[int] = []
        self._rows: dict[Text, Float[Tensor, " vocab"]] = {}

    def reset(self) -> None:
        super().reset()
        self._context = []

    def append(self, tokens: list[int], all_logits: bool = False) -> Output:
        """Note the context. Nothing runs yet, so the Output is empty: `MemoisedDrafter` needs none."""
        self._context += tokens
        return Output(torch.empty(0, self.vocab))

    def score(self, tree: Tree) -> Output:
        paths = [(*self._context, *tree.tokens[tree.path_to(row)].tolist()) for row in range(len(tree))]
        if any(path not in self._rows for path in paths):
            prefill(self.real, self._context)
            for path, logits in zip(paths, self.real.score(tree).logits, strict=True):
                self._rows.setdefault(path, logits.cpu().clone())
        self._scored = tree.tokens.tolist()
        return Output(torch.stack([self._rows[path] for path in paths]))

    def commit(self, path: list[int]) -> None:
        self._context += [self._scored[row] for row in path]


class MemoisedDrafter(Drafter):
    """A drafter that knows its scores by context and branch.

    By both, because the same text can have two distributions: a head reads the target's features of the context, and
    its own estimates of the branch. `target` is the real one, whose features the real drafter begins with. (Behind a
    prompt of one token a head's first input has no feature; that is forgotten as soon as there is a second token.)
    """

    def __init__(self, real: Drafter, target: CausalLM) -> None:
        self.real, self._target, self.max_context = real, target, real.max_context
        target.watch(real.features)
        self._known: dict[tuple[Text, Text], Float[Tensor, " vocab"]] = {}

    def reset(self, prompt: list[int], output: Output | None) -> None:
        """Nothing is kept from one generation to the next but scores."""

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"]:
        self._context = list(context)
        self._branches: list[Text] = [()]  # by draft row
        self._asked: list[Frontier] = []
        return self._answer([()])

    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"]:
        grown = zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        branches = [(*self._branches[parent], token) for parent, token in grown]
        self._branches += branches
        self._asked.append(frontier)
        return self._answer(branches)

    def observe(self, outcome: Outcome) -> None:
        """What survived is part of the next `root`'s context."""

    def _answer(self, branches: list[Text]) -> Float[Tensor, "rows vocab"]:
        context = tuple(self._context)
        keys = [(context, branch) for branch in branches]
        if any(key not in self._known for key in keys):
            self.real.reset(self._context, prefill(self._target, self._context[:-1]))
            scores = self.real.root(self._context)
            for frontier in self._asked:
                scores = self.real.expand(frontier)
            for key, row in zip(keys, scores, strict=True):
                self._known.setdefault(key, row.cpu().clone())
        return torch.stack([self._known[key] for key in keys])


def prefill(target: CausalLM, tokens: list[int]) -> Output | None:
    """Begin a new context on a real target; the Output is None where there is nothing to begin with."""
    target.reset()
    return target.append(tokens) if tokens else None
