"""Block drafters: one forward over a block of masked tokens drafts every layer of a tree (DFlash, arXiv:2602.06036).

Owns how a block is driven: DFlash, DFlash 2, JetSpec (arXiv:2606.18394), DSpark (arXiv:2607.05147), Domino. The block
reads hidden states of several of the target's layers, keeps their keys and values, and fills in masks behind the root.
Its laws are those of their depths, or know the parent or the path (`block_laws.py`); OPT-Tree grows the best tree over
either. The network is in `block_network.py`, how files become drafters in `block_loading.py`. DSpark's scheduler, and
the temperatures that calibrate its confidence place by place, are not here; a `calibration.json` beside the model
sharpens the laws, as it does for every drafter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.backend import cache_argument
from opt_tree.cache import KVCache, LayerShape, inference
from opt_tree.children import LogProbs
from opt_tree.drafter import Drafter
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.heads.block_laws import Below, BlockLaw, Place
from opt_tree.methods.drafters.heads.block_network import Masks, RawEmbedding, Scores, Sights, run_blocks, two_sided
from opt_tree.methods.drafters.heads.eagle import ends_at_positions, warn_beyond
from opt_tree.methods.drafters.heads.families import DFLASH
from opt_tree.methods.drafters.heads.layer_probe import Probed, States
from opt_tree.methods.drafters.heads.one_pass import OnePass
from opt_tree.models.capabilities import size_of
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.output_scaling import scaling_of
from opt_tree.models.positions import positions_of
from opt_tree.models.quantised_layers import rows_of
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Output
from opt_tree.tree import send


@dataclass
class Block:
    """A block drafter's network and what its file says of it."""

    model: Any
    """A `MuseGlimmerAssistantModel`, of `block_network`."""
    layers: tuple[int, ...]
    """The target's layers whose outputs it reads, in the order of `fc`'s columns; `LAST`: behind the target's norm."""
    first: int = 1
    """The row of the block that speaks of the first token."""
    law: BlockLaw | None = None
    """What the tokens above add to the scores of a depth; None: nothing."""
    tokens: Int[Tensor, " columns"] | None = None
    """The target's ids of the columns, in rising order; None: a column a token."""
    sights: Sights | None = None
    """What its rows see; None: as in transformers' layers."""
    embed: RawEmbedding | None = None
    """From tokens to the embeddings that its rows begin as; None: what the target makes of them."""
    scores: Scores | None = None
    """From its rows' states to the scores of the columns; None: the target's logits where these are its last states."""
    family: str = DFLASH


