"""Make a drafter for a model: its own answers, a store of them, a head, calibration, and a verdict.

    opt-tree train-drafter MODEL --output DIR [--data FILES] [--kind eagle3] [--minutes 60] [--disk 5GB]

Then `load_pair(MODEL, drafter=DIR)`. Each stage is a command of this package in a process of its own; what it has done
lies in DIR, so a run that was killed goes on by the same command. Owns the order, the time each stage gets, and which
of the drafters that came out is taken. docs/train_drafter.md is the page.
"""

import argparse
import re
import sys
from pathlib import Path

from opt_tree.training.command_line import TrainingParser, command, existing

SHARES = {"eagle3": (0.33, 0.2), "eagle": (0.33, 0.2), "store": (0.7, 0.15)}
"""Of the minutes, by kind: for the answers, and for calibration and verdict. Features and head have the rest."""


def parse_size(text: str) -> int:
    """Read 5GB, 800MB, 1.5G: bytes, above 0."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", text.upper())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"takes a size such as 5GB or 800MB, got {text}")
    return int(float(found[1]) * 1000 ** ("", "K", "M", "G", "T").index(found[2]))


def new_parser() -> TrainingParser:
    parser = TrainingParser("Make a drafter for a model, from the model's own answers.")
    parser.add_argument("model", help="folder, Hub id or known name")
    parser.add_argument("--data", type=existing, nargs="+", help="prompts, .jsonl or a line each (default: our own)")
    parser.add_argument("--kind", choices=tuple(SHARES), default="eagle3", help="what is trained (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the whole, about (%(default)s)")
    parser.add_argument("--disk", type=parse_size, default="5GB", help="for answers and features (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=192, help="of each answer (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder of all that is made")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser


main = command(new_parser, "opt_tree.training.train_drafter:train")

if __name__ == "__main__":
    sys.exit(main())

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm
from transformers import AutoConfig

from opt_tree.methods.drafters.heads.eagle3 import chosen_layers
from opt_tree.methods.drafters.registry import MADE
from opt_tree.models.checkpoints import check_is_folder
from opt_tree.models.named import resolve
from opt_tree.system.files import write_text
from opt_tree.training.prompts import default_prompts, read_prompts
from opt_tree.training.stages import STATE, StagedRun, alone_in

CALIBRATED, JUDGED = 20, 24
"""Held-out prompts: the first ones calibrate, those behind them are the verdict's."""
VOCAB = 8192
UNROLL = "0.2:1,0.3:2,0.5:4"
"""Share of the head's training:passes on its own estimates; the published seven are for more than minutes."""
BYTES = 2
"""Of a number among the features."""


def train(args: argparse.Namespace) -> None:
    """Make what is not there yet, weigh what came out, and say which drafter it is."""
    if re.search(r"[:+]", str(args.output)):
        raise ValueError(f"--output must have no ':' and no '+', which separate the parts of a drafter: {args.output}")
    given, args.model = args.model, resolve(args.model, "target")
    check_is_folder(args.model)
    config = AutoConfig.from_pretrained(args.model)
    prompts = _prompts(args)
    state = _state(args, prompts)
    args.output.mkdir(parents=True, exist_ok=True)
    total, spent = round(60 * args.minutes), round(state["seconds"])
    shown = "{desc} |{bar}| {percentage:3.0f} %"
    bar = tqdm(total=total, initial=min(spent, total), bar_format=shown, disable=None)
    with alone_in(args.output) as lock, bar:
        work = StagedRun(args, state, bar, lock)
        work.save()
        for name, some in prompts.items():
            write_text(args.output / f"{name}.jsonl", "".join(json.dumps({"prompt": text}) + "\n" for text in some))
        found = [_judge(work, spec) for spec in _parts(work, config)]
    _conclude(args, given, found)


