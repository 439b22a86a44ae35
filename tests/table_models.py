"""Drafters and targets without a model.

Laws are functions of the whole token path (context and branch), so nothing here needs a network, a file or a GPU.
"""

from collections.abc import Mapping

import numpy as np

from opt_tree import Tree
from opt_tree.children import LogProbs
from opt_tree.pool import Frontier
from opt_tree.target import Forward, Output, Target, Work
from opt_tree.tools import enumeration
from opt_tree.tools.enumeration import Laws, hashed_laws, log_rows  # noqa: F401


def written_laws(table: Mapping[tuple[int, ...], tuple[float, ...]]) -> Laws:
    """Laws by hand: the entry of the longest suffix of the path that the table knows; () answers for everything."""

    def law(path: tuple[int, ...]) -> np.ndarray:
        return np.array(next(table[path[i:]] for i in range(len(path) + 1) if path[i:] in table))

    return law


class TableDrafter(enumeration.TableDrafter):
    """Drafts from laws given as a function of the token path; `expanded` lists what it was asked to expand."""

    def __init__(self, laws: Laws) -> None:
        super().__init__(laws)
        self.forwards = self.tokens = 0
        self.expanded: list[list[tuple[int, ...]]] = []
        """Branches below the root, one list a layer, of the current step."""

    def root(self, context: list[int]) -> LogProbs:
        self._base, self.expanded = len(context), []
        return self._counted(super().root(context))

    def expand(self, frontier: Frontier) -> LogProbs:
        answer = self._counted(super().expand(frontier))
        self.expanded.append([path[self._base :] for path in self._paths[-len(answer.values) :]])
        return answer

    @property
    def work(self) -> Work:
        return Work(self.forwards, self.tokens)

    def _counted(self, answer: LogProbs) -> LogProbs:
        self.forwards += 1
        self.tokens += len(answer.values)
        return answer


class TableTarget(Target):
    """A target without a model: its logits are the logarithms of the laws, at every row of a tree."""

    def __init__(self, laws: Laws, vocab: int, max_context: int = 1 << 20) -> None:
        self.laws, self.name, self.vocab, self.max_context = laws, "a table", vocab, max_context
        self._context: list[int] = []
        self._scored: list[int] = []

    def reset(self) -> None:
        super().reset()
        self._context = []

    @property
    def length(self) -> int:
        return len(self._context)

    def run(self, forward: Forward) -> Output:
        if forward.tree is not None:
            return self._score(forward.tree)
        self._context += forward.tokens.tolist()
        begin = len(self._context) + 1 - (1 if forward.last_only else len(forward.tokens))
        return Output(log_rows(self.laws, [tuple(self._context[:end]) for end in range(begin, len(self._context) + 1)]))

    def _score(self, tree: Tree) -> Output:
        self.work += Work(forwards=1, tokens=len(tree))
        self._scored = tree.tokens.tolist()
        branches = [tree.tokens[tree.path_to(row)].tolist() for row in range(len(tree))]
        return Output(log_rows(self.laws, [(*self._context, *branch) for branch in branches]))

    def commit(self, path: list[int]) -> None:
        self._context += [self._scored[row] for row in path]
