"""Are texts of a canonical target plain decoding's, and all of its rows one prefill's, bit for bit, whatever drafts?

    python -m experiments.certificates [--base-model-path smollm2] [--compile] [--threads 2] [--limit 24]

Every way decodes the questions' first turns: plainly, by trees of 12 and 60 nodes, by each further drafter, in lanes
side by side, with a reused beginning, and drawn at temperature 1 with a seed. Texts are compared with plain decoding's,
and each row of logits that a way committed with that row of one prefill of the text. The output is written as it grows,
and a call that finds its own output goes on with it; the exit status is 1 where anything differs.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import at_least, option, parse, run_command, work_of
from evaluation.run.options import Asked

EMBEDDED = ("eagle:demo", "eagle3:demo", "store:demo", "graft:1:eagle:demo+store:demo", "exit:demo")
"""What else drafts for the embedded target."""
INFLATED = ("eagle:demo", "store:demo")
"""What else drafts for it with --inflate, which knows no hidden states but the last."""


@dataclass(frozen=True)
class Options(Asked):
    """The pair, its other drafters, and how much is decoded."""

    limit: int = option(24, "this many questions at most")
    dtype: str = option("bfloat16", "of the target: bfloat16 or float32")
    also: list[str] = option(  # noqa: RUF009
        (), f"further drafters, several specs; for the embedded target by default {' '.join(EMBEDDED)}"
    )
    threshold: float = option(0.2, "draft another layer while the newest raised E(A) by more than this")
    lanes: int = option(8, "of the batch")
    max_new_tokens: int = option(128, "of each text")
    output: str = option("certificates.json", "where the counts go, as they grow; ways that are there are not repeated")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, lanes=1, max_new_tokens=1)
        if not self.also and self.base_model_path == "demo":
            object.__setattr__(self, "also", list(INFLATED if self.inflate else EMBEDDED))


def main(arguments: list[str] | None = None) -> int:
    """Return 0 where all is equal, 1 where anything differs, 2 for bad input."""

    def command() -> int:
        options = parse(Options, "python -m experiments.certificates", __doc__, arguments)
        return work_of("experiments.certificates:certify")(options)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from evaluation.command_line import Value, check_writable, print_json, table
from evaluation.questions.prompts import Prompter
from evaluation.run.models import load_several, read_questions
from evaluation.timing import environment
from opt_tree import Decoder, OptTree, Output, Pair, Sampling, Target, Tree
from opt_tree.core.files import write_text
from opt_tree.decoding.presets import plain

SEED = 3
GREEDY, DRAWN = Sampling(), Sampling(1.0)


@dataclass
class Recorded:
    """A text, and the digest of each row of logits that was committed while it was decoded."""

    tokens: list[int] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)


def digests(logits: Tensor) -> list[bytes]:
    """One for each row, of all its bits."""
    return [hashlib.blake2b(row.tobytes()).digest() for row in logits.cpu().contiguous().view(torch.uint8).numpy()]


@contextmanager
def recording(lm: Target) -> Iterator[list[bytes]]:
    """Inside, keep the digests of the rows that are committed behind the prefill."""
    kind, rows = type(lm), list[bytes]()
    last: list[Tensor] = []

    def score(tree: Tree) -> Output:
        output = kind.score(lm, tree)
        last[:] = [output.logits]
        return output

    def commit(path: list[int]) -> None:
        if last:
            rows.extend(digests(last.pop()[path]))
        kind.commit(lm, path)

    vars(lm).update(score=score, commit=commit)
    try:
        yield rows
    finally:
        del vars(lm)["score"], vars(lm)["commit"]


@torch.inference_mode()
def prefilled(lm: Target, prompt: list[int], tokens: list[int]) -> list[bytes]:
    """The rows of one prefill that say these tokens."""
    lm.reset()
    rows = digests(lm.append([*prompt, *tokens[:-1]], all_logits=True).logits[len(prompt) - 1 :])
    lm.reset()
    return rows


class Certifying:
    """Decodes all prompts in every way and counts what is plain decoding's."""

    def __init__(self, pairs: dict[str, Pair], prompts: Sequence[list[int]], options: Options) -> None:
        self.pairs, self.prompts, self.options = pairs, prompts, options
        self.own = next(iter(pairs))
        self.target = pairs[self.own].target
        self.known: dict[float, list[Recorded]] = {}
        """By temperature: plain decoding's texts, and the rows of one prefill of each."""

    def rows(self, done: dict[str, dict[str, Value]]) -> Iterator[dict[str, Value]]:
        """A row a way, as soon as it is done; those of an earlier call, by their ways, are taken as they are.

        All are compared with plain decoding, which is always done.
        """
        for name, sampling in (("plain", GREEDY), ("plain, temperature 1", DRAWN)):
            found = self._decoded(name, plain(self.target), sampling)
            self.known[sampling.temperature] = [
                Recorded(one.tokens, prefilled(self.target, prompt, one.tokens))
                for prompt, one in zip(self.prompts, found, strict=True)
            ]
            yield self._counted(name, found, sampling)
        for name, (spec, nodes, sampling, decoded) in self._ways().items():
            if name in done:
                yield done[name]
                continue
            pair = self.pairs[spec]
            decoder = Decoder(pair.target, pair.drafter, OptTree(nodes, self.options.threshold))
            yield self._counted(name, decoded(name, decoder, sampling), sampling)

    def _ways(self) -> dict[str, tuple[str, int, Sampling, Callable[[str, Decoder, Sampling], list[Recorded]]]]:
        """What drafts, nodes, how tokens are chosen and how prompts are decoded, by the name of the way."""
        own, lanes = self.own, f"{self.options.lanes} lanes, 12 nodes"
        return {
            **{f"{own}, {nodes} nodes": (own, nodes, GREEDY, self._decoded) for nodes in (12, 60)},
            **{f"{spec}, 12 nodes": (spec, 12, GREEDY, self._decoded) for spec in self.options.also},
            "temperature 1, 12 nodes": (own, 12, DRAWN, self._decoded),
            "reused beginning, 12 nodes": (own, 12, GREEDY, partial(self._decoded, reuse=True)),
            lanes: (own, 12, GREEDY, self._side_by_side),
            f"{lanes}, temperature 1": (own, 12, DRAWN, self._side_by_side),
        }

    def _side_by_side(self, name: str, decoder: Decoder, sampling: Sampling) -> list[Recorded]:
        lanes, most = self.options.lanes, self.options.max_new_tokens
        batch = decoder.generate_batch(self.prompts, lanes, most, sampling, seed=SEED)
        return [Recorded(one.tokens) for one in batch]

    def _decoded(self, name: str, decoder: Decoder, sampling: Sampling, reuse: bool = False) -> list[Recorded]:
        """One prompt after the other, with `reuse` behind a beginning of it that is decoded before."""
        found, most = [], self.options.max_new_tokens
        for prompt in tqdm(self.prompts, desc=name, disable=None):
            if reuse:
                decoder.generate(prompt[: len(prompt) * 2 // 3], 9)
            with recording(decoder.target) as rows:
                tokens = decoder.generate(prompt, most, sampling, seed=SEED, reuse=reuse).tokens
            found.append(Recorded(tokens, rows[: len(tokens)]))
        return found

    def _counted(self, name: str, found: list[Recorded], sampling: Sampling) -> dict[str, Value]:
        pairs = list(zip(found, self.known[sampling.temperature], strict=True))
        rows = sum(len(one.rows) for one, _ in pairs)
        equal = sum(a == b for one, known in pairs for a, b in zip(one.rows, known.rows, strict=False))
        return {
            "way": name,
            "texts": len(found),
            "texts as plain": sum(one.tokens == known.tokens for one, known in pairs),
            "rows": rows or None,
            "rows as one prefill": equal if rows else None,
        }


def run(options: Options) -> dict[str, Any]:
    """Decode, write what is counted as it grows, print the table and return it."""
    output = Path(options.output)
    check_writable(output)
    _, chosen = read_questions(options)
    pairs = load_several(options, list(dict.fromkeys((options.drafter, *options.also))), options.check_device())
    pair = next(iter(pairs.values()))
    prompter, target = Prompter(pair.tokenizer, pair.stop, options.conv_template), pair.target
    if not target.canonical:
        raise ValueError(target.not_canonical or f"{target.name} is not canonical by itself here: pass --canonical")
    prompts = [prompter.encode(question.turns[:1], []) for question in chosen]
    found: dict[str, Any] = {
        "environment": environment(target.device),
        "target": target.name,
        "engine": target.engine.name,
        "dtype": options.dtype,
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "max_new_tokens": options.max_new_tokens,
        "threshold": options.threshold,
        "rows": [],
    }
    done = _done(output, found)
    for row in Certifying(pairs, prompts, options).rows(done.copy()):
        done[row["way"]] = row
        found["rows"] = list(done.values())  # with those of an earlier call, should this one be stopped, too
        write_text(output, json.dumps(found, indent=1) + "\n")
    print(table(found["rows"]))
    return found


def _done(output: Path, asked: dict[str, Any]) -> dict[str, dict[str, Value]]:
    """The rows of an output that an earlier call of the same left, by their ways; raises ValueError for another's."""
    if not output.exists():
        return {}
    with suppress(ValueError, KeyError, TypeError):  # of another program
        found = json.loads(output.read_text())
        if {**found, "rows": []} == asked:
            return {row["way"]: row for row in found["rows"]}
    raise ValueError(f"{output} is another run's: delete it, or pass another --output")


def whole(found: dict[str, Any]) -> bool:
    """Whether nothing differs."""
    pairs = (("texts", "texts as plain"), ("rows", "rows as one prefill"))
    return all(row[one] == row[other] for row in found["rows"] for one, other in pairs)


def certify(options: Options) -> int:
    """Run, print the figures where --json asks for them, and return 0 where nothing differs, else 1."""
    found = run(options)
    print_json(options.json, found)
    return 0 if whole(found) else 1
