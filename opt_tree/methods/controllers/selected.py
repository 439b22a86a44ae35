"""A delayed tree and its verifier, chosen before each step by a small network (arXiv:2602.16994, Appendix E).

Owns the actions, the network, its files, and the controller. The paper's selector puts out the action itself, trained
for one machine's seconds, and reads the drafter's hidden states, too. This one says how many tokens each action is
expected to bring, and the seconds are counted when it chooses: the same weights serve every machine.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from opt_tree.answers import LogProbs, log_probs_of
from opt_tree.children import Children
from opt_tree.methods.controllers.registry import Wanted, register
from opt_tree.methods.policies.costs import DECAY, Costs
from opt_tree.methods.policies.delayed import Delayed
from opt_tree.methods.policies.static import Static
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import CheckpointError, load_named, load_tensors, read_own_config, refused
from opt_tree.policy import TreePolicy
from opt_tree.pool import CandidatePool
from opt_tree.step import Outcome, Step
from opt_tree.target import Output
from opt_tree.tree import fetch
from opt_tree.verify import Verifier

KIND = "opt_tree tree values"
"""What `config.json` beside the network says that it is."""
LAST = -1
_BEST = 8
FACTS = _BEST + 6
"""Numbers that are known of a root: see `Informed.facts`."""


class Action(NamedTuple):
    """A delayed tree, in the paper's words (K, L1, L2), and the name of who judges it."""

    branches: int
    trunk: int
    length: int
    verifier: str

    @property
    def policy(self) -> "Judged":
        nothing = self.trunk + self.length == 0
        return Judged(Static.empty() if nothing else Delayed(self.trunk, self.branches, self.length), self.judge)

    @property
    def judge(self) -> Verifier:
        return VERIFIERS.named(self.verifier).make

    @property
    def nodes(self) -> int:
        return self.trunk + self.branches * self.length

    @property
    def draft_rows(self) -> int:
        """Rows of its draft forwards behind the root's: nodes that have children."""
        return self.nodes - (self.branches if self.length else min(self.trunk, 1))

    def seconds(self, costs: Costs, judging: Mapping[str, Sequence[float]]) -> float:
        """What the step costs; the root is asked in every case. `judging`: seconds of a verifier, and of a node."""
        fixed, node = judging[self.verifier]
        drafting = costs.draft(max(self.trunk + self.length, 1), self.draft_rows)
        return costs.score(1 + self.nodes) + drafting + (fixed + node * self.nodes if self.nodes else 0.0)


@dataclass(frozen=True)
class Judged(TreePolicy):
    """The tree of a policy, and who judges it above temperature 0."""

    policy: TreePolicy
    verifier: Verifier

    @property
    def children(self) -> Children:
        return self.policy.children

    @property
    def max_depth(self) -> int:
        return self.policy.max_depth

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        return self.policy.expand(pool)

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return self.policy.select(pool)


