"""Fit the sharpening temperature of a drafter: how much surer the target's argmax is than the drafter says.

Maximum likelihood of the target's own greedy choices, along its own answers to held-out prompts, at every tree node
where the target's choice is known and the drafter's distribution was computed (temperature scaling, arXiv:1706.04599).
The result goes beside the drafter as `calibration.json`, where `load_pair` picks it up for temperature 0.

    python -m opt_tree.training.fitting.calibrate --target T --drafter lm:D [--prompts my_prompts.jsonl]
"""

import sys

from opt_tree.training.command_line import TrainingParser, command, existing


def new_parser() -> TrainingParser:
    parser = TrainingParser(__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", default="lm:demo", help="a spec: lm:MODEL, eagle:HEAD, ... (default: %(default)s)")
    parser.add_argument("--prompts", type=existing, nargs="+", help="prompts, .jsonl or a line each (default: our own)")
    parser.add_argument("--count", type=int, default=80, help="prompts to use, half to fit and half to check")
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--threshold", type=float, default=0.2)
    parser.add_argument("--max-depth", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--output", help="folder for calibration.json; default: the drafter's own")
    return parser


main = command(new_parser, "opt_tree.training.fitting.calibrate:run")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from opt_tree.children import LogProbs
from opt_tree.decoder import Decoder
from opt_tree.drafter import Asked, Drafter
from opt_tree.errors import counted
from opt_tree.generation import Outcome, Step
from opt_tree.methods.children.draws import over_vocabulary
from opt_tree.methods.drafters.around import DrafterAround
from opt_tree.methods.drafters.registry import KINDS, parse_spec
from opt_tree.models.checkpoints import CALIBRATION
from opt_tree.models.named import resolve
from opt_tree.policy import OptTree
from opt_tree.pool import Frontier
from opt_tree.system.files import write_text
from opt_tree.tools.pair import Pair, load_pair
from opt_tree.training.prompts import default_prompts, read_prompts

_INVERSE = np.geomspace(0.2, 20, 141)


@dataclass
class Likelihood:
    """Negative log-likelihood of the target's choices under the sharpened drafter, for a grid of inverse temperatures.

    The sum is convex in the inverse temperature, so the parabola through the three lowest grid points gives the
    minimum; nothing but 141 sums is kept, whatever the vocabulary.
    """

    sums: Float[np.ndarray, " grid"] = field(default_factory=lambda: np.zeros(len(_INVERSE)))
    count: int = 0

    def add(self, log_probs: Float[Tensor, " vocab"], choice: int) -> None:
        """Count one node: the drafter's log-probabilities there and what the target chose."""
        if choice >= len(log_probs) or not torch.isfinite(log_probs[choice]):
            return  # a token the drafter cannot propose says nothing about its temperature
        log_probs = log_probs.float()
        scaled = torch.from_numpy(_INVERSE).to(log_probs)[:, None] * log_probs
        self.sums += (scaled.logsumexp(-1) - scaled[:, choice]).double().cpu().numpy()
        self.count += 1

    def temperature(self) -> float:
        """The most likely temperature; raises ValueError without data or with the optimum outside the grid."""
        best = int(np.argmin(self.sums))
        if self.count == 0 or best in (0, len(_INVERSE) - 1):
            raise ValueError(
                f"no temperature between {1 / _INVERSE[-1]:.2f} and {1 / _INVERSE[0]:.0f} fits "
                f"{counted(self.count, 'node')}"
            )
        x, y = np.log(_INVERSE[best - 1 : best + 2]), self.sums[best - 1 : best + 2]
        a, b, _ = np.polyfit(x - x[1], y, 2)
        return float(np.exp(-(x[1] - b / (2 * a))))


class LikelihoodRecorder(DrafterAround):
    """Wraps a drafter and shows a Likelihood what it said along the target's answer. Drafts as it would alone."""

    def __init__(self, drafter: Drafter, likelihood: Likelihood) -> None:
        super().__init__(drafter)
        if drafter.names_few:
            raise ValueError(f"{drafter.describe()} names a few tokens only: there is no temperature to fit")
        self.likelihood = likelihood
        self._rows: list[Tensor] = []

    def root(self, context: list[int]) -> Asked:
        self._rows = []
        return self.after(self.drafter.root(context), self._record)

    def expand(self, frontier: Frontier) -> Asked:
        return self.after(self.drafter.expand(frontier), self._record)

    def _record(self, answer: LogProbs) -> LogProbs:
        self._rows.append(over_vocabulary(answer))
        return answer

    def accept(self, outcome: Outcome) -> None:
        rows = torch.cat(self._rows) if self._rows else torch.zeros(0)
        for row, choice in zip(outcome.tree.draft_rows[outcome.path].tolist(), outcome.tokens, strict=True):
            if 0 <= row < len(rows):
                self.likelihood.add(rows[row], choice)
        self._rows = []
        self.drafter.accept(outcome)


def fit(pair: Pair, prompts: list[list[int]], policy: OptTree, max_new_tokens: int) -> float:
    """Return the temperature under which the target's greedy choices along its answers are most likely."""
    likelihood = Likelihood()
    decoder = Decoder(pair.target, LikelihoodRecorder(pair.drafter, likelihood), policy)
    for prompt in tqdm(prompts, desc="fit", unit="prompt"):
        decoder.generate(prompt, max_new_tokens, stop=pair.stop)
    return likelihood.temperature()


def reliability(
    decoder: Decoder, pair: Pair, prompts: list[list[int]], max_new_tokens: int, title: str
) -> dict[str, float]:
    """Decode the prompts greedily and compare what the trees promised with what they gave.

    Means over the steps of E(A) ("expected"), A ("accepted") and draft "forwards", and the "slope" of A on E(A) by
    least squares: 1 where the distribution means what it says.
    """
    steps: list[Step] = []
    for prompt in tqdm(prompts, desc=title, unit="prompt"):
        steps += decoder.generate(prompt, max_new_tokens, stop=pair.stop).steps
    expected = np.array([step.expected_accepted for step in steps])
    accepted = np.array([step.accepted for step in steps], dtype=float)
    slope = np.polyfit(expected, accepted, 1)[0] if np.ptp(expected) > 0 else np.nan
    forwards = np.mean([step.draft_forwards for step in steps])
    return {"expected": expected.mean(), "accepted": accepted.mean(), "forwards": forwards, "slope": slope}


def run(options: argparse.Namespace) -> None:
    """Fit the temperature on one half of the prompts, compare E(A) with A on the other, and store what was found."""
    if options.count < 2:
        raise ValueError(f"--count must be at least 2, got {options.count}")
    policy = OptTree(options.nodes, options.threshold, options.max_depth)
    texts = read_prompts(options.prompts) if options.prompts else default_prompts(heldout=True)
    if len(texts) < 2:
        raise ValueError(f"it takes 2 prompts at least, to fit on one half and check on the other; got {len(texts)}")
    folder = _drafter_folder(options.drafter, options.output)
    pair = load_pair(options.target, options.drafter, dtype=options.dtype, device=options.device, bare=True)
    prompts = [pair.encode(text) for text in texts[: options.count]]
    half = len(prompts) // 2
    temperature = fit(pair, prompts[:half], policy, options.max_new_tokens)
    found = {}
    for title, own in (("bare", 1.0), ("sharpened", temperature)):
        decoder = Decoder(pair.target, pair.drafter.calibrated(own), policy)
        found[title] = reliability(decoder, pair, prompts[half:], options.max_new_tokens, title)
    others = len(prompts) - half
    fitted = f"fitted on {counted(half, 'prompt')}; checked on {counted(others, 'other')}"
    print(f"\ntemperature {temperature:.3f}, {fitted}, {policy}")
    print(f"{'':10} {'E(A)':>6} {'A':>6} {'A - E(A)':>9} {'slope':>6} {'draft forwards':>15}")
    for title, of in found.items():
        expected, accepted, forwards, slope = of.values()
        numbers = f"{expected:6.2f} {accepted:6.2f} {accepted - expected:9.2f} {slope:6.2f} {forwards:15.2f}"
        print(f"{title:10} {numbers}")
    record = {
        "temperature": round(temperature, 4),
        "target": Path(pair.target.name).name,
        "prompts": half,
        "policy": str(policy),
        **{title: {name: round(float(value), 4) for name, value in of.items()} for title, of in found.items()},
    }
    write_text(folder / CALIBRATION, json.dumps(record, indent=2) + "\n")
    print(f"written: {folder / CALIBRATION}")


def _drafter_folder(spec: str, output: str | None) -> Path:
    """Where the result is stored; a drafter from the Hub has no folder of its own, so --output must name one."""
    if output:
        return Path(output)
    kind, path = parse_spec(spec)
    folder = Path(resolve(path, KINDS[kind].part or ""))
    if not path or not folder.is_dir():
        raise ValueError(f"{spec} is not a local folder; say with --output where the calibration should go")
    return folder
