"""Train an EAGLE-1 or EAGLE-3 head from hidden states on disk, over a reduced draft vocabulary.

    python -m opt_tree.training.heads.train --kind eagle3 --target DIR --features DIR --output DIR --minutes 45

The features are those of `opt_tree.training.heads.features`; the target itself never runs. The draft vocabulary holds
the tokens that are most frequent in its answers (FR-Spec, arXiv:2502.14856). Every pass is judged by the cross-entropy
with the target's law over that vocabulary, or over frequent tokens and a few others (`--frequent`, `--drawn`), on
answers alone; with `--feature` also by how far what the output layer reads lies from the target's last state behind
its norm (EAGLE-3 as published does without). Where the draft vocabulary is the whole one, an EAGLE-1 head is saved with
its embedding. Passes, rotary positions and attention are those of `opt_tree.training.embedded_family.eagle`. Others
align training with drafting by EAGLE-3's test (arXiv:2503.01840), HASS (2408.15766) or GRIFFIN (2502.11018).
The run is as long as its minutes: learning rate and number of passes follow the clock. It is resumed by `--resume`.
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from opt_tree.core.command_line import from_fields
from opt_tree.drafters.heads.eagle3 import Eagle3Head, chosen_layers
from opt_tree.models.checkpoints import TRAINING, load_weights
from opt_tree.training.command_line import (
    Parser,
    existing,
    model_path,
    run_command,
    whole_numbers,
)
from opt_tree.training.embedded_family.eagle import new_head, save_head
from opt_tree.training.files import whole
from opt_tree.training.heads.batches import Batch, Documents, Group, most_frequent
from opt_tree.training.heads.eagle3 import LAYOUTS, new_eagle3_head, save_eagle3
from opt_tree.training.heads.features import COUNTS
from opt_tree.training.heads.head_loss import Goal, HeadLoss
from opt_tree.training.optimizer import MuonAdamW
from opt_tree.training.trainer import read_pairs


@dataclass(frozen=True)
class Plan:
    """How long, how fast, how deep."""

    minutes: float = 45.0  # of the whole run, resumed parts included
    lr: float = 5e-3  # highest learning rate; it falls linearly to nothing
    tokens: int = 3072  # of a batch, padding included
    unroll: str = "0.2:1,0.3:2,0.5:4"  # share of the run:passes, each on the estimates of the one before
    decay: float = 0.8  # weight of each pass relative to the one before
    hard: float = 0.0  # share that the target's best token alone gets of the law that judges
    frequent: int = 0  # most frequent tokens over which each step is judged; 0: the whole draft vocabulary
    drawn: int = 0  # others, drawn anew for each step
    average: float = 0.0  # decay a step of a running mean of the weights, which is what is kept; 0: the last ones
    feature: float = 0.0  # weight of SmoothL1 between what the output layer reads here and in the target
    noise: float = 0.0  # half-width of uniform noise on the features
    save_minutes: float = 4.0  # between checkpoints
    seed: int = 0

    def check(self, vocab: int) -> None:
        """Raise ValueError for shares that are none, and for more tokens than a draft vocabulary has."""
        self.passes(0.0)
        if self.hard > 1 or self.average >= 1:
            raise ValueError(f"--hard goes up to 1, --average stays below it, got {self.hard} and {self.average}")
        if (self.drawn and not self.frequent) or self.frequent + self.drawn > vocab:
            raise ValueError(f"--frequent {self.frequent} and --drawn {self.drawn} of a draft vocabulary of {vocab}")

    def passes(self, progress: float) -> int:
        """Return the number of passes at a share of the run."""
        stages = read_pairs(self.unroll, ":", float, int)
        ends = np.cumsum([share for share, _ in stages])
        if abs(ends[-1] - 1) > 1e-6:
            raise ValueError(f"the shares of {self.unroll!r} must sum to 1")
        return stages[min(int(np.searchsorted(ends, progress, side="right")), len(stages) - 1)][1]


class Training:
    """One run: what a checkpoint holds, and the step."""

    def __init__(self, model: HeadLoss, documents: Documents, plan: Plan, output: Path) -> None:
        self.model, self.documents, self.plan, self.output = model, documents, plan, output
        self.kept = copy.deepcopy(model) if plan.average else model
        self.optimizer = MuonAdamW(model, plan.lr)
        self.seconds, self.steps, self.tokens = 0.0, 0, 0

    def order(self) -> Iterator[Group]:
        """Yield groups of documents for ever, each epoch in another order; parts that are new come first."""
        rng = np.random.default_rng((self.plan.seed, self.steps))
        waiting: list[Group] = []
        while True:
            new = self.documents.refresh()
            waiting += [new[index] for index in rng.permutation(len(new))]
            if not waiting:
                train = self.documents.train
                waiting = [train[index] for index in rng.permutation(len(train))]
            yield waiting.pop()

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Take one optimizer step; return loss and share of equal argmaxes by pass."""
        progress = min(self.seconds / (60 * self.plan.minutes), 1.0)
        unroll = self.plan.passes(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr * min(1.0, (self.steps + 1) / 20) * (1 - progress)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, equal = self.model(batch, unroll)
        weights = self.plan.decay ** torch.arange(unroll)
        (loss * weights).sum().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.tokens += int(batch.judged.sum())
        self._average()
        return loss.detach(), equal

    @torch.no_grad()
    def _average(self) -> None:
        share = 1 - min(self.plan.average, self.steps / (self.steps + 10))  # the first weights are soon forgotten
        for mean, last in zip(self.kept.parameters(), self.model.parameters(), strict=True):
            if mean is not last and last.requires_grad:
                mean.lerp_(last, share)

    @torch.no_grad()
    def heldout(self, unroll: int) -> tuple[list[float], list[float]]:
        """Return loss and share of equal argmaxes by pass on the held-out batches."""
        self.kept.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = [self.kept(self.documents[group], unroll) for group in self.documents.heldout]
        self.kept.train()
        loss, equal = (torch.stack(each).mean(0).tolist() for each in zip(*results, strict=True))
        return loss, equal

    def save(self) -> None:
        """Write a checkpoint, and what is held out beside it."""
        state: dict[str, Any] = {"head": self.model.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["kept"], state["sizes"] = self.kept.head.state_dict(), self.model.sizes
        counts = {"seconds": self.seconds, "steps": self.steps, "tokens": self.tokens}
        with whole(self.output / "checkpoint.pt") as partial:
            torch.save({**state, **counts}, partial)
        loss, equal = self.heldout(self.plan.passes(1.0))
        record = {**counts, "loss": [round(x, 4) for x in loss], "equal": [round(x, 4) for x in equal]}
        tqdm.write(json.dumps(record))
        with (self.output / "heldout.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")

    def resume(self) -> None:
        """Load the checkpoint; FileNotFoundError if there is none."""
        path = self.output / "checkpoint.pt"
        if not path.exists():
            raise FileNotFoundError(f"no checkpoint in {self.output} to go on from")
        state = torch.load(path, weights_only=True)
        self.model.head.load_state_dict(state["head"])
        self.kept.head.load_state_dict(state.get("kept", state["head"]))
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.sizes = self.kept.sizes = state.get("sizes", [1.0] * 3)  # earlier ones: features as they are
        self.seconds, self.steps, self.tokens = state["seconds"], state["steps"], state["tokens"]

    def run(self) -> None:
        """Train until the minutes are over."""
        end, saved, mean = 60 * self.plan.minutes, self.seconds, torch.zeros(0)
        bar = tqdm(total=round(end), initial=round(self.seconds), unit="s")
        for group in self.order():
            begin = time.monotonic()
            _, equal = self.step(self.documents[group])
            self.seconds += time.monotonic() - begin
            mean = equal if len(mean) != len(equal) else 0.97 * mean + 0.03 * equal
            bar.update(round(self.seconds) - bar.n)
            shown = " ".join(f"{share:.3f}" for share in mean.tolist())
            bar.set_postfix_str(f"{self.steps} steps, {self.tokens / 1e3:.0f}k tokens, equal {shown}")
            over = self.seconds >= end
            if over or self.seconds - saved > 60 * self.plan.save_minutes:
                self.save()
                saved = self.seconds
            if over:
                return


def new_parser() -> Parser:
    parser = Parser("Train an EAGLE head from hidden states on disk.")
    parser.add_argument("--kind", choices=("eagle", "eagle3"), default="eagle3", help="default: %(default)s")
    parser.add_argument("--target", type=model_path, required=True, help="model folder; its weights only are read")
    parser.add_argument("--features", type=existing, required=True, help="folder of `opt_tree.training.heads.features`")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint and, in final/, the head")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens of the draft vocabulary (%(default)s)")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of an EAGLE-3 head")
    parser.add_argument(
        "--layers", type=whole_numbers, help="layers whose outputs an EAGLE-3 head reads (default: the published ones)"
    )
    parser.add_argument("--init", type=existing, help="EAGLE-1 head to go on from, with an embedding of its own")
    parser.add_argument("--embedding", action="store_true", help="train an EAGLE-1 head's embedding too")
    parser.add_argument("--cold", action="store_true", help="begin an EAGLE-3 head from random weights")
    parser.add_argument("--norm-before-residual", action="store_true", help="in an EAGLE-3 head; it learns faster")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in OUTPUT")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_fields(Plan())
    return parser


def train(args: argparse.Namespace) -> None:
    plan = from_fields(Plan, args)
    plan.check(args.vocab)
    target = load_weights(str(args.target), torch.bfloat16)
    normed: bool = args.norm_before_residual
    if args.kind == "eagle" and (args.layers or normed):
        raise ValueError("--layers and --norm-before-residual are for EAGLE-3 heads")
    layers = () if args.kind == "eagle" else chosen_layers(args.layers, target.config.num_hidden_layers)
    if args.kind != "eagle" and (args.init or args.embedding):
        raise ValueError("--init and --embedding are for EAGLE-1 heads")
    if args.embedding and args.vocab < target.config.vocab_size:
        raise ValueError(f"--embedding goes with the whole vocabulary, --vocab {target.config.vocab_size}")
    documents = Documents(args.features, args.tokens, (-1, *layers))
    counts = np.load(args.features / COUNTS)
    kept = most_frequent(counts, args.vocab, "target")
    sizes = [documents.size(layer) for layer in layers]
    head = new_head(target) if not layers else new_eagle3_head(target, len(kept), not args.cold, sizes[-1], normed)
    if args.init:
        head.load_published(load_file(args.init / "model.safetensors"), str(args.init))
    head.embed_tokens.requires_grad_(args.embedding)
    output = target.get_output_embeddings().weight.detach()[kept].clone()
    often = torch.from_numpy(np.argsort(-counts[kept], kind="stable")[: plan.frequent]) if plan.frequent else None
    goal = Goal(plan.feature, plan.noise, plan.hard, often, plan.drawn)
    training = Training(HeadLoss(head.float(), output, goal, sizes), documents, plan, args.output)
    if args.resume:
        training.resume()
    training.run()
    training.kept.fold()
    head = training.kept.head
    if isinstance(head, Eagle3Head):
        save_eagle3(head, kept, args.output / "final", args.layout, shared=True, layers=args.layers)
    else:
        save_head(head, args.output / "final", None if args.vocab == target.config.vocab_size else kept)
    note = {"minutes": round(training.seconds / 60, 2), "on": f"{args.threads} CPU threads, {training.steps} steps"}
    (args.output / "final" / TRAINING).write_text(json.dumps(note) + "\n")
    print(f"done; to decode with it: --target {args.target} --drafter eagle:{args.output}")


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(new_parser(), train, arguments)


if __name__ == "__main__":
    main()
