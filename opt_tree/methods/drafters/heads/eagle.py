"""EAGLE-1/2: a one-layer head that drafts in the target's feature space (arXiv:2401.15077, arXiv:2406.16858).

Owns the drafter around a head (`eagle_head.py`), and how a published checkpoint becomes one.
"""

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaConfig

from opt_tree.draft_model import OfModel
from opt_tree.drafter import Asked
from opt_tree.errors import one_line, require
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.draft_vocabulary import take_vocabulary, trimmed_further
from opt_tree.methods.drafters.heads.eagle_head import EagleHead, HeadedEagle
from opt_tree.methods.drafters.heads.families import refuse_others
from opt_tree.methods.drafters.heads.published_files import WINDOWS, read_head, refuse_windows
from opt_tree.models.capabilities import cast_weights
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import CheckpointError, read_config, refused
from opt_tree.models.output_scaling import scaling_of
from opt_tree.models.quantised_layers import follow, home_of, rows_of
from opt_tree.models.tensor_parallel import replicated, whole
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Forward, Output, shared
from opt_tree.tree import send

LAST = -1
"""The layer that the head reads: the target's final hidden state, behind its last norm."""


class EagleDrafter(OfModel):
    """Drafts with an EAGLE-1/2 head.

    Committed pairs carry the target's own features. Rows of tree nodes were computed from estimated features. So they
    are dropped after the step, and the accepted tokens run again with the real ones, as the published method does. The
    extra rows ride in the forward that is needed anyway for the target's own token.
    """

    features: tuple[int, ...] = (LAST,)
    beyond: bool = False
    """Whether a warning has said that the context is longer than what it was trained on."""

    def __init__(
        self,
        head: EagleHead,
        target: CausalLM,
        tokens: Int[Tensor, " columns"] | None = None,
    ) -> None:
        """`tokens`: the draft vocabulary; None: all tokens of the head."""
        require(EagleHead, head=head)
        require(CausalLM, target=target)
        if head.config.hidden_size != target.hidden:
            raise ValueError(
                f"wrong head for this target: the head is {head.config.hidden_size} wide, {target.name} {target.hidden}"
            )
        output = replicated(target.model.get_output_embeddings())
        if tokens is not None:
            output = rows_of(output, tokens)
        self._begin(HeadedEagle(head, output, scaling_of(target.model)), target, tokens)

    def _begin(self, model: HeadedEagle, target: CausalLM, tokens: Int[Tensor, " columns"] | None) -> None:
        config = model.config
        if config.vocab_size > target.vocab:
            raise ValueError(
                f"wrong head for this target: the head has {config.vocab_size} tokens, {target.name} {target.vocab}"
            )
        follow(model.base_model, model.get_output_embeddings())
        lm = CausalLM(model, probe=False)
        self.take_model(lm, config.vocab_size, target.vocab, tokens)
        self.lm.watch((LAST,))
        self.trained = self.lm.max_context
        """How many tokens of context it was trained on, by its config; behind them it drafts on."""
        if not lm.context_note and not ends_at_positions(model.config):
            self.lm.max_context = target.max_context
        self.max_context = min(self.lm.max_context, target.max_context)
        self._ready: Tensor = torch.zeros(0)
        """The head's inputs for tokens whose pair is not in its cache yet, from the target's features."""
        self._first = 1
        """The token that the first pair has the embedding of."""
        self._context: list[int] = []
        """The text under way, which the loop goes on writing."""
        self._drafted: Tensor = torch.zeros(0)
        """The head's own features by draft row: 0 the root, k the k-th node expanded; none: the root is asked about."""

    def inputs(self, features: Mapping[int, Float[Tensor, "tokens hidden"]]) -> Float[Tensor, "tokens hidden"]:
        """Return what the head reads of the target's features."""
        return features[LAST].to(self.lm.device, self.lm.dtype)

    def best(self, estimates: Float[Tensor, "*rows hidden"]) -> Int[Tensor, "*rows"]:
        """Return the token that the head drafts first behind each estimate of a feature."""
        output: Any = self.lm.model.get_output_embeddings()
        head: Any = self.lm.model.base_model
        found = output(head.read(estimates)).argmax(-1)  # no scaling changes which is the largest
        return found if self.tokens is None else self.tokens[found]

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        super().begin(prompt, kept, prefill, sampling)
        self._context = prompt
        if kept:
            assert prefill is not None
            rows = min(self.lm.length, kept)
            self.lm.cut(rows)
            self._ready = torch.cat([self._ready[: kept - rows], self.inputs(prefill.features)])
            return
        self.lm.reset()
        if prefill is None:
            # A one-token prompt has no earlier feature: its pair starts from zeros.
            self._ready = torch.zeros(1, self.lm.hidden, dtype=self.lm.dtype, device=self.lm.device)
        else:
            self._ready = self.inputs(prefill.features)
        # With a feature for each token but the last, the pairs begin at the second token; without any, at the first.
        self._first = 0 if prefill is None else 1

    def keeps(self, prompt: list[int]) -> int:
        """See `Drafter.keeps`. Of the last common token the feature is needed once more, beside another next token."""
        pairs = self.lm.length + len(self._ready) if self._first else 0
        return max(min(shared(self._context, prompt) - 1, pairs), 0)

    def root(self, context: list[int]) -> Forward:
        """Ask for the pairs that the last step completed, with the target's features."""
        warn_beyond(self, len(context))
        tokens, features = self.take_pairs(context)
        self._drafted = self._drafted[:0]
        return self.lm.text(tokens, features)

    def take_pairs(self, context: list[int]) -> tuple[list[int], Float[Tensor, "pairs hidden"]]:
        """Return the pairs that are not in the head's cache yet, tokens and features; whoever takes them runs them."""
        features, self._ready = self._ready, self._ready[:0]
        return self.known(context[self._first + self.lm.length :]), features

    def expand(self, frontier: Frontier) -> Asked:
        above = self._drafted.index_select(0, send(frontier.parents, self._drafted.device))
        return Forward(self.lm, frontier.tokens, frontier.depths + (self.lm.length - 1), frontier.visible, above)

    def read(self, output: Output) -> Asked:
        states = output.features[LAST]
        # Copies: they outlive the next forward.
        self._drafted = torch.cat([self._drafted, states]) if len(self._drafted) else states[-1:].clone()
        return self.answer(output)

    def accept(self, outcome: Outcome) -> None:
        self.lm.commit([])
        new = self.inputs(outcome.features)
        self._ready = torch.cat([self._ready, new]) if self._ready.shape[0] else new

    def describe(self) -> str:
        return f"EAGLE head {self.name}: {self._size()}"


