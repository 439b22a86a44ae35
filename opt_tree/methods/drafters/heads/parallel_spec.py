"""ParallelSpec and P-EAGLE: masks behind the root's pair draft every layer of a tree in one forward (2410.05589).

Owns ParallelSpec's head (an EAGLE head that knows mask tokens), its files, and the drafters around it and around an
EAGLE-3 head that knows a mask (P-EAGLE, arXiv:2602.01469). The look-up is `OnePass`.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from opt_tree.drafter import Asked, Drafter
from opt_tree.errors import counted
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.draft_vocabulary import take_vocabulary
from opt_tree.methods.drafters.heads.eagle import LAST, EagleDrafter, head_config, lend_embeddings
from opt_tree.methods.drafters.heads.eagle_head import EagleHead
from opt_tree.methods.drafters.heads.one_pass import OnePass
from opt_tree.methods.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.capabilities import cast_weights, size_of
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, load_tensors, refused
from opt_tree.models.quantised_layers import home_of
from opt_tree.sampling import Temperature
from opt_tree.target import Forward, Output, Work, causal

_PAIRS = 512
"""With more new pairs than this, all but the last run before."""


class ParallelHead(EagleHead):
    """An EAGLE-1 head with mask tokens: token `vocab_size + j` is the j-th mask, whose embedding is trained.

    The pair of the root speaks of the first token behind it, mask j = 0, 1, ... of token j + 2. A mask sees the true
    pairs and the masks before it. State-dict names are those of `EagleHead`, and `masks.weight` [depths - 1, hidden].
    """

    def __init__(self, config: LlamaConfig, depths: int) -> None:
        super().__init__(config)
        self.masks = nn.Embedding(depths - 1, config.hidden_size)

    def embed(self, input_ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows hidden"]:
        masks = input_ids - self.config.vocab_size
        known = self.embed_tokens(input_ids.clamp(max=self.config.vocab_size - 1))
        return torch.where((masks >= 0)[..., None], self.masks(masks.clamp(min=0)), known)


class ParallelSpecDrafter(OnePass):
    """Drafts all depths with one forward of a parallel head over [new pairs, mask, mask, ...].

    Committed pairs carry the target's own features, as with an EAGLE head. Masks stand behind the root's pair, carry
    its feature, and leave the cache after the forward. Of the paper only the abstract and summaries could be read: what
    stands for a mask's feature, and that the root's pair drafts the first layer, are choices made here.
    """

    what = "parallel head"
    """What drafts, for a reader."""
    _left: tuple[list[int], Tensor] | None = None
    """The last of many new pairs, while those before it run."""
    _pairs: int = 0
    """How many run before the masks."""

    def __init__(
        self,
        head: ParallelHead,
        target: CausalLM,
        tokens: Int[Tensor, " columns"] | None = None,
    ) -> None:
        """`tokens`: the draft vocabulary; None: all tokens of the head."""
        super().__init__(target)
        self.tokens = None if tokens is None else tokens.cpu().sort().values
        self.eagle = EagleDrafter(head, target, self.tokens)
        self.models, self.max_context = self.eagle.models, self.eagle.max_context - head.masks.num_embeddings
        self.masks = head.config.vocab_size + np.arange(head.masks.num_embeddings)

    def root(self, context: list[int]) -> Forward:
        pairs, features = self.eagle.take_pairs(context)
        if len(pairs) <= _PAIRS:
            return self._with_masks(pairs, features)
        self._left = pairs[-1:], features[-1:]
        return self.eagle.lm.text(pairs[:-1], features[:-1])

    def _with_masks(self, pairs: list[int], features: Float[Tensor, "pairs hidden"]) -> Forward:
        """Ask for the forward over new pairs and the masks."""
        self._left, self._pairs, lm = None, len(pairs), self.eagle.lm
        tokens = np.array([*pairs, *self.masks])
        rows = len(tokens)
        inputs = torch.cat([features, self.of_masks(features[-1:]).expand(len(self.masks), -1)])
        return Forward(lm, tokens, lm.length + np.arange(rows), causal(rows), inputs, last_only=True)

    def read(self, output: Output) -> Asked:
        if self._left is not None:
            return self._with_masks(*self._left)
        self.eagle.lm.commit(list(range(self._pairs)))
        return self.answer(self.scores(output))

    def scores(self, output: Output) -> Float[Tensor, "depths columns"]:
        """Return the scores of every depth behind a forward over the root's pair and the masks, and others before."""
        lm: Any = self.eagle.lm
        headed: Any = lm.model
        states, layer = output.features[LAST][-len(self.masks) - 1 : -1], headed.get_output_embeddings()
        states = headed.base_model.read(states)
        with lm.eager.packed:
            return torch.cat([headed.scaling(layer(states.to(*home_of(layer)))), output.logits])

    def of_masks(self, last: Float[Tensor, "1 hidden"]) -> Float[Tensor, "1 hidden"]:
        """Return the feature that masks carry behind a pair of this one."""
        return last

    def keeps(self, prompt: list[int]) -> int:
        return self.eagle.keeps(prompt)

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        super().begin(prompt, kept, prefill, sampling)
        self.eagle.begin(prompt, kept, prefill, sampling)

    def accept(self, outcome: Outcome) -> None:
        self.eagle.accept(outcome)

    @property
    def work(self) -> Work:
        """The head's forwards."""
        return self.eagle.work

    def describe(self) -> str:
        head: Any = self.eagle.lm.model.base_model
        columns = "" if self.tokens is None else f", {len(self.tokens)} tokens of {self.target.vocab}"
        return f"{self.what} {self.name}: {size_of(head)}, {counted(len(self.masks) + 1, 'layer')} a pass{columns}"


