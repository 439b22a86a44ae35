"""Residual heads behind one forward of an EAGLE head: a law for each depth (after ParallelSpec, arXiv:2410.05589).

Owns the heads (`ResidualHeads`), the drafter around them, and their files. The look-up is `OnePass`.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from opt_tree.core.children import Reduced
from opt_tree.core.step import Outcome
from opt_tree.core.target import Output, Work
from opt_tree.core.tree import send
from opt_tree.drafters.base import Drafter
from opt_tree.drafters.draft_vocabulary import take_vocabulary
from opt_tree.drafters.heads.eagle import EagleDrafter, read_by
from opt_tree.drafters.heads.one_pass import OnePass, fill, one_pass_config
from opt_tree.drafters.registry import DrafterOptions, feature_target, load_drafter, register
from opt_tree.models.capabilities import size_of
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, load_tensors, refused
from opt_tree.models.quantised_layers import home_of


class ResidualHeads(nn.Module):
    """For each depth from 2 on, what is added to the estimate of depth 1: down(silu(up(estimate, root, feature)))."""

    def __init__(self, hidden: int, depths: int, inner: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(3 * hidden, inner) for _ in range(depths - 1))
        self.down = nn.ModuleList(nn.Linear(inner, hidden) for _ in range(depths - 1))
        for weight in self.down.parameters():
            nn.init.zeros_(weight)

    def forward(
        self,
        estimate: Float[Tensor, "rows hidden"],
        root: Float[Tensor, "rows hidden"],
        feature: Float[Tensor, "rows hidden"],
    ) -> Float[Tensor, "depths rows hidden"]:
        """Return estimated features for depths 2, 3, ...: of the EAGLE head's estimate, the root's embedding, f."""
        inputs = torch.cat([estimate, root, feature], -1)
        pairs = zip(self.up, self.down, strict=True)
        return torch.stack([estimate + down(F.silu(up(inputs))) for up, down in pairs])


class ResidualDrafter(OnePass):
    """Drafts depth 1 with one forward of an EAGLE head, and the others with residual heads on what it estimated.

    `tokens` is the draft vocabulary of all depths, that of the EAGLE head included; None: all tokens of the head. In a
    small model the output layer, read for each of five depths, is most of the arithmetic.
    """

    def __init__(
        self,
        heads: ResidualHeads,
        eagle: EagleDrafter,
        target: CausalLM,
        tokens: Int[Tensor, " columns"] | None = None,
    ) -> None:
        super().__init__(target)
        if tokens is not None:
            head: Any = eagle.lm.model.base_model
            self.tokens = tokens.sort().values
            trimmed = EagleDrafter(head, target, eagle.lm.buckets, self.tokens)
            trimmed.name, eagle = eagle.name, trimmed
        self.heads, self.eagle = heads, eagle
        self.models, self.max_context = eagle.models, eagle.max_context

    def laws(self, context: list[int]) -> Float[Tensor, "depths columns"]:
        first = self.eagle.root(context)
        root = send(np.array(context[-1:]), self.target.device)
        embedded = self.target.model.get_input_embeddings()(root)
        states = self.heads(self.eagle.estimate, embedded, self._feature)[:, 0]
        if self.tokens is not None:
            assert isinstance(first, Reduced)
            output: Any = self.eagle.lm.model.get_output_embeddings()
            with self.eagle.lm.eager.packed:
                return torch.cat([first.scores, output(states.to(*home_of(output)))])
        first = first.whole() if isinstance(first, Reduced) else first
        return torch.cat([first, read_by(self.target, states)[:, : first.shape[1]]])

    def reset(self, prompt: list[int], output: Output | None) -> None:
        super().reset(prompt, output)
        self.eagle.reset(prompt, output)

    def holds(self, prompt: list[int]) -> int:
        return self.eagle.holds(prompt)

    def resume(self, prompt: list[int], kept: int, output: Output) -> None:
        super().reset(prompt, output)
        self.eagle.resume(prompt, kept, output)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self.eagle.observe(outcome)

    @property
    def work(self) -> Work:
        """The EAGLE head's forwards; the residual heads are part of each."""
        head, whole = self.eagle.work, self._done
        return Work(head.forwards, head.tokens, whole.seconds)

    def describe(self) -> str:
        return f"{len(self.heads.up)} residual heads {self.name}: {size_of(self.heads)}, behind {self.eagle.describe()}"


def load_residual_heads(path: str, eagle: Drafter, target: CausalLM) -> ResidualDrafter:
    """Load residual heads (`config.json`, `model.safetensors`) behind the EAGLE head that they were trained with."""
    config = one_pass_config(path, ("depths", "inner"))
    if not isinstance(eagle, EagleDrafter):
        raise CheckpointError(f"{path}: residual heads stand behind an EAGLE head, not behind {eagle.describe()}")
    heads, tensors = ResidualHeads(target.hidden, int(config["depths"]), int(config["inner"])), load_tensors(path)
    with refused(f"cannot use {path}"):
        tokens = take_vocabulary(tensors, target.vocab)
    fill(heads, tensors, f"{path} has no residual heads for {target.name}")
    return ResidualDrafter(heads.to(target.device, eagle.lm.dtype).eval().requires_grad_(False), eagle, target, tokens)


def read_base(path: str) -> str:
    """Return the spec of the EAGLE head that the residual heads at `path` stand behind."""
    base = one_pass_config(path, ("depths", "inner")).get("eagle")
    if not isinstance(base, str):
        raise CheckpointError(f"{path}/config.json does not name the EAGLE head that these heads stand behind")
    return base


@register(
    "onepass",
    about="residual heads behind one forward of an EAGLE head (after ParallelSpec)",
    paper="2410.05589",
    part="onepass",
    others=lambda folder: [read_base(folder)],
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return load_residual_heads(path, load_drafter(read_base(path), target, options).bare, feature_target(target))
