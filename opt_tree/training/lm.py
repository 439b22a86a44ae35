"""Train a small Llama-architecture language model, from scratch or on from `--init`, with a loss on every token.

    python -m opt_tree.training.lm --tokenizer DIR --output DIR [--layers 12 --hidden 256 ...]
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m opt_tree.training.lm ...      # one single-thread process a core

Stopped runs go on from the last checkpoint in OUTPUT with `--resume`. The finished model lies in OUTPUT/final (bf16).
"""

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from torch import nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from opt_tree.training.data import DEFAULT_DATA, Blocks, Mixture, build_stream, collate, corpus_names
from opt_tree.training.optimizer import MuonAdamW

T = TypeVar("T")
SHARD = "15MB"  # files of a published model stay under 16 MiB


@dataclass(frozen=True)
class Shape:
    """The architecture of a new model."""

    layers: int = 12
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 512

    def build(self, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
        """Return a randomly initialised model with tied embeddings that reads 2048 positions."""
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=tokenizer.model_max_length,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Schedule:
    """How long, how fast and in which portions a model is trained; `batch` and `micro_batch` count tokens.

    `rows` lists share:row length, in order: short rows are cheap on a CPU, long ones teach the late positions.
    """

    tokens: int = 0  # 0: the whole stream
    batch: int = 8192
    micro_batch: int = 2048  # of one forward pass of one process
    block: int = 2048
    rows: str = "0.62:256,0.34:512,0.04:2048"
    lr: float = 4e-3
    warmup: int = 60
    save_steps: int = 200
    eval_steps: int = 200
    eval_blocks: int = 12
    seed: int = 0

    @property
    def row_lengths(self) -> list[tuple[float, int]]:
        """Return `rows` as (share, length) pairs."""
        pairs = [part.split(":") for part in self.rows.split(",")]
        return [(float(share), int(length)) for share, length in pairs]


class OrderedTrainer(Trainer):
    """A Trainer that reads its data in order (the order of a stream is its curriculum) and means over equal rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model_accepts_loss_kwargs = False  # all rows are full, so a mean of means is the mean

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return SequentialSampler(train_dataset or self.train_dataset)  # type: ignore[arg-type]


def training_arguments(schedule: Schedule, steps: int, output: Path, compile_model: bool) -> TrainingArguments:
    """Return the arguments of a run on CPU or on one GPU (bf16 autocast on both); raise ValueError if a batch is uneven."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if schedule.batch % (schedule.micro_batch * processes) or schedule.micro_batch % schedule.block:
        raise ValueError(
            f"batch {schedule.batch} must be a multiple of {processes} process(es) x micro-batch {schedule.micro_batch},"
            f" and that of block {schedule.block}"
        )
    return TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=schedule.micro_batch // schedule.block,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=schedule.batch // (schedule.micro_batch * processes),
        learning_rate=schedule.lr,
        lr_scheduler_type="linear",
        warmup_steps=schedule.warmup,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=None if torch.cuda.is_available() else "gloo",
        torch_compile=compile_model,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=schedule.eval_steps,
        prediction_loss_only=True,
        save_steps=schedule.save_steps,
        save_total_limit=3,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        seed=schedule.seed,
        report_to="none",
        label_names=["labels"],
    )


@dataclass(frozen=True)
class Run:
    """Where a run writes and how it starts."""

    output: Path
    resume: bool = False
    compile: bool = False


