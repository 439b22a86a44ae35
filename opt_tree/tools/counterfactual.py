"""What other policies would have drawn at every step of a generation, from the same drafter in the same state.

Owns the memory of what a drafter was asked in a step. It is asked again only for nodes that nobody expanded yet, after
the step's own tree is verified and before the drafter learns of it: text and trees of the run stay as they are.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from opt_tree.answers import LogProbs
from opt_tree.decoder import Decoder
from opt_tree.drafter import Asked, Drafter
from opt_tree.errors import require
from opt_tree.generation import Generation, check_prompt
from opt_tree.grow import grow, layers_left, run
from opt_tree.methods.drafters.around import DrafterAround
from opt_tree.policy import TreePolicy, check_grows
from opt_tree.pool import Frontier
from opt_tree.sampling import Sampling
from opt_tree.step import Outcome
from opt_tree.target import Work
from opt_tree.tree import Tree
from opt_tree.verify import match


@dataclass(frozen=True)
class Beside:
    """A generation, and at each of its steps the trees of other policies."""

    generation: Generation
    """Its times do not contain what the other trees cost, but for copying the drafter's answers."""
    trees: list[dict[str, Tree]]
    """Of every step: the tree of each policy, at the same context. A policy is missing where its tree is not known:
    where the step drafted nothing, and where it wants an answer that the drafter can no longer be asked for."""
    accepted: list[dict[str, int]]
    """Of every step: the A that each tree would have had. Missing where that is not known: behind the end of the text,
    and where the run's verifier draws text that depends on the tree (every one but `greedy` and `match`)."""


def generate_beside(
    decoder: Decoder,
    policies: Mapping[str, TreePolicy],
    prompt: Sequence[int] | Tensor,
    max_new_tokens: int = 128,
    **options: Any,
) -> Beside:
    """Do what `decoder.generate(prompt, max_new_tokens, **options)` does, and draw the trees of `policies` beside it.

    Every step costs their draft forwards on top. Drafters that answer in `any_order` (an independent model, an EAGLE
    head, a table) know all of these trees; others only those below nodes that the run itself expanded. Raises
    ValueError for a decoder without a drafter and for a policy that draws its children: it has no one tree. Raises
    TypeError for what grows no tree itself.
    """
    require(Decoder, decoder=decoder)
    require(Mapping, policies=policies)
    if decoder.drafter is None:
        raise ValueError("a decoder without a drafter has no trees to compare others with")
    for name, policy in policies.items():
        check_grows(policy)
        if policy.children.sampled:
            raise ValueError(f"{name} draws its children: it has many trees at a step, not one")
    sampling = options.get("sampling", Sampling())
    target = decoder.target
    end = min(target.max_context, len(check_prompt(prompt, target)) + max_new_tokens)
    drafter = decoder.drafter
    watch = _Watch(drafter, policies, lambda length: layers_left(target, drafter, length, end))
    beside = copy.copy(decoder)
    beside.drafter = watch
    generation = beside.generate(prompt, max_new_tokens, **options)
    steps = [
        replace(step, times=replace(step.times, commit=max(step.times.commit - seconds, 0.0)))
        for step, seconds in zip(generation.steps, watch.seconds, strict=True)
    ]
    generation = replace(generation, steps=steps, seconds=generation.seconds - sum(watch.seconds))
    told = sampling.greedy or decoder.verifier is match
    return Beside(generation, watch.trees, _accepted(generation, watch.trees) if told else [{} for _ in steps])


def _accepted(generation: Generation, trees: list[dict[str, Tree]]) -> list[dict[str, int]]:
    """Follow the text down every tree: with `greedy` and `match` it is the same whatever the tree."""
    found, begin = [], 0
    for length, beside in zip(generation.accept_lengths, trees, strict=True):
        rest = generation.tokens[begin:]
        paths = {name: follow(tree, rest) for name, tree in beside.items()}
        found.append(
            {
                name: len(path) - 1
                for name, path in paths.items()
                # Where the text ends inside the tree, nobody knows what would have come next.
                if len(path) <= len(rest) or path[-1] not in beside[name].parents
            }
        )
        begin += length
    return found


def follow(tree: Tree, tokens: Sequence[int]) -> list[int]:
    """Return the rows of the path, root first, that these tokens take down a tree of distinct siblings."""
    child = {(int(tree.parents[row]), int(tree.tokens[row])): row for row in range(1, len(tree))}
    path = [0]
    for token in tokens:
        if (row := child.get((path[-1], token))) is None:
            break
        path.append(row)
    return path


class _Unknown(LookupError):
    """A node that the drafter was not asked for, and can no longer be."""


