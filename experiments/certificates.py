"""Are texts of a canonical target plain decoding's, and all of its rows one prefill's, bit for bit, whatever drafts?

    python -m experiments.certificates [--base-model-path smollm2] [--compile] [--threads 2] [--limit 24]

Every way decodes the questions' first turns: plainly, by trees of 12 and 60 nodes, by each further drafter, in lanes
side by side, with a reused beginning, and drawn at temperature 1 with a seed. Texts are compared with plain decoding's,
and each row of logits that a way committed with that row of one prefill of the text. A way is said, and written to
--output with those before it, as it is done; the exit status is 1 where anything differs.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from evaluation.command_line import check_writable, main_of, option
from evaluation.run.options import Asked

EMBEDDED = ("eagle:demo", "eagle3:demo", "store:demo", "graft:1:eagle:demo+store:demo", "exit:demo")
"""What else drafts for the embedded target."""
INFLATED = ("eagle:demo", "store:demo")
"""What else drafts for it where --through inflates it, which knows no hidden states but the last."""


@dataclass(frozen=True)
class Options(Asked):
    """The pair, its other drafters, and how much is decoded."""

    limit: int = option(24, "this many questions at most", least=1)
    dtype: str = option("bfloat16", "of the target: bfloat16 or float32")
    also: list[str] = option(  # noqa: RUF009
        (), f"further drafters, several specs; for the embedded target by default {' '.join(EMBEDDED)}"
    )
    lanes: int = option(8, "of the batch", least=1)
    max_new_tokens: int = option(128, "of each text", least=1)
    output: str = option("certificates.json", "where the figures go, after each way")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_writable(Path(self.output))
        if not self.also and self.base_model_path == "demo":
            object.__setattr__(self, "also", list(INFLATED if self.through else EMBEDDED))


main = main_of("experiments.certificates", Options, __doc__, "experiments.certificates:run")

if __name__ == "__main__":
    sys.exit(main())

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from evaluation.command_line import Value, print_json, table
from evaluation.questions.prompts import Prompter
from evaluation.run.models import load_several, read_questions
from evaluation.timing import environment
from opt_tree import Decoder, OptTree, Output, Pair, Sampling, Target, generate_batch
from opt_tree.system.files import write_text
from opt_tree.target import Forward
from opt_tree.tools.presets import plain

SEED = 3
THRESHOLD = 0.2
GREEDY, DRAWN = Sampling(), Sampling(1.0)


class Recorded(NamedTuple):
    """A text, and the digest of each row of logits that was committed while it was decoded."""

    tokens: list[int]
    rows: list[bytes]


def digests(logits: Tensor) -> list[bytes]:
    """One for each row, of all its bits."""
    return [hashlib.blake2b(row.tobytes()).digest() for row in logits.cpu().contiguous().view(torch.uint8).numpy()]


@contextmanager
def recording(lm: Target) -> Iterator[list[bytes]]:
    """Inside, keep the digests of the rows that are committed behind the prefill."""
    kind, rows = type(lm), list[bytes]()
    last: list[Tensor] = []

    def run(forward: Forward, *engine: Any) -> Output:
        output = kind.run(lm, forward, *engine)
        if forward.tree is not None:
            last[:] = [output.logits]
        return output

    def commit(path: list[int]) -> None:
        if last:
            rows.extend(digests(last.pop()[path]))
        kind.commit(lm, path)

    vars(lm).update(run=run, commit=commit)
    try:
        yield rows
    finally:
        del vars(lm)["run"], vars(lm)["commit"]


@torch.inference_mode()
def prefilled(lm: Target, prompt: list[int], tokens: list[int]) -> list[bytes]:
    """The rows of one prefill that say these tokens."""
    lm.reset()
    rows = digests(lm.append([*prompt, *tokens[:-1]], all_logits=True).logits[len(prompt) - 1 :])
    lm.reset()
    return rows


class Way(NamedTuple):
    """One way to decode the prompts."""

    name: str
    decoder: Decoder
    sampling: Sampling = GREEDY
    reuse: bool = False
    """Behind a beginning of each prompt that is decoded before."""
    lanes: int = 1


def ways_of(pairs: dict[str, Pair], options: Options) -> Iterator[Way]:
    """Every way, plain decoding first: the others are compared with it."""

    def trees(spec: str, nodes: int = 12) -> Decoder:
        return Decoder(pairs[spec].target, pairs[spec].drafter, OptTree(nodes, THRESHOLD))

    own, several = next(iter(pairs)), f"{options.lanes} lanes, 12 nodes"
    yield Way("plain", plain(pairs[own].target))
    yield Way("plain, temperature 1", plain(pairs[own].target), DRAWN)
    yield from (Way(f"{own}, {nodes} nodes", trees(own, nodes)) for nodes in (12, 60))
    yield from (Way(f"{spec}, 12 nodes", trees(spec)) for spec in options.also)
    yield Way("temperature 1, 12 nodes", trees(own), DRAWN)
    yield Way("reused beginning, 12 nodes", trees(own), reuse=True)
    yield Way(several, trees(own), lanes=options.lanes)
    yield Way(f"{several}, temperature 1", trees(own), DRAWN, lanes=options.lanes)


def decoded(way: Way, prompts: Sequence[list[int]], most: int) -> list[Recorded]:
    """The texts; their rows where prompts are decoded one after the other."""
    if way.lanes > 1:
        batch = generate_batch(way.decoder, prompts, most, way.sampling, None, SEED, width=way.lanes)
        return [Recorded(one.tokens, []) for one in batch]
    found = []
    for prompt in tqdm(prompts, desc=way.name, leave=False, disable=None):
        if way.reuse:
            way.decoder.generate(prompt[: len(prompt) * 2 // 3], 9, stop=None)
        with recording(way.decoder.target) as rows:
            tokens = way.decoder.generate(prompt, most, way.sampling, None, seed=SEED, reuse=way.reuse).tokens
        found.append(Recorded(tokens, rows[: len(tokens)]))
    return found


def certify(pairs: dict[str, Pair], prompts: Sequence[list[int]], options: Options) -> Iterator[dict[str, Value]]:
    """Decode all prompts in every way, and count what is plain decoding's and one prefill's; a row a way."""
    known: dict[float, list[Recorded]] = {}  # by temperature: plain texts, and the rows of one prefill of each
    for way in ways_of(pairs, options):
        found = decoded(way, prompts, options.max_new_tokens)
        if (temperature := way.sampling.temperature) not in known:
            target = way.decoder.target
            known[temperature] = [
                Recorded(one.tokens, prefilled(target, prompt, one.tokens))
                for prompt, one in zip(prompts, found, strict=True)
            ]
        both = list(zip(found, known[temperature], strict=True))
        rows = sum(len(one.rows) for one in found)
        equal = sum(a == b for one, other in both for a, b in zip(one.rows, other.rows, strict=False))
        yield {
            "way": way.name,
            "texts": len(found),
            "texts as plain": sum(one.tokens == other.tokens for one, other in both),
            "rows": rows or None,
            "rows as one prefill": equal if rows else None,
        }


def run(options: Options) -> int:
    """Print each way as it is done, then the table; return 0 where nothing differs, else 1."""
    _, chosen = read_questions(options)
    pairs = load_several(options, list(dict.fromkeys((options.drafter, *options.also))), options.check_device())
    pair = next(iter(pairs.values()))
    prompter, target = Prompter(pair.tokenizer, pair.stop, options.conv_template), pair.target
    if not target.canonical:
        raise ValueError(target.not_canonical or f"{target.name} is not canonical by itself here: pass --canonical")
    prompts = [prompter.encode(question.turns[:1], []) for question in chosen]
    rows: list[dict[str, Value]] = []
    found = {"environment": environment(target.device), "target": target.name, "engine": target.backend.name}
    found |= {"options": asdict(options), "rows": rows}
    for row in certify(pairs, prompts, options):
        rows.append(row)
        write_text(Path(options.output), json.dumps(found, indent=1) + "\n")
        print(", ".join(f"{key}: {value}" for key, value in row.items() if value is not None), file=sys.stderr)
    print(table(rows))
    print_json(options.json, found)
    pairs_of_counts = (("texts", "texts as plain"), ("rows", "rows as one prefill"))
    return int(any(row[one] != row[other] for row in rows for one, other in pairs_of_counts))
