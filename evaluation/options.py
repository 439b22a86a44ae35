"""The options of the evaluation commands: the fields of one dataclass, from which the command line is built."""

import argparse
import dataclasses
import types
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints

from opt_tree import OptTree

METHODS = ("opt", "chain", "none")
KINDS = {"classic": "draft_model_path", "eagle": "ea_model_path"}
"""The two commands, and the option that names the drafter of each."""


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class Options:
    """Everything a run can be asked for. An underscore in a name is a hyphen on the command line, or an underscore."""

    base_model_path: str = _option("demo", "target: a folder, a Hub id or 'demo', the embedded one")
    draft_model_path: str = _option("demo", "independent draft model, likewise")
    ea_model_path: str = _option("demo", "EAGLE head, likewise")
    method: str = _option("opt", "OPT-Tree, a chain of the drafter's best tokens, or plain decoding", choices=METHODS)
    nodes: int = _option(OptTree.nodes, "drafted nodes sent to the target each step, root excluded")
    threshold: float = _option(OptTree.threshold, "draft another layer while the newest raised E(A) by more than this")
    max_depth: int = _option(OptTree.max_depth, "drafted layers at most; with --method chain, the chain's length")
    temperature: float = _option(0.0, "0 decodes greedily, above 0 samples")
    max_new_token: int = _option(1024, "new tokens a turn, at most")
    num_choices: int = _option(1, "answers to each question; they differ above temperature 0")
    seed: int = _option(0, "of sampling; each turn's own follows from it, the question, the choice and the turn")

    bench_name: str = _option(
        "demo", "question set: demo, mt_bench, gsm8k, humaneval, spec_bench, or a file's name in the data folder"
    )
    question_file: str | None = _option(None, "any JSONL with `turns` or `question`, instead of --bench-name")
    data_dir: str | None = _option(
        None, "where question sets lie, looked in first; then $OPT_TREE_DATA, ./data and the user cache"
    )
    fetch: bool = _option(False, "download the question set to the user cache if it is in none of these")
    question_begin: int | None = _option(None, "index of the first question")
    question_end: int | None = _option(None, "index behind the last question")
    limit: int | None = _option(None, "answer this many questions at most")

    answer_file: str | None = _option(None, "by default BENCH-COMMAND-METHOD.jsonl here")
    model_id: str | None = _option(
        None, "model_id in the answers, -temperature-T appended; by default the target's name"
    )
    overwrite: bool = _option(False, "delete the answer file and what lies beside it, instead of resuming it")
    baseline: bool = _option(
        False,
        "also answer by plain decoding (same loop, empty tree) and by transformers' generate, question by question in "
        "turn, into files beside; print the comparison",
    )
    history: str | None = _option(
        None, "answer file whose answers are the conversation so far, for every method; by default its own"
    )
    conv_template: str | None = _option(
        None, "FastChat's conversation of this name instead of the tokenizer's chat template"
    )
    system_message: str | None = _option(None, "system message; by default the template's own")

    dtype: str = _option(
        "auto", "of the target: auto, float32, bfloat16, float16; on an accelerator also of an independent drafter"
    )
    device: str | None = _option(None, "by default cuda where there is one, else cpu")
    inflate: str | None = _option(
        None, "replace the target by a larger one of the same function: 350m, 1b, 7b, 13b, HIDDENxLAYERS"
    )
    num_gpus_per_model: int = _option(1, "GPUs that hold one copy of the target, layers spread over them")
    num_gpus_total: int | None = _option(
        None,
        "GPUs in all: the questions are split over num-gpus-total / num-gpus-per-model processes, which are launched "
        "here unless `accelerate launch` already did",
    )
    max_gpu_memory: str | None = _option(
        None, "of each GPU for the target's weights, such as 20GiB; refused if they do not fit"
    )

    def __post_init__(self) -> None:
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
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    hints = get_type_hints(Options)
    for option in fields(Options):
        if option.name in others:
            continue
        # Published: --max_depth but --bench-name. Both spellings of every name are taken.
        flags = list(dict.fromkeys((f"--{option.name.replace('_', '-')}", f"--{option.name}")))
        given: dict[str, Any] = {**option.metadata, "default": option.default}
        if hints[option.name] is bool:
            given["action"] = "store_true"
        else:
            given["type"] = _scalar(hints[option.name])
            given["metavar"] = None if "choices" in given else option.name.rpartition("_")[2].upper()
        parser.add_argument(*flags, **given)
    return Options(**vars(parser.parse_args(arguments)))


def _scalar(hint: Any) -> type:
    """int from `int | None`, str from `str`."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in get_args(hint) if kind is not types.NoneType)
    return hint


def as_dict(options: Options, kind: str) -> dict[str, Any]:
    """Every option of the command, for the header."""
    others = {name for other, name in KINDS.items() if other != kind}
    return {key: value for key, value in dataclasses.asdict(options).items() if key not in others}