class _Asked:
    """What a drafter was asked in a step, and what it said: a row for each expanded node, the root's first."""

    def __init__(self, length: int) -> None:
        self.length = length
        """Of the context."""
        self.row: dict[tuple[int, int], int] = {}
        """Draft rows of expanded nodes by their parent's row and their token."""
        self._above: list[list[int]] = [[]]  # of each row: the columns that it sees, its own the last one
        self._said: list[tuple[Tensor, ...]] = []  # of each row: its values and, where it names a few, its tokens
        self._columns: Tensor | None = None  # the tokens of the columns, where they are those of all rows

    def add(self, frontier: Frontier | None, answer: LogProbs) -> None:
        """Note an answer; at first, without a frontier, the one to the root. Copied: the drafter may run again."""
        parts = [answer.values] if answer.tokens is None or not answer.names_few else [answer.values, answer.tokens]
        self._said += zip(*(part.clone() for part in parts), strict=True)
        self._columns = None if answer.names_few else answer.tokens
        if frontier is not None:
            for parent, token in zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True):
                self.row[parent, token] = len(self._above)
                self._above.append([*self._above[parent], len(self._above) - 1])

    def frontier(self, nodes: Sequence[tuple[int, int]]) -> Frontier:
        """Describe nodes that nobody expanded, given by their parents' rows and their tokens."""
        parents, tokens = np.array(nodes).T
        first = len(self._above)
        visible = np.zeros((len(nodes), first - 1 + len(nodes)), dtype=bool)
        for index, parent in enumerate(parents.tolist()):
            visible[index, [*self._above[parent], first - 1 + index]] = True
        return Frontier(tokens, parents, np.array([len(self._above[parent]) + 1 for parent in parents]), visible)

    def answer(self, rows: Sequence[int]) -> LogProbs:
        """Return what the drafter said of these rows."""
        values, *tokens = (list(part) for part in zip(*(self._said[row] for row in rows), strict=True))
        if tokens:  # as wide as the widest
            return LogProbs(pad_sequence(values, True, -torch.inf), pad_sequence(tokens[0], True))
        return LogProbs(torch.stack(values), self._columns)


class _Again(DrafterAround):
    """A drafter that draws one more tree of a step: it says what is noted, and asks only for what is not."""

    def __init__(self, drafter: Drafter, asked: _Asked) -> None:
        super().__init__(drafter)
        self._asked, self._rows = asked, [0]  # of the other tree's draft rows: the rows that are noted

    def root(self, context: list[int]) -> LogProbs:
        return self._asked.answer([0])

    def expand(self, frontier: Frontier) -> Asked:
        nodes = [
            (self._rows[parent], token)
            for parent, token in zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        ]
        new = [node for node in nodes if node not in self._asked.row]
        if new and not self.drafter.any_order:
            raise _Unknown
        if not new:
            return self._known(nodes)
        missing = self._asked.frontier(new)

        def noted(answer: LogProbs) -> LogProbs:
            self._asked.add(missing, answer)
            return self._known(nodes)

        return self.after(self.drafter.expand(missing), noted)

    def _known(self, nodes: list[tuple[int, int]]) -> LogProbs:
        rows = [self._asked.row[node] for node in nodes]
        self._rows += rows
        return self._asked.answer(rows)


class _Watch(DrafterAround):
    """Notes what the run asks of a drafter, and has the other trees drawn before the drafter learns of the outcome."""

    def __init__(self, drafter: Drafter, policies: Mapping[str, TreePolicy], layers: Callable[[int], int]) -> None:
        super().__init__(drafter)
        self.policies, self._layers = policies, layers
        self.trees: list[dict[str, Tree]] = []
        self.seconds: list[float] = []
        """What the other trees cost, step by step."""
        self._asked: _Asked | None = None
        self._extra = Work()

    def root(self, context: list[int]) -> Asked:
        self._asked, self._root = _Asked(len(context)), context[-1]
        return self.after(self.drafter.root(context), lambda answer: self._noted(None, answer))

    def expand(self, frontier: Frontier) -> Asked:
        return self.after(self.drafter.expand(frontier), lambda answer: self._noted(frontier, answer))

    def _noted(self, frontier: Frontier | None, answer: LogProbs) -> LogProbs:
        assert self._asked is not None, "the root comes first"
        self._asked.add(frontier, answer)
        return answer

    def accept(self, outcome: Outcome) -> None:
        begin, work = time.perf_counter(), self.drafter.work
        self.trees.append(self._draw() if self._asked else {})
        self._asked = None
        self._extra += self.drafter.work - work
        self.seconds.append(time.perf_counter() - begin)
        self.drafter.accept(outcome)

    def _draw(self) -> dict[str, Tree]:
        asked, found = self._asked, {}
        assert asked is not None
        for name, policy in self.policies.items():
            limit = min(policy.max_depth, self._layers(asked.length))
            with contextlib.suppress(_Unknown):
                found[name] = run(grow(_Again(self.drafter, asked), policy, [self._root], limit))
        return found

    @property
    def work(self) -> Work:
        """What the run cost, without the other trees."""
        return self.drafter.work - self._extra
