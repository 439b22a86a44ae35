"""Train a block drafter from hidden states on disk: a DSpark, DFlash or JetSpec model.

    python -m opt_tree.training.heads.dspark --kind dspark --target DIR --features DIR --output DIR --minutes 12

Anchors are drawn from the answers anew for each batch. A block behind an anchor sees the target's hidden states before
it and its own places, never another block's. Embedding and output layer are the target's and stay as they are. Each
place has a mean of its own here; a draft vocabulary is judged as if the target had no other tokens. By `--kind`:

- dspark (arXiv:2607.05147, section 3.3): with a Markov head and a confidence head. Place k is weighed by
  exp(-(k - 1) / 4), as in the released configuration.
- dflash (arXiv:2602.06036, section 4.2): the anchor's row says nothing, the others fill in what follows it. The loss is
  the cross-entropy of these tokens, weighed as DSpark's (eq. 4): the paper's choice for blocks of 8 (appendix A.1).
- jetspec (arXiv:2606.18394, eq. 8 and 9): no row sees a later one; the loss is the KL divergence of the draft from the
  target's law at temperature 1, and all places count alike, as in the paper's main results.

The losses are in `block_loss.py`. Stream, clock and files are those of `opt_tree.training.heads.train`.
"""

import math
import sys
from dataclasses import dataclass

from opt_tree.system.command_line import whole_numbers
from opt_tree.training.command_line import TrainingParser, command, stream_parser
from opt_tree.training.plans import Pace


@dataclass(frozen=True)
class DSparkPlan(Pace):
    """The model, and how many blocks a batch has."""

    lr: float = 3e-3  # highest learning rate; it falls linearly to nothing
    decay: float = math.exp(-1 / 4)  # weight of each place relative to the one before
    block: int = 7  # places of a block that draft: layers of a draft
    depth: int = 5  # layers of the block's network
    rank: int = 256  # of the Markov head
    anchors: float = 0.125  # blocks, as a share of the answers' tokens

    def passes(self, progress: float) -> int:
        return self.block


DECAYS = {"dspark": DSparkPlan.decay, "dflash": DSparkPlan.decay, "jetspec": 1.0}
"""The kinds, and `decay` by each paper where it is not named."""
MARKOV = ("vanilla", "gated")
"""Kinds of Markov heads that know the parent alone."""


def new_parser() -> TrainingParser:
    parser = stream_parser("Train a DSpark, DFlash or JetSpec model from hidden states on disk.", DSparkPlan())
    parser.add_argument("--kind", choices=tuple(DECAYS), default="dspark", help="default: %(default)s")
    parser.add_argument(
        "--layers", type=whole_numbers, help="layers that it reads (default: as many as it has, spread)"
    )
    parser.add_argument("--markov", choices=MARKOV, help=f"Markov head of a DSpark model (default: {MARKOV[0]})")
    parser.add_argument("--mask", type=int, help="token that stands for a mask (default: the target's padding)")
    parser.set_defaults(decay=None)
    return parser


main = command(new_parser, "opt_tree.training.heads.dspark:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from opt_tree.methods.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.methods.drafters.heads.block_files import read_block_file, spread
from opt_tree.methods.drafters.heads.block_laws import DSparkHeads
from opt_tree.methods.drafters.heads.block_network import block_network
from opt_tree.models.checkpoints import load_weights
from opt_tree.models.output_scaling import scaling_of
from opt_tree.system.command_line import from_fields
from opt_tree.training.files import working_dtype, write_checkpoint
from opt_tree.training.heads.batches import Documents, most_frequent
from opt_tree.training.heads.block_loss import BlockLoss
from opt_tree.training.heads.features import COUNTS
from opt_tree.training.heads.run import Training, train_as_told

AS_TARGET = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size"),
)
"""What of its config is the target's."""


_BACKBONE = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""What z-lab and DeepSpec call the parts of transformers' network that have other names there."""


