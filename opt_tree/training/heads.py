"""Train an EAGLE-1 or EAGLE-3 head from hidden states on disk, over a reduced draft vocabulary.

    python -m opt_tree.training.heads --kind eagle3 --target DIR --features DIR --output DIR --minutes 45

The features are those of `opt_tree.training.features`; the target itself never runs. The draft vocabulary holds the
tokens that are most frequent in its answers (FR-Spec, arXiv:2502.14856). Every pass is judged by the cross-entropy with
the target's law over that vocabulary, on answers alone; EAGLE-1 heads also by how far the estimate lies from the
feature. Passes, rotary positions and attention are those of `opt_tree.training.eagle`.

The run is as long as its minutes: learning rate and number of passes follow the clock. It is resumed by `--resume`.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from opt_tree.checkpoints import TRAINING, load_weights
from opt_tree.drafters.eagle3 import Eagle3Head, chosen_layers
from opt_tree.training.batches import Batch, Documents, Group, most_frequent
from opt_tree.training.command_line import (
    Parser,
    add_fields,
    existing,
    from_fields,
    model_path,
    run_command,
    whole_numbers,
)
from opt_tree.training.eagle import new_head, save_head
from opt_tree.training.eagle3 import new_eagle3_head, save_eagle3
from opt_tree.training.features import COUNTS
from opt_tree.training.files import whole
from opt_tree.training.head_loss import HeadLoss
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
    feature: float = 0.0  # weight of SmoothL1 to the target's feature (EAGLE-1 heads)
    noise: float = 0.0  # half-width of uniform noise on the features
    save_minutes: float = 4.0  # between checkpoints
    seed: int = 0

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
        return loss.detach(), equal

    @torch.no_grad()
    def heldout(self, unroll: int) -> tuple[list[float], list[float]]:
        """Return loss and share of equal argmaxes by pass on the held-out batches."""
        self.model.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = [self.model(self.documents[group], unroll) for group in self.documents.heldout]
        self.model.train()
        loss, equal = (torch.stack(each).mean(0).tolist() for each in zip(*results, strict=True))
        return loss, equal

    def save(self) -> None:
        """Write a checkpoint, and what is held out beside it."""
        state = {"head": self.model.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["sizes"] = self.model.sizes
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
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.sizes = state.get("sizes", [1.0] * 3)  # earlier ones: features as they are
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
    parser.add_argument("--features", type=existing, required=True, help="folder of `opt_tree.training.features`")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint and, in final/, the head")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens of the draft vocabulary (%(default)s)")
    parser.add_argument(
        "--layout", choices=("published", "speculators"), default="published", help="of an EAGLE-3 head"
    )
    parser.add_argument(
        "--layers", type=whole_numbers, help="layers whose outputs an EAGLE-3 head reads (default: the published ones)"
    )
    parser.add_argument("--cold", action="store_true", help="begin an EAGLE-3 head from random weights")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in OUTPUT")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    add_fields(parser, Plan())
    return parser


def train(args: argparse.Namespace) -> None:
    plan = from_fields(Plan, args)
    plan.passes(0.0)
    target = load_weights(str(args.target), torch.bfloat16)
    if args.kind == "eagle" and args.layers:
        raise ValueError("--layers is for EAGLE-3 heads; those of EAGLE-1 read the last hidden state")
    layers = () if args.kind == "eagle" else chosen_layers(args.layers, target.config.num_hidden_layers)
    documents = Documents(args.features, args.tokens, (-1, *layers))
    kept = most_frequent(np.load(args.features / COUNTS), args.vocab, "target")
    sizes = [documents.size(layer) for layer in layers]
    head = new_head(target) if not layers else new_eagle3_head(target, len(kept), not args.cold, sizes[-1])
    output = target.get_output_embeddings().weight.detach()[kept].clone()
    training = Training(HeadLoss(head.float(), output, plan.feature, plan.noise, sizes), documents, plan, args.output)
    if args.resume:
        training.resume()
    training.run()
    training.model.fold()
    if isinstance(head, Eagle3Head):
        save_eagle3(head, kept, args.output / "final", args.layout, shared=True, layers=args.layers)
    else:
        save_head(head, args.output / "final", kept)
    note = {"minutes": round(training.seconds / 60, 2), "on": f"{args.threads} CPU threads, {training.steps} steps"}
    (args.output / "final" / TRAINING).write_text(json.dumps(note) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(new_parser(), train, arguments)


if __name__ == "__main__":
    main()
