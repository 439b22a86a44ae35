"""The training loop that all models share: a `transformers.Trainer` over a token stream in order.

Owns the schedule and the held-out evaluation; knows no loss but a causal LM's own.
"""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments

from experiments.embedded_family.plans import OWN, Schedule, corpus_names
from experiments.embedded_family.stream import Blocks, Mixture, build_stream, collate
from opt_tree.system.command_line import from_fields
from opt_tree.training.answers import TokenDocuments
from opt_tree.training.optimizer import MuonAdamW
from opt_tree.training.plans import read_pairs

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Run:
    """Where a run writes and how it starts."""

    output: Path
    resume: bool = False
    compile: bool = False


@dataclass(frozen=True)
class Streams:
    """The tokens to train on, in order, and held-out tokens by the name under which their loss is logged."""

    train: np.ndarray
    heldout: dict[str, np.ndarray]

    def blocks(self, schedule: Schedule) -> "Examples":
        """Cut the streams into blocks as a schedule wants them."""
        length = schedule.eval_blocks * schedule.block
        rows = [(1.0, schedule.block // 4)]
        heldout = {name: Blocks(tokens[:length], schedule.block, rows) for name, tokens in self.heldout.items()}
        return Examples(Blocks(self.train, schedule.block, schedule.row_lengths, schedule.tokens), heldout)


@dataclass(frozen=True)
class Examples:
    """What a run reads: items of `schedule.block` tokens, in order, and held-out ones by name."""

    train: Dataset
    heldout: dict[str, Blocks]


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run that was written to its end, or None; the Trainer writes its state last."""
    checkpoints = [state.parent for state in folder.glob("checkpoint-*/trainer_state.json")]
    return max(checkpoints, key=lambda checkpoint: int(checkpoint.name.partition("-")[2]), default=None)


class LossTrainer(Trainer):
    """A Trainer with an exchangeable loss."""

    def __init__(self, *, loss: Loss | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.loss = loss
        self.model_accepts_loss_kwargs = False  # all rows are full, so a mean of means is the mean

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a batch."""
        loss = self.loss(model, inputs) if self.loss else model(**inputs).loss
        return (loss, {}) if return_outputs else loss


def fit(model: nn.Module, examples: Examples, schedule: Schedule, run: Run, loss: Loss | None = None) -> Trainer:
    """Train `model` in place on the examples in order and return the trainer.

    Raise ValueError for uneven batches, without a checkpoint to resume from, and beside those of another run.
    """
    start = last_checkpoint(run.output) if run.resume else None
    if run.resume and start is None:
        raise ValueError(f"no checkpoint in {run.output} to go on from")
    if not run.resume and (older := last_checkpoint(run.output)):
        raise ValueError(f"{older} is another run's: --resume goes on from it; else remove it or name a new folder")
    tokens = len(examples.train) * schedule.block  # type: ignore[arg-type]
    steps = min(schedule.tokens or tokens, tokens) // schedule.batch
    if not steps:
        raise ValueError(f"{tokens} training tokens do not fill one batch of {schedule.batch}")
    trainer = LossTrainer(
        model=model,
        args=_arguments(schedule, steps, run),
        data_collator=collate,
        train_dataset=examples.train,
        eval_dataset=examples.heldout,
        optimizers=(MuonAdamW(model, schedule.lr), None),
        loss=loss,
    )
    # Each row length is a shape of its own: compiled statically it is faster than one dynamic graph.
    torch._dynamo.config.automatic_dynamic_shapes = False
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    losses = {key: value for key, value in trainer.evaluate().items() if key.endswith("loss")}
    if trainer.is_world_process_zero():
        print(losses)
    return trainer


def _arguments(schedule: Schedule, steps: int, run: Run) -> TrainingArguments:
    """Return the arguments of a run on CPU or on one GPU (bf16 autocast on both)."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if schedule.batch % (schedule.micro_batch * processes) or schedule.micro_batch % schedule.block:
        raise ValueError(
            f"batch {schedule.batch} must be a multiple of {processes} x micro-batch {schedule.micro_batch}, "
            f"and that of block {schedule.block}"
        )
    gpu = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(run.output),
        max_steps=steps,
        train_sampling_strategy="sequential",  # the order of a stream is its curriculum
        per_device_train_batch_size=schedule.micro_batch // schedule.block,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=schedule.batch // (schedule.micro_batch * processes),
        learning_rate=schedule.lr,
        lr_scheduler_type="linear",
        warmup_steps=min(schedule.warmup, steps // 4),
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=not gpu,
        ddp_backend=None if gpu or processes == 1 else "gloo",
        ddp_find_unused_parameters=False,
        torch_compile=run.compile,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=schedule.save_steps,
        prediction_loss_only=True,
        save_steps=schedule.save_steps,
        save_total_limit=3,
        dataloader_pin_memory=gpu,
        seed=schedule.seed,
        remove_unused_columns=False,
        report_to="none",
        label_names=["labels"],
    )


def load_streams(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    mixture: Mixture,
    cache: Path,
    own: TokenDocuments | None = None,
) -> Streams:
    """Build or load the training stream, and the held-out streams of chat and of prose (each corpus once).

    `folder` holds the corpora; the corpus "own" is a model's own outputs.
    """
    kinds = {
        kind: [name for name in corpus_names(folder) if name.startswith(prefix)]
        for kind, prefix in (("chat", "chat_"), ("prose", "text_"))
    }
    with PartialState(cpu=not torch.cuda.is_available()).main_process_first():
        train = build_stream(tokenizer, folder, "train", mixture, cache, own)
        heldout = {
            kind: build_stream(tokenizer, folder, "heldout", Mixture(dict.fromkeys(names, 1.0)), cache)
            for kind, names in kinds.items()
            if names
        }
    return Streams(train, heldout)


def parse_epochs(text: str, names: list[str]) -> dict[str, float]:
    """Read `corpus=passes,...`; the empty text means every corpus once. Raise ValueError for an unknown corpus."""
    if not text:
        return dict.fromkeys(names, 1.0)
    epochs = dict(read_pairs(text, "=", str, float))
    if unknown := sorted(set(epochs) - set(names)):
        raise ValueError(f"no such corpus: {', '.join(unknown)}; there are {', '.join(names)}")
    if not all(0 <= passes < math.inf for passes in epochs.values()):
        raise ValueError(f"passes through a corpus must be finite and at least 0, got {text!r}")
    return epochs


def load_examples(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, slope: float, own: TokenDocuments | None = None
) -> Examples:
    """Return what a command line asks to train on; `own` is what its mixture calls "own"."""
    schedule = from_fields(Schedule, args)
    names = corpus_names(args.data) if own is None else [OWN, *corpus_names(args.data)]
    mixture = Mixture(parse_epochs(args.epochs, names), slope, args.seed)
    return load_streams(tokenizer, args.data, mixture, args.cache or args.output / "cache", own).blocks(schedule)


def fit_as_told(args: argparse.Namespace, model: nn.Module, examples: Examples, loss: Loss | None = None) -> bool:
    """Train `model` as a command line says; return whether this process is the one that saves it."""
    run = Run(args.output, args.resume, args.compile)
    return fit(model, examples, from_fields(Schedule, args), run, loss).is_world_process_zero()
