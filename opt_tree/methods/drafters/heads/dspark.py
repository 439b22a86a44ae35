"""DSpark: a DFlash block gives every layer in one forward, a Markov head lets each law know its parent (2607.05147).

Owns the heads on the block's states, the drafter, and their files, which are DeepSpec's. Law of depth k below token a:
log p(v | a) = U_k(v) + W2[v] W1[a] + const (eq. 4 and 5). So each node has a law of its own, and no layer below the
first needs a forward. The paper's scheduler, and the temperatures that calibrate its confidence place by place, are not
here; a `calibration.json` beside the model sharpens the laws, as it does for every drafter.
"""

import time
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from opt_tree.answers import LogProbs
from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.draft_vocabulary import take_vocabulary
from opt_tree.methods.drafters.heads.dflash import DFlashDrafter
from opt_tree.methods.drafters.heads.families import DSPARK, refuse_others
from opt_tree.methods.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.capabilities import size_of
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, load_named, load_tensors, read_config, refused
from opt_tree.models.output_scaling import scaling_of
from opt_tree.models.quantised_layers import home_of, rows_of
from opt_tree.models.tensor_parallel import replicated
from opt_tree.pool import Frontier
from opt_tree.sampling import Sampling
from opt_tree.step import Outcome
from opt_tree.target import Output, Work
from opt_tree.tree import send

KINDS = ("vanilla", "gated")
"""Markov heads. The paper's RNN head remembers the path above the parent, and is not here."""
_BACKBONE = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
"""What transformers calls the parts of a DFlash block that DeepSpec calls otherwise."""
_TARGETS = ("embed_tokens.weight", "lm_head.weight")
"""Frozen copies of the target's layers, which published checkpoints hold."""


class MarkovHead(nn.Module):
    """What the parent's token adds to the logits: W2 W1[a]; gated, W2 (sigmoid(Wg [h; W1[a]]) * W1[a]).

    State-dict names are the published ones: `markov_w1.weight` [vocab, rank], `markov_w2.weight` [columns, rank] and
    `gate_proj.weight`, `gate_proj.bias`.
    """

    def __init__(self, vocab: int, columns: int, rank: int, gated: int = 0) -> None:
        """`gated`: the width of the states that a gate reads; 0: no gate."""
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, columns, bias=False)
        self.gate_proj = nn.Linear(gated + rank, rank) if gated else None

    def latent(
        self, states: Float[Tensor, "*rows hidden"], tokens: Int[Tensor, "*rows"]
    ) -> Float[Tensor, "*rows rank"]:
        """Return what W2 reads of parents and the states at their children's depth."""
        parents = self.markov_w1(tokens)
        if self.gate_proj is None:
            return parents
        return torch.sigmoid(self.gate_proj(torch.cat([states, parents], -1))) * parents


