"""From options to models and methods: devices, GPUs of a process, inflation.

Loads through `opt_tree.load_pair`, decodes through presets; owns what the GPU options mean.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from evaluation.questions.prompts import Prompter
from evaluation.run.baselines import Timed, transformers_greedy
from evaluation.run.conversation import Answer
from evaluation.run.options import Options
from evaluation.run.processes import Crew
from opt_tree import (
    CausalLMDrafter,
    Decoder,
    OptTree,
    Pair,
    Sampling,
    Sharpened,
    load_causal_lm,
    load_pair,
    load_tokenizer,
)
from opt_tree.checkpoints import DEMO
from opt_tree.inflate import inflate_pair
from opt_tree.presets import chain, opt, plain


def check_device(options: Options, crew: Crew) -> str:
    """The device of this process; ValueError when the GPU options ask for what is not there."""
    count = torch.cuda.device_count()
    device = options.device or ("cuda" if count else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
    if kind != "cuda":
        if options.max_gpu_memory or options.num_gpus_per_model > 1 or options.processes not in (None, 1):
            raise ValueError(
                f"--num-gpus-total, --num-gpus-per-model and --max-gpu-memory speak of GPUs, but the device is {device}"
                "; on a CPU several processes are: accelerate launch --multi_gpu --num_processes N"
            )
        return device
    needed = (crew.local_rank + 1) * options.num_gpus_per_model
    if needed > count:
        raise ValueError(f"process {crew.rank} needs {needed} GPUs on this machine, which has {count}")
    if options.processes not in (None, crew.size):
        raise ValueError(
            f"--num-gpus-total {options.num_gpus_total} with {options.num_gpus_per_model} a model means "
            f"{options.processes} processes, {crew.size} were launched"
        )
    if device == "cuda":
        device = f"cuda:{crew.local_rank * options.num_gpus_per_model}"
    torch.cuda.set_device(device)
    return device


def relaunch(kind: str, options: Options, arguments: Sequence[str]) -> None:
    """Become `accelerate launch` of as many processes as --num-gpus-total asks for; return if that is one."""
    count = torch.cuda.device_count()
    if "WORLD_SIZE" in os.environ or options.processes in (None, 1) or options.device == "cpu" or not count:
        return
    if options.num_gpus_total > count:  # type: ignore[operator]
        raise ValueError(
            f"--num-gpus-total {options.num_gpus_total}: this machine has {count} GPUs; over several machines use "
            "accelerate launch --num_machines"
        )
    os.execv(sys.executable, [sys.executable, *launcher(kind, options.processes or 1), *arguments])


def launcher(kind: str, processes: int) -> list[str]:
    """The part of the command line that launches."""
    # Its other flags start one process, however many are asked for.
    several = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    count = ["--num_processes", str(processes)]
    return ["-m", "accelerate.commands.launch", *several, *count, "-m", f"evaluation.eval_opt_{kind}"]


def load(kind: str, options: Options, device: str) -> Pair:
    """Load what the method needs, inflated if asked for. A method that drafts nothing gets its target only."""
    placement = _placement(options, device)
    path = options.base_model_path
    if options.method == "none":
        path = str(DEMO / "target") if path == "demo" else path
        target = load_causal_lm(path, options.dtype, device, **placement)
        pair = Pair(target, load_tokenizer(path), CausalLMDrafter(target))
    else:
        # "auto" keeps an independent drafter in float32 on a CPU, where that is fastest.
        draft_dtype = "auto" if torch.device(device).type == "cpu" else options.dtype
        drafter = {"drafter": options.draft_model_path} if kind == "classic" else {"eagle": options.ea_model_path}
        pair = load_pair(path, **drafter, dtype=options.dtype, draft_dtype=draft_dtype, device=device, **placement)
    homes = {str(home) for home in (getattr(pair.target.model, "hf_device_map", None) or {}).values()}
    if placement and homes & {"cpu", "disk"}:
        raise ValueError(
            f"{path} does not fit into {options.max_gpu_memory or 'the free memory'} on each of "
            f"{options.num_gpus_per_model} GPUs; raise --max-gpu-memory or --num-gpus-per-model"
        )
    return inflate_pair(pair, options.inflate) if options.inflate else pair


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
    decoder = _decoder(name, options, pair)
    return lambda prompt, limit, seed: decoder.generate(prompt, limit, sampling, prompter.stop, seed=seed)


def _decoder(name: str, options: Options, pair: Pair) -> Decoder:
    if name == "opt":
        return opt(pair.target, pair.drafter, OptTree(options.nodes, options.threshold, options.max_depth))
    if name == "chain":
        return chain(pair.target, pair.drafter, min(options.max_depth, options.nodes))
    return plain(pair.target)


def resolved(pair: Pair) -> dict[str, Any]:
    """What "auto" and a stored calibration came to."""
    bare = pair.drafter.drafter if isinstance(pair.drafter, Sharpened) else pair.drafter
    return {
        "target_dtype": _name(pair.target.dtype),
        "draft_dtype": _name(bare.lm.dtype) if hasattr(bare, "lm") else None,
        "sharpening": pair.drafter.temperature if isinstance(pair.drafter, Sharpened) else None,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
