"""The code of both demos: an answer streamed in colour, then one table of what it cost against what.

Owns the demos' options, their defaults for the embedded models, and the streaming. Decoding is the library's, measuring
is `comparison`'s.
"""

import argparse
import dataclasses
import functools
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evaluation.demo.comparison import (
    ASSISTED,
    GREEDY,
    LABELS,
    OURS,
    PLAIN,
    Method,
    in_loop,
    interleave,
    list_partings,
    notes,
    report,
    table,
)
from evaluation.run import baselines
from evaluation.run.machine import environment
from evaluation.run.options import Machine, add_options, option
from opt_tree import OptTree, Pair, Sampling, Sharpened, load_causal_lm, load_pair, load_tokenizer
from opt_tree.checkpoints import DEMO, as_dtype, check_same_tokenizer
from opt_tree.decode import check_prompt
from opt_tree.display import IncrementalText, paint, to_html
from opt_tree.inflate import inflate_pair
from opt_tree.presets import opt, plain

Kind = Literal["classic", "eagle"]

# The best tree for the embedded models on one CPU core, not the paper's: there a node costs more than on a GPU.
DEMO_TREE = OptTree(nodes=12, threshold=0.45, max_depth=10)

PROMPTS = (
    "Explain the `tar` command on Linux with examples.",
    "Give me an overview of the economy of Iceland.",
    'What does the word "lantern" mean? Please give an example.',
    "Is it true that penguins can fly? Why or why not?",
    "Write a short story about a fox who wanted to learn how to swim.",
    "A box holds 12 pencils. Anna buys 3 boxes and gives away 5 pencils. How many pencils does she have left?",
)
TIME_LIMIT = 35.0  # seconds after which the comparison begins no further prompt: a demo is to take less than a minute


