"""The options of the evaluation commands: the fields of one dataclass, from which the command line is built.

Also what they share with the other commands: `Machine`, how a field becomes an option, how a mistake is reported.
"""

import argparse
import dataclasses
import os
import sys
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints

import torch

from opt_tree import OptTree
from opt_tree.inflate import parse_shape

METHODS = ("opt", "chain", "none")
KINDS = {"classic": "draft_model_path", "eagle": "ea_model_path"}
"""The two commands, and the option that names the drafter of each."""


def option(default: Any, help: str, **metadata: Any) -> Any:
    """Make a field that `add_options` can turn into an option; `metadata` goes to argparse."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class Machine:
    """On what a command runs, and how large a target it is to stand for."""

    device: str | None = option(None, "by default cuda where there is one, else cpu")
    threads: int | None = option(
        None,
        "CPU threads; where the CPU decodes, by default $OMP_NUM_THREADS or 1: more of them stall when a neighbour is "
        "busy",
    )
    inflate: str | None = option(
        None, "replace the target by a larger one of the same function: 350m, 1b, 7b, 13b, HIDDENxLAYERS"
    )

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {self.threads}")
        if self.inflate is not None:
            parse_shape(self.inflate)

    def set_threads(self, device: torch.device) -> None:
        """Give this process the threads it was told to use on a device, or the default."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        elif device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)


@dataclass(frozen=True)
class Options(Machine):
    """Everything a run can be asked for. An underscore in a name is a hyphen on the command line, or an underscore."""

    base_model_path: str = option("demo", "target: a folder, a Hub id or 'demo', the embedded one")
    draft_model_path: str = option("demo", "independent draft model, likewise")
    ea_model_path: str = option("demo", "EAGLE head, likewise")
    method: str = option("opt", "OPT-Tree, a chain of the drafter's best tokens, or plain decoding", choices=METHODS)
    nodes: int = option(OptTree.nodes, "drafted nodes sent to the target each step, root excluded")
    threshold: float = option(OptTree.threshold, "draft another layer while the newest raised E(A) by more than this")
    max_depth: int = option(OptTree.max_depth, "drafted layers at most; with --method chain, the chain's length")
    temperature: float = option(0.0, "0 decodes greedily, above 0 samples")
    max_new_token: int = option(1024, "new tokens a turn, at most")
    num_choices: int = option(1, "answers to each question; they differ above temperature 0")
    seed: int = option(0, "of sampling; each turn's own follows from it, the question, the choice and the turn")

    bench_name: str = option(
        "demo", "question set: demo, mt_bench, gsm8k, humaneval, spec_bench, or a file's name in the data folder"
    )
    question_file: str | None = option(None, "any JSONL with `turns` or `question`, instead of --bench-name")
    data_dir: str | None = option(
        None, "where question sets lie, looked in first; then $OPT_TREE_DATA, ./data and the user cache"
    )
    fetch: bool = option(False, "download the question set to the user cache if it is in none of these")
    question_begin: int | None = option(None, "index of the first question")
    question_end: int | None = option(None, "index behind the last question")
    limit: int | None = option(None, "answer this many questions at most")

    answer_file: str | None = option(None, "by default BENCH-COMMAND-METHOD.jsonl here")
    model_id: str | None = option(
        None, "model_id in the answers, -temperature-T appended; by default the target's name"
    )
    overwrite: bool = option(False, "delete the answer file and what lies beside it, instead of resuming it")
    baseline: bool = option(
        False,
        "also answer by plain decoding (same loop, empty tree) and by transformers' generate, question by question in "
        "turn, into files beside; print the comparison",
    )
    history: str | None = option(
        None, "answer file whose answers are the conversation so far, for every method; by default its own"
    )
    conv_template: str | None = option(
        None, "FastChat's conversation of this name instead of the tokenizer's chat template"
    )
    system_message: str | None = option(None, "system message; by default the template's own")

    dtype: str = option(
        "auto", "of the target: auto, float32, bfloat16, float16; on an accelerator also of an independent drafter"
    )
    num_gpus_per_model: int = option(1, "GPUs that hold one copy of the target, layers spread over them")
    num_gpus_total: int | None = option(
        None,
        "GPUs in all: the questions are split over num-gpus-total / num-gpus-per-model processes, which are launched "
        "here unless `accelerate launch` already did",
    )
    max_gpu_memory: str | None = option(
        None, "of each GPU for the target's weights, such as 20GiB; refused if they do not fit"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("max_new_token", 1), ("num_choices", 1), ("num_gpus_per_model", 1), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        total, each = self.num_gpus_total, self.num_gpus_per_model
        if total is not None and (total < 1 or total % each):
            raise ValueError(f"--num-gpus-total {total} is not a multiple of --num-gpus-per-model {each}")

    @property
    def processes(self) -> int | None:
        """How many processes --num-gpus-total asks for; None: it was not given."""
        return None if self.num_gpus_total is None else self.num_gpus_total // self.num_gpus_per_model


def parse(kind: str, arguments: list[str] | None, description: str) -> Options:
    """Read the command line of one of the two commands; `kind` decides whose drafter it names."""
    others = {name for other, name in KINDS.items() if other != kind}
    parser = argparse.ArgumentParser(
        prog=f"python -m evaluation.eval_opt_{kind}",
        description=description,
        allow_abbrev=False,
    )
    add_options(parser, Options, others)
    return Options(**vars(parser.parse_args(arguments)))


def add_options(parser: argparse.ArgumentParser, options: type, without: Collection[str] = ()) -> None:
    """Add an option for each field of a dataclass made of `option`s."""
    hints = get_type_hints(options)
    for known in fields(options):
        if known.name in without:
            continue
        # Published: --max_depth but --bench-name. Both spellings of every name are taken.
        flags = dict.fromkeys((f"--{known.name.replace('_', '-')}", f"--{known.name}"))
        given: dict[str, Any] = {**known.metadata, "default": known.default}
        if hints[known.name] is bool:
            given["action"] = "store_true"
        else:
            given["type"] = _scalar(hints[known.name])
            given["metavar"] = None if "choices" in given else known.name.rpartition("_")[2].upper()
            if known.default is not None:
                given["help"] += " (default: %(default)s)"
        parser.add_argument(*flags, **given)


def _scalar(hint: Any) -> type:
    """int from `int | None`, str from `str`."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in get_args(hint) if kind is not types.NoneType)
    return hint


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a target and its one drafter."""
    parser.add_argument("--base-model-path", default="demo", help="target: a folder, a Hub id or 'demo', embedded")
    parser.add_argument("--draft-model-path", default="demo", help="independent draft model, likewise")
    parser.add_argument("--ea-model-path", help="EAGLE head, likewise, instead of a draft model")


def run_command(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], arguments: list[str] | None
) -> int:
    """Read the command line and run; what the caller got wrong is one line on stderr and exit status 2."""
    try:
        return run(parser.parse_args(arguments))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def as_dict(options: Options, kind: str) -> dict[str, Any]:
    """Every option of the command, for the header."""
    others = {name for other, name in KINDS.items() if other != kind}
    return {key: value for key, value in dataclasses.asdict(options).items() if key not in others}
