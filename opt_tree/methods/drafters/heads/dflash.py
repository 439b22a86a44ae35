"""DFlash: a diffusion model of a block of tokens drafts every layer of a tree in one forward (arXiv:2602.06036).

Owns how a DFlash model of `transformers` is driven: it reads hidden states of several of the target's layers, keeps
their keys and values, and fills in a block of masked tokens behind the root. `generate(speculation_type="dflash")`
drafts a chain of the best of each; here each place of the block is the law of a depth, and the tree is over these.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DFlashCache

from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.heads.eagle import LAST
from opt_tree.methods.drafters.heads.families import refuse_others
from opt_tree.methods.drafters.heads.one_pass import OnePass
from opt_tree.methods.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.capabilities import size_of
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import check_finite, load_config, load_model, read_config, refused
from opt_tree.models.positions import positions_of
from opt_tree.sampling import Sampling
from opt_tree.step import Outcome
from opt_tree.target import Output

_NUMBERS = ("block_size", "mask_token_id", "target_layer_ids", "hidden_size")


class DFlashDrafter(OnePass):
    """Drafts `block_size - 1` layers with one forward of a DFlash model over the block [root, mask, mask, ...].

    Its cache holds what it made of the target's hidden states, never the block. Embeddings and output layer are the
    target's. Raises ValueError for a model that is not one, or not for this target.
    """

    alone = "a DFlash model keeps a cache of its own, for one sequence"

    def __init__(self, model: Any, target: CausalLM) -> None:
        config, count = model.config, _check(model.config, target)
        super().__init__(target)
        self.model, self.block = model, int(config.block_size)
        self.rows = self.block
        # As transformers counts them: behind the last layer comes the norm.
        self._layers = [LAST if layer == count - 1 else layer for layer in config.target_layer_ids]
        self.features = tuple(dict.fromkeys(self._layers))
        self.max_context = min(target.max_context, positions_of(config) - self.block)
        self._begin(self._nothing())

    def _nothing(self) -> Float[Tensor, "0 wide"]:
        width = len(self._layers) * self.target.hidden
        return torch.zeros(0, width, dtype=self.model.dtype, device=self.model.device)

    def _begin(self, waiting: Float[Tensor, "tokens wide"]) -> None:
        self._waiting = waiting
        self._cache = DFlashCache(config=self.model.config)
        self._cache.activate_past_recording()

    def _inputs(self, features: Mapping[int, Float[Tensor, "tokens hidden"]]) -> Float[Tensor, "tokens wide"]:
        states = [features[layer].to(self.model.device, self.model.dtype) for layer in self._layers]
        return torch.cat(states, -1)

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Sampling) -> None:
        Drafter.begin(self, prompt, kept, prefill, sampling)  # the last feature alone is read by others
        self._begin(self._nothing() if prefill is None else self._inputs(prefill.features))

    def laws(self, context: list[int]) -> Float[Tensor, "depths vocab"]:
        return self.logits_of(self.states(context)[1:])

    def states(self, context: list[int]) -> Float[Tensor, "block hidden"]:
        """Run the states that came since the last forward, and the block behind them; return what the block became."""
        count = len(self._waiting)
        masks = [self.model.config.mask_token_id] * (self.block - 1)
        root = torch.tensor([[context[-1], *masks]], device=self.target.device)
        embedding: Any = self.target.model.get_input_embeddings()
        # DFlash models were trained without the norm that a target's embedding may have behind it.
        noise = nn.Embedding.forward(embedding, root) if hasattr(embedding, "embed_norm") else embedding(root)
        first = len(context) - 1 - count
        self._cache.set_previous_accepted_tokens(count)
        states = self.model(
            noise_embeds=noise.to(self.model.device, self.model.dtype),
            context_hidden_states=self._waiting[None],
            position_ids=torch.arange(first, first + count + self.block, device=self.model.device)[None],
            past_key_values=self._cache,
        ).last_hidden_state
        self._cache.crop(-self.block)
        self._waiting = self._nothing()
        return states[0]

    def accept(self, outcome: Outcome) -> None:
        self._waiting = torch.cat([self._waiting, self._inputs(outcome.features)])

    def describe(self) -> str:
        return f"DFlash model {self.name}: {size_of(self.model)}, blocks of {self.block}"


def _check(config: Any, target: CausalLM) -> int:
    """Return how many layers the target has; ValueError for a model that is not one of its."""
    count = int(target.model.config.get_text_config().num_hidden_layers)
    if missing := [name for name in _NUMBERS if getattr(config, name, None) is None]:
        raise ValueError(f"no DFlash model: its config has no {', '.join(missing)}")
    if config.hidden_size != target.hidden:
        raise ValueError(
            f"wrong DFlash model for this target: it is {config.hidden_size} wide, {target.name} {target.hidden}"
        )
    if bad := [layer for layer in config.target_layer_ids if not 0 <= layer < count]:
        raise ValueError(f"wrong DFlash model for this target: it reads layer {bad[0]}, {target.name} has {count}")
    if not 0 <= config.mask_token_id < target.vocab:
        raise ValueError(
            f"wrong DFlash model for this target: its mask is token {config.mask_token_id} of {target.vocab}"
        )
    if config.block_size < 2:
        raise ValueError(f"a DFlash model with blocks of {config.block_size} drafts nothing")
    return count


@register("dflash", about="a DFlash model of transformers, one pass a block", paper="2602.06036", part="dflash")
def load_dflash(path: str, target: AnyLM, options: DrafterOptions) -> DFlashDrafter:
    """Load a DFlash model as transformers does, in the target's dtype and on its device. Raises CheckpointError."""
    target = feature_target(target)
    refuse_others(path, read_config(path, "a DFlash model"))
    with refused(f"cannot use {path}"):
        # Before its weights are made: a folder of something else may be large.
        _check(load_config(path), target)
        model = load_model(path, target.dtype, str(target.device))
        check_finite(path, dict(model.named_parameters()))
        return DFlashDrafter(model.eval().requires_grad_(False), target)
