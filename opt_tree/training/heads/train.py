"""Train a drafting head from hidden states on disk: EAGLE, Medusa, ParallelSpec, block drafters, early exits.

    python -m opt_tree.training.heads.train --kind eagle3 --target DIR --features DIR --output DIR --minutes 45

The features are those of `opt_tree.training.heads.features`; the target itself never runs. `--kind` is what is trained,
and says which options there are. Unless they say otherwise a head is trained by its paper's recipe, but for the
optimizer (Muon beside AdamW) and its rate, which suit minutes: the module of each kind has the rest. The run is as long
as its minutes, of process time: learning rate and number of passes follow it. `--resume` goes on.
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

import pkgutil

from opt_tree.models.checkpoints import load_config, load_weights
from opt_tree.system.command_line import from_fields
from opt_tree.training.files import working_dtype
from opt_tree.training.heads.batches import Documents
from opt_tree.training.heads.run import Training


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