class ConfidenceHead(nn.Module):
    """sigmoid(w [h_k; W1[a]] + b): how likely a child drawn below a is accepted, if a was (eq. 7)."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)

    def forward(
        self, states: Float[Tensor, "*rows hidden"], parents: Float[Tensor, "*rows rank"]
    ) -> Float[Tensor, "*rows"]:
        """Return logits; `rank` is 0 where it reads the states alone."""
        return self.proj(torch.cat([states, parents], -1)).squeeze(-1)


class DSparkHeads(nn.Module):
    """What stands on the states of a block: the Markov head, and the confidence head where there is one."""

    def __init__(self, config: dict[str, Any], columns: int) -> None:
        super().__init__()
        hidden, rank = int(config["hidden_size"]), int(config["markov_rank"])
        gated = hidden if config.get("markov_head_type", KINDS[0]) == "gated" else 0
        self.markov_head = MarkovHead(int(config["vocab_size"]), columns, rank, gated)
        self.reads_parent = bool(config.get("confidence_head_with_markov", True))
        wanted = config.get("enable_confidence_head", False)
        self.confidence_head = ConfidenceHead(hidden, rank if self.reads_parent else 0) if wanted else None

    def confidence(
        self, states: Float[Tensor, "*rows hidden"], tokens: Int[Tensor, "*rows"]
    ) -> Float[Tensor, "*rows"] | None:
        """Return the logits of the confidence below these parents; None: there is no such head."""
        if self.confidence_head is None:
            return None
        parents = self.markov_head.markov_w1(tokens)
        return self.confidence_head(states, parents if self.reads_parent else parents[..., :0])


class DSparkDrafter(Drafter):
    """Drafts `block_size` layers with one forward over the block [root, mask, ...], whose first place speaks first.

    Below a parent whose confidence is under `least` nothing is drafted; it looks at the parent, never at what was drawn
    below it, so children may be drawn. 0, as the paper's tables are made: all is drafted.
    """

    alone = DFlashDrafter.alone

    def __init__(
        self,
        block: DFlashDrafter,
        heads: DSparkHeads,
        tokens: Int[Tensor, " columns"] | None = None,
        least: float = 0.0,
    ) -> None:
        """`tokens`: the target's ids of the columns; None: a column a token."""
        target = block.target
        if tokens is not None and (tokens.diff() < 0).any():
            raise ValueError("the tokens of its columns are not in rising order")
        self.block, self.heads, self.least = block, heads, least
        self.tokens = None if tokens is None else tokens.cpu()  # children are named where they are read
        self.target, self.features, self.max_context = target, block.features, block.max_context
        output: Any = replicated(target.model.get_output_embeddings())
        self._output: Any = output if tokens is None else rows_of(output, tokens)
        self._device, self._dtype, self._scaling = *home_of(self._output), scaling_of(target.model)
        self._states = self._unary = torch.zeros(0, 0, device=self._device, dtype=self._dtype)
        self._done = Work()

    def root(self, context: list[int]) -> LogProbs:
        begin = time.perf_counter()
        self._states = self.block.states(context)
        self._unary = self._scaling(self._output(self._states.to(self._device, self._dtype)))
        answer = self._below(0, send(np.array(context[-1:]), self._device))
        self._done += Work(1, len(self._states), time.perf_counter() - begin)
        return answer

    def expand(self, frontier: Frontier) -> LogProbs:
        """Answer for parents of one depth, each with its own law; nothing is known beyond the block."""
        depth = int(frontier.depths[0])
        if depth >= len(self._states):
            nothing = self._unary.new_full((1, self._unary.shape[1]), -torch.inf)
            return LogProbs(nothing.expand(len(frontier.tokens), -1), self.tokens)
        return self._below(depth, send(frontier.tokens, self._device))

    def _below(self, depth: int, tokens: Int[Tensor, " rows"]) -> LogProbs:
        """Return what is said of children at place `depth` of the block, below these parents."""
        states = self._states[depth].expand(len(tokens), -1)
        bias = self.heads.markov_head.markov_w2(self.heads.markov_head.latent(states, tokens))
        scores = self._unary[depth] + bias.to(self._unary.dtype)
        if self.least and (confidence := self.heads.confidence(states, tokens)) is not None:
            scores = scores.masked_fill((confidence.sigmoid() < self.least)[:, None], -torch.inf)
        return LogProbs.of(scores, self.tokens, self.scale)

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Sampling) -> None:
        super().begin(prompt, kept, prefill, sampling)
        self.block.begin(prompt, kept, prefill, sampling)

    def accept(self, outcome: Outcome) -> None:
        self.block.accept(outcome)

    @property
    def work(self) -> Work:
        return self._done

    def describe(self) -> str:
        columns = "" if self.tokens is None else f", {len(self.tokens)} tokens of {self.target.vocab}"
        kind = "gated " if self.heads.markov_head.gate_proj is not None else ""
        rank = self.heads.markov_head.markov_w1.embedding_dim
        return (
            f"DSpark model {self.name}: {size_of(self.block.model)} and a {kind}Markov head of rank {rank}, blocks of "
            f"{self.block.block}{columns}"
        )


