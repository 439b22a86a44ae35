"""The network of the neural selector of delayed trees, what it chooses from, and its files (arXiv:2602.16994, App. E).

Knows nothing of decoding: `selected.py` brings it what it reads, `opt_tree.training.controllers.tree_values` trains it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from opt_tree.methods.policies.costs import Costs
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.static import Static
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import CheckpointError, load_named, load_tensors, read_own_config, refused
from opt_tree.policy import TreePolicy
from opt_tree.verify import Verifier

KIND = "opt_tree selector of trees"
"""What `config.json` beside the network says that it is."""
SCALARS = 11
"""Numbers that are known of a root: see `SelectedTree.known`."""


class Action(NamedTuple):
    """A delayed tree, in the paper's words: K, L1, L2."""

    branches: int
    trunk: int
    length: int

    @property
    def policy(self) -> TreePolicy:
        nothing = self.trunk + self.length == 0
        return Static.empty() if nothing else Sampled.delayed(self.trunk, self.branches, self.length)

    @property
    def nodes(self) -> int:
        return self.trunk + self.branches * self.length

    def seconds(self, costs: Costs) -> float:
        """What the step costs; the root is asked in every case (equation 11, by the rows of each forward)."""
        rows = self.nodes - (self.branches if self.length else min(self.trunk, 1))
        return costs.score(1 + self.nodes) + costs.draft(max(self.trunk + self.length, 1), rows)


@dataclass(frozen=True)
class TreeMenu:
    """What there is to choose from, for whom."""

    actions: tuple[Action, ...]
    verifier: str
    """By name; it judges every one of the trees."""
    costs: Costs
    """What steps cost where it is used."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.actions or not self.temperature > 0:
            raise ValueError(
                f"there must be actions and a temperature above 0, got {len(self.actions)} and {self.temperature}"
            )

    @property
    def judge(self) -> Verifier:
        return VERIFIERS.named(self.verifier).make


class RootFacts(NamedTuple):
    """What is known before a step is drafted, a row a root."""

    states: tuple[Float[Tensor, "roots hidden"], ...]
    """Hidden states: the target's and the drafter's of the token before the root, the drafter's of the root."""
    scalars: Float[Tensor, "roots scalars"]


class Selector(nn.Module):
    """Logits of the actions: each hidden state projected and normed, with the scalars into two layers (equation 10)."""

    def __init__(self, hidden: Sequence[int], choice: TreeMenu, width: int = 128, layers: Sequence[int] = (512, 32)):
        super().__init__()
        self.mean: Tensor
        self.scale: Tensor
        self.hidden, self.choice, self.width, self.layers = tuple(hidden), choice, width, tuple(layers)
        self.register_buffer("mean", torch.zeros(SCALARS))
        self.register_buffer("scale", torch.ones(SCALARS))
        self.projections = nn.ModuleList([nn.Linear(size, width) for size in hidden])
        sizes = [width * len(hidden) + SCALARS, *layers]
        self.inner = nn.ModuleList([nn.Linear(*pair) for pair in pairwise(sizes)])
        self.leave = nn.Linear(sizes[-1], len(choice.actions))

    def forward(self, known: RootFacts, dropout: float = 0.0) -> Float[Tensor, "roots actions"]:
        parts = [
            F.layer_norm(projection(states), (self.width,))
            for projection, states in zip(self.projections, known.states, strict=True)
        ]
        x = torch.cat([*parts, (known.scalars - self.mean) / self.scale], -1)
        for layer in self.inner:
            x = F.dropout(F.gelu(layer(x)), dropout)
        return self.leave(x)

    @property
    def config(self) -> dict[str, Any]:
        """What `config.json` says of it."""
        sizes = {"kind": KIND, "hidden": self.hidden, "width": self.width, "layers": self.layers}
        return sizes | asdict(self.choice)

    @classmethod
    def load(cls, path: str, target: CausalLM, model: Any) -> Self:
        """Load what `opt_tree.training.controllers.tree_values` wrote; `model`: the drafter's.

        Raises CheckpointError for anything else, and for another pair's.
        """
        config = read_own_config(path, KIND, "holds no selector of trees")
        wide = (target.hidden, model.hidden, model.hidden)
        if tuple(config["hidden"]) != wide:
            raise CheckpointError(
                f"{path} is another pair's: it reads states {tuple(config['hidden'])} wide, {target.name} and its "
                f"drafter have {wide}"
            )
        actions = tuple(Action(*one) for one in config["actions"])
        choice = TreeMenu(actions, config["verifier"], Costs.read(config["costs"]), config["temperature"])
        selector = cls(wide, choice, config["width"], config["layers"])
        with refused(f"cannot use {path}"):
            load_named(selector, load_tensors(path), "it is no selector of these trees")
        return selector.to(target.device).float().eval().requires_grad_(False)