def train(model: nn.Module, stream: np.ndarray, heldout: dict[str, np.ndarray], schedule: Schedule, run: Run) -> Trainer:
    """Train a causal language model on a stream in order and return its trainer; `heldout` streams are evaluated."""
    steps = (schedule.tokens or len(stream)) // schedule.batch
    if len(stream) < steps * schedule.batch or not steps:
        raise ValueError(f"a stream of {len(stream)} tokens is too short for {max(steps, 1)} x {schedule.batch}")
    trainer = OrderedTrainer(
        model=model,
        args=training_arguments(schedule, steps, run.output, run.compile),
        data_collator=collate,
        train_dataset=Blocks(stream[: steps * schedule.batch], schedule.block, schedule.row_lengths),
        eval_dataset={
            name: Blocks(tokens[: schedule.eval_blocks * schedule.block], schedule.block, [(1.0, schedule.block // 4)])
            for name, tokens in heldout.items()
        },
        optimizers=(MuonAdamW(model, schedule.lr), None),
    )
    trainer.train(resume_from_checkpoint=run.resume)
    return trainer


def heldout_streams(tokenizer: PreTrainedTokenizerBase, data: Path, cache: Path) -> dict[str, np.ndarray]:
    """Return the held-out tokens of chat and of prose, each corpus once."""
    names = corpus_names(data)
    kinds = {"chat": [n for n in names if n.startswith("chat_")], "prose": [n for n in names if n.startswith("text_")]}
    return {
        kind: build_stream(tokenizer, data, "heldout", Mixture(dict.fromkeys(chosen, 1.0)), cache)
        for kind, chosen in kinds.items()
        if chosen
    }


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model in bf16 with its tokenizer and greedy generation defaults."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=SHARD)
    tokenizer.save_pretrained(folder)


def add_fields(parser: argparse.ArgumentParser, options: type) -> None:
    """Add one argument per field of a dataclass, with the field's default."""
    for field in fields(options):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help=f"default {field.default}")


def from_fields(options: type[T], args: argparse.Namespace) -> T:
    """Build a dataclass from the arguments that `add_fields` made."""
    return options(**{field.name: getattr(args, field.name) for field in fields(options)})  # type: ignore[arg-type]


def parse_epochs(text: str, names: list[str]) -> dict[str, float]:
    """Read `corpus=passes,...`; the empty text means every corpus once. Raise ValueError for an unknown corpus."""
    if not text:
        return dict.fromkeys(names, 1.0)
    epochs = {name: float(passes) for name, passes in (part.split("=") for part in text.split(","))}
    if unknown := sorted(set(epochs) - set(names)):
        raise ValueError(f"no such corpus: {', '.join(unknown)}; there are {', '.join(names)}")
    return epochs


def main() -> None:
    """Train a model from the command line."""
    parser = argparse.ArgumentParser(description="Train a small language model.")
    parser.add_argument("--data", type=Path, default=Path(DEFAULT_DATA), help="corpus folder")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer folder")
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints, cache and final model")
    parser.add_argument("--init", type=Path, help="continue from this model instead of from scratch")
    parser.add_argument("--epochs", default="", help="corpus=passes,... (default: every corpus once)")
    parser.add_argument("--slope", type=float, default=0.8, help="how far prose moves to the front, chat to the end")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUTPUT")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    add_fields(parser, Shape)
    add_fields(parser, Schedule)
    args = parser.parse_args()
    schedule = from_fields(Schedule, args)
    set_seed(schedule.seed)
    # Each row length is a shape of its own: compiled statically it is faster than one dynamic graph.
    torch._dynamo.config.automatic_dynamic_shapes = False
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        mixture = Mixture(parse_epochs(args.epochs, corpus_names(args.data)), args.slope, schedule.seed)
        cache = args.output / "cache"
        with PartialState(cpu=not torch.cuda.is_available()).main_process_first():
            stream = build_stream(tokenizer, args.data, "train", mixture, cache)
            heldout = heldout_streams(tokenizer, args.data, cache)
        model = AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32) if args.init else None
        model = model or from_fields(Shape, args).build(tokenizer)
        model.set_attn_implementation("eager" if args.compile else "sdpa")  # compiled, plain attention is the faster one
        trainer = train(model, stream, heldout, schedule, Run(args.output, args.resume, args.compile))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if trainer.is_world_process_zero():
        save_model(model, tokenizer, args.output / "final")


if __name__ == "__main__":
    main()