class PEagleDrafter(ParallelSpecDrafter):
    """Drafts all depths with one forward of an EAGLE-3 head over [new pairs, mask, mask, ...].

    A mask is one token of the vocabulary beside a trained stand-in for the target's states (`mask_hidden`), which goes
    through `fc` as they do. It sees the true pairs and the masks before it.
    """

    what = "P-EAGLE head"

    def __init__(self, eagle: EagleDrafter, target: CausalLM, mask: int, depths: int) -> None:
        """`mask`: its token. `depths`: layers that are drafted."""
        OnePass.__init__(self, target)
        head: Any = eagle.lm.model.base_model
        if not 0 <= mask < head.config.vocab_size:
            raise ValueError(f"its mask is token {mask} of {head.config.vocab_size}")
        if depths < 1:
            raise ValueError(f"a P-EAGLE head of {depths} depths drafts nothing")
        self.eagle, self.features, self.models = eagle, eagle.features, eagle.models
        order = None if eagle.tokens is None else eagle.tokens.argsort()
        self.tokens = None if eagle.tokens is None else eagle.tokens[order]
        self._order = None if order is None else order.to(eagle.lm.device)
        self.max_context, self.masks = eagle.max_context - depths + 1, np.full(depths - 1, mask)

    def of_masks(self, last: Float[Tensor, "1 hidden"]) -> Float[Tensor, "1 hidden"]:
        head: Any = self.eagle.lm.model.base_model
        return head.of_mask()[None].to(last.dtype)

    def scores(self, output: Output) -> Float[Tensor, "depths columns"]:
        found = super().scores(output)
        return found if self._order is None else found[:, self._order]

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        Drafter.begin(self, prompt, kept, prefill, sampling)
        self.eagle.begin(prompt, kept, prefill, sampling)

    def describe(self) -> str:
        probed = getattr(self.eagle, "probed", None)
        return super().describe() + (f", {probed}" if probed else "")


@register(
    "parallelspec",
    about="mask tokens behind the root of an EAGLE head, one pass a draft (ParallelSpec)",
    paper="2410.05589",
    part="parallelspec",
)
def load_parallel_spec(path: str, target: AnyLM, options: DrafterOptions) -> ParallelSpecDrafter:
    """Load a parallel head: an EAGLE-1 head's `config.json` and tensors, `masks.weight` among them.

    `embed_tokens`, `d2t` and `t2d` are as `load_eagle` reads them. Raises CheckpointError.
    """
    target, tensors = feature_target(target), load_tensors(path)
    if "masks.weight" not in tensors:
        raise CheckpointError(f"{path} is no parallel head: it has no masks.weight")
    config = head_config(path)
    with refused(f"cannot use {path}"):
        tokens = take_vocabulary(tensors, config.vocab_size)
        lend_embeddings(tensors, target, config.vocab_size)
        head = ParallelHead(config, len(tensors["masks.weight"]) + 1)
        head.load_published(tensors, "it")
        device, _ = home_of(target.model.get_output_embeddings())
        cast_weights(head, device, target.dtype).eval().requires_grad_(False)
        return ParallelSpecDrafter(head, target, tokens)