def backbone(config: dict[str, Any]) -> MuseGlimmerAssistantModel:
    """Return the untrained DFlash block of a published config, as transformers has it."""
    names: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling")
    names += ("max_position_embeddings", "hidden_act", "block_size", "mask_token_id")
    names += ("target_layer_ids", "layer_types", "sliding_window")
    own = {name: config[name] for name in names if config.get(name) is not None}
    own.setdefault("layer_types", ["full_attention"] * own["num_hidden_layers"])
    return MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**own))


def published_names(block: nn.Module, heads: DSparkHeads) -> dict[str, Tensor]:
    """Return the tensors of a model under DeepSpec's names."""
    tensors = {**block.state_dict(), **heads.state_dict()}
    for theirs, ours in _BACKBONE.items():
        tensors = {n.replace(ours, theirs, 1) if n.startswith(ours) else n: t for n, t in tensors.items()}
    return tensors


def _read_config(path: str) -> dict[str, Any]:
    """Read a DSpark config. CheckpointError says what is missing, or not here."""
    config = read_config(path, "a DSpark model")
    refuse_others(path, config, DSPARK)
    if "transformer_layer_config" in config:
        raise CheckpointError(f"{path} is a DSpark model in speculators' layout; DeepSpec's is read here")
    numbers = ("hidden_size", "vocab_size", "num_hidden_layers", "block_size", "mask_token_id", "markov_rank")
    if missing := [name for name in numbers if not isinstance(config.get(name), int)]:
        raise CheckpointError(f"{path}/config.json is not that of a DSpark model: it names no {', '.join(missing)}")
    if (kind := config.get("markov_head_type", KINDS[0])) not in KINDS or config["markov_rank"] < 1:
        raise CheckpointError(f"{path} has a Markov head {kind} of rank {config['markov_rank']}: {KINDS} are read here")
    if not config.get("target_layer_ids"):
        raise CheckpointError(f"{path}/config.json does not say which layers of the target it reads (target_layer_ids)")
    if config.get("attention_bias"):
        raise CheckpointError(f"{path} has biases in its attention, which DFlash blocks of transformers have not")
    return config


@register(
    "dspark",
    about="a DFlash block whose laws know the parent's token, one pass a block (DSpark)",
    paper="2607.05147",
    part="dspark",
)
def load_dspark(path: str, target: AnyLM, options: DrafterOptions) -> DSparkDrafter:
    """Load a DSpark model as DeepSpec writes it, in the target's dtype and on its device. Raises CheckpointError.

    The embedding and the output layer are the target's. `d2t` and `t2d` may be there: then the columns of `markov_w2`
    are these tokens.
    """
    target, config = feature_target(target), _read_config(path)
    with refused(f"cannot use {path}"):
        if config["vocab_size"] != target.vocab:
            raise ValueError(f"it is for {config['vocab_size']} tokens, {target.name} has {target.vocab}")
        tensors = {name: tensor for name, tensor in load_tensors(path).items() if name not in _TARGETS}
        tokens = take_vocabulary(tensors, target.vocab)
        heads, block = DSparkHeads(config, target.vocab if tokens is None else len(tokens)), backbone(config)
        own = {n: tensors.pop(n) for n in list(tensors) if n.startswith(("markov_head.", "confidence_head."))}
        for theirs, ours in _BACKBONE.items():
            tensors = {n.replace(theirs, ours, 1) if n.startswith(theirs) else n: t for n, t in tensors.items()}
        load_named(block, tensors, "it is not the block of this config")
        load_named(heads, own, "these are not the heads of this config")
        models: list[Any] = [block, heads]
        both = [module.to(target.device, target.dtype).eval().requires_grad_(False) for module in models]
        drafter = DFlashDrafter(both[0], target)
        return DSparkDrafter(drafter, both[1], tokens, float(config.get("confidence_threshold", 0.0)))
