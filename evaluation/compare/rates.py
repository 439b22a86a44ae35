"""How often the child of each rank is the accepted one: the rates that Sequoia's and Medusa's trees are computed from.

Counted on other questions than those that trees are compared on: rates fitted to the test set flatter the trees made
of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from tqdm import tqdm

from evaluation.questions.sets import Question
from evaluation.run.conversation import Conversation, alone
from opt_tree import Decoder, Generation, Pair, Sampling, Static, match
from opt_tree.children import Children, TopK
from opt_tree.errors import counted
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.recursive_rejection import without_replacement
from opt_tree.verify import Verifier

WIDTH, DEPTH = 12, 4
"""Ranks and layers that are counted."""
KINDS: dict[str, tuple[Callable[[int], Children], Verifier]] = {
    "TopK": (TopK, match),
    "WithoutReplacement": (WithoutReplacement, without_replacement),
    "IID": (IID, multi_round),
}
"""The kinds of siblings, each with the verifier that its papers judge it by (at temperature 0: `greedy`)."""


def measuring_tree(width: int, depth: int, siblings: Callable[[int], Children] = TopK) -> Static:
    """Return the tree that rates are counted on: the paths of ranks r1, ..., rd with (r1 + 1) ... (rd + 1) <= width.

    So the root has `width` children, and so has every node on the path of best ones. Every rank is tried at every
    depth, more often where it is more often met. That takes about width * log(width) ** (depth - 1) nodes instead of
    width ** depth. A shape, not a policy that looks at probabilities: those would choose which parents are counted.

              root                width 4, depth 2
          /    |   |  \\
         0     1   2   3
       / | | \\  | \\  |   |
      0  1 2 3  0 1  0   0
    """

    def below(path: tuple[int, ...], width: int) -> Iterator[tuple[int, ...]]:
        for rank in range(width if len(path) < depth else 0):
            yield (*path, rank)
            yield from below((*path, rank), width // (rank + 1))

    return Static(tuple(below((), width)), siblings)


@dataclass
class Counts:
    """Of the accepted nodes of each depth: how many had a child of each rank, and how often it was accepted."""

    tried: Int[np.ndarray, "depths ranks"]
    accepted: Int[np.ndarray, "depths ranks"]

    def add(self, generation: Generation) -> None:
        """Count every node whose next token was emitted: of the last step, those before the generation's end."""
        for step, emitted in zip(generation.steps, generation.accept_lengths, strict=True):
            for depth, row in enumerate(step.path[:emitted]):
                children = (step.tree.parents == row).nonzero()[0]
                if not len(children):
                    continue  # a leaf, or where the token budget cut the tree off
                self.tried[depth, : len(children)] += 1
                if depth < step.accepted:
                    self.accepted[depth, np.searchsorted(children, step.path[depth + 1])] += 1

    def rates(self, least: int) -> AcceptanceRates:
        """Return the rates of ranks and depths that were tried at least that often.

        Raises ValueError where not even the first rank was.
        """
        by_rank = _rates(self.tried.sum(0), self.accepted.sum(0), least)
        if not by_rank:
            raise ValueError(
                f"too few questions for acceptance rates: the first rank was tried {self.tried[:, 0].sum()} times, "
                f"fewer than {least}; raise --rates-questions"
            )
        by_depth = []
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            rates = _rates(tried, accepted, least)
            if not rates:
                break
            by_depth.append(rates)
        return AcceptanceRates(by_rank, tuple(by_depth))


def _rates(tried: Int[np.ndarray, " ranks"], accepted: Int[np.ndarray, " ranks"], least: int) -> tuple[float, ...]:
    """The rates of the ranks before the first that was tried too seldom."""
    enough = int(np.argmin(np.append(tried >= least, False)))
    return tuple((accepted[:enough] / tried[:enough]).tolist())


def measure(
    pair: Pair, kind: str, sampling: Sampling, questions: Sequence[Question], conversation: Conversation
) -> Counts:
    """Let the library's loop answer the questions with the measuring tree, and count."""
    siblings, verifier = KINDS[kind]
    tree, counts = measuring_tree(WIDTH, DEPTH, siblings), Counts(*np.zeros((2, DEPTH, WIDTH), dtype=int))
    decoder = Decoder(pair.target, pair.drafter, tree, verifier)

    def answer(prompt: list[int], limit: int, seed: int) -> Generation:
        generation = decoder.generate(prompt, limit, sampling, conversation.prompter.stop, seed=seed)
        counts.add(generation)
        return generation

    for question in tqdm(questions, desc=f"{kind}, {counted(tree.nodes, 'node')} a step", unit="question", leave=False):
        alone(answer, conversation.answer(question, answer))
    return counts
