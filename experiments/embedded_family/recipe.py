"""Train the whole demo family, stage by stage: tokenizer, target, own outputs, drafter.

    python -m experiments.embedded_family.recipe --data CORPORA --work DIR [--preset cpu|tiny]

A stage whose product exists is skipped and a training stage that was stopped goes on from its last checkpoint, so the
same command may be run again at any time. `cpu` is what made the embedded models (two busy cores, about four hours).
`tiny` makes useless models in a few minutes, to see that every stage fits the next one. A head, calibration and a store
are `opt_tree.train_drafter`'s.

Where the embedded models differ from `cpu`: their stages were run one by one, the drafter in two runs, the second with
`--init` from the first. They read 2.2M tokens of 5,000 own answers (rows of 512), then 3.2M of 15,000 (at 4e-3).
"""

import sys
from pathlib import Path

from experiments.embedded_family.plans import add_data
from experiments.embedded_family.sizes import CHAT_EPOCHS, SIZES, TARGET_EPOCHS, Size
from opt_tree.training.command_line import TrainingParser, command


def new_parser() -> TrainingParser:
    parser = TrainingParser("Train the demo family, stage by stage.")
    add_data(parser)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages; give it again to go on")
    parser.add_argument("--preset", choices=sorted(SIZES), default="cpu", help="size of the run")
    return parser


main = command(new_parser, "experiments.embedded_family.recipe:run_all")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass

from experiments.embedded_family.trainer import last_checkpoint

PROCESSES = 2
"""Of a training stage, a thread each."""


@dataclass(frozen=True)
class Stage:
    """One command and the folder whose existence says that it is done."""

    name: str
    module: str
    arguments: str
    product: Path

    @property
    def trains(self) -> bool:
        """Whether the stage is a training run, which can be resumed and spread over processes."""
        return self.module not in ("tokenizer", "outputs")


def stages(size: Size, work: Path) -> list[Stage]:
    """Return the recipe in order; each stage reads the products of earlier ones."""
    tokenizer, base = work / "tokenizer", work / "base"
    plan = [
        Stage("tokenizer", "tokenizer", f"--output {tokenizer} {size.tokenizer}", tokenizer),
        Stage(
            "base",
            "lm",
            f"--tokenizer {tokenizer} --output {base} --epochs {_epochs(TARGET_EPOCHS, size.epochs)} {size.target}",
            base / "final",
        ),
    ]
    model = base / "final"
    sizes = f"--batch {size.batch} --micro-batch {size.micro_batch}"
    for turn, loops in enumerate(size.rounds, 1):
        cured = work / f"cured-{turn}"
        plan.append(_answers(f"loops-{turn}", model, work / "loops", size, loops.seed))
        arguments = (
            f"--model {model} --own {work / 'loops'} --output {cured} --epochs {_epochs(CHAT_EPOCHS, 1)} {sizes}"
        )
        arguments += f" --order {loops.order} --lr {loops.lr} --tokens {loops.steps * size.batch} --seed {loops.seed}"
        plan.append(Stage(cured.name, "unlikelihood", arguments, cured / "final"))
        model = cured / "final"
    own = work / "own"
    plan.append(_answers("own", model, own, size, 0))
    epochs = f"{_epochs(CHAT_EPOCHS, size.corpus_passes)},own={size.own_passes}"
    draft = work / "draft"
    arguments = f"--target {model} --own {own} --output {draft} --epochs {epochs} {sizes} {size.draft}"
    return [*plan, Stage("draft", "distil", arguments, draft / "final")]


def _answers(name: str, model: Path, folder: Path, size: Size, seed: int) -> Stage:
    prompts = size.own_prompts if name == "own" else size.loop_prompts
    arguments = f"--target {model} --output {folder} --prompts {prompts} --batch {size.answer_batch} --seed {seed}"
    return Stage(name, "outputs", arguments, folder / f"seed-{seed}-part-0-of-1.npz")


def _epochs(units: dict[str, float], factor: float) -> str:
    return ",".join(f"{name}={passes * factor:g}" for name, passes in units.items())


def run(stage: Stage, args: argparse.Namespace, size: Size) -> None:
    """Run one stage. Raises ValueError where it fails."""
    words = [sys.executable]
    arguments = [*stage.arguments.split(), "--data", str(args.data)]
    if stage.trains:
        arguments += ["--cache", str(args.work / "cache")]
        if size.compile:
            arguments.append("--compile")
        if last_checkpoint(stage.product.parent):
            arguments.append("--resume")
        words += ["-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
    # One thread a process: two OpenMP threads that share a busy machine wait for each other at every barrier.
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if status := _status_of([*words, "-m", f"{__package__}.{stage.module}", *arguments], environment):
        raise ValueError(f"stage {stage.name} failed with exit status {status}; its output is above")


def _status_of(command: list[str], environment: dict[str, str]) -> int:
    with subprocess.Popen(command, env=environment) as child:
        try:
            return child.wait()
        except BaseException:
            child.terminate()  # a launcher ends its own processes then
            raise


def run_all(args: argparse.Namespace) -> None:
    size = SIZES[args.preset]
    for stage in stages(size, args.work):
        if stage.product.exists():
            print(f"{stage.name}: done before ({stage.product})", flush=True)
            continue
        print(f"{stage.name}: {stage.module} {stage.arguments}", flush=True)
        run(stage, args, size)
