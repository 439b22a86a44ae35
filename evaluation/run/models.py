"""From options to models and methods: devices, GPUs of a process, inflation.

Loads through `opt_tree.load_pair`, decodes through presets; owns what the GPU options mean.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from evaluation.questions.prompts import Prompter
from evaluation.run.baselines import assistant_of, transformers_greedy
from evaluation.run.conversation import Answer, InLoop
from evaluation.run.inflate import inflate_pair
from evaluation.run.options import Machine, Models, Options
from evaluation.run.processes import Processes
from evaluation.timing import Timed
from opt_tree import Decoder, OptTree, Pair, Sampling, load_pair
from opt_tree.decoding.presets import chain, opt, plain
from opt_tree.decoding.step_costs import auto
from opt_tree.drafters import model_drafter
from opt_tree.drafters.registry import DrafterOptions, load_drafter
from opt_tree.models.checkpoints import as_dtype, check_same_tokenizer, load_causal_lm, load_tokenizer, require_device
from opt_tree.models.named import resolve


def check_device(options: Machine) -> str:
    """The device asked for, or the default; ValueError where this machine or this build of torch has none such.

    Also gives this process its threads.
    """
    device = options.device or ("cuda" if torch.cuda.device_count() else "cpu")
    require_device(device)
    options.set_threads(torch.device(device))
    return device


def place(options: Options, processes: Processes) -> str:
    """The device of this process; ValueError when the GPU options ask for what is not there."""
    count = torch.cuda.device_count()
    device = options.device or ("cuda" if count else "cpu")
    if not device.startswith("cuda"):
        if options.max_gpu_memory or options.num_gpus_per_model > 1 or options.processes not in (None, 1):
            raise ValueError(
                f"--num-gpus-total, --num-gpus-per-model and --max-gpu-memory speak of GPUs, but the device is {device}"
                "; on a CPU several processes are: accelerate launch --multi_gpu --num_processes N"
            )
        return check_device(options)
    needed = (processes.local_rank + 1) * options.num_gpus_per_model
    if needed > count:
        raise ValueError(f"process {processes.rank} needs {needed} GPUs on this machine, which has {count}")
    if options.processes not in (None, processes.size):
        raise ValueError(
            f"--num-gpus-total {options.num_gpus_total} with {options.num_gpus_per_model} a model means "
            f"{options.processes} processes, {processes.size} were launched"
        )
    if device == "cuda":
        device = f"cuda:{processes.local_rank * options.num_gpus_per_model}"
    torch.cuda.set_device(device)
    return device


def relaunch(command: str, options: Options, arguments: Sequence[str]) -> None:
    """Become `accelerate launch` of as many processes as --num-gpus-total asks for; return if that is one."""
    count = torch.cuda.device_count()
    if "WORLD_SIZE" in os.environ or options.processes in (None, 1) or options.device == "cpu" or not count:
        return
    if options.num_gpus_total > count:  # type: ignore[operator]
        raise ValueError(
            f"--num-gpus-total {options.num_gpus_total}: this machine has {count} GPUs; over several machines use "
            "accelerate launch --num_machines"
        )
    os.execv(sys.executable, [sys.executable, *launcher(command, options.processes or 1), *arguments])


def launcher(command: str, processes: int) -> list[str]:
    """The part of the command line that launches."""
    # Its other flags start one process, however many are asked for.
    several = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    count = ["--num_processes", str(processes)]
    return ["-m", "accelerate.commands.launch", *several, *count, "-m", f"evaluation.eval_opt_{command}"]


def load(options: Models, device: str, bare: bool = False, draft_dtype: str | None = None) -> Pair:
    """Load a target and its drafter, inflated if asked for; `bare`: without the stored sharpening."""
    return _ready(_load_pair(options, device, draft_dtype, bare=bare), options, draft_dtype=draft_dtype or "auto")


def load_several(options: Models, drafters: Sequence[str], device: str) -> dict[str, Pair]:
    """Load one target and several drafters for it, by their specs; they share it, inflated, compiled or neither."""
    small = _load_pair(options, device, drafter=drafters[0])
    settings = DrafterOptions(small.tokenizer, _draft_dtype(options, device), device)
    pairs: dict[str, Pair] = {}
    for spec in drafters:
        drafter = load_drafter(spec, small.target, settings) if pairs else small.drafter
        large = next((pair.target.model for pair in pairs.values()), None)
        pairs[spec] = _ready(replace(small, drafter=drafter), options, large, _draft_dtype(options, device))
    return pairs


def load_target(options: Models, device: str) -> Pair:
    """Load a target alone, for what drafts nothing: it is its own drafter, which nobody asks."""
    return _ready(_load_alone(options, device), options)


def load_run(options: Options, device: str) -> Pair:
    """Load what a run's method needs, on the GPUs that are this process's."""
    placement = _placement(options, device)
    alone = options.method == "none"
    pair = _load_alone(options, device, **placement) if alone else _load_pair(options, device, **placement)
    homes = {str(home) for home in (getattr(pair.target.model, "hf_device_map", None) or {}).values()}
    if placement and homes & {"cpu", "disk"}:
        raise ValueError(
            f"{options.base_model_path} does not fit into {options.max_gpu_memory or 'the free memory'} on each of "
            f"{options.num_gpus_per_model} GPUs; raise --max-gpu-memory or --num-gpus-per-model"
        )
    return _ready(pair, options)


def load_assistant(options: Models, path: str | None, pair: Pair, draft_dtype: str = "auto") -> PreTrainedModel | None:
    """Return the causal LM that assists transformers' generate: the one at `path`, else the pair's own draft model.

    Where there is neither, the embedded one for the embedded target; else None.
    """
    own = assistant_of(pair.drafter)
    if path is None and own is not None:
        # A drafter that was compiled may have been cast to what is fastest then; transformers runs it as it is.
        if not options.compile or draft_dtype != "auto":
            return own
        path = own.name_or_path
    path = path or ("demo" if options.base_model_path == "demo" else None)
    if path is None:
        return None
    folder, device = resolve(path, "draft"), str(pair.target.device)
    check_same_tokenizer(pair.tokenizer, load_tokenizer(folder), options.base_model_path, path)
    dtype = "float32" if draft_dtype == "auto" and device == "cpu" else draft_dtype
    return load_causal_lm(folder, as_dtype(dtype, device), device).model


def _load_pair(options: Models, device: str, draft_dtype: str | None = None, **more: Any) -> Pair:
    given = {"dtype": options.dtype, "draft_dtype": draft_dtype or _draft_dtype(options, device)}
    given |= {"drafter": options.drafter, "device": device} | more
    return load_pair(options.base_model_path, **given)


def _draft_dtype(options: Models, device: str) -> str:
    """Of an independent drafter: "auto" keeps it in float32 on a CPU, where that is fastest."""
    return "auto" if device == "cpu" else options.dtype


def _load_alone(options: Models, device: str, **more: Any) -> Pair:
    path = resolve(options.base_model_path, "target")
    target = load_causal_lm(path, options.dtype, device, **more)
    return Pair(target, load_tokenizer(path), model_drafter(target))


def _ready(pair: Pair, options: Models, large: PreTrainedModel | None = None, draft_dtype: str | None = None) -> Pair:
    """The pair inflated and compiled, where that is asked for."""
    if options.inflate:
        pair = inflate_pair(pair, options.inflate, large=large)
    if options.unpacked:
        pair.pack(False)
    if options.compile:
        pair.compile(any_dtype=draft_dtype == "auto")
    return pair


def _placement(options: Options, device: str) -> dict[str, Any]:
    """Options for transformers that put the target on this process's own GPUs and nowhere else."""
    if torch.device(device).type != "cuda" or (options.num_gpus_per_model == 1 and options.max_gpu_memory is None):
        return {}
    first = torch.device(device).index
    mine = range(first, first + options.num_gpus_per_model)
    return {
        "device_map": "auto",
        "max_memory": {i: options.max_gpu_memory or torch.cuda.mem_get_info(i)[0] for i in mine},
    }


