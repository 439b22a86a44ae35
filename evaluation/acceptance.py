"""How often the child of each rank is the accepted one: the rates that Sequoia's and Medusa's trees are computed from.

    python -m evaluation.acceptance                                          # the embedded pair, temperature 0
    python -m evaluation.acceptance --drafter eagle:demo --question-file prompts.jsonl --output eagle.json
    python -m evaluation.acceptance --temperature 1 --children WithoutReplacement,IID

Writes a JSON file for `AcceptanceRates.load`. Measure on other questions than those that trees are compared on
(`--question-begin`, `--question-end`): rates fitted to the test set flatter the trees made of them.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from evaluation.command_line import check_writable, main_of, option
from evaluation.run.options import Asked


@dataclass(frozen=True)
class Options(Asked):
    """What is measured, on what."""

    bare: bool = option(False, "without the sharpening stored beside the drafter")
    children: str = option("TopK", "comma list of TopK, WithoutReplacement, IID")
    temperature: float = option(0.0, "0: greedy")
    max_new_tokens: int = option(128, "new tokens a turn, at most", least=1)
    seed: int = option(0, "of sampling")
    width: int = option(12, "ranks that are measured", least=1)
    depth: int = option(4, "layers that are measured", least=1)
    least_trials: int = option(50, "ranks and depths tried less often are left out", least=1)
    output: str = option("acceptance.json", "where the rates go")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_writable(Path(self.output))


main = main_of("evaluation.acceptance", Options, __doc__, "evaluation.acceptance:run")

if __name__ == "__main__":
    sys.exit(main())

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from jaxtyping import Int
from tqdm import tqdm

from evaluation.command_line import Value, table
from evaluation.questions.sets import Question
from evaluation.run.conversation import Conversation
from evaluation.run.models import gather
from opt_tree import Decoder, Generation, Pair, Sampling, Static, match
from opt_tree.children import Children, TopK
from opt_tree.errors import counted
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.recursive_rejection import without_replacement
from opt_tree.policy import MOST_NODES
from opt_tree.system.files import write_text
from opt_tree.verify import Verifier

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

    @classmethod
    def none(cls, depths: int, ranks: int) -> "Counts":
        """Nothing counted yet."""
        return cls(np.zeros((depths, ranks), dtype=np.int64), np.zeros((depths, ranks), dtype=np.int64))

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
                f"the first rank was tried {self.tried[:, 0].sum()} times, fewer than {least}: generate more, or lower "
                "--least-trials"
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


@dataclass(frozen=True)
class Counting:
    """How trials are made: the measuring tree, and the conversations that it answers."""

    conversation: Conversation
    width: int = 12
    depth: int = 4


def measure(pair: Pair, kind: str, sampling: Sampling, questions: Sequence[Question], counting: Counting) -> Counts:
    """Let the library's loop answer the questions with the measuring tree, and count."""
    siblings, verifier = KINDS[kind]
    tree = measuring_tree(counting.width, counting.depth, siblings)
    decoder = Decoder(pair.target, pair.drafter, tree, verifier)
    conversation = counting.conversation
    counts = Counts.none(counting.depth, counting.width)

    def answer(prompt: list[int], limit: int, seed: int) -> Generation:
        generation = decoder.generate(prompt, limit, sampling, conversation.prompter.stop, seed=seed)
        counts.add(generation)
        return generation

    for question in tqdm(questions, desc=f"{kind}, {counted(tree.nodes, 'node')} a step", unit="question", leave=False):
        conversation.answer(question, answer)
    return counts


def rows(counts: Counts) -> list[dict[str, Value]]:
    """One row a rank: the rate over all depths with its standard error and trials, then depth by depth."""
    lines: list[dict[str, Value]] = []
    for rank, (tried, accepted) in enumerate(zip(counts.tried.T, counts.accepted.T, strict=True)):
        n = int(tried.sum())
        rate = float(accepted.sum()) / n if n else None
        error = None if rate is None else (rate * (1 - rate) / n) ** 0.5
        by_depth = [float(hits) / int(of) if of else None for of, hits in zip(tried, accepted, strict=True)]
        lines.append(
            {"rank": rank, "accepted": rate, "+-": error, "tried": n}
            | {f"at depth {depth}": one for depth, one in enumerate(by_depth, 1)}
        )
    return lines


def run(options: Options) -> dict[str, Any]:
    """Measure every kind of siblings asked for; print tables, write the file, and return what it holds."""
    if options.width * options.depth > MOST_NODES:
        raise ValueError(f"--width {options.width} times --depth {options.depth} must be at most {MOST_NODES}")
    if unknown := sorted(set(options.children.split(",")) - set(KINDS)):
        raise ValueError(f"unknown children {', '.join(unknown)}; there are {', '.join(KINDS)}")
    sampling = Sampling(options.temperature)
    given = gather(options, options.bare)
    questions, chosen = given.questions, given.chosen
    conversation = Conversation(given.prompter, options.max_new_tokens, seed=options.seed)
    counting = Counting(conversation, options.width, options.depth)
    document: dict[str, Any] = {
        "target": options.base_model_path,
        "drafter": options.drafter,
        "bare": options.bare,
        "questions": {"name": questions.name, "sha256": questions.sha256, "ids": [question.id for question in chosen]},
        **{key: getattr(options, key) for key in ("temperature", "max_new_tokens", "seed", "width", "depth")},
        "machine": f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}",
        "rates": {},
        "tried": {},
        "accepted": {},
    }
    for kind in options.children.split(","):
        counts = measure(given.pair, kind, sampling, chosen, counting)
        document["rates"][kind] = counts.rates(options.least_trials).to_dict()
        document["tried"][kind], document["accepted"][kind] = counts.tried.tolist(), counts.accepted.tolist()
        print(f"\n{kind}: how often the child of each rank is the accepted one, given that its parent was")
        print(table(rows(counts), ".3f"))
    write_text(Path(options.output), json.dumps(document) + "\n")
    print(f"\nwritten: {options.output}")
    return document
