"""The length of a chain, predicted before it is drafted from the target's newest feature (AdaEAGLE, arXiv:2412.18910).

Owns the predictor, its files, and the controller. The paper's predictor answers with one number; this one with a
distribution over lengths, from which the paper's number and the length of most tokens for their seconds both follow.
"""

import copy
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from opt_tree.answers import LogProbs
from opt_tree.methods.controllers.registry import Wanted, register
from opt_tree.methods.policies.costs import DECAY, Costs
from opt_tree.methods.policies.static import Static
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import CheckpointError, load_named, load_tensors, read_own_config, refused
from opt_tree.policy import TreePolicy
from opt_tree.step import Outcome, Step
from opt_tree.target import Output
from opt_tree.tree import fetch

KIND = "opt_tree draft length"
"""What `config.json` beside a predictor says that it is."""
LAST = -1
"""The layer that it reads: the target's final hidden state, behind its last norm."""


class LengthPredictor(nn.Module):
    """How many tokens of the drafter's best chain will be accepted: a small perceptron with residual layers.

    It reads the final hidden state of the last token that the target has run, the embedding of that token (both as
    published) and that of the root, which the target has chosen but not run.
    """

    def __init__(self, hidden: int, longest: int = 8, width: int = 96) -> None:
        super().__init__()
        self.hidden, self.longest, self.width = hidden, longest, width
        self.enter = nn.Linear(3 * hidden, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.leave = nn.Linear(width, longest)

    def forward(
        self, features: Float[Tensor, "rows hidden"], embedded: Float[Tensor, "rows 2 hidden"]
    ) -> Float[Tensor, "rows longest"]:
        """Return the logit of each further token being accepted, given that all before it are.

        `embedded`: the embeddings of the last token that was run, and of the root.
        """
        parts = torch.cat([features[:, None], embedded], 1).to(self.enter.weight.dtype)
        x = F.gelu(self.enter(F.layer_norm(parts, parts.shape[-1:]).flatten(1)))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.leave(x)

    def reach(
        self, features: Float[Tensor, "rows hidden"], embedded: Float[Tensor, "rows 2 hidden"]
    ) -> Float[Tensor, "rows longest"]:
        """Return the probability that at least 1, 2, ... tokens are accepted."""
        return F.logsigmoid(self(features, embedded)).cumsum(-1).exp()

    @classmethod
    def load(cls, path: str, target: CausalLM) -> Self:
        """Load what `opt_tree.training.controllers.draft_length` wrote.

        Raises CheckpointError for anything else, and for another target's.
        """
        config = read_own_config(path, KIND, "is no predictor of draft lengths")
        if config["hidden"] != target.hidden:
            raise CheckpointError(
                f"{path} is the predictor of another target: it reads features {config['hidden']} wide, {target.name} "
                f"has {target.hidden}"
            )
        predictor = cls(config["hidden"], config["longest"], config["width"])
        with refused(f"cannot use {path}"):
            load_named(predictor, load_tensors(path), "it is no predictor of this config")
        return predictor.to(target.device).float().eval().requires_grad_(False)


class PredictedLength(TreePolicy):
    """Drafts a chain as long as the predictor says that it pays; no chain at all where none does.

    The length k is that of the largest 1 + sum of P(i tokens are accepted), i to k, less what the step's modelled
    seconds are worth at the rate so far. With a number for `price` it is the published one instead: the length that
    errs least where too short costs `price` times as much as too long, that is the last token whose chance is above
    1 / (1 + price). With `chain=lambda k: ThresholdChain(8, 0.55, k)` drafting goes on beyond it while the drafter is
    sure.

        predictor = LengthPredictor.load("length", pair.target)
        decoder = Decoder(pair.target, pair.drafter, PredictedLength(predictor, pair.target, costs))
        [step.tree.nodes for step in decoder.generate(pair.encode("Why is the sky blue?")).steps]
    """

    features = (LAST,)

    def __init__(
        self,
        predictor: LengthPredictor,
        target: CausalLM,
        price: Costs | float,
        chain: Callable[[int], TreePolicy] = Static.chain,
    ) -> None:
        """`chain` makes the policy of a length, 0 included."""
        if not isinstance(price, Costs) and not price > 0:
            raise ValueError(f"price must be the costs of a step, or above 0, got {price}")
        self.policies = tuple(chain(length) for length in range(predictor.longest + 1))
        self.price = price
        self._predictor, self._target = predictor, target
        self._feature = torch.zeros(1, predictor.hidden, device=target.device)
        # Discounted sums; before anything was seen, 20 steps at half again plain decoding's speed.
        self._tokens = 30.0
        self._seconds = 20 * price.plain if isinstance(price, Costs) else 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> "PredictedLength":
        """A lane's own: what it learned and the feature are copied, the weights are shared."""
        twin = copy.copy(self)
        twin._target = memo.get(id(self._target), self._target)
        return twin

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        self._feature = torch.zeros_like(self._feature) if prefill is None else prefill.features[LAST][-1:].clone()

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        (reach,) = fetch(self.reach(context))
        if not isinstance(self.price, Costs):
            return self.policies[int((reach > 1 / (1 + self.price)).sum())]
        self._now = now = self.price.at(len(context))
        seconds = [now.score(1 + k) + now.draft(k, k - 1) for k in range(len(reach) + 1)]
        worth = np.concatenate([[0], reach.cumsum()]) - self._tokens / self._seconds * np.array(seconds)
        return self.policies[int(worth.argmax())]

    def reach(self, context: list[int]) -> Float[Tensor, " longest"]:
        """The probability that at least 1, 2, ... tokens of a chain behind this context will be accepted."""
        last: Int[Tensor, "1 2"] = torch.tensor([[context[-2] if len(context) > 1 else context[-1], context[-1]]])
        embed: Any = self._target.model.get_input_embeddings()
        return self._predictor.reach(self._feature, embed(last.to(embed.weight.device)).to(self._feature.device))[0]

    def observe(self, step: Step, outcome: Outcome) -> None:
        self._feature = outcome.features[LAST][-1:]
        if isinstance(self.price, Costs):
            self._tokens = DECAY * self._tokens + len(step.tokens)
            self._seconds = DECAY * self._seconds + self._now.of(step)


@register(
    "predicted",
    about="the length of a chain, by a predictor that reads the target's newest feature (AdaEAGLE)",
    paper="2412.18910",
    part="length",
)
def _make(path: str, wanted: Wanted) -> PredictedLength:
    return PredictedLength(LengthPredictor.load(path, wanted.features), wanted.features, wanted.costs())
