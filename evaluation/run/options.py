"""The options that commands share, each group a dataclass: the models, the questions; and a run's own.

What they are checked against is the library's, which is imported where options are made: --help imports none of it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import opt_tree
from evaluation.command_line import check_bound, check_bounds, option
from opt_tree.methods.registry import listed
from opt_tree.models.known import KNOWN, drafter_of

if TYPE_CHECKING:
    import torch

METHODS = ("opt", "chain", "none")
DEFAULTS = NODES, THRESHOLD, DEPTH = 60, 0.5, 10
"""What `opt_tree.OptTree` has by default; a test compares them."""
DRAFTERS = Path(opt_tree.__file__).parent / "methods" / "drafters"
PUBLISHED = {"draft_model_path": "lm", "ea_model_path": "eagle"}
"""The published flags of the two commands, and what kind of drafter each names."""
MOST_THREADS, MOST_LANES = 1024, 1024
"""Beyond these a number is a slip of the keyboard, and would take the machine's memory before it failed."""
WEIGHTS = ("int8", "int4")
"""What weights may be quantised to: `opt_tree.backends.quantised.BITS`."""
STOPPED = "stopped; the same command goes on from here"
AUTO = "auto"
"""Instead of a number of nodes: the tree that what steps cost on this machine says (`Auto`)."""


def known(family: str, text: str) -> Callable[[], str]:
    """Return the help of an option that names a method of a family: drafters, policies, verifiers, controllers."""
    return lambda: text + ", ".join(listed(Path(opt_tree.__file__).parent / "methods" / family))


