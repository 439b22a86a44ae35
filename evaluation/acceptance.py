"""How often the child of each rank is the accepted one: the rates that Sequoia's and Medusa's trees are computed from.

    python -m evaluation.acceptance                                          # the embedded pair, temperature 0
    python -m evaluation.acceptance --ea-model-path demo --question-file prompts.jsonl --output eagle.json
    python -m evaluation.acceptance --temperature 1 --children WithoutReplacement,IID

Writes a JSON file for `opt_tree.policies.AcceptanceRates.load`. Measure on other questions than those that trees are
compared on (`--question-begin`, `--question-end`): rates fitted to the test set flatter the trees made of them.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from jaxtyping import Int
from tqdm import tqdm

from evaluation.card import table
from evaluation.questions.prompts import Prompter
from evaluation.questions.sets import Question, load_set, select
from evaluation.run.conversation import Conversation
from evaluation.run.options import add_models, run_command
from opt_tree import Decoder, Generation, Pair, Sampling, Static, load_pair, match
from opt_tree.children import IID, Children, TopK, WithoutReplacement
from opt_tree.policies import AcceptanceRates
from opt_tree.verifiers import Verifier, multi_round, without_replacement

KINDS: dict[str, tuple[Callable[[int], Children], Verifier]] = {
    "TopK": (TopK, match),
    "WithoutReplacement": (WithoutReplacement, without_replacement),
    "IID": (IID, multi_round),
}
"""The kinds of siblings, each with the verifier that its papers judge it by (at temperature 0: `greedy`)."""


def measuring_tree(width: int, depth: int, siblings: Callable[[int], Children] = TopK) -> Static:
    """Return the tree that rates are counted on: the paths of ranks r1, ..., rd with (r1 + 1) ... (rd + 1) <= width.

    So the root has `width` children, and so has every node on the path of best ones: every rank is tried at every
    depth, more often where it is more often met, at about width * log(width) ** (depth - 1) nodes instead of
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


def measure(
    pair: Pair, kind: str, sampling: Sampling, questions: list[Question], options: argparse.Namespace
) -> Counts:
    """Let the library's loop answer the questions with the measuring tree, and count."""
    siblings, verifier = KINDS[kind]
    tree = measuring_tree(options.width, options.depth, siblings)
    decoder = Decoder(pair.target, pair.drafter, tree, verifier)
    prompter = Prompter(pair.tokenizer, pair.stop, options.conv_template)
    conversation = Conversation(prompter, options.max_new_tokens, seed=options.seed)
    counts = Counts.none(options.depth, options.width)

    def answer(prompt: list[int], limit: int, seed: int) -> Generation:
        generation = decoder.generate(prompt, limit, sampling, prompter.stop, seed=seed)
        counts.add(generation)
        return generation

    for question in tqdm(questions, desc=f"{kind}, {tree.nodes} nodes a step", unit="question", leave=False):
        conversation.answer(question, answer)
    return counts


def rows(counts: Counts) -> list[dict[str, str]]:
    """One row a rank: the rate over all depths with its standard error and trials, then depth by depth."""

    def cell(tried: int, accepted: int) -> str:
        return f"{accepted / tried:.3f}" if tried else ""

    tried, accepted = counts.tried.sum(0), counts.accepted.sum(0)
    lines = []
    for rank in range(len(tried)):
        n, hits = int(tried[rank]), int(accepted[rank])
        error = f"{(hits / n * (1 - hits / n) / n) ** 0.5:.3f}" if n else ""
        line = {"rank": str(rank), "accepted": cell(n, hits), "+-": error, "tried": str(n)}
        depths = enumerate(zip(counts.tried[:, rank], counts.accepted[:, rank], strict=True), 1)
        lines.append(line | {f"at depth {depth}": cell(int(n), int(hits)) for depth, (n, hits) in depths})
    return lines


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every kind of siblings asked for; print tables, write the file, and return what it holds."""
    kinds = options.children.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"unknown children {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if min(options.width, options.depth, options.least_trials) < 1:
        raise ValueError(
            "--width, --depth and --least-trials must be at least 1, "
            f"got {options.width}, {options.depth} and {options.least_trials}"
        )
    sampling = Sampling(options.temperature)
    if not Path(options.output).parent.is_dir():
        raise FileNotFoundError(f"no folder {Path(options.output).parent} for --output {options.output}")
    questions = load_set(options.bench_name, options.question_file, options.data_dir)
    chosen = select(questions.questions, options.question_begin, options.question_end, options.limit)
    named = {"eagle": options.ea_model_path} if options.ea_model_path else {"drafter": options.draft_model_path}
    pair = load_pair(options.base_model_path, **named, dtype=options.dtype, device=options.device, bare=options.bare)
    document: dict[str, Any] = {
        "target": options.base_model_path,
        **named,
        "bare": options.bare,
        "questions": {"name": questions.name, "sha256": questions.sha256, "ids": [question.id for question in chosen]},
        "temperature": sampling.temperature,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "width": options.width,
        "depth": options.depth,
        "machine": f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}",
        "rates": {},
        "tried": {},
        "accepted": {},
    }
    for kind in kinds:
        counts = measure(pair, kind, sampling, chosen, options)
        document["rates"][kind] = counts.rates(options.least_trials).to_dict()
        document["tried"][kind], document["accepted"][kind] = counts.tried.tolist(), counts.accepted.tolist()
        print(f"\n{kind}: how often the child of each rank is the accepted one, given that its parent was")
        print(table(rows(counts)) + "\n")
    Path(options.output).write_text(json.dumps(document) + "\n")
    print(json.dumps(document))
    return document


def main(arguments: list[str] | None = None) -> int:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m evaluation.acceptance", description=description)
    add_models(parser)
    parser.add_argument("--bare", action="store_true", help="without the sharpening stored beside the drafter")
    parser.add_argument("--bench-name", default="demo", help="question set, as for evaluation.eval_opt_classic")
    parser.add_argument("--question-file", help="any JSONL with `turns` or `question`, instead of --bench-name")
    parser.add_argument("--data-dir", help="where question sets lie")
    parser.add_argument("--question-begin", type=int, help="index of the first question")
    parser.add_argument("--question-end", type=int, help="index behind the last question")
    parser.add_argument("--limit", type=int, help="this many questions at most")
    parser.add_argument("--conv-template", help="FastChat's conversation of this name instead of the chat template")
    parser.add_argument("--children", default="TopK", help="comma list of " + ", ".join(KINDS))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="new tokens a turn, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=12, help="ranks that are measured")
    parser.add_argument("--depth", type=int, default=4, help="layers that are measured")
    parser.add_argument("--least-trials", type=int, default=50, help="ranks and depths tried less often are left out")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--output", default="acceptance.json")

    def measured(options: argparse.Namespace) -> int:
        torch.set_num_threads(options.threads)
        run(options)
        return 0

    return run_command(parser, measured, arguments)


if __name__ == "__main__":
    sys.exit(main())
