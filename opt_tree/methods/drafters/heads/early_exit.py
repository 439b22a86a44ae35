"""Early exit (EESD, arXiv:2406.03853): the target's first layers and one trained layer draft for the whole target.

Owns the exit layer (`ExitLayer`), its files, and the drafter that runs it on the rows of the target's lower half, which
stay in the target's cache: what was drafted is not run there again when the target scores the tree
(`opt_tree.models.split_target`).
"""

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from opt_tree.backend import cache_argument
from opt_tree.children import LogProbs
from opt_tree.drafter import Drafter
from opt_tree.errors import counted
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.capabilities import size_of, unwrapped
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, load_named, load_tensors, read_own_config, refused
from opt_tree.models.output_scaling import scaling_of
from opt_tree.models.quantised_layers import follow, plain_copy
from opt_tree.models.split_target import SplitTarget, check_cut
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Forward, Output, Work, shared

KIND = "opt_tree early exit"
"""What `config.json` beside an exit layer says that it is."""


class ExitLayer(nn.Module):
    """One more layer of the target's own kind behind its first `depth` layers, then the target's norm and output layer.

    Its only weights of its own are the layer's. By reports of the paper its exit has a norm and an output layer of its
    own, too, which begin as the target's. A causal LM in shape, whose inputs are the hidden states behind the lower
    half, so that `CausalLM` can run it on a cache of its own.
    """

    def __init__(self, model: Any, depth: int) -> None:
        super().__init__()
        model = unwrapped(model)
        check_cut(model, depth)
        body = model.base_model
        self.depth, self.scaling = depth, scaling_of(model)
        layer: Any = plain_copy(body.layers[-1])  # where training begins
        layer.self_attn.layer_idx = 0  # its place in a cache of its own, which has this one layer
        self.layer = layer
        self.config = copy.copy(body.config)
        self.config.num_hidden_layers = 1
        # In a list, so that the target's modules do not become submodules (they are not ours to move or to save).
        self._target = [model]

    def hidden(
        self,
        features: Float[Tensor, "batch rows hidden"],
        position_ids: Int[Tensor, "batch rows"],
        attention_mask: Tensor | None = None,
        cache: object | None = None,
    ) -> Float[Tensor, "batch rows hidden"]:
        """Return the exit's hidden states, behind the target's norm."""
        body = self._target[0].base_model
        out = self.layer(
            features,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{cache_argument(type(self.layer)): cache},
            use_cache=cache is not None,
            position_embeddings=body.rotary_emb(features, position_ids),
        )
        return body.norm(out[0] if isinstance(out, tuple) else out)

    def forward(
        self,
        input_ids: Int[Tensor, "batch rows"],
        features: Float[Tensor, "batch rows hidden"],
        use_cache: bool = True,
        cache: object | None = None,
        **attention: Any,
    ) -> SimpleNamespace:
        """`input_ids` are not read: the features stand for them. `attention`: positions and mask."""
        hidden = self.hidden(features, cache=cache, **attention)
        return SimpleNamespace(logits=self.scaling(self.get_output_embeddings()(hidden)))

    @property
    def base_model(self) -> nn.Module:
        return self.layer

    def get_input_embeddings(self) -> nn.Module:
        return self._target[0].get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self._target[0].get_output_embeddings()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take weights; ValueError names every missing, unexpected and misshapen tensor."""
        load_named(self.layer, tensors, "it is no exit layer of this target")


class EarlyExit(Drafter):
    """Drafts with the target's lower half and an exit layer.

    A drafted token is run as the target itself would run it, so accepted rows of both caches stay as they are. Only an
    accepted leaf is new to the exit layer, which gets its hidden state from the target's own forward.
    """

    alone = "an early exit drafts in the target's own cache, which has room for one sequence"

    def __init__(self, layer: ExitLayer, target: CausalLM) -> None:
        self.split = SplitTarget(target, layer.depth)
        self.lm = CausalLM(layer, probe=False)
        self._below = layer.depth - 1
        """The layer of the target whose states go in."""
        self.models, self.features = (self.lm,), (self._below,)
        self.max_context = target.max_context
        self._ready: Tensor = torch.zeros(0)
        """Hidden states behind the lower half of committed tokens that the exit layer has not run."""
        self._asked = False
        """Whether this step's root was drafted."""
        self._context: list[int] = []
        """The text under way, which the loop goes on writing."""

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        super().begin(prompt, kept, prefill, sampling)
        self._asked, self._context = False, prompt
        nothing = torch.zeros(0, self.lm.hidden, dtype=self.lm.dtype, device=self.lm.device)
        new = nothing if prefill is None else prefill.features[self._below].clone()
        if kept:
            rows = min(self.lm.length, kept)
            self.lm.cut(rows)
            self._ready = torch.cat([self._ready[: kept - rows], new])
        else:
            self.lm.reset()
            self._ready = new

    def keeps(self, prompt: list[int]) -> int:
        return min(shared(self._context, prompt), self.lm.length + len(self._ready))

    def root(self, context: list[int]) -> Forward:
        features = torch.cat([self._ready, self.split.begin(context[-1])])
        self._ready, self._asked = self._ready[:0], True
        return self.lm.text(context[self.lm.length :], features)

    def expand(self, frontier: Frontier) -> Forward:
        positions = self.lm.length - 1 + frontier.depths
        seen = np.pad(frontier.visible, ((0, 0), (1, 0)), constant_values=True)  # the root is a drafted row there
        features = self.split.extend(frontier.tokens, positions, seen)
        return Forward(self.lm, frontier.tokens, positions, frontier.visible, features)

    def read(self, output: Output) -> LogProbs:
        return LogProbs.of(output.logits, scale=self.scale)

    def accept(self, outcome: Outcome) -> None:
        rows = outcome.tree.draft_rows[outcome.path]
        known = rows >= 0 if self._asked else rows < -1
        self.lm.commit((rows[known][1:] - 1).tolist())
        self._ready = torch.cat([self._ready, outcome.features[self._below][int(known.sum()) :]])
        self._asked = False

    @property
    def work(self) -> Work:
        """Each forward of the exit layer together with the lower half's before it."""
        own, lower = self.lm.work, self.split.work
        return Work(own.forwards, own.tokens, own.seconds + lower.seconds)

    def describe(self) -> str:
        own = size_of(self.lm.model)
        return f"early exit {self.name}: {counted(self.split.depth, 'layer')} of the target and one of {own}, eager"

    @property
    def settings(self) -> dict[str, Any]:
        return {"exit_after": self.split.depth}


@register(
    "exit", about="the target's first layers and a trained one, in the target's cache", paper="2406.03853", part="exit"
)
def load_early_exit(path: str, target: AnyLM, options: DrafterOptions) -> EarlyExit:
    """Load an exit layer: `config.json` (which says behind how many layers it belongs) and `model.safetensors`.

    Weights come to the target's dtype and device. Raises CheckpointError for what is no exit layer or another target's.
    """
    target, config = feature_target(target), read_own_config(path, KIND, "is no early exit of this library")
    text = target.model.config.get_text_config()
    wrong = [
        f"{name} is {getattr(text, name, None)}, it wants {wanted}"
        for name, wanted in config["target"].items()
        if getattr(text, name, None) != wanted
    ]
    if wrong:
        raise CheckpointError(f"{path} is the exit of another target than {target.name}: {'; '.join(wrong)}")
    with refused(f"cannot use {path}"):
        layer = ExitLayer(target.model, config["depth"])
        layer.load(load_tensors(path))
        layer.to(target.device, target.dtype).eval().requires_grad_(False)
        follow(layer, layer.get_output_embeddings())
        return EarlyExit(layer, target)