@dataclass(frozen=True)
class Models:
    """A target and what drafts for it, on what it runs, and whether a machine reads what is printed."""

    device: str | None = option(None, "by default cuda where there is one, else cpu")
    threads: int | None = option(
        None,
        "CPU threads; where the CPU decodes, by default $OMP_NUM_THREADS or 1: more of them stall when a neighbour is "
        "busy",
        least=1,
        most=MOST_THREADS,
    )
    through: str | None = option(
        None,
        "FILE.py:NAME:ARGUMENT, a function that changes the pair once it is loaded; "
        "experiments/inflate.py:inflate_pair:7b makes the target larger",
    )
    json: bool = option(False, "print the figures as one JSON line, too")
    base_model_path: str = option(
        "demo",
        "target: a folder, a .gguf file, a Hub id, 'demo', the embedded one, or a known model, fetched once: "
        + ", ".join(KNOWN),
    )
    drafter: str = option(
        None,
        lambda: (
            "what drafts: KIND:PATH, PATH a folder, a Hub id or 'demo'; by default a known model's own, else the "
            "embedded one; " + ", ".join(f"{kind}: {about}" for kind, about in listed(DRAFTERS).items())
        ),
    )
    draft_model_path: str | None = option(None, "a causal LM that drafts: --drafter lm:PATH")
    ea_model_path: str | None = option(None, "an EAGLE head that drafts: --drafter eagle:PATH")
    dtype: str = option("auto", "of the target and of an independent drafter: auto, float32, bfloat16, float16")
    weights: str | None = option(
        None,
        "of the target and of a draft model, on a CPU: int8 or int4; by default as --dtype says",
        choices=WEIGHTS,
    )
    compile: bool = option(
        False, "compile the models' forwards for this CPU, once, in minutes, kept in the user's cache; on CUDA: graphs"
    )
    unpacked: bool = option(
        False, "eager forwards by the weights as they are, not by copies packed for this CPU: less memory, slower trees"
    )
    canonical: bool = option(
        False, "on a CPU a tree changes no bit of the target's logits; refused where it cannot be so"
    )
    no_exact: bool = option(
        False, "let the target round as in transformers, where in bfloat16 on a CPU it is --canonical if it can be"
    )

    embedded: ClassVar[str] = "lm:demo"
    """What drafts where neither a flag nor the model says so."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.through is not None:
            from opt_tree.methods.own_files import split_name

            if split_name(self.through) is None:
                raise ValueError(f"--through takes FILE.py:NAME, a function that changes a pair, got {self.through}")
        for key, kind in PUBLISHED.items():
            if (path := getattr(self, key)) is not None:
                if self.drafter is not None:
                    raise ValueError("--drafter, --draft-model-path and --ea-model-path each say what drafts: give one")
                object.__setattr__(self, "drafter", f"{kind}:{path}")
                object.__setattr__(self, key, None)
        if self.drafter is None:
            object.__setattr__(self, "drafter", self.default_drafter())
        if self.canonical and self.no_exact:
            raise ValueError("--canonical asks for what --no-exact turns off: give one of them")
        if self.unpacked and self.compile:
            raise ValueError("--unpacked is for eager forwards, --compile for others: give one of them")
        from opt_tree.methods.drafters.registry import parse_spec

        for spec in self.drafters:
            parse_spec(spec)

    @property
    def drafters(self) -> list[str]:
        """The specs that are named: one, but for commands that take a list."""
        return [self.drafter]

    def default_drafter(self) -> str:
        """What drafts where no flag says it: a known model brings its own drafter; the embedded ones fit no other."""
        own = drafter_of(self.base_model_path) if self.base_model_path in KNOWN else None
        return own or self.embedded

    def check_device(self) -> str:
        """Return the device asked for, or the default, and give this process its threads.

        Raises ValueError where this machine or this build of torch has no such device.
        """
        import torch

        from opt_tree.models.checkpoints import require_device

        device = self.device or ("cuda" if torch.cuda.device_count() else "cpu")
        require_device(device)
        self.set_threads(torch.device(device))
        return device

    def set_threads(self, device: "torch.device") -> None:
        """Give this process the threads it was told to use on a device, or the default."""
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        elif device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)


@dataclass(frozen=True)
class Asked(Models):
    """The questions that are put."""

    bench_name: str = option(
        "demo",
        "question set: demo, heldout, mt_bench, gsm8k, humaneval, spec_bench, speed_bench/qualitative, "
        "speed_bench/throughput_1k (2k, 8k, 16k, 32k), or a file in the data folder",
    )
    question_file: str | None = option(
        None, "any JSONL or parquet file with `turns` or `question`, instead of --bench-name"
    )
    data_dir: str | None = option(
        None, "where question sets lie, looked in first; then $OPT_TREE_DATA, ./data and the user cache"
    )
    fetch: bool = option(False, "download the question set to the user cache if it is in none of these")
    question_begin: int | None = option(None, "index of the first question")
    question_end: int | None = option(None, "index behind the last question")
    limit: int | None = option(None, "this many questions at most", least=1)
    conv_template: str | None = option(
        None, "FastChat's conversation of this name instead of the tokenizer's chat template"
    )


CONTROLLER = known("controllers", "which tree each step gets, of those within the tree options: NAME or NAME:PATH, of ")


def read_tree(options: Any) -> None:
    """Read --nodes as a number or as `auto`, and check what is said of the trees beside it.

    Raises ValueError for what is neither, for more nodes than a tree may have, for a controller that there is not, and
    for what --nodes auto, which is one, decides itself.
    """
    from opt_tree.methods.controllers.registry import parse_controller
    from opt_tree.policy import MOST_NODES

    given, controller = options.nodes, options.controller
    try:
        object.__setattr__(options, "nodes", given if given in (None, AUTO) else int(given))
    except ValueError:
        raise ValueError(f"--nodes: neither a number nor {AUTO}: {given!r}") from None
    if controller is not None:
        parse_controller(controller)
    if given != AUTO:
        check_bound("nodes", options.nodes, most=MOST_NODES)
    elif options.threshold is not None:
        raise ValueError("--nodes auto takes no --threshold: what a layer must bring is what it costs here")
    elif controller is not None:
        raise ValueError(f"--nodes auto is --controller auto: leave it out beside --controller {controller}")


@dataclass(frozen=True)
class Options(Asked):
    """Everything a run can be asked for. An underscore in a name is a hyphen on the command line, or an underscore."""

    method: str = option("opt", "OPT-Tree, a chain of the drafter's best tokens, or plain decoding", choices=METHODS)
    nodes: int | str | None = option(
        None,
        "drafted nodes sent to the target each step, root excluded; auto: nodes and layers by what they cost here; by "
        f"default {NODES}, but on a CPU auto, if neither a threshold nor a controller nor a chain is asked for",
    )
    threshold: float | None = option(
        None,
        f"draft another layer while the newest raised E(A) by more than this (default: {THRESHOLD}; none with "
        "--nodes auto)",
    )
    max_depth: int = option(DEPTH, "drafted layers at most; with --method chain, the chain's length")
    controller: str | None = option(None, CONTROLLER)
    temperature: float = option(0.0, "0 decodes greedily, above 0 samples")
    max_new_token: int = option(
        1024, "new tokens a turn, at most", least=1, aliases=["--max-new-tokens", "--max_new_tokens"]
    )
    num_choices: int = option(1, "answers to each question; they differ above temperature 0", least=1)
    batch_size: int = option(
        1,
        "questions that are decoded side by side; answers are the same, times are the batch's and tell of no speed",
        least=1,
        most=MOST_LANES,
    )
    seed: int = option(0, "of sampling; each turn's own follows from it, the question, the choice and the turn")
    answer_file: str | None = option(None, "by default BENCH-COMMAND-METHOD.jsonl here", aliases=["--output"])
    model_id: str | None = option(
        None, "model_id in the answers, -temperature-T appended; by default the target's name"
    )
    overwrite: bool = option(False, "delete the answer file and what lies beside it, instead of resuming it")
    baseline: bool = option(
        False,
        "also answer by plain decoding (same loop, empty tree) and by transformers' generate, question by question in "
        "turn, into files beside; print the comparison",
    )
    ceiling: bool = option(False, "write down what each tree allows at most; the seconds are the answer's")
    load_in_8bit: bool = option(False, "as published; on a CPU: --weights int8")
    num_gpus_per_model: int = option(1, "GPUs that hold one copy of the target, layers spread over them", least=1)
    num_gpus_total: int | None = option(
        None, "GPUs in all, of all processes that `accelerate launch` started; refused where they are others"
    )
    max_gpu_memory: str | None = option(
        None, "of each GPU for the target's weights, such as 20GiB; refused if they do not fit"
    )

    command: ClassVar[str] = "classic"
    """eval_opt_`command`, as answer files are called by default."""

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.weights not in (None, "int8"):
            raise ValueError(f"--load-in-8bit and --weights {self.weights}: leave out one of them")
        object.__setattr__(self, "weights", "int8" if self.load_in_8bit else self.weights)
        super().__post_init__()
        read_tree(self)
        if self.controller is not None and self.method != "opt":
            raise ValueError(f"--controller chooses among OPT-Tree's trees: leave out --method {self.method}")
        if self.nodes != AUTO:
            self.tree()  # refuses what is no tree
        elif self.method == "chain":
            raise ValueError("--nodes auto is OPT-Tree's; a chain takes --max-depth")
        opt_tree.Sampling(self.temperature)
        total, each = self.num_gpus_total, self.num_gpus_per_model
        if total is not None and (total < 1 or total % each):
            raise ValueError(f"--num-gpus-total {total} is not a multiple of --num-gpus-per-model {each}")

    def tree(self) -> "opt_tree.OptTree":
        """The tree of numbers: those that were given, else the published commands'."""
        given = {name: getattr(self, name) for name in ("nodes", "threshold", "max_depth")}
        return opt_tree.OptTree(**{name: value for name, value in given.items() if value is not None})

    def on(self, device: str) -> "Options":
        """The same with its tree said. Where nobody chose one, a CPU's is what its steps cost: the published
        one, meant for a GPU, can be slower there than none at all."""
        if isinstance(self.nodes, str):
            return self
        unsaid = self.method == "opt" and (self.nodes, self.threshold, self.controller) == (None, None, None)
        if unsaid and device.partition(":")[0] == "cpu":
            return replace(self, nodes=AUTO)
        tree = self.tree()
        return replace(self, nodes=tree.nodes, threshold=tree.threshold)

    @property
    def processes(self) -> int | None:
        """How many processes --num-gpus-total asks for; None: it was not given."""
        return None if self.num_gpus_total is None else self.num_gpus_total // self.num_gpus_per_model

    def as_dict(self) -> dict[str, Any]:
        """Every option, for the header; what drafts is said once."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in PUBLISHED}


@dataclass(frozen=True)
class EagleOptions(Options):
    """The same with another default: the embedded EAGLE head drafts."""

    command: ClassVar[str] = "eagle"
    embedded: ClassVar[str] = "eagle:demo"