@dataclass(frozen=True)
class Choice:
    """What there is to choose from, and for which sampling."""

    actions: tuple[Action, ...]
    judging: Mapping[str, Sequence[float]]
    """Seconds of each verifier: of a tree, and of each of its nodes."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.actions or not self.temperature > 0:
            raise ValueError(
                f"there must be actions and a temperature above 0, got {len(self.actions)} and {self.temperature}"
            )
        if unknown := sorted({action.verifier for action in self.actions} - set(self.judging)):
            raise ValueError(f"nothing is known of what verifier {unknown[0]} costs")


class TreeValues(nn.Module):
    """How many tokens each action is expected to bring: a perceptron on facts of the root and the target's feature."""

    def __init__(self, hidden: int, choice: Choice, width: int = 32) -> None:
        super().__init__()
        self.mean: Tensor
        self.scale: Tensor
        self.hidden, self.choice, self.width = hidden, choice, width
        self.register_buffer("mean", torch.zeros(FACTS))
        self.register_buffer("scale", torch.ones(FACTS))
        self.state = nn.Linear(hidden, width // 2)
        self.enter = nn.Linear(FACTS + width // 2, width)
        self.leave = nn.Linear(width, len(choice.actions))

    def forward(
        self, facts: Float[Tensor, "rows facts"], features: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, "rows actions"]:
        """Return the expected tokens of a step, the target's own included."""
        state = F.gelu(self.state(F.layer_norm(features, features.shape[-1:])))
        return 1 + F.softplus(self.leave(F.gelu(self.enter(torch.cat([(facts - self.mean) / self.scale, state], -1)))))

    @classmethod
    def load(cls, path: str, target: CausalLM) -> Self:
        """Load what `opt_tree.training.controllers.tree_values` wrote.

        Raises CheckpointError for anything else, and for another target's.
        """
        config = read_own_config(path, KIND, "holds no values of trees")
        if config["hidden"] != target.hidden:
            raise CheckpointError(
                f"{path} is another target's: it reads features {config['hidden']} wide, {target.name} has "
                f"{target.hidden}"
            )
        choice = Choice(tuple(Action(*one) for one in config["actions"]), config["judging"], config["temperature"])
        values = cls(config["hidden"], choice, config["width"])
        with refused(f"cannot use {path}"):
            load_named(values, load_tensors(path), "it holds no values of these trees")
        return values.to(target.device).float().eval().requires_grad_(False)


class Informed(TreePolicy):
    """What a chooser of trees knows before it drafts: the drafter's law at the root, and what the target said last."""

    features = (LAST,)
    reads_root = True

    def __init__(self, hidden: int, temperature: float) -> None:
        self.temperature = temperature
        self._feature = torch.zeros(1, hidden)
        self._before = [0.0] * 3
        self._accepted = 0.0

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        self._accepted = 0.0
        if prefill is None:
            self._feature, self._before = torch.zeros_like(self._feature), [0.0] * 3
        else:
            self._remember(prefill.features[LAST][-1:], prefill.logits[-1], prompt[-1])

    def observe(self, step: Step, outcome: Outcome) -> None:
        self._accepted = float(step.accepted)
        self._remember(outcome.features[LAST][-1:], outcome.logits[outcome.path[-1]], outcome.tokens[-1])

    def _remember(self, feature: Float[Tensor, "1 hidden"], logits: Float[Tensor, " vocab"], token: int) -> None:
        law = log_probs_of(logits[None].float() / self.temperature)[0]
        entropy = -(law.exp() * law).nan_to_num().sum()
        self._feature = feature.float().clone()
        self._before = fetch(torch.stack([entropy, law.max(), law[token]]))[0].tolist()

    def facts(self, context: list[int], root: LogProbs | None) -> Float[Tensor, "1 facts"]:
        """The drafter's best log-probabilities at the root and its entropy; the target's entropy, its best
        log-probability and that of the root behind the last token it ran; the context's length; what was accepted."""
        if root is None:
            return torch.zeros(1, FACTS)
        law = log_probs_of(root.over_vocabulary().float() / self.temperature)[0]
        best = law.topk(min(_BEST, len(law))).values
        drafted = fetch(torch.cat([best, -(law.exp() * law).nan_to_num().sum()[None]]))[0].clip(-20)
        drafted = np.concatenate([np.full(_BEST - len(best), -20.0), drafted])
        known = [*drafted.tolist(), *self._before, math.log(len(context)), self._accepted]
        return torch.tensor([known], dtype=torch.float32).clamp_min(-20)


class SelectedTree(Informed):
    """Chooses the tree, of those that the network knows, and its verifier: most tokens for their seconds.

    The action taken is the one of largest expected tokens - rate * seconds, the rate being tokens over modelled seconds
    so far. Nothing has been drawn when it chooses, and each verifier is exact for each of the trees, so the output is.

        values = TreeValues.load("trees", pair.target)
        decoder = Decoder(pair.target, pair.drafter, SelectedTree(values, costs), traversal)
        decoder.generate(pair.encode("Why is the sky blue?"), sampling=Sampling(1.0)).mean_acceptance_length
    """

    def __init__(self, values: TreeValues, costs: Costs) -> None:
        super().__init__(values.hidden, values.choice.temperature)
        self._values, self.costs = values, costs
        self._actions = values.choice.actions
        self.policies = tuple(action.policy for action in self._actions)
        self._now, self._chosen = costs, self._actions[0]
        # Discounted sums; before anything was seen, 20 steps at half again plain decoding's speed.
        self._tokens, self._seconds = 30.0, 20 * costs.plain

    def __deepcopy__(self, memo: dict[int, Any]) -> "SelectedTree":
        """A lane's own: what it learned is copied, the weights are shared."""
        return copy.copy(self)

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        self._now = self.costs.at(len(context))
        device = self._values.mean.device
        (tokens,) = fetch(self._values(self.facts(context, root).to(device), self._feature.to(device)))
        judging, rate = self._values.choice.judging, self._tokens / self._seconds
        worth = tokens[0] - rate * np.array([action.seconds(self._now, judging) for action in self._actions])
        chosen = int(worth.argmax())
        self._chosen = self._actions[chosen]
        return self.policies[chosen]

    def observe(self, step: Step, outcome: Outcome) -> None:
        super().observe(step, outcome)
        self._tokens = DECAY * self._tokens + len(step.tokens)
        self._seconds = DECAY * self._seconds + self._chosen.seconds(self._now, self._values.choice.judging)


@register(
    "selected",
    about="a delayed tree and its verifier, by a network that reads the drafter's law at the root",
    paper="2602.16994",
    part="trees",
)
def _make(path: str, wanted: Wanted) -> SelectedTree:
    return SelectedTree(TreeValues.load(path, wanted.features), wanted.costs())