def _prompts(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the prompts by what they are for: "train", "calibrate" and "judge".

    A quarter of the prompts that were given is held out of the training, but no more than are used.
    """
    if args.data:
        given = read_prompts(args.data)
        count = min(CALIBRATED + JUDGED, len(given) // 4)
        if count < 6:
            raise ValueError(f"it takes 24 prompts at least, a quarter of which is held out; got {len(given)}")
        heldout, train = given[:count], given[count:]
    else:
        heldout, train = default_prompts(heldout=True), default_prompts()
    calibrated = min(CALIBRATED, len(heldout) // 2)
    return {"train": train, "calibrate": heldout[:calibrated], "judge": heldout[calibrated:][:JUDGED]}


def _state(args: argparse.Namespace, prompts: dict[str, list[str]]) -> dict[str, Any]:
    """What an earlier run of the same command left; ValueError for that of another command."""
    asked = {"model": str(args.model), "kind": args.kind, "max_new_tokens": args.max_new_tokens}
    asked["prompts"] = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    path = args.output / STATE
    if not path.exists():
        if args.output.is_dir() and any(args.output.iterdir()):
            raise ValueError(f"{args.output} holds other things: name a new folder")
        return {"asked": asked, "seconds": 0.0, "verdicts": {}}
    try:
        known = dict(json.loads(path.read_text()))
        other = [name for name, value in known["asked"].items() if asked.get(name) != value]
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: name a new folder") from error
    if other:
        raise ValueError(f"{args.output} was begun with another {' and '.join(other)}: name a new folder")
    return known


def _parts(work: StagedRun, config: Any) -> list[str]:
    """Make the parts that are not there yet; return the specs of the drafters that they make.

    These are the store alone, and where a head was asked for the head alone, and the head's layer above the store's.
    """
    head, store = "eagle:{here}/head", "store:{here}/store"
    layers = chosen_layers(None, config.num_hidden_layers) if work.args.kind == "eagle3" else ()
    _once(work, "answers", lambda: _answers(work, config, layers))
    _once(work, "store", lambda: _store(work, config))
    if work.args.kind == "store":
        return [store]
    _once(work, "features", lambda: _features(work, layers))
    _once(work, "head", lambda: _head(work, config))
    _once(work, "calibrated", lambda: _calibrate(work))
    return [store, head, f"graft:1:copy:{head}+{store}"]


def _once(work: StagedRun, name: str, stage: Callable[[], object]) -> None:
    """Run a stage unless an earlier run has."""
    if not work.state.get(name):
        stage()
        work.state[name] = True
        work.save()


def _answers(work: StagedRun, config: Any, layers: Sequence[int]) -> None:
    """The model's answers, for their share of the minutes, and no more than the disk holds with their features."""
    args, output = work.args, work.args.output
    seconds = max(SHARES[args.kind][0] * 60 * args.minutes - work.state["seconds"], 30.0)
    states = 0 if args.kind == "store" else len({-1, *layers})
    words = ("--target", args.model, "--questions", output / "train.jsonl", "--output", output / "answers")
    words += ("--minutes", seconds / 60, "--tokens", args.disk // (BYTES * config.hidden_size * states + 8))
    words += ("--max-new-tokens", args.max_new_tokens, "--batch", 32, "--threads", args.threads)
    work.run("the model's own answers", seconds, "training.outputs", *words)


def _store(work: StagedRun, config: Any) -> None:
    output = work.args.output
    words = ("--target", work.args.model, "--answers", output / "answers", "--output", output / "store")
    words += ("--max-mib", 8, "--vocab", config.vocab_size)
    work.run("a store of its answers", 20, "training.fitting.store", *words)


def _features(work: StagedRun, layers: Sequence[int]) -> None:
    args, output = work.args, work.args.output
    words = ("--target", args.model, "--answers", output / "answers", "--output", output / "features")
    words += (f"--layers={','.join(map(str, (-1, *layers)))}", "--threads", args.threads)
    work.run("its hidden states", 0.15 * 60 * args.minutes, "training.heads.features", *words)


def _head(work: StagedRun, config: Any) -> None:
    """A head, in the minutes that answers and features have left; a run that goes on keeps to what it was given."""
    args, output = work.args, work.args.output
    if "head_minutes" not in work.state:
        left = (1 - SHARES[args.kind][1]) * args.minutes - work.state["seconds"] / 60
        work.state["head_minutes"] = max(left, 0.2 * args.minutes)
        work.save()
    minutes, vocab = work.state["head_minutes"], min(VOCAB, config.vocab_size)
    words = ("--target", args.model, "--features", output / "features", "--output", output / "head")
    words += ("--minutes", minutes, "--save-minutes", max(args.minutes / 20, 0.2), "--threads", args.threads)
    words += ("--kind", args.kind, "--vocab", vocab, "--average", 0.98, "--feature", 0.1, "--noise", 0)
    words += ("--unroll", UNROLL)
    words += ("--frequent", 1024, "--drawn", 256) if vocab >= 2048 else ()  # most of a step is the output layer
    words += ("--layout", "speculators", "--norm-before-residual", "--warm") if args.kind == "eagle3" else ()
    words += ("--resume",) if (output / "head" / "checkpoint.pt").exists() else ()
    work.run("the head", 60 * minutes, "training.heads.train", *words)


def _calibrate(work: StagedRun) -> None:
    """A head that learned too little for any temperature to fit stays bare."""
    args, output = work.args, work.args.output
    words = ("--target", args.model, "--drafter", f"eagle:{output / 'head'}", "--prompts", output / "calibrate.jsonl")
    words += ("--nodes", 16, "--threshold", 0.1, "--max-new-tokens", 64, "--count", CALIBRATED)
    words += ("--threads", args.threads)
    try:
        work.run("calibration", 60, "training.fitting.calibrate", *words)
    except ValueError as error:
        tqdm.write(f"not calibrated: {error}")


def _placed(args: argparse.Namespace, spec: str) -> str:
    """A spec of `drafter.json` with its folder in it."""
    return spec.replace("{here}", str(args.output))


def _judge(work: StagedRun, spec: str) -> dict[str, Any]:
    """What `advise` says of a drafter on the held-out prompts."""
    if spec not in work.state["verdicts"]:
        args, seconds = work.args, max(10.0, min(60 * work.args.minutes / 40, 90.0))
        words = (args.model, "--drafter", _placed(args, spec), "--prompts")
        words += (args.output / "judge.jsonl", "--side-by-side", 1, "--seconds", seconds, "--threads", args.threads)
        said = work.run(f"verdict on {spec.partition(':')[0]}", 2 * seconds, "training.advise", *words, "--json")
        work.state["verdicts"][spec] = json.loads(said.strip().splitlines()[-1])
        work.save()
    return {"spec": spec, **work.state["verdicts"][spec]}


def _conclude(args: argparse.Namespace, given: str, found: Sequence[dict[str, Any]]) -> None:
    """Print what came out, and note in the folder which drafter is taken."""
    curve = args.output / "head" / "heldout.jsonl"
    if curve.exists():
        print("held out, by minutes of the head's training: share of equal argmaxes, pass by pass")
        for line in curve.read_text().splitlines():
            row = json.loads(line)
            print(f"  {row['seconds'] / 60:5.1f}  " + " ".join(f"{share:.3f}" for share in row["equal"]))
    best = max(found, key=lambda one: one["setting"]["speed_up"])
    for one in found:
        setting, here = one["setting"], one["prospects"]["here"]
        interval = f"{setting['low']:.2f} to {setting['high']:.2f}"
        tokens, speed = f"{here['emitted']:.2f} tokens a step", f"{setting['speed_up']:.2f} x plain ({interval})"
        print(f"{_placed(args, one['spec']):<55} {speed}, {tokens}, {setting['name']}")
    write_text(args.output / MADE, json.dumps({"spec": best["spec"], "setting": best["setting"]["name"]}) + "\n")
    print(f"{best['verdict']}\nload_pair({given!r}, drafter={str(args.output)!r}) takes {_placed(args, best['spec'])}")
