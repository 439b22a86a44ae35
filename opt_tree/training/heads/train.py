"""Train an EAGLE-1 or EAGLE-3 head from hidden states on disk, over a reduced draft vocabulary.

    python -m opt_tree.training.heads.train --kind eagle3 --target DIR --features DIR --output DIR --minutes 45

The features are those of `opt_tree.training.heads.features`; the target itself never runs. Unless options say
otherwise a head is trained by its paper's recipe (`PUBLISHED`). EAGLE-1 (arXiv:2401.15077): SmoothL1 to the target's
next feature, a tenth as much cross-entropy through the target's own output layer, noise on the features, no pass on
estimates. EAGLE-3 (arXiv:2503.01840): cross-entropy alone, over a draft vocabulary, through an output layer of its
own; random weights; seven passes, each on the estimates of the one before, weighed by powers of 0.8. Other options are
HASS's (2408.15766), GRIFFIN's (2502.11018), FR-Spec's draft vocabulary (2502.14856) for EAGLE-1, and what the embedded
heads were trained by. From the papers differ: the optimizer (Muon beside AdamW) and its rate, which suit minutes. The
released code of EAGLE-1 multiplies the noise by 512 over a text's length; here it does not depend on it.
Passes, rotary positions and attention are those of `opt_tree.training.heads.eagle`.
The run is as long as its minutes, of process time: learning rate and number of passes follow it. `--resume` goes on.
"""

import sys
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from opt_tree.system.command_line import whole_numbers
from opt_tree.training.command_line import TrainingParser, command, existing, stream_parser
from opt_tree.training.plans import LAYOUTS, Judging, read_pairs

PUBLISHED = {
    "eagle": {"unroll": "1:1", "feature": 10.0, "noise": 0.1},
    "eagle3": {"unroll": "1:7", "feature": 0.0, "noise": 0.0},
}
"""What these options are by each paper where they are not named. EAGLE-1 weighs feature and tokens by 1 and 0.1."""


@dataclass(frozen=True)
class HeadPlan(Judging):
    """How deep, and judged by what."""

    unroll: str = "1:7"  # share of the run:passes, each on the estimates of the one before
    feature: float = 0.0  # weight of SmoothL1 between what the output layer reads here and in the target
    noise: float = 0.0  # half-width of uniform noise on the features

    def check(self, vocab: int) -> None:
        self.passes(0.0)
        super().check(vocab)

    def passes(self, progress: float) -> int:
        stages = read_pairs(self.unroll, ":", float, int)
        ends = list(accumulate(share for share, _ in stages))
        if abs(ends[-1] - 1) > 1e-6:
            raise ValueError(f"the shares of {self.unroll!r} must sum to 1")
        return stages[min(bisect_right(ends, progress), len(stages) - 1)][1]


def new_parser() -> TrainingParser:
    parser = stream_parser("Train an EAGLE head from hidden states on disk.", HeadPlan())
    parser.add_argument("--kind", choices=tuple(PUBLISHED), default="eagle3", help="default: %(default)s")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of an EAGLE-3 head")
    parser.add_argument(
        "--layers", type=whole_numbers, help="layers whose outputs an EAGLE-3 head reads (default: the published ones)"
    )
    parser.add_argument("--init", type=existing, help="EAGLE-1 head to go on from, with an embedding of its own")
    parser.add_argument("--embedding", action="store_true", help="train an EAGLE-1 head's embedding too")
    parser.add_argument(
        "--warm", action="store_true", help="begin an EAGLE-3 head as the target's last layer, keep its output rows"
    )
    parser.add_argument("--norm-before-residual", action="store_true", help="in an EAGLE-3 head, as in `speculators`")
    parser.set_defaults(**dict.fromkeys(PUBLISHED["eagle"]))
    return parser


main = command(new_parser, "opt_tree.training.heads.train:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file
from transformers import PreTrainedModel

from opt_tree.methods.drafters.heads.eagle3 import chosen_layers
from opt_tree.methods.drafters.heads.eagle3_head import Eagle3Head
from opt_tree.methods.drafters.heads.eagle_head import EagleHead
from opt_tree.models.checkpoints import load_weights
from opt_tree.system.command_line import from_fields
from opt_tree.training.files import working_dtype
from opt_tree.training.heads.batches import Documents
from opt_tree.training.heads.eagle import new_head, save_head
from opt_tree.training.heads.eagle3 import new_eagle3_head, save_eagle3
from opt_tree.training.heads.head_loss import HeadLoss, columns_of
from opt_tree.training.heads.run import Training, train_as_told


def train(args: argparse.Namespace) -> None:
    for name, value in PUBLISHED[args.kind].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    plan = from_fields(HeadPlan, args)
    plan.check(args.vocab)
    target = load_weights(str(args.target), working_dtype())
    layers = _layers(args, target)
    documents = Documents(args.features, args.tokens, (-1, *layers))
    kept, output, goal = columns_of(target, args.features, plan, args.vocab)
    sizes = [documents.size(layer) for layer in layers]
    head: EagleHead | Eagle3Head
    if layers:
        head = new_eagle3_head(target, len(kept), args.warm, sizes[-1], args.norm_before_residual)
    else:
        head = new_head(target)
    if args.init:
        head.load_published(load_file(args.init / "model.safetensors"), str(args.init))
    head.embed_tokens.requires_grad_(args.embedding)
    goal = replace(goal, feature=plan.feature, noise=plan.noise)
    training = Training(HeadLoss(head.float(), output, goal, sizes, kept), documents, plan, args.output)

    def save(loss: HeadLoss, folder: Path) -> None:
        loss.fold()
        if isinstance(loss.head, Eagle3Head):
            told = {"layers": args.layers, "verifier": target.config, "depth": plan.passes(1.0)}
            save_eagle3(loss.head, kept, folder, args.layout, args.warm, **told)
        else:
            save_head(loss.head, folder, None if args.vocab == loss.head.config.vocab_size else kept)

    train_as_told(training, args, "eagle", save)


def _layers(args: argparse.Namespace, target: PreTrainedModel) -> tuple[int, ...]:
    """Return the layers that the head reads beside the last state; ValueError for options of the other kind."""
    if args.kind == "eagle":
        if args.layers or args.norm_before_residual or args.warm:
            raise ValueError("--layers, --norm-before-residual and --warm are for EAGLE-3 heads")
        if args.embedding and args.vocab < target.config.vocab_size:
            raise ValueError(f"--embedding goes with the whole vocabulary, --vocab {target.config.vocab_size}")
        return ()
    if args.init or args.embedding:
        raise ValueError("--init and --embedding are for EAGLE-1 heads")
    return chosen_layers(args.layers, target.config.num_hidden_layers)