def make_method(name: str, options: Options, pair: Pair, prompter: Prompter) -> Answer:
    """The method of this name as a function from a prompt to new tokens."""
    sampling = Sampling(options.temperature if options.temperature > 1e-5 else 0.0)
    if name == "transformers":

        def generate(prompt: list[int], limit: int, seed: int) -> Timed:
            timed = transformers_greedy(pair, prompt, limit, sampling, seed)
            # It knows the stop tokens of the pair, not those of a FastChat template.
            return Timed(prompter.trim(timed.tokens), timed.seconds)

        return generate
    return InLoop(_decoder(name, options, pair), sampling, prompter.stop)


def _decoder(name: str, options: Options, pair: Pair) -> Decoder:
    if name == "opt" and isinstance(options.nodes, str):
        return Decoder(pair.target, pair.drafter, auto(pair.target, pair.drafter, max_depth=options.max_depth))
    if name == "opt":
        return opt(pair.target, pair.drafter, OptTree(int(options.nodes), options.threshold, options.max_depth))
    if name == "chain":
        return chain(pair.target, pair.drafter, min(options.max_depth, int(options.nodes)))
    return plain(pair.target)


def resolved(pair: Pair) -> dict[str, Any]:
    """What "auto" and a stored calibration came to."""
    dtype = str(pair.target.dtype).removeprefix("torch.")
    engine = {} if pair.target.engine.name == "eager" else {"engine": pair.target.engine.name}
    return engine | {"target_dtype": dtype, "draft_dtype": None, "sharpening": None} | pair.drafter.settings
