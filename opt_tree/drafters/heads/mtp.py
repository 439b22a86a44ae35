"""Native multi-token prediction: layers that a target was trained with draft for it (arXiv:2412.19437, section 2.2).

Owns the drafter; the layers are in `opt_tree.drafters.heads.mtp_layers`. Layer i reads a token beside what layer i - 1
made of the token before it, layer 0 beside the target's last hidden state. The target's own output layer scores what
comes out.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree.core.children import Picking, Reduced
from opt_tree.core.pool import Frontier
from opt_tree.core.step import Outcome
from opt_tree.core.target import Forward, Output
from opt_tree.core.tree import send
from opt_tree.drafters.heads.eagle import LAST, EagleDrafter
from opt_tree.drafters.heads.eagle_head import HeadedEagle
from opt_tree.drafters.heads.mtp_layers import MtpLayer, read_layers
from opt_tree.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import refused
from opt_tree.models.output_scaling import scaling_of

_AT_ONCE = 64
"""Committed rows that a layer runs beside drafted ones; more of them run before."""


class _Deeper:
    """A layer behind the first one, from step to step."""

    def __init__(self, head: HeadedEagle, buckets: Buckets | None, columns: int, below: "_Deeper | None") -> None:
        self.lm = CausalLM(head, buckets, probe=False)
        self.lm.watch((LAST,))
        self.lm.columns = columns
        self.below = below
        """The layer that reads what this one makes."""
        self.ready: Tensor = torch.zeros(0)
        """What the layer above made of committed tokens whose successors are not in this cache; of the root last."""
        self.fresh = 0
        """How many pending rows are committed tokens; those of nodes are behind them."""
        self.made: Tensor = torch.zeros(0)
        """What it made by draft row: 0 the root, k the k-th node expanded."""

    def take(self, states: Float[Tensor, "rows hidden"]) -> None:
        """Take what the layer above made of the next committed tokens; copied, as it lives until the next forward."""
        self.ready = torch.cat([self.ready.to(states), states])

    def run(
        self, text: list[int], nodes: Frontier, above: Float[Tensor, "rows hidden"], picking: Picking | None
    ) -> Output:
        """Run the committed tokens that are missing, and all nodes of this step, which read rows of `above`."""
        left = self._catch_up(text)
        inputs = torch.cat([self.ready[:left], above])
        output = self._forward(text[len(text) - left :], nodes, inputs, picking)
        states = output.features[LAST]
        root = states[left - 1 : left] if left else states.new_zeros(1, states.shape[1])
        self.made = torch.cat([root, states[left:]])
        self._made_of_text(states[:left])
        self.fresh = left
        return output

    def run_on(self, nodes: Frontier, picking: Picking | None) -> Output:
        """Run more nodes, which read what this layer made of their parents."""
        output = self._forward([], nodes, self.made, picking)
        self.made = torch.cat([self.made, output.features[LAST]])
        return output

    def _catch_up(self, text: list[int]) -> int:
        """Run what is too much to run beside nodes; return how many committed tokens are left to run, the last ones."""
        left = len(self.ready) - 1
        if (many := left - _AT_ONCE) <= 0:
            return left
        tokens = text[len(text) - left :][:many]
        self._made_of_text(self.lm.append(tokens, features=self.ready[:many]).features[LAST])
        return _AT_ONCE

    def _made_of_text(self, states: Float[Tensor, "rows hidden"]) -> None:
        self.ready = self.ready[len(states) :]
        if self.below is not None:
            self.below.take(states)

    def _forward(self, text: list[int], nodes: Frontier, inputs: Tensor, picking: Picking | None) -> Output:
        """Run tokens of the text and nodes behind them; `inputs` are those of the tokens, then what nodes choose of."""
        left, behind = len(text), self.fresh + len(text)
        seen = np.pad(nodes.visible, ((left, 0), (behind, 0)), constant_values=True)
        seen[:left] = np.tri(left, seen.shape[1], dtype=bool)
        tokens = np.concatenate([np.array(text, dtype=np.int64), nodes.tokens])
        positions = np.concatenate([np.arange(left), nodes.depths + (behind - 1)])
        taken = np.concatenate([np.arange(left), nodes.parents + left])
        states = inputs.index_select(0, send(taken, inputs.device))
        return self.lm.run(Forward(self.lm, tokens, self.lm.length + positions, seen, states, picking=picking))

    def commit(self) -> None:
        """Keep the committed tokens, drop the nodes."""
        self.lm.commit(list(range(self.fresh)))
        self.fresh = 0


class MtpDrafter(EagleDrafter):
    """Drafts with the target's own MTP layers: layer d the children of nodes at depth d, the last one all below.

    With one layer it is an EAGLE drafter whose head is that layer. With several, a layer runs all nodes above anew: it
    reads of them what the layer above made of their parents. Committed tokens come to a layer when the draft next comes
    as deep, in one forward with its nodes. A prompt of fewer tokens than layers is drafted less deep.
    """

    def __init__(self, model: Any, target: CausalLM, buckets: Buckets | None = None) -> None:
        """`model`: a transformers `MtpModel` of this target, whose layers become this drafter's."""
        scaling, count = scaling_of(target.model), len(model.layers)
        heads = [HeadedEagle(MtpLayer(model, index), model.shared_head, scaling) for index in range(count)]
        self._begin(heads[0], target, buckets, None)
        self._deeper: list[_Deeper] = []
        for head in reversed(heads[1:]):
            self._deeper.insert(0, _Deeper(head, buckets, self.lm.columns, next(iter(self._deeper), None)))
        self.models = (self.lm, *(each.lm for each in self._deeper))
        self.any_order = not self._deeper
        self._text: list[int] = []
        """The context of this step."""
        self._layers: list[Frontier] = []
        """The frontiers of this step."""

    def reset(self, prompt: list[int], output: Output | None) -> None:
        super().reset(prompt, output)
        for each in self._deeper:
            each.lm.reset()
            each.ready, each.fresh = self._ready[:0], 0

    def holds(self, prompt: list[int]) -> int:
        return 0 if self._deeper else super().holds(prompt)

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"] | Reduced:
        self._text, self._layers = context, []
        return super().root(context)

    def _draft(self, states: Float[Tensor, "rows hidden"], first: int = 0) -> None:
        if self._deeper and not self._rows:  # the root's, and those of other committed tokens
            self._deeper[0].take(states)
        super()._draft(states, first)

    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"] | Reduced:
        if not self._deeper:
            return super().expand(frontier)
        self._layers.append(frontier)
        depth = len(self._layers)
        if depth > len(self._deeper):
            output = self._deeper[-1].run_on(frontier, self._picking)
        else:
            each, above = self._deeper[depth - 1], self._drafted[:1] if depth == 1 else self._deeper[depth - 2].made
            if not len(each.ready):  # the prompt is too short for this layer
                return torch.full((len(frontier.tokens), self._whole), -torch.inf, device=self.lm.device)
            output = each.run(self._text, self._all(), above, self._picking)
        return self._scores(output.some(slice(len(output.logits) - len(frontier.tokens), None)))

    def _all(self) -> Frontier:
        """All nodes of this step as one frontier."""
        tokens, parents, depths = (np.concatenate([some[part] for some in self._layers]) for part in range(3))
        rows = [np.pad(some.visible, ((0, 0), (0, len(tokens) - some.visible.shape[1]))) for some in self._layers]
        return Frontier(tokens, parents, depths, np.concatenate(rows))

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        for each in self._deeper:
            each.commit()

    def describe(self) -> str:
        count = len(self.models)
        return f"{count} MTP layer{'s' if count > 1 else ''} of the target, {self.lm.size} each"


@register("mtp", about="the multi-token-prediction layers of the target's own checkpoint", paper="2412.19437")
def load_mtp(path: str, target: AnyLM, options: DrafterOptions) -> MtpDrafter:
    """Load the MTP layers that lie in the target's own checkpoint (see `read_layers`)."""
    target = feature_target(target)
    model = read_layers(target)
    with refused(f"cannot draft by the MTP layers of {target.name}"):
        return MtpDrafter(model, target, options.buckets)
