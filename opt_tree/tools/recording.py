"""Texts recorded with all that a drafter says beside them, and a target and a drafter that play them again.

Owns the recording, the replaying and the price of what was replayed: what `opt_tree.advise` and
`experiments.controllers` stand on.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from tqdm import tqdm

from opt_tree.answers import LogProbs
from opt_tree.children import TopK
from opt_tree.decoder import Decoder
from opt_tree.drafter import Asked, Drafter
from opt_tree.generation import Generation
from opt_tree.methods.drafters.around import DrafterAround
from opt_tree.methods.policies.costs import CATCHING_UP, Costs
from opt_tree.policy import TreePolicy
from opt_tree.pool import CandidatePool, Frontier
from opt_tree.step import Outcome
from opt_tree.stop import StopRule
from opt_tree.target import Forward, Output, Target, TreeForward, Work
from opt_tree.tools.pair import Pair
from opt_tree.tree import fetch, send

Branch = tuple[int, ...]
Known = tuple[Float[np.ndarray, " columns"], Int[np.ndarray, " columns"]]
LARGEST = 32
UNKNOWN: Known = (np.log(np.full(LARGEST, 1e-6)) - 1e-3 * np.arange(LARGEST), np.arange(LARGEST))
"""Below what no tree of 32 nodes and no chain would have expanded, which trees of a fixed shape ask for."""


@dataclass
class Recorded:
    """A text, and what the drafter said behind every prefix of it."""

    prompt: list[int]
    tokens: list[int]
    said: dict[int, dict[Branch, Known]] = field(repr=False)
    """By the context's length and the branch below it: the most probable tokens, with their log-probabilities."""
    asked: int
    """New tokens that were asked for; the text may have ended before, which no tree may know."""


class Recorder(DrafterAround):
    """Keeps every answer."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.said: dict[int, dict[Branch, Known]] = {}

    def root(self, context: list[int]) -> Asked:
        self._now = self.said[len(context)] = {}
        self._branches: list[Branch] = [()]
        return self.after(self.drafter.root(context), lambda answer: self._keep([()], answer))

    def expand(self, frontier: Frontier) -> Asked:
        branches = grown(self._branches, frontier)
        return self.after(self.drafter.expand(frontier), lambda answer: self._keep(branches, answer))

    def _keep(self, branches: list[Branch], answer: LogProbs) -> LogProbs:
        values, places = answer.values.topk(min(LARGEST, answer.values.shape[1]))
        tokens = places
        if answer.tokens is not None:
            named = send(answer.tokens, places.device)
            tokens = named.gather(1, places) if answer.names_few else named[places]
        for branch, *known in zip(branches, *fetch(values.double(), tokens), strict=True):
            self._now[branch] = known[0].copy(), known[1].copy()
        return answer


def grown(branches: list[Branch], frontier: Frontier) -> list[Branch]:
    """The branches of a frontier; they are added to those by draft row."""
    found = [
        (*branches[row], token) for row, token in zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
    ]
    branches += found
    return found


@dataclass(frozen=True)
class Survey(TreePolicy):
    """Drafts all that a tree of 32 nodes or a chain may ask for, and sends nothing to the target."""

    max_depth: int = 10

    @property
    def children(self) -> TopK:
        return TopK(per_node=LARGEST)

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Expand what only 31 candidates or fewer surpass, and the best child of the best child of ... the root."""
        paths, newest = pool.path_log_probs, pool.newest
        floor = np.partition(paths, -LARGEST - 1)[-LARGEST - 1] if len(paths) > LARGEST else -np.inf
        kept = (paths[newest] > floor) | (newest == _chain_end(pool))
        return newest[kept & (paths[newest] > -np.inf)] if kept.any() else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return np.array([0])