def ends_at_positions(config: Any) -> bool:
    """Whether a head cannot draft behind its `max_position_embeddings`.

    That is what it was trained on (2,048 in most files), not where rotary positions end. Where factors change with the
    length of the text ("dynamic", LongRoPE), rows behind it would be rotated by others than those before it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type") in ("dynamic", "longrope")


def warn_beyond(drafter: Any, length: int) -> None:
    """Warn once that a context of this length is longer than what a head was `trained` on."""
    if drafter.trained < length < drafter.max_context and not drafter.beyond:
        drafter.beyond = True
        warnings.warn(
            f"{drafter.describe()} was trained on {drafter.trained} tokens of context (max_position_embeddings): "
            "behind them it may draft worse",
            stacklevel=3,
        )


def load_eagle(path: str, target: CausalLM, tensors: dict[str, Tensor] | None = None) -> EagleDrafter:
    """Load an EAGLE-1/2 head as published: `config.json` and `model.safetensors`, its parts or `pytorch_model.bin`.

    Weights come to the target's dtype and device. `embed_tokens` may be absent: then the target's is used. `d2t` and
    `t2d` may be there, or `draft_vocabulary.safetensors` beside the weights: then it drafts these tokens only, by the
    target's own output rows. Missing, unexpected and misshapen tensors are all named. `tensors`: those of the
    checkpoint, if they are read already.
    """
    require(CausalLM, target=target)
    tensors = read_head(path) if tensors is None else tensors
    if any(name.startswith("midlayer.") for name in tensors):
        raise CheckpointError(f"{path} is an EAGLE-3 head, not one of EAGLE-1 or EAGLE-2")
    config = head_config(path)
    with refused(f"cannot use {path}"):
        tokens = trimmed_further(path, take_vocabulary(tensors, config.vocab_size), config.vocab_size)
        lend_embeddings(tensors, target, config.vocab_size)
        head = EagleHead(config)
        head.load_published(tensors, "it")
        device, _ = home_of(target.model.get_output_embeddings())
        cast_weights(head, device, target.dtype).eval().requires_grad_(False)
        return EagleDrafter(head, target, tokens)


def lend_embeddings(tensors: dict[str, Tensor], target: CausalLM, vocab: int) -> None:
    """Put the target's embeddings where a checkpoint has none."""
    if "embed_tokens.weight" not in tensors:
        embeddings = whole(cast(Tensor, target.model.get_input_embeddings().weight))
        tensors["embed_tokens.weight"] = embeddings.detach()[:vocab]


def head_config(path: str) -> LlamaConfig:
    """Read a head's config.json. Heads name no model type of their own: all are Llama layers."""
    raw = read_config(path, "an EAGLE head")
    refuse_others(path, raw)
    try:
        refuse_windows(raw)
        own = {key: value for key, value in raw.items() if key not in ("architectures", "model_type", *WINDOWS)}
        if "num_hidden_layers" not in own:
            raise ValueError("it names no num_hidden_layers")
        return LlamaConfig(**own)
    except Exception as error:  # strict configs raise errors of their own kind
        raise CheckpointError(f"{path}/config.json is not the config of an EAGLE head: {one_line(error)}") from error
