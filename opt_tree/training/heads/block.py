"""A block drafter in training: a DSpark, DFlash or JetSpec model.

Anchors are drawn from the answers anew for each batch. A block behind an anchor sees the target's hidden states before
it and its own places, never another block's. Embedding and output layer are the target's and stay as they are. Each
place has a mean of its own here; a draft vocabulary is judged as if the target had no other tokens. By `--kind`:

- dspark (arXiv:2607.05147, section 3.3): with a Markov head and a confidence head. Place k is weighed by
  exp(-(k - 1) / 4), as in the released configuration.
- dflash (arXiv:2602.06036, section 4.2): the anchor's row says nothing, the others fill in what follows it. The loss is
  the cross-entropy of these tokens, weighed as DSpark's (eq. 4): the paper's choice for blocks of 8 (appendix A.1).
- jetspec (arXiv:2606.18394, eq. 8 and 9): no row sees a later one; the loss is the KL divergence of the draft from the
  target's law at temperature 1, and all places count alike, as in the paper's main results.

The losses are in `block_loss.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from opt_tree.methods.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.methods.drafters.heads.block_files import read_block_file, spread
from opt_tree.methods.drafters.heads.block_laws import DSparkHeads
from opt_tree.methods.drafters.heads.block_network import block_network
from opt_tree.models.output_scaling import scaling_of
from opt_tree.training.files import write_checkpoint
from opt_tree.training.heads.batches import Documents, most_frequent
from opt_tree.training.heads.block_loss import BlockLoss
from opt_tree.training.heads.features import COUNTS
from opt_tree.training.plans import BlockPlan, DSparkPlan, JetSpecPlan

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


class BlockJudge(BlockLoss):
    """A block drafter with what judges it, to be saved. `self.tokens`: its draft vocabulary."""

    @staticmethod
    def layers_of(plan: BlockPlan, target: PreTrainedModel) -> tuple[int, ...]:
        last = target.config.get_text_config().num_hidden_layers - 1  # the drafter has it behind its norm
        return (-1, *(-1 if layer == last else layer for layer in _layers(plan, target)))

    @classmethod
    def new(cls, plan: BlockPlan, target: PreTrainedModel, documents: Documents) -> "BlockJudge":
        mask = target.config.pad_token_id if plan.mask is None else plan.mask
        if mask is None or not 0 <= mask < target.config.vocab_size:
            raise ValueError(f"--mask is a token of the target that no text has, got {mask}")
        tokens = most_frequent(np.load(documents.folder / COUNTS), plan.vocab, "target")
        head = BlockModel(new_config(target, plan, _layers(plan, target), mask), len(tokens))
        if head.heads.markov_head is not None:
            nn.init.normal_(head.heads.markov_head.markov_w1.weight, std=0.02)
        loss = cls(head.float(), target, tokens, plan.anchors)
        loss.tokens = tokens
        return loss

    def save(self, folder: Path) -> None:
        """Save in bf16 as z-lab and DeepSpec do, but for the target's layers; with the draft vocabulary, if any."""
        config = self.head.config
        vocab = config["vocab_size"]
        vocabulary = vocabulary_tensors(self.tokens, vocab) if len(self.tokens) < vocab else {}
        write_checkpoint(config, self.head.published() | dict(vocabulary), folder)


def _layers(plan: BlockPlan, target: PreTrainedModel) -> tuple[int, ...]:
    """Return the target's layers that a model reads."""
    return plan.layers or spread(target.config.get_text_config().num_hidden_layers, plan.depth)


def new_config(target: PreTrainedModel, plan: BlockPlan, layers: Sequence[int], mask: int) -> dict[str, Any]:
    """Return the config of a model for this target, under the published names."""
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
    if not isinstance(plan, DSparkPlan):
        own = reads | ({"causal_head": True} if isinstance(plan, JetSpecPlan) else {})
        return config | {"architectures": ["DFlashDraftModel"], "block_size": plan.block + 1, "dflash_config": own}
    return (
        config
        | reads
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": plan.block,
            "markov_rank": plan.rank,
            "markov_head_type": plan.markov,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    )
