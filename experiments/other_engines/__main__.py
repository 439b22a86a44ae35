"""The same model, prompts and cores in other people's engines and in this library, taking turns.

    python -m experiments.other_engines --bench-name mt_bench --limit 16 --drafters ngram,store:smollm2@8/0.03

Each engine runs in a process of its own, so that one that crashes is one line. A peer that is not installed is left out
with a line. Speeds count new tokens over the time of an answer, its prompt included.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from evaluation.command_line import check_bounds, main_of, option, whole_numbers
from evaluation.run.options import WEIGHTS
from experiments.other_engines.registry import GROUPS, parse_drafter
from experiments.other_engines.texts import KINDS
from opt_tree.models.known import KNOWN, drafters_of


@dataclass(frozen=True)
class Options:
    """The command's options."""

    base_model_path: str = option("smollm2", "the model: a known name, a folder, a .gguf file or 'demo'")
    gguf: str | None = option(None, "the same model for llama.cpp and OpenVINO; by default what it was converted from")
    assistant: str | None = option(
        None,
        "a causal LM that assists transformers, named likewise; its GGUF file, if any, drafts in the other engines",
    )
    drafters: str | None = option(
        None,
        "comma list of what drafts for opt_tree, SPEC or SPEC@NODES/THRESHOLD; by default what belongs to it",
        aliases=["--drafter"],
    )
    peers: str = option(",".join(GROUPS), "comma list of groups of peers")
    texts: str = option(
        "chat",
        "comma list; chat: --bench-name; repeated: of spec_bench and humaneval; body: of a function of humaneval",
    )
    weights: str = option("full,int8,int4", "comma list: what opt_tree's weights have; full is --dtype")
    cores: str = option("1,2", "comma list: how many cores, one measurement each")
    eager: bool = option(False, "leave out opt_tree with compiled forwards, which are made once, in minutes")
    share: bool = option(False, "peers of torch with the same weights in one process; peak memory is theirs together")
    only: str | None = option(None, "semicolon list of the peers' names: these alone, where the models do not fit")
    dtype: str = option("auto", "of transformers and opt_tree")
    bench_name: str = option("mt_bench", "question set; the first turns are asked")
    data_dir: str | None = option(None, "where question sets lie, looked in first")
    fetch: bool = option(False, "download the question set to the user cache if it is in none of these")
    limit: int = option(16, "this many questions, spread over the set", least=1)
    max_new_tokens: int = option(96, "new tokens an answer, at most", least=1)
    output: str = option("peers.jsonl", "the answers, a line each, as they come")
    overwrite: bool = option(False, "replace the output file")
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, known in (("peers", GROUPS), ("texts", KINDS), ("weights", ("full", *WEIGHTS))):
            if unknown := set(getattr(self, name).split(",")) - set(known):
                raise ValueError(f"--{name} {', '.join(sorted(unknown))}: there are {', '.join(known)}")

        from opt_tree.methods.drafters.registry import parse_spec

        for named in self.named_drafters:
            parse_spec(parse_drafter(named)[0])
        there = len(os.sched_getaffinity(0))
        if any(not 1 <= count <= there for count in whole_numbers(self.cores)):
            raise ValueError(f"--cores {self.cores}: this machine has {there}")
        if Path(self.output).exists() and not self.overwrite:
            raise ValueError(f"{self.output} is there already: name another --output, or --overwrite")

    @property
    def groups(self) -> list[str]:
        return self.peers.split(",")

    @property
    def named_drafters(self) -> list[str]:
        """What is named, else what belongs to the model."""
        return self.drafters.split(",") if self.drafters else drafters_of(self.base_model_path) or ["ngram"]

    @property
    def trees(self) -> dict[str | None, dict[str, float]]:
        """What OPT-Tree grows where a drafter does not say it, for each kind of weights that is asked for."""
        known = KNOWN.get(self.base_model_path)
        kinds = [None if kind == "full" else kind for kind in self.weights.split(",")]
        return {
            kind: dict(zip(("nodes", "threshold"), known.tree(kind), strict=True)) if known else {} for kind in kinds
        }


