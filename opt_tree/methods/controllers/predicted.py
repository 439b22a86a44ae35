"""The length of a chain, predicted before it is drafted from the target's newest feature (AdaEAGLE, arXiv:2412.18910).

Owns the paper's lightweight draft length predictor, its files, and the controller.
"""

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from opt_tree.children import LogProbs
from opt_tree.generation import Outcome, Step
from opt_tree.methods.controllers.registry import ControllerRequest, register
from opt_tree.methods.policies.static import Static
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import CheckpointError, load_named, load_tensors, read_own_config, refused
from opt_tree.policy import TreePolicy
from opt_tree.target import Output
from opt_tree.tree import fetch

KIND = "opt_tree draft length"
"""What `config.json` beside a predictor says that it is."""
LAST = -1
"""The layer that it reads: the target's final hidden state, behind its last norm."""


class LengthPredictor(nn.Module):
    """How many tokens of the drafter's best chain will be accepted, as one number (section 3.2).

    A perceptron of three layers, the last two of them residual, and a linear map to a number. It reads the embedding of
    the last token that the target has run and that token's final hidden state. The paper does not say its width.
    """

    def __init__(self, hidden: int, longest: int = 8, width: int = 64) -> None:
        """`longest`: the paper's k_max, a bound that seldom matters."""
        super().__init__()
        self.hidden, self.longest, self.width = hidden, longest, width
        self.enter = nn.Linear(2 * hidden, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.leave = nn.Linear(width, 1)

    def forward(
        self, embedded: Float[Tensor, "rows hidden"], features: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, " rows"]:
        """Return the lengths, not rounded."""
        parts = [F.layer_norm(part.to(self.enter.weight.dtype), part.shape[-1:]) for part in (embedded, features)]
        x = F.gelu(self.enter(torch.cat(parts, -1)))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.leave(x)[:, 0]

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
    """Drafts a chain as long as the predictor says, rounded, at most its `longest`; none where it says 0 (equation 3).

    With `chain=lambda k: ThresholdChain(8, math.exp(-0.6), k)` drafting goes on beyond it while the drafter is sure:
    the paper's AdaEAGLE-DDD.

        predictor = LengthPredictor.load("length", pair.target)
        decoder = Decoder(pair.target, pair.drafter, PredictedLength(predictor, pair.target))
        [step.tree.nodes for step in decoder.generate(pair.encode("Why is the sky blue?")).steps]
    """

    features = (LAST,)

    def __init__(
        self,
        predictor: LengthPredictor,
        target: CausalLM,
        chain: Callable[[int], TreePolicy] = Static.chain,
    ) -> None:
        """`chain` makes the policy of a length: `Static.chain`, or `Sampled.chain` where children are drawn."""
        self.policies = tuple(chain(length) for length in range(predictor.longest + 1))
        self._predictor, self._target = predictor, target
        self._feature = torch.zeros(1, predictor.hidden, device=target.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PredictedLength":
        """A lane's own: the feature is copied, the weights are shared."""
        twin = copy.copy(self)
        twin._target = memo.get(id(self._target), self._target)
        return twin

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        self._feature = torch.zeros_like(self._feature) if prefill is None else prefill.features[LAST][-1:].clone()

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        """The root is the paper's bonus token, of which nothing is read."""
        embed: Any = self._target.model.get_input_embeddings()
        last = torch.tensor([context[-2] if len(context) > 1 else context[-1]], device=embed.weight.device)
        (lengths,) = fetch(self._predictor(embed(last).to(self._feature.device), self._feature))
        return self.policies[min(max(round(float(lengths[0])), 0), self._predictor.longest)]

    def observe(self, step: Step, outcome: Outcome) -> None:
        self._feature = outcome.features[LAST][-1:]


@register(
    "predicted",
    about="the length of a chain, by a predictor that reads the target's newest feature (AdaEAGLE)",
    paper="2412.18910",
    part="length",
)
def _make(path: str, wanted: ControllerRequest) -> PredictedLength:
    return PredictedLength(LengthPredictor.load(path, wanted.features), wanted.features)