class BlockDrafter(OnePass):
    """Drafts `block_size - first` layers with one forward of a block [root, mask, mask, ...].

    Its cache holds what it made of the target's hidden states, never the block. Raises ValueError for a block that is
    not for this target.
    """

    alone = "a block drafter keeps a cache of its own, for one sequence"
    beyond: bool = False
    """Whether a warning has said that the context is longer than what it was trained on."""
    probed: tuple[Probed, ...] = ()
    """What a probe of each convention found that its file does not say."""

    def __init__(self, block: Block, target: CausalLM) -> None:
        config: Any = block.model.config
        super().__init__(target)
        self.block, self.model = block, block.model
        self.rows, self.features = int(config.block_size), tuple(dict.fromkeys(block.layers))
        self.tokens = None if block.tokens is None else block.tokens.cpu()
        sights = block.sights or two_sided(config.sliding_window)
        self.sights = {kind: sights[kind] for kind in sorted({*config.layer_types})}
        output: Any = target.model.get_output_embeddings()
        self._scores = block.scores or Scores(
            output if block.tokens is None else rows_of(output, block.tokens), scaling_of(target.model)
        )
        embedding: Any = target.model.get_input_embeddings()
        # DFlash models were trained without the norm that a target's embedding may have behind it.
        self._embed = block.embed or (RawEmbedding(embedding) if hasattr(embedding, "embed_norm") else embedding)
        self._masks = torch.full((self.rows - 1,), int(config.mask_token_id), device=target.device)
        self._states = self._unary = torch.zeros(0, 0)
        self.carried: Tensor = torch.zeros(0, 0)
        """What the nodes above some parents carry for a law that reads the path, by draft row."""
        attention, kept = block.model.layers[0].self_attn, (block.model.dtype, block.model.device)
        size = attention.num_key_value_heads, attention.head_dim, attention.head_dim
        self.cache = KVCache([LayerShape(*size, *kept)] * len(block.model.layers))
        """A row for each token that it has taken in."""
        self.trained = positions_of(config)
        if ends_at_positions(config):
            self.max_context = min(self.max_context, self.trained - self.rows)
        self._begin(None)
        _check(self, target)

    def _begin(self, prefill: Output | None) -> None:
        nothing = torch.zeros(0, len(self.block.layers) * self.target.hidden).to(self.model.device, self.model.dtype)
        self.waiting = nothing if prefill is None else self.inputs(prefill.features)
        """What the target said of the tokens that came since its last forward."""
        self.cache.reset()

    def inputs(self, features: Mapping[int, Float[Tensor, "*tokens hidden"]]) -> Float[Tensor, "*tokens wide"]:
        """Return what the block reads of the target's features."""
        return torch.cat([features[layer].to(self.model.device, self.model.dtype) for layer in self.block.layers], -1)

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        Drafter.begin(self, prompt, kept, prefill, sampling)  # the last feature alone is read by others
        self._begin(prefill)

    def embed(self, tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows hidden"]:
        """Return the embeddings that its rows begin as."""
        return self._embed(tokens).to(self.model.device, self.model.dtype)

    @inference
    def laws(self, root: Int[Tensor, " 1"], length: int) -> Float[Tensor, "depths columns"]:
        """Return what the block says of each depth, whatever the tokens above."""
        return self.scores(self.states(root, length), root)

    def scores(self, states: Float[Tensor, "block hidden"], root: Int[Tensor, " 1"]) -> Float[Tensor, "depths columns"]:
        """Return what the states of a block say of each depth; begin what a law of parents or paths reads."""
        first = self.block.first
        self._states, self._unary = states[first:], self._scores(states[first:])
        if self.block.law is not None:
            self._root, self.carried = root, self.block.law.start(states[:first], root)
        return self._unary

    def answer(self, scores: Float[Tensor, "depths columns"]) -> LogProbs:
        return super().answer(scores) if self.block.law is None else self._say(1, self._root, self.carried)

    def expand(self, frontier: Frontier) -> LogProbs:
        """Answer for parents of one depth."""
        if self.block.law is None:
            return super().expand(frontier)
        if self.block.law.width:
            carried = self.carried.index_select(0, send(frontier.parents, self.carried.device))
        else:
            carried = self.carried.expand(len(frontier.tokens), -1)
        return self._say(int(frontier.depths[0]) + 1, send(frontier.tokens, self.model.device), carried)

    @inference
    def _say(self, depth: int, parents: Int[Tensor, " parents"], carried: Float[Tensor, "parents width"]) -> LogProbs:
        """Return what is said of children at a depth; what they read of the path is kept by draft row."""
        below = self.below(depth, parents, carried)
        if below.carried.shape[1]:  # the root's takes the place of what is above it
            self.carried = below.carried if depth == 1 else torch.cat([self.carried, below.carried])
        return LogProbs.of(below.scores, self.tokens, self.scale)

    def below(self, depth: int, parents: Int[Tensor, " parents"], carried: Float[Tensor, "parents width"]) -> Below:
        """Return what a law of parents or paths says at a depth; nothing is known beyond the block."""
        assert self.block.law is not None
        if depth > len(self._states):
            return Below(self._unary.new_full((len(parents), self._unary.shape[1]), -torch.inf), carried)
        place = Place(depth, self._unary[depth - 1], self._states[depth - 1], self.embed)
        return self.block.law(place, parents, carried)

    def states(self, root: Int[Tensor, " 1"], length: int) -> Float[Tensor, "block hidden"]:
        """Run the states that came since the last forward, and the block behind `length` tokens; return the block's."""
        warn_beyond(self, length)
        anchor = length - 1
        places = torch.arange(anchor - len(self.waiting), anchor + self.rows, device=self.model.device)
        anchors, known = torch.full((1, 1), anchor, device=self.model.device), self.sights.items()
        masks = {kind: None if one.open else one.mask(anchors, self.rows, anchor) for kind, one in known}
        self.cache.open(len(places))
        states = self.fill_in(root, self.waiting, places, masks)
        self.took_in()
        return states

    def fill_in(
        self, root: Int[Tensor, " 1"], waiting: Float[Tensor, "tokens wide"], places: Int[Tensor, " both"], masks: Masks
    ) -> Float[Tensor, "block hidden"]:
        """Run the block behind rows that were waiting, over a cache that is open for both; return its states."""
        return self.model(
            noise_embeds=self.embed(torch.cat([root.to(self._masks.device), self._masks])[None]),
            context_hidden_states=waiting[None],
            position_ids=places[None],
            **{cache_argument(type(self.model)): self.cache},
            attention_mask=masks,
        ).last_hidden_state[0]

    def took_in(self) -> None:
        """Note that what was waiting is in the cache, and the block behind it is not to stay."""
        self.cache.truncate(self.cache.length)
        self.cache.open(len(self.waiting))
        self.cache.commit(list(range(len(self.waiting))))
        self.waiting = self.waiting[:0]

    def accept(self, outcome: Outcome) -> None:
        self.waiting = torch.cat([self.waiting, self.inputs(outcome.features)])

    def best(
        self, layers: tuple[int, ...], row: int, ids: Int[Tensor, "1 tokens"], states: States
    ) -> Int[Tensor, " tokens"]:
        """Return the token that it drafts first behind every second token of a text, by other conventions; else -1.

        `layers`: those whose outputs it reads. `row`: the one of the block that speaks of the first token.
        """
        device = self.model.device
        anchors = torch.arange(1, ids.shape[1], 2, device=device)[None]
        block = torch.full((*anchors.shape, self.rows), int(self.model.config.mask_token_id), device=device)
        block[..., 0] = ids.to(device).gather(1, anchors)
        context = torch.cat([states[layer].to(device, self.model.dtype) for layer in layers], -1)
        found = run_blocks(self.model, self.embed(block), context, anchors, self.sights)[0]
        best = self._scores(found[:, row])
        if (law := self.block.law) is not None:
            roots = block[0, :, :1]
            places = [Place(1, best[i], found[i, row], self.embed) for i in range(len(best))]
            above = [law.start(found[i, :row], roots[i]) for i in range(len(best))]
            best = torch.cat([law(place, roots[i], above[i]).scores for i, place in enumerate(places)])
        tokens = best.argmax(-1).cpu()
        all_rows = torch.full(ids.shape[1:], -1)
        all_rows[anchors[0].cpu()] = tokens if self.tokens is None else self.tokens[tokens]
        return all_rows

    def describe(self) -> str:
        law = "" if self.block.law is None else f" and {self.block.law}"
        columns = "" if self.tokens is None else f", {len(self.tokens)} tokens of {self.target.vocab}"
        found = "".join(f", {one}" for one in self.probed)
        kind, size = self.block.family, size_of(self.model)
        return f"{kind} model {self.name}: {size}{law}, blocks of {self.rows}{columns}{found}"


def _check(drafter: BlockDrafter, target: CausalLM) -> None:
    """Raise ValueError for a block that does not fit its target."""
    config, what = drafter.model.config, f"wrong {drafter.block.family} model for this target"
    embed, scores = drafter.block.embed, drafter.block.scores
    widths = {
        target.hidden if embed is None else embed.layer.embedding_dim,
        target.hidden if scores is None else scores.layer.in_features,
    }
    if widths != {config.hidden_size}:
        raise ValueError(f"{what}: it is {config.hidden_size} wide, {target.name} {target.hidden}")
    columns = drafter.model.encoder.fc.in_features
    if columns != len(drafter.block.layers) * target.hidden:
        raise ValueError(
            f"{what}: fc.weight has {columns} columns, {len(drafter.block.layers)} layers of {target.name} have "
            f"{len(drafter.block.layers) * target.hidden} numbers"
        )
    if not 0 <= config.mask_token_id < target.vocab:
        raise ValueError(f"{what}: its mask is token {config.mask_token_id} of {target.vocab}")