main = main_of("experiments.other_engines", Options, __doc__, "experiments.other_engines.__main__:run")

if __name__ == "__main__":
    sys.exit(main())

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from evaluation.answers.metrics import between, estimate
from evaluation.command_line import print_json, table
from evaluation.questions.prompts import Prompter
from evaluation.questions.sets import load_set, select
from evaluation.timing import processor
from experiments.other_engines.engines import Settings, bf16_gguf
from experiments.other_engines.measuring import Measured, Run, measure
from experiments.other_engines.registry import BASE, REFERENCE, Peer, peers_of
from experiments.other_engines.texts import bodies, repeated
from opt_tree.models.checkpoints import as_dtype, load_tokenizer
from opt_tree.models.named import resolve
from opt_tree.tools.stop_strings import Stop

TIMEOUT = 900.0
"""Seconds after which a peer that does not answer is left out."""


def prompts_of(options: Options, tokenizer: Any, stops: frozenset[int]) -> dict[str, list[list[int]]]:
    """Return the prompts of each kind of text that is asked for."""
    questions = load_set(options.bench_name, None, options.data_dir, options.fetch)
    step = max(1, len(questions.questions) // options.limit)
    chosen = select(questions.questions[::step], None, None, options.limit)
    prompter = Prompter(tokenizer, Stop(stops))
    asked = {"chat": [question.turns[0] for question in chosen]}
    kinds = options.texts.split(",")
    if "repeated" in kinds:
        asked["repeated"] = repeated(options.limit, options.data_dir, options.fetch)
    prompts = {kind: [prompter.encode([one], []) for one in asked.get(kind, [])] for kind in kinds}
    if "body" in kinds:
        known = bodies(options.limit, options.data_dir, options.fetch)
        prompts["body"] = [
            [*prompter.encode([one.message], []), *tokenizer(one.given, add_special_tokens=False).input_ids]
            for one in known
        ]
    return prompts


def run(options: Options) -> int:
    """Measure, print the table; 1 where not even the reference ran."""
    folder = resolve(options.base_model_path, "target")
    tokenizer = load_tokenizer(folder)
    ends = tokenizer.eos_token_id
    stops = frozenset() if ends is None else frozenset([ends])
    prompts = prompts_of(options, tokenizer, stops)
    context = max(len(one) for some in prompts.values() for one in some) + options.max_new_tokens + 64
    dtype = str(as_dtype(options.dtype, "cpu")).removeprefix("torch.")
    assistant = resolve(options.assistant, "draft") if options.assistant else ""
    assistant_gguf = str(file) if assistant and (file := Path(assistant) / "source.gguf").is_file() else ""
    common = Settings(folder, 1, context, sorted(stops), dtype, _gguf_of(options, folder), assistant=assistant)
    output = Path(options.output)
    output.write_text("")
    measured = []
    with _bf16(common.gguf, options.groups if options.only is None else options.only.split("bf16")[1:]) as bf16:
        for count in whole_numbers(options.cores):
            cores = sorted(os.sched_getaffinity(0))[:count]
            settings = replace(common, threads=count)
            peers = peers_of(
                settings, bf16, options.named_drafters, options.groups, options.trees, assistant_gguf, options.eager
            )
            if options.only is not None:
                peers = named(peers, options.only)
            runs = [
                Run(some, options.max_new_tokens, stops, TIMEOUT, output, kind, options.share)
                for kind, some in prompts.items()
            ]
            measured += measure(peers, cores, *runs)
    found = figures(measured)
    left_out = [f"{one.name}, {one.cores} cores: left out, {one.failed}" for one in measured if one.failed]
    load = f", load {os.getloadavg()[0]:.1f}"
    print(f"{options.base_model_path}, {dtype}; {options.limit} prompts of each kind, at most "
          f"{options.max_new_tokens} tokens each; {processor()}{load}")  # fmt: skip
    print(table(found), *left_out, f"answers in {output}", sep="\n")
    print_json(options.json, {"options": asdict(options), "machine": processor(), "peers": found, "left out": left_out})
    return int(all(one.failed for one in measured))


def named(peers: Sequence[Peer], only: str) -> list[Peer]:
    """The peers of these names. ValueError for a name that none has."""
    wanted = [name.strip() for name in only.split(";")]
    if unknown := set(wanted) - {peer.name for peer in peers}:
        raise ValueError(f"--only {', '.join(sorted(unknown))}: there are {'; '.join(peer.name for peer in peers)}")
    return [peer for peer in peers if peer.name in wanted]


def _gguf_of(options: Options, folder: str) -> str:
    """The GGUF file of the same weights, or nothing."""
    if options.gguf is not None:
        if not Path(options.gguf).is_file():
            raise ValueError(f"no GGUF file at {options.gguf}")
        return options.gguf
    if options.base_model_path.endswith(".gguf"):
        return options.base_model_path
    source = Path(folder) / "source.gguf"
    return str(source) if source.is_file() else ""


@contextmanager
def _bf16(gguf: str, groups: list[str]) -> Iterator[str]:
    """The GGUF file unpacked to bfloat16 for as long as the measurement takes, where somebody reads it."""
    if not gguf or "llama.cpp" not in groups:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="peers.") as folder:
        print("unpacking the GGUF file to bfloat16 for llama.cpp", file=sys.stderr)
        yield str(bf16_gguf(Path(gguf), Path(folder) / "bf16.gguf"))


