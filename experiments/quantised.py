"""What a target with weights of fewer bits costs and says: forwards beside what the machine allows, and its quality.

    python -m experiments.quantised --base-model-path smollm2 --text corpus.jsonl.xz --answers plain.bf16.jsonl

Times: one forward of so many rows behind 128 tokens, every kind of weights and backend in turn, medians; and a prefill.
Their limit is the larger of two times: weights over the memory's bandwidth, products over the processor's peak. Both
are given, as a loop of loads and a loop of dot-product instructions measure them.
Quality: perplexity of text, and how often the most likely token is the one that bfloat16 chose in its own answers.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option, whole_numbers
from evaluation.run.options import Models


@dataclass(frozen=True)
class Options(Models):
    """The target, the forwards, the machine's limits, and what the quality is measured on."""

    dtype: str = option("bfloat16", "of the target: bfloat16 or float32")
    rows: str = option("1,6,8,16,61", "comma list: rows of the forwards that are timed")
    rounds: int = option(15, "forwards of each kind", least=3)
    bandwidth: float = option(24.0, "of the memory to one core, in GB a second")
    peak: float = option(116.0, "products of bfloat16 a second, in 10^9; of bytes there are twice as many")
    text: str | None = option(None, "JSONL, or JSONL.xz, with a `text` a line: its perplexity")
    answers: str | None = option(None, "an answer file of the bfloat16 target, by plain decoding")
    limit: int = option(40, "answers, spread over the file, and pieces of the text, of 512 tokens", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_numbers(self.rows)


main = main_of("experiments.quantised", Options, __doc__, "experiments.quantised:run")

if __name__ == "__main__":
    sys.exit(main())

import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import trange

from evaluation.answers.reading import AnswerSet
from evaluation.command_line import Value, table
from evaluation.run.models import load
from evaluation.timing import environment, schedule
from opt_tree import CausalLM, Pair
from opt_tree.training.answers import lines as read_lines

KINDS = (None, "int8", "int4")
_BEHIND, _PREFILL = 128, 500
_COLD = 2
"""Of each kind, not counted."""


def pairs_of(options: Options, device: str) -> Iterator[tuple[dict[str, str], Pair]]:
    """Every kind of weights, eager and, with --compile, compiled."""
    for kind in KINDS:
        for compiled in (False, True) if options.compile else (False,):
            names = {"weights": kind or options.dtype, "forwards": "compiled" if compiled else "eager"}
            yield names, load(replace(options, weights=kind, compile=compiled, drafter="ngram"), device)


def limit_ms(lm: CausalLM, rows: int, options: Options) -> float:
    """The least milliseconds of a forward of so many rows: its linear layers' alone."""
    loaded = products = 0.0  # bytes, and products of one row
    quantised = False
    output: Any = lm.model.get_output_embeddings()
    for layer in {id(one): one for one in (*lm.model.modules(), output)}.values():
        if hasattr(layer, "packed"):
            quantised, size, count = True, layer.packed.numel(), layer.in_features * layer.out_features
        elif isinstance(layer, torch.nn.Linear):
            size, count = layer.weight.numel() * layer.weight.element_size(), layer.weight.numel()
        else:
            continue
        loaded, products = loaded + size, products + count
    peak = options.peak * (2 if quantised else 1)
    return max(loaded / options.bandwidth, rows * products / peak) / 1e6  # both rates are in 10^9 a second


def fill(lm: CausalLM, count: int) -> float:
    """Begin anew with a context of so many tokens, any ones; return the seconds of it."""
    tokens = np.random.default_rng(0).integers(0, lm.vocab, count).tolist()
    lm.reset()
    begin = time.perf_counter()
    lm.append(tokens)
    return time.perf_counter() - begin


@torch.inference_mode()
def forward(lm: CausalLM, rows: int) -> float:
    """Seconds of a forward of so many rows, as decoding runs it; they are dropped again."""
    tokens, places = np.random.default_rng(rows).integers(0, lm.vocab, rows), lm.length + np.arange(rows)
    begin = time.perf_counter()
    lm.extend(tokens, places, np.tri(rows, dtype=bool), None)
    seconds = time.perf_counter() - begin
    lm.commit([])
    return seconds


def times(found: list[tuple[dict[str, str], Pair]], options: Options) -> list[dict[str, Value]]:
    """Forwards and prefills of all targets in turn; a line each."""
    targets = [pair.target for _, pair in found if isinstance(pair.target, CausalLM)]
    prefills: dict[CausalLM, list[float]] = {lm: [] for lm in targets}
    for lm, _ in schedule(targets, trange(_COLD + 3, desc="prefill", leave=False, disable=None)):
        prefills[lm].append(fill(lm, _PREFILL))
    for lm in targets:
        fill(lm, _BEHIND)
    seconds: dict[tuple[CausalLM, int], list[float]]
    seconds = {(lm, rows): [] for lm in targets for rows in whole_numbers(options.rows)}
    rounds = trange(_COLD + options.rounds, desc="forwards", leave=False, disable=None)
    for turn in rounds:  # in a cycle each forward would always follow the same one
        for place in random.Random(turn).sample(list(seconds), len(seconds)):
            seconds[place].append(forward(*place))
    ms = {place: 1000 * statistics.median(each[_COLD:]) for place, each in seconds.items()}
    lines: list[dict[str, Value]] = []
    for lm, (names, _) in zip(targets, found, strict=True):
        line: dict[str, Value] = {**names}
        for rows in whole_numbers(options.rows):
            limit = limit_ms(lm, rows, options)
            line |= {f"{rows} rows, ms": ms[lm, rows], f"{rows}: times the limit": ms[lm, rows] / limit}
        lines.append(line | {f"prefill of {_PREFILL}, ms": 1000 * statistics.median(prefills[lm][_COLD:])})
    return lines


def pieces_of(options: Options, pair: Pair) -> list[list[int]]:
    """Windows of the text, 512 tokens each."""
    if options.text is None:
        return []
    tokens: list[int] = []
    for row in read_lines(Path(options.text)):
        tokens += pair.tokenizer(row["text"] + "\n\n").input_ids
        if len(tokens) >= 512 * options.limit:
            break
    return [tokens[begin : begin + 512] for begin in range(0, len(tokens) - 511, 512)][: options.limit]


def turns_of(options: Options) -> list[tuple[list[int], list[int]]]:
    """First turns of the answer file: prompt and answer."""
    if options.answers is None:
        return []
    answers = AnswerSet.read(options.answers).require(("prompt_ids", "token_ids"), "answers are compared by token")
    if answers.settings.get("weights") or answers.settings.get("method") != "none":
        raise ValueError(f"{options.answers}: answers of the target as it is, by plain decoding, are wanted")
    chosen = answers.answers[:: max(1, len(answers.answers) // options.limit)][: options.limit]
    return [(record["choices"][0]["prompt_ids"][0], record["choices"][0]["token_ids"][0]) for record in chosen]


@torch.inference_mode()
def quality(names: dict[str, str], pair: Pair, options: Options) -> dict[str, Value]:
    """Perplexity of the text, and the share of the answers' tokens that are the target's most likely ones."""
    lm, line = pair.target, dict[str, Value](names)
    assert isinstance(lm, CausalLM)

    def rows(tokens: list[int]) -> torch.Tensor:
        lm.reset()
        return lm.append(tokens[:-1], all_logits=True).logits.float()

    if pieces := pieces_of(options, pair):
        loss = [torch.nn.functional.cross_entropy(rows(one), torch.tensor(one[1:])) for one in pieces]
        line["perplexity"] = math.exp(float(torch.stack(loss).mean()))
    if turns := turns_of(options):
        same = total = 0
        for prompt, answer in turns:
            best = rows([*prompt, *answer])[len(prompt) - 1 :].argmax(-1)
            hits = int((best == torch.tensor(answer)).sum())
            same, total = same + hits, total + len(answer)
        line |= {"of bfloat16's tokens": same / total, "tokens": total}
    lm.reset()
    return line


def run(options: Options) -> dict[str, Any]:
    """Measure, print the tables and return them."""
    device = options.check_device()
    if options.weights is not None or options.drafter != options.default_drafter():
        raise ValueError("every kind of weights is measured, and nothing is drafted: no --weights, no --drafter")
    for path in (options.text, options.answers):
        if path is not None and not Path(path).is_file():
            raise ValueError(f"no file at {path}")
    found = list(pairs_of(options, device))
    lines = times(found, options)
    target = found[0][1].target
    peaks = f"{options.peak:g} and {2 * options.peak:g} x 10^9 products a second"
    print(
        f"{target.name}, {target.size}; limits: {options.bandwidth:g} GB/s, {peaks}", table(lines), sep="\n", flush=True
    )
    kinds = [(names, pair) for names, pair in found if names["forwards"] == "eager"]
    said = [quality(names, pair, options) for names, pair in kinds] if options.text or options.answers else []
    print(table(said, ".4f"))
    return {"environment": environment(target.device), "times": lines, "quality": said}
