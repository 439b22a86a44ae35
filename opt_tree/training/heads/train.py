"""Train a drafting head from hidden states on disk: EAGLE, Medusa, ParallelSpec, block drafters, early exits.

    python -m opt_tree.training.heads.train --kind eagle3 --target DIR --features DIR --output DIR --minutes 45

The features are those of `opt_tree.training.heads.features`; the target itself never runs. `--kind` is what is trained,
and says which options there are. Unless they say otherwise a head is trained by its paper's recipe, but for the
optimizer (Muon beside AdamW) and its rate, which suit minutes: the module of each kind has the rest. The run is as long
as its minutes, of process time: learning rate and number of passes follow it. `--resume` goes on. What is trained and
what judges it is a `Judge`; here are the clock, the learning rate, the running mean and the checkpoints.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from opt_tree.training.command_line import TrainingParser, command, existing, model_path
from opt_tree.training.plans import KINDS


class HeadParser(TrainingParser):
    """A parser that has the options of the kind of head that is asked for. It reads one command line."""

    def __init__(self) -> None:
        super().__init__("Train a drafting head from hidden states on disk.")
        told = "what is trained, which has options of its own: see --kind KIND --help (default: %(default)s)"
        self.add_argument("--kind", choices=tuple(KINDS), default="eagle3", help=told)
        self.add_argument("--target", type=model_path, required=True, help="model folder; its weights only are read")
        self.add_argument("--features", type=existing, required=True, help="folder that `opt-tree features` wrote")
        self.add_argument("--output", type=Path, required=True, help="folder of the checkpoint; the head is in final/")
        self.add_argument("--resume", action="store_true", help="go on from the checkpoint in OUTPUT")
        self.add_argument("--threads", type=int, default=1, help="CPU threads")
        self.kind: str = self.get_default("kind")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # --help and refusals of options need the kind first; what else is wrong the parser itself tells.
        early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        early.add_argument("--kind", nargs="?")
        asked = early.parse_known_args(args)[0].kind
        self.kind = asked if asked in KINDS else self.kind  # another one is refused below
        self.add_fields(KINDS[self.kind]())
        return super().parse_known_args(args, namespace)

    def hinted(self, message: str) -> str:
        for word in self._given:
            name = word.partition("=")[0].replace("_", "-")
            kinds = [kind for kind, plan in KINDS.items() if name in map(_spelled, dataclasses.fields(plan))]
            if kinds and self.kind not in kinds:
                return f"{name} is for --kind {', '.join(kinds)}, not for {self.kind}"
        return super().hinted(message)


def _spelled(field: dataclasses.Field[Any]) -> str:
    return f"--{field.name.replace('_', '-')}"


main = command(HeadParser, "opt_tree.training.heads.train:train")

if __name__ == "__main__":
    sys.exit(main())

import copy
import json
import pkgutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from opt_tree.errors import counted
from opt_tree.models.checkpoints import TRAINING, load_config, load_weights
from opt_tree.system.command_line import from_fields
from opt_tree.system.files import whole, write_text
from opt_tree.training.files import working_dtype
from opt_tree.training.heads.batches import Batch, Documents, Group
from opt_tree.training.heads.head_loss import Judge
from opt_tree.training.optimizer import MuonAdamW
from opt_tree.training.plans import Pace


@contextmanager
def own_draws(seed: int) -> Iterator[None]:
    """Inside, torch draws as it does after this seed; behind it, as if nothing had been drawn."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


class Training:
    """One run: what a checkpoint holds, and the step."""

    def __init__(self, model: Judge, documents: Documents, plan: Pace, output: Path) -> None:
        self.model, self.documents, self.plan, self.output = model, documents, plan, output
        self.kept = copy.deepcopy(model) if plan.average else model
        self.optimizer = MuonAdamW(model, plan.lr)
        self.fast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=working_dtype() is torch.bfloat16)
        self.seconds, self.steps, self.tokens = 0.0, 0, 0

    def order(self) -> Iterator[Group]:
        """Yield groups of documents for ever, each epoch in another order, from its last one on."""
        rng, train = np.random.default_rng((self.plan.seed, self.steps)), self.documents.train
        while True:
            for index in rng.permutation(len(train))[::-1]:
                yield train[index]

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Take one optimizer step; return loss and share of equal argmaxes by pass."""
        progress = min(self.seconds / (60 * self.plan.minutes), 1.0)
        unroll = self.plan.passes(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr * min(1.0, (self.steps + 1) / 20) * (1 - progress)
        with self.fast:
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
        """Return loss and share of equal argmaxes by pass on the held-out batches, with the same draws each time."""
        self.kept.eval()
        with own_draws(self.plan.seed), self.fast:
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
        self.kept.head.load_state_dict(state["kept"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.sizes = self.kept.sizes = state["sizes"]
        self.seconds, self.steps, self.tokens = state["seconds"], state["steps"], state["tokens"]

    def run(self) -> None:
        """Train until the minutes are over; then write the head."""
        end, saved, mean = 60 * self.plan.minutes, self.seconds, torch.zeros(0)
        bar = tqdm(total=round(end), initial=round(self.seconds), unit="s")
        for group in self.order():
            begin = time.process_time()
            _, equal = self.step(self.documents[group])
            self.seconds += time.process_time() - begin
            mean = equal if len(mean) != len(equal) else 0.97 * mean + 0.03 * equal
            bar.update(round(self.seconds) - bar.n)
            shown = " ".join(f"{share:.3f}" for share in mean.tolist())
            bar.set_postfix_str(f"{counted(self.steps, 'step')}, {self.tokens / 1e3:.0f}k tokens, equal {shown}")
            over = self.seconds >= end
            if over or self.seconds - saved > 60 * self.plan.save_minutes:
                self.save()
                saved = self.seconds
            if over:
                break
        self.kept.save(self.output / "final")
        note = f"{counted(torch.get_num_threads(), 'CPU thread')}, {counted(self.steps, 'step')}, {self.tokens} tokens"
        made = {"minutes": round(self.seconds / 60, 2), "on": note}
        write_text(self.output / "final" / TRAINING, json.dumps(made) + "\n")


def train(args: argparse.Namespace) -> None:
    """Train a head as a command line says, and name the drafter that it is."""
    plan, path = from_fields(KINDS[args.kind], args), str(args.target)
    plan.check(load_config(path).get_text_config())
    target, judge = load_weights(path, working_dtype()), pkgutil.resolve_name(f"{__package__}.{plan.judge}")
    documents = Documents(args.features, plan.tokens, judge.layers_of(plan, target))
    training = Training(judge.new(plan, target, documents), documents, plan, args.output)
    if args.resume:
        training.resume()
    training.run()
    print(f"done; to decode with it: --target {args.target} --drafter {plan.spec}:{args.output / 'final'}")