def _chain_end(pool: CandidatePool) -> int:
    """The last node of the chain of best tokens; -1 where it ended above the newest layer."""
    node = 0
    for _ in range(pool.depth):
        below = (pool.parents[1:] == node).nonzero()[0] + 1
        if not len(below):
            return -1
        node = int(below[pool.path_log_probs[below].argmax()])
    return node


def record(pair: Pair, prompts: Sequence[list[int]], max_new_tokens: int, seconds: float = math.inf) -> list[Recorded]:
    """Decode plainly, a token a step, and ask the drafter at each of them; no text is begun after so many seconds."""
    found, begin = list[Recorded](), time.perf_counter()
    for prompt in tqdm(prompts, desc="recording", unit="text", leave=False, disable=None):
        if found and time.perf_counter() - begin > seconds:
            break
        recorder = Recorder(pair.drafter)
        answer = Decoder(pair.target, recorder, Survey()).generate(prompt, max_new_tokens, stop=pair.stop)
        found.append(Recorded(prompt, answer.tokens, recorder.said, max_new_tokens))
    return found


class Rerun(Target):
    """A target that says a recorded text again."""

    name, vocab, max_context = "a recorded text", 2, 1 << 20

    def __init__(self, text: list[int], vocab: int) -> None:
        self.recorded, self.vocab = text, vocab

    def reset(self) -> None:
        super().reset()
        self.length = 0

    def run(self, forward: Forward) -> Output:
        if not isinstance(forward, TreeForward):
            self.length += len(forward.tokens)
            return Output(torch.zeros(1, self.vocab))
        tree = forward.tree
        assert tree is not None
        logits, follows = torch.zeros(len(tree), self.vocab), [True] * len(tree)
        for row in range(len(tree)):
            place = self.length + int(tree.depths[row])
            follows[row] = place < len(self.recorded) and self.recorded[place] == int(tree.tokens[row])
            follows[row] &= row == 0 or follows[int(tree.parents[row])]
            if follows[row] and place + 1 < len(self.recorded):
                logits[row, self.recorded[place + 1]] = 1
        return Output(logits)

    def commit(self, path: list[int]) -> None:
        self.length += len(path)


class Replayed(Drafter):
    """Answers as it was recorded; counts forwards and rows as a model would have had them."""

    names_few = True

    def __init__(self, text: Recorded) -> None:
        self.said, self._work = text.said, Work()

    def root(self, context: list[int]) -> LogProbs:
        self._now, self._branches = self.said[len(context)], list[Branch]([()])
        return self._answer([()], CATCHING_UP)

    def expand(self, frontier: Frontier) -> LogProbs:
        return self._answer(grown(self._branches, frontier), len(frontier.tokens))

    def _answer(self, branches: list[Branch], rows: int) -> LogProbs:
        self._work += Work(1, rows)
        values, tokens = zip(*(self._now.get(branch, UNKNOWN) for branch in branches), strict=True)
        return LogProbs(torch.from_numpy(np.stack(values)), torch.from_numpy(np.stack(tokens)))

    def accept(self, outcome: Outcome) -> None:
        """What survived is in the next context."""

    @property
    def work(self) -> Work:
        return self._work


def _at(end: int) -> StopRule:
    return lambda tokens: "end" if len(tokens) >= end else None


def replay(texts: Sequence[Recorded], policy: TreePolicy, vocab: int) -> list[Generation]:
    """Decode the recorded texts again. A controller keeps what it learned from text to text."""
    found = []
    for text in texts:
        decoder, end = Decoder(Rerun([*text.prompt, *text.tokens], vocab), Replayed(text), policy), len(text.tokens)
        found.append(decoder.generate(text.prompt, text.asked, stop=_at(end)))
    return found


def seconds_of(generation: Generation, costs: Costs) -> float:
    """What the steps of a generation cost."""
    total, context = 0.0, len(generation.prompt)
    for step, emitted in zip(generation.steps, generation.accept_lengths, strict=True):
        total += costs.at(context).of(step)
        context += emitted
    return total