class BlockModel(nn.Module):
    """A block and its heads, where it has some, under the published names: what is trained and saved."""

    def __init__(self, config: dict[str, Any], columns: int) -> None:
        super().__init__()
        file = read_block_file(config, int(config["num_target_layers"]))
        self.config, self.family, self.first, self.sights = config, file.family, file.first, file.sights
        self.block, self.heads = block_network(file.config), DSparkHeads({"markov_rank": 0, **config}, columns)

    def published(self) -> dict[str, Tensor]:
        """Return its tensors under the names of z-lab and DeepSpec."""
        tensors = {**self.block.state_dict(), **self.heads.state_dict()}
        for ours, theirs in _BACKBONE.items():
            tensors = {n.replace(ours, theirs, 1) if n.startswith(ours) else n: t for n, t in tensors.items()}
        return tensors


def new_config(
    target: PreTrainedModel, plan: DSparkPlan, layers: Sequence[int], kind: str, mask: int
) -> dict[str, Any]:
    """Return the config of a model for this target, under the published names; `kind`: "dflash", "jetspec", or that of
    a DSpark model's Markov head."""
    text, scaling = target.config.get_text_config().to_dict(), scaling_of(target)
    config = {name: text[name] for name in AS_TARGET if text.get(name) is not None} | {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_hidden_layers": plan.depth,
        "num_target_layers": text["num_hidden_layers"],
        "output_multiplier": scaling.factor,
        "final_logit_softcapping": scaling.cap,
    }
    reads = {"mask_token_id": mask, "target_layer_ids": list(layers)}
    if kind not in MARKOV:
        own = reads | ({"causal_head": True} if kind == "jetspec" else {})
        return config | {"architectures": ["DFlashDraftModel"], "block_size": plan.block + 1, "dflash_config": own}
    return (
        config
        | reads
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": plan.block,
            "markov_rank": plan.rank,
            "markov_head_type": kind,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    )


def save_block(model: BlockModel, folder: Path, tokens: Int[Tensor, " columns"]) -> None:
    """Save a model in bf16 as z-lab and DeepSpec do, but for the target's layers; with its draft vocabulary, if any."""
    vocab = model.config["vocab_size"]
    vocabulary = vocabulary_tensors(tokens, vocab) if len(tokens) < vocab else {}
    write_checkpoint(model.config, model.published() | dict(vocabulary), folder)


def train(args: argparse.Namespace) -> None:
    if args.decay is None:
        args.decay = DECAYS[args.kind]
    plan, target = from_fields(DSparkPlan, args), load_weights(str(args.target), working_dtype())
    if args.markov and args.kind != "dspark":
        raise ValueError(f"--markov is for DSpark models, not for --kind {args.kind}")
    count = target.config.get_text_config().num_hidden_layers
    layers = args.layers or spread(count, plan.depth)
    mask = target.config.pad_token_id if args.mask is None else args.mask
    if mask is None or not 0 <= mask < target.config.vocab_size:
        raise ValueError(f"--mask is a token of the target that no text has, got {mask}")
    kept = most_frequent(np.load(args.features / COUNTS), args.vocab, "target")
    kind = args.markov or MARKOV[0] if args.kind == "dspark" else args.kind
    head = BlockModel(new_config(target, plan, layers, kind, mask), len(kept))
    if head.heads.markov_head is not None:
        nn.init.normal_(head.heads.markov_head.markov_w1.weight, std=0.02)
    read = [-1 if layer == count - 1 else layer for layer in layers]  # the drafter has the last one behind its norm
    documents = Documents(args.features, plan.tokens, (-1, *read))
    training = Training(BlockLoss(head.float(), target, kept, plan.anchors), documents, plan, args.output)
    spec = "dspark" if args.kind == "dspark" else "dflash"
    train_as_told(training, args, spec, lambda loss, folder: save_block(loss.head, folder, kept))
