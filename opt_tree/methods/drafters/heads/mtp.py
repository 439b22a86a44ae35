"""Native multi-token prediction: layers that a target was trained with draft for it (arXiv:2412.19437, section 2.2).

Owns the drafter; the layers are in `mtp_layers.py`. Layer i reads a token beside what layer i - 1 made of the token
before it, layer 0 beside the target's last hidden state. The target's own output layer scores what comes out.
"""

from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree.answers import LogProbs
from opt_tree.drafter import Asked
from opt_tree.methods.drafters.around import SeveralForwards
from opt_tree.methods.drafters.heads.eagle import LAST, EagleDrafter
from opt_tree.methods.drafters.heads.eagle_head import HeadedEagle
from opt_tree.methods.drafters.heads.mtp_layers import MtpLayer, read_layers
from opt_tree.methods.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import refused
from opt_tree.models.output_scaling import scaling_of
from opt_tree.pool import Frontier
from opt_tree.sampling import Sampling
from opt_tree.step import Outcome
from opt_tree.target import Forward, Output
from opt_tree.tree import send

Asking = Generator[Forward, Output, Output]
_AT_ONCE = 64
"""Committed rows that a layer runs beside drafted ones; more of them run before."""


class _Deeper:
    """A layer behind the first one, from step to step."""

    def __init__(self, head: HeadedEagle, below: "_Deeper | None") -> None:
        self.lm = CausalLM(head, probe=False)
        self.lm.watch((LAST,))
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

    def run(self, text: list[int], nodes: Frontier, above: Float[Tensor, "rows hidden"]) -> Asking:
        """Run the committed tokens that are missing, and all nodes of this step, which read rows of `above`."""
        left = yield from self._catch_up(text)
        inputs = torch.cat([self.ready[:left], above])
        output = yield self._forward(text[len(text) - left :], nodes, inputs)
        states = output.features[LAST]
        root = states[left - 1 : left] if left else states.new_zeros(1, states.shape[1])
        self.made = torch.cat([root, states[left:]])
        self._made_of_text(states[:left])
        self.fresh = left
        return output

    def run_on(self, nodes: Frontier) -> Asking:
        """Run more nodes, which read what this layer made of their parents."""
        output = yield self._forward([], nodes, self.made)
        self.made = torch.cat([self.made, output.features[LAST]])
        return output

    def _catch_up(self, text: list[int]) -> Generator[Forward, Output, int]:
        """Run what is too much to run beside nodes; return how many committed tokens are left to run, the last ones."""
        left = len(self.ready) - 1
        if (many := left - _AT_ONCE) <= 0:
            return left
        tokens = text[len(text) - left :][:many]
        output = yield self.lm.text(tokens, self.ready[:many])
        self._made_of_text(output.features[LAST])
        return _AT_ONCE

    def _made_of_text(self, states: Float[Tensor, "rows hidden"]) -> None:
        self.ready = self.ready[len(states) :]
        if self.below is not None:
            self.below.take(states)

    def _forward(self, text: list[int], nodes: Frontier, inputs: Tensor) -> Forward:
        """Tokens of the text and nodes behind them; `inputs` are those of the tokens, then what nodes choose of."""
        left, behind = len(text), self.fresh + len(text)
        seen = np.pad(nodes.visible, ((left, 0), (behind, 0)), constant_values=True)
        seen[:left] = np.tri(left, seen.shape[1], dtype=bool)
        tokens = np.concatenate([np.array(text, dtype=np.int64), nodes.tokens])
        positions = np.concatenate([np.arange(left), nodes.depths + (behind - 1)]) + self.lm.length
        taken = send(np.concatenate([np.arange(left), nodes.parents + left]), inputs.device)
        return Forward(self.lm, tokens, positions, seen, inputs.index_select(0, taken))

    def commit(self) -> None:
        """Keep the committed tokens, drop the nodes."""
        self.lm.commit(list(range(self.fresh)))
        self.fresh = 0


class MtpDrafter(SeveralForwards, EagleDrafter):
    """Drafts with the target's own MTP layers: layer d the children of nodes at depth d, the last one all below.

    With one layer it is an EAGLE drafter whose head is that layer. With several, a layer runs all nodes above anew: it
    reads of them what the layer above made of their parents. Committed tokens come to a layer when the draft next comes
    as deep, in one forward with its nodes. A prompt of fewer tokens than layers is drafted less deep.
    """

    def __init__(self, model: Any, target: CausalLM) -> None:
        """`model`: a transformers `MtpModel` of this target, whose layers become this drafter's."""
        scaling, count = scaling_of(target.model), len(model.layers)
        heads = [HeadedEagle(MtpLayer(model, index), model.shared_head, scaling) for index in range(count)]
        self._begin(heads[0], target, None)
        self._deeper: list[_Deeper] = []
        for head in reversed(heads[1:]):
            self._deeper.insert(0, _Deeper(head, next(iter(self._deeper), None)))
        for each in self._deeper:
            each.lm.drafted = self.drafted
        self.models = (self.lm, *(each.lm for each in self._deeper))
        self._text: list[int] = []
        """The context of this step."""
        self._layers: list[Frontier] = []
        """The frontiers of this step."""
        self._at_depth = False
        """Whether a layer behind the first one is asked."""

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Sampling) -> None:
        super().begin(prompt, kept, prefill, sampling)
        for each in self._deeper:
            each.lm.reset()
            each.ready, each.fresh = self._ready[:0], 0

    def keeps(self, prompt: list[int]) -> int:
        return 0 if self._deeper else super().keeps(prompt)

    def root(self, context: list[int]) -> Forward:
        self._text, self._layers, self._at_depth = context, [], False
        return super().root(context)

    def read(self, output: Output) -> Asked:
        if self._at_depth:
            return self._go_on(output)
        if self._deeper and self._rows < 0:  # the root's, and those of other committed tokens
            self._deeper[0].take(output.features[LAST])
        return EagleDrafter.read(self, output)

    def expand(self, frontier: Frontier) -> Asked:
        if not self._deeper:
            return super().expand(frontier)
        self._layers.append(frontier)
        self._at_depth = True
        return self.ask(self._below(frontier))

    def _below(self, frontier: Frontier) -> Generator[Forward, Output, LogProbs]:
        """Ask about nodes of the newest layer."""
        depth = len(self._layers)
        if depth > len(self._deeper):
            output = yield from self._deeper[-1].run_on(frontier)
        else:
            each, above = self._deeper[depth - 1], self._drafted[:1] if depth == 1 else self._deeper[depth - 2].made
            if not len(each.ready):  # the prompt is too short for this layer
                nothing = torch.full((len(frontier.tokens), self.vocab), -torch.inf, device=self.lm.device)
                return LogProbs(nothing)
            output = yield from each.run(self._text, self._all(), above)
        return self.answer(output.last(len(frontier.tokens)))

    def _all(self) -> Frontier:
        """All nodes of this step as one frontier."""
        tokens, parents, depths = (np.concatenate([some[part] for some in self._layers]) for part in range(3))
        rows = [np.pad(some.visible, ((0, 0), (0, len(tokens) - some.visible.shape[1]))) for some in self._layers]
        return Frontier(tokens, parents, depths, np.concatenate(rows))

    def accept(self, outcome: Outcome) -> None:
        super().accept(outcome)
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
        return MtpDrafter(model, target)
