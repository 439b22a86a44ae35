"""Are texts of a canonical target plain decoding's, and all of its rows one prefill's, bit for bit, whatever drafts?

    python -m experiments.certificates [--base-model-path smollm2] [--compile] [--threads 2] [--limit 24]

Every way decodes the questions' first turns: plainly, by trees of 12 and 60 nodes, by each further drafter, in lanes
side by side, with a reused beginning, and drawn at temperature 1 with a seed. Texts are compared with plain decoding's,
and each row of logits that a way committed with that row of one prefill of the text. The output is written as it grows,
and a call that finds its own output goes on with it; the exit status is 1 where anything differs.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from evaluation.command_line import Value, at_least, check_writable, option, parse, print_json, run_command, table
from evaluation.questions.prompts import Prompter
from evaluation.questions.sets import load_set, select
from evaluation.run.models import load_several
from evaluation.run.options import Asked
from evaluation.timing import environment
from opt_tree import Decoder, OptTree, Output, Pair, Sampling, Target, Tree
from opt_tree.decoding.presets import plain

EMBEDDED = ("eagle:demo", "eagle3:demo", "store:demo", "graft:1:eagle:demo+store:demo", "exit:demo")
"""What else drafts for the embedded target."""
SEED = 3
DRAWN = Sampling(1.0)


@dataclass(frozen=True)
class Options(Asked):
    """The pair, its other drafters, and how much is decoded."""

    dtype: str = option("bfloat16", "of the target: bfloat16 or float32")
    also: list[str] = option(  # noqa: RUF009
        (), f"further drafters, several specs; for the embedded target by default {' '.join(EMBEDDED)}"
    )
    threshold: float = option(0.2, "draft another layer while the newest raised E(A) by more than this")
    lanes: int = option(8, "of the batch")
    max_new_tokens: int = option(128, "of each text")
    output: str = option("certificates.json", "where the counts go, as they grow; ways that are there are not repeated")
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, lanes=1, max_new_tokens=1)
        if self.limit is None:
            object.__setattr__(self, "limit", 24)
        if not self.also and self.base_model_path == "demo":
            object.__setattr__(self, "also", list(EMBEDDED))


@dataclass
class Recorded:
    """A text, and the digest of each row of logits that was committed while it was decoded."""

    tokens: list[int] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)


def digests(logits: Tensor) -> list[bytes]:
    """One for each row, of all its bits."""
    return [hashlib.blake2b(row.tobytes()).digest() for row in logits.contiguous().view(torch.uint8).numpy()]


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

    def __init__(
        self, pairs: dict[str, Pair], prompts: Sequence[list[int]], options: Options, done: dict[str, dict[str, Value]]
    ) -> None:
        """`done`: rows of an earlier call by their ways, which are left out; all are compared with plain decoding."""
        self.pairs, self.prompts, self.options, self.done = pairs, prompts, options, done
        self.own = next(iter(pairs))
        self.known: dict[float, list[Recorded]] = {}
        """By temperature: plain decoding's texts, and the rows of one prefill of each."""

    def rows(self) -> Iterator[dict[str, Value]]:
        """A row a way, as soon as it is done."""
        options = self.options
        for name, sampling in (("plain", Sampling()), ("plain, temperature 1", DRAWN)):
            found = [self._decoded(plain(self.pairs[self.own].target), prompt, sampling) for prompt in self._each(name)]
            pairs = zip(self.prompts, found, strict=True)
            whole = [
                Recorded(one.tokens, prefilled(self.pairs[self.own].target, prompt, one.tokens))
                for prompt, one in pairs
            ]
            self.known[sampling.temperature] = whole
            yield self._counted(name, found, sampling)
        ways = {f"{self.own}, {nodes} nodes": self._way(self.own, nodes) for nodes in (12, 60)}
        ways |= {f"{spec}, 12 nodes": self._way(spec) for spec in options.also}
        ways["temperature 1, 12 nodes"] = self._way(self.own, sampling=DRAWN)
        ways["reused beginning, 12 nodes"] = self._way(self.own, reuse=True)
        lanes = f"{options.lanes} lanes, 12 nodes"
        ways |= {lanes: self._lanes(Sampling()), f"{lanes}, temperature 1": self._lanes(DRAWN)}
        for name, way in ways.items():
            yield self.done.get(name) or way(name)

    def _decoder(self, spec: str, nodes: int = 12) -> Decoder:
        return Decoder(self.pairs[spec].target, self.pairs[spec].drafter, OptTree(nodes, self.options.threshold))

    def _each(self, name: str) -> Any:
        return tqdm(self.prompts, desc=name, disable=None)

    def _way(
        self, spec: str, nodes: int = 12, sampling: Sampling = Sampling(), reuse: bool = False
    ) -> Callable[[str], dict[str, Value]]:
        """What decodes one prompt after the other by trees, and counts."""

        def decode(name: str) -> dict[str, Value]:
            decoder = self._decoder(spec, nodes)
            found = [self._decoded(decoder, prompt, sampling, reuse) for prompt in self._each(name)]
            return self._counted(name, found, sampling)

        return decode

    def _lanes(self, sampling: Sampling) -> Callable[[str], dict[str, Value]]:
        """What decodes the prompts side by side, and counts."""

        def decode(name: str) -> dict[str, Value]:
            lanes, most = self.options.lanes, self.options.max_new_tokens
            batch = self._decoder(self.own).generate_batch(self.prompts, lanes, most, sampling, seed=SEED)
            return self._counted(name, [Recorded(one.tokens) for one in batch], sampling)

        return decode

    def _decoded(self, decoder: Decoder, prompt: list[int], sampling: Sampling, reuse: bool = False) -> Recorded:
        if reuse:
            decoder.generate(prompt[: len(prompt) * 2 // 3], 9)
        most = self.options.max_new_tokens
        with recording(decoder.target) as rows:
            tokens = decoder.generate(prompt, most, sampling, seed=SEED, reuse=reuse).tokens
        return Recorded(tokens, rows[: len(tokens)])

    def _counted(self, name: str, found: list[Recorded], sampling: Sampling) -> dict[str, Value]:
        texts = rows = equal = 0
        for one, known in zip(found, self.known[sampling.temperature], strict=True):
            texts += one.tokens == known.tokens
            rows += len(one.rows)
            equal += sum(a == b for a, b in zip(one.rows, known.rows, strict=False))
        return {
            "way": name,
            "texts": len(found),
            "texts as plain": texts,
            "rows": rows or None,
            "rows as one prefill": equal if rows else None,
        }


def run(options: Options) -> dict[str, Any]:
    """Decode, write what is counted as it grows, print the table and return it."""
    output = Path(options.output)
    check_writable(output)
    questions = load_set(options.bench_name, options.question_file, options.data_dir, options.fetch)
    chosen = select(questions.questions, options.question_begin, options.question_end, options.limit)
    pairs = load_several(options, list(dict.fromkeys((options.drafter, *options.also))), options.check_device())
    pair = next(iter(pairs.values()))
    prompter = Prompter(pair.tokenizer, pair.stop, options.conv_template)
    prompts = [prompter.encode(question.turns[:1], []) for question in chosen]
    target = pair.target
    if not target.canonical:
        raise ValueError(target.not_canonical or f"{target.name} is not canonical by itself here: pass --canonical")
    found: dict[str, Any] = {
        "environment": environment(target.device),
        "target": target.name,
        "engine": target.engine.name,
        "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "rows": [],
    }
    done = _done(output, found)
    for row in Certifying(pairs, prompts, options, done.copy()).rows():
        done[row["way"]] = row
        found["rows"] = list(done.values())
        output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found["rows"]))
    return found


def _done(output: Path, asked: dict[str, Any]) -> dict[str, dict[str, Value]]:
    """The rows of an output that an earlier call of the same left, by their ways; raises ValueError for another's."""
    if not output.exists():
        return {}
    found = json.loads(output.read_text())
    if {**found, "rows": []} != asked:
        raise ValueError(f"{output} is another run's: delete it, or pass another --output")
    return {row["way"]: row for row in found["rows"]}


def whole(found: dict[str, Any]) -> bool:
    """Whether nothing differs."""
    pairs = (("texts", "texts as plain"), ("rows", "rows as one prefill"))
    return all(row[one] == row[other] for row in found["rows"] for one, other in pairs)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 where all is equal, 1 where anything differs, 2 for bad input."""

    def command() -> int:
        options = parse(Options, "python -m experiments.certificates", __doc__, arguments)
        found = run(options)
        print_json(options.json, found)
        return 0 if whole(found) else 1

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