def figures(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """A row for each peer that ran, fastest first for each number of cores and kind of text."""
    rows = []
    for one in measured:
        if not one.answers:
            continue
        base, reference, plain = (_beside(one, measured, name) for name in (BASE, REFERENCE, one.plain))
        row = {"texts": one.texts, "peer": one.name, "weights": one.weights, "cores": one.cores}
        row |= {
            "tokens/s": _rate(one),
            "95 %": _interval([one]),
            "x transformers": _rate(one) / _rate(base) if base else None,
            "x plain": _rate(one) / _rate(plain) if plain else None,
            "x plain 95 %": _interval([one, plain]) if plain and plain is not one else None,
            "tokens a step": _tokens_a_step(one),
            "plain's text": f"{_equal(one, plain)}/{len(one.answers)}" if plain else None,
            "first token ms": 1000 * statistics.median(answer["first_seconds"] or 0 for answer in one.answers),
            "load s": one.load_seconds,
            "peak MB": max(answer["peak_mb"] for answer in one.answers),
            "float32's text": f"{_equal(one, reference)}/{len(one.answers)}" if reference else None,
        }
        rows.append(row)
    return sorted(rows, key=lambda row: (row["cores"], row["texts"], -row["tokens/s"]))


def _beside(one: Measured, measured: Sequence[Measured], name: str) -> Measured | None:
    """What a peer of this name did on the same cores and texts."""
    place = (name, one.cores, one.texts)
    return next((each for each in measured if (each.name, each.cores, each.texts) == place and each.answers), None)


def _rate(one: Measured) -> float:
    return sum(len(answer["tokens"]) for answer in one.answers) / sum(answer["seconds"] for answer in one.answers)


def _interval(some: list[Measured]) -> str | None:
    """Of the rate of the first, or of how many times that of the second it is: by resampling prompts."""
    sums = [
        [value for answer in answers for value in (len(answer["tokens"]), answer["seconds"])]
        for answers in zip(*(one.answers for one in some), strict=True)
    ]

    def of(drawn: Any) -> Any:
        rate = drawn[..., 0] / drawn[..., 1]
        return rate / (drawn[..., 2] / drawn[..., 3]) if len(some) > 1 else rate

    return between(estimate(sums, of)[1]) or None


def _tokens_a_step(one: Measured) -> float | None:
    steps = [answer.get("steps") for answer in one.answers]
    return None if None in steps else sum(len(answer["tokens"]) for answer in one.answers) / sum(filter(None, steps))


def _equal(one: Measured, reference: Measured) -> int:
    """How many texts are the same."""
    pairs = zip(one.answers, reference.answers, strict=True)
    return sum(answer["tokens"] == expected["tokens"] for answer, expected in pairs)