@dataclass(frozen=True)
class Options(Machine):
    """Everything a demo can be told. The command line is made of these fields."""

    base_model_path: str = option("demo", "target: folder, Hub id, or demo for the embedded one")
    draft_model_path: str | None = option(None, "draft model; beside a head: what assists transformers")
    ea_model_path: str | None = option(None, "EAGLE head (demo_opt_eagle.py)")
    prompt: str | None = option(None, "the question (default: a handful of built-in ones)")
    nodes: int | None = option(None, "drafted nodes per tree, root excluded (the paper's n)")
    threshold: float | None = option(None, "least gain in E(A) worth one more layer (the paper's delta)")
    max_depth: int | None = option(None, "layers drafted at most")
    temperature: float = option(0.0, "0: greedy")
    top_p: float = option(1.0, "nucleus, at temperature > 0")
    top_k: int = option(0, "0: off")
    max_new_tokens: int = option(128, "length of an answer at most")
    rounds: int = option(3, "repetitions of the comparison")
    seed: int = option(0, "of the sampling")
    dtype: str = option("auto", "of the target: float32, bfloat16, float16, or auto for what suits the device")
    draft_dtype: str = option("auto", "of the draft model")
    bare: bool = option(False, "take the draft law as it is, not sharpened by its fitted temperature")
    html: str | None = option(None, "write the coloured transcript and drawn trees to this file")
    no_color: bool = option(False, "mark accepted draft tokens by brackets instead of colour")

    def policy(self) -> OptTree:
        """The tree: the demo's own for the embedded target, else the paper's, with whatever was named replaced."""
        default = DEMO_TREE if self.base_model_path == "demo" else OptTree()
        named = {name: getattr(self, name) for name in ("nodes", "threshold", "max_depth")}
        return dataclasses.replace(default, **{name: value for name, value in named.items() if value is not None})

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k)

    def check(self, kind: Kind) -> None:
        """Raise ValueError for whatever is wrong before any model is looked at."""
        self.policy()
        if self.sampling.greedy and (self.top_p < 1 or self.top_k):
            raise ValueError("top_p and top_k act at temperature > 0 only; give --temperature")
        for name in ("max_new_tokens", "rounds"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("the prompt is empty")
        if kind == "classic" and self.ea_model_path:
            raise ValueError("demo_opt_classic.py drafts with a draft model; for an EAGLE head run demo_opt_eagle.py")
        needed = "draft_model_path" if kind == "classic" else "ea_model_path"
        if self.base_model_path != "demo" and not getattr(self, needed):
            raise ValueError(f"no drafter named for {self.base_model_path}: give --{needed.replace('_', '-')}")
        if self.html:
            check_writable(Path(self.html))


def check_writable(path: Path) -> None:
    """Raise ValueError unless `path` can be written."""
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
    if not existed:
        path.unlink()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # one line, like every other error, instead of the usage and then the line


def parse(kind: Kind, arguments: Sequence[str]) -> Options:
    """Read the command line; an option may be written with hyphens or underscores."""
    drafter = "an independent draft model" if kind == "classic" else "an EAGLE head"
    parser = _Parser(f"demo_opt_{kind}.py", description=f"Decode with OPT-Tree and {drafter}, and compare.")
    add_options(parser, Options)
    return Options(**vars(parser.parse_args(arguments)))


def main(kind: Kind, arguments: Sequence[str] | None = None) -> int:
    """Run a demo and return its exit status: 2, after one line on stderr, for whatever a caller got wrong."""
    try:
        options = parse(kind, sys.argv[1:] if arguments is None else arguments)
        options.check(kind)
        run(kind, options)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def run(kind: Kind, options: Options) -> None:
    """Load, stream one answer, compare, write the page: a table for people, one JSON line for machines."""
    transformers.logging.set_verbosity_error()
    if options.base_model_path == "demo" or not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()  # the embedded models load in a blink
    device = check_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.set_threads(device)
    pair = load(kind, options, str(device))
    assistant = load_assistant(options, pair, str(device))
    policy, texts = options.policy(), [options.prompt] if options.prompt else PROMPTS
    prompts = [check_prompt(pair.encode(text), pair.target) for text in texts]

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal still gets its answer
    facts = {"models": describe_models(kind, options, pair), "machine": describe_machine(environment(device), device)}
    print(*facts.values(), f"{policy}, {describe_sampling(options.sampling)}", f"\n> {texts[0]}\n", sep="\n")
    decoder = opt(pair.target, pair.drafter, policy)
    streamer = ColorStreamer(pair.tokenizer, sys.stdout, wants_color(sys.stdout) and not options.no_color)
    first = decoder.generate(prompts[0], options.max_new_tokens, options.sampling, pair.stop, streamer, options.seed)

    sampling, seed = options.sampling, options.seed
    methods: dict[str, Method] = {
        PLAIN: in_loop(plain(pair.target), pair, sampling, seed),
        GREEDY: functools.partial(baselines.transformers_greedy, pair, sampling=sampling, seed=seed),
        OURS: in_loop(decoder, pair, sampling, seed),
    }
    if assistant is not None:
        methods[ASSISTED] = functools.partial(
            baselines.transformers_assisted, pair, sampling=sampling, seed=seed, assistant=assistant
        )
    comparison = interleave(methods, prompts, options.max_new_tokens, options.rounds, TIME_LIMIT)
    partings = list_partings(comparison, pair, prompts, sampling, seed)
    print(table(comparison, device.type, partings, sampling), *notes(comparison, pair, partings, sampling), sep="\n")
    if options.html:
        rates = "; ".join(f"{label} {comparison.rate(name):.0f}" for name, label in LABELS.items() if name in methods)
        compared = {f"{len(prompts)} prompts" if len(prompts) > 1 else "compared": f"{rates} tokens per second"}
        page = to_html(first, pair.tokenizer, facts=compared | {"policy": repr(policy)} | facts)
        Path(options.html).write_text(page, encoding="utf-8")
        print(f"wrote {options.html}")
    settings = {"demo": kind, "options": dataclasses.asdict(options), "policy": dataclasses.asdict(policy)}
    print(json.dumps(settings | facts | report(comparison, partings) | {"environment": environment(device)}))


def check_device(name: str) -> torch.device:
    """Return the device, or raise ValueError where this machine or this build of torch has none of that name."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled with CUDA
        raise ValueError(f"no device {name!r} here: {str(error).splitlines()[0]}") from error


def load(kind: Kind, options: Options, device: str) -> Pair:
    """Load the target, inflated if asked for, and its drafter."""
    drafter = {"drafter": options.draft_model_path} if kind == "classic" else {"eagle": options.ea_model_path or "demo"}
    pair = load_pair(
        options.base_model_path,
        **drafter,
        dtype=options.dtype,
        draft_dtype=options.draft_dtype,
        device=device,
        bare=options.bare,
    )
    return inflate_pair(pair, options.inflate) if options.inflate else pair


def load_assistant(options: Options, pair: Pair, device: str) -> PreTrainedModel | None:
    """Return the model that assists transformers: the pair's drafter, or beside a head the draft model, if any."""
    if (drafter := baselines.assistant_of(pair.drafter)) is not None:
        return drafter
    path = options.draft_model_path or ("demo" if options.base_model_path == "demo" else None)
    if path is None:
        return None
    folder = str(DEMO / "draft") if path == "demo" else path
    check_same_tokenizer(pair.tokenizer, load_tokenizer(folder), options.base_model_path, path)
    dtype = "float32" if options.draft_dtype == "auto" and device == "cpu" else options.draft_dtype
    return load_causal_lm(folder, as_dtype(dtype, device), device).model


def wants_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class ColorStreamer:
    """A transformers streamer for the library's loop: accepted draft tokens in colour or in brackets, as they come.

    The loop hands over one step at a time, and its last token is the target's own. (Only a stop token inside an
    accepted path ends a step otherwise, and it is not shown.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO, color: bool) -> None:
        self._text, self._out, self._color = IncrementalText(tokenizer), out, color
        self._begun = False

    def put(self, value: Tensor) -> None:
        """Show one step's tokens; the first call brings the prompt, which is not shown."""
        if not self._begun:
            self._begun = True
            return
        *drafted, own = [self._text.add(token) for token in value.tolist()]
        self._out.write(paint("".join(drafted), True, self._color) + own)
        self._out.flush()

    def end(self) -> None:
        """Show what was held back, and what the marks mean."""
        legend = paint("drafted and accepted", True, self._color) + " the target's own"
        self._out.write(f"{self._text.rest()}\n\n({legend})\n\n")
        self._out.flush()


def describe_models(kind: Kind, options: Options, pair: Pair) -> str:
    """Say what decodes and what drafts: names, sizes, dtypes, the fitted sharpening."""
    drafter: Any = pair.drafter
    sharpened = ""
    if isinstance(drafter, Sharpened):
        sharpened, drafter = f", sharpened by temperature {drafter.temperature:.2f}", drafter.drafter
    if kind == "classic":
        name, model = f"draft model {options.draft_model_path or 'demo'}", drafter.lm.model
    else:
        name, model = f"EAGLE head {options.ea_model_path or 'demo'}", drafter.lm.model.base_model
    inflated = f" inflated to {options.inflate}" if options.inflate else ""
    return (
        f"target {options.base_model_path}{inflated}: {_size(pair.target.model)}, {_name(pair.target.dtype)}; "
        f"{name}: {_size(model)}, {_name(drafter.lm.dtype)}{sharpened}"
    )


def describe_sampling(sampling: Sampling) -> str:
    """Say in words how the target's law is made."""
    if sampling.greedy:
        return "greedy"
    return f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k or 'off'}"


def _size(model: torch.nn.Module) -> str:
    return f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe_machine(about: dict[str, Any], device: torch.device) -> str:
    """Say on what the figures were measured; without it they mean nothing."""
    threads = f"{about['threads']} thread{'s'[: about['threads'] > 1]}"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{device.type}: {about['device']}, {threads}{load}; "
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {about['python']}"
    )
