"""What a model makes of the numbers that its output layer gives: Granite divides them, Cohere multiplies, Gemma caps.

Whoever reads that layer alone owes its numbers the same, or drafts by another distribution than the target's. It is
measured, not read in a config: `logits_scaling` divides in Granite and multiplies in HyperCLOVA X.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_tree.models.quantised_layers import home_of
from opt_tree.models.text_states import logits_and_states

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What configs call a cap c: logits become c tanh(logits / c)."""
_ROWS = 8


class Scaling(NamedTuple):
    """Logits are the output layer's numbers times `factor`, then capped: cap * tanh(. / cap)."""

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return the logits that these numbers of the output layer become, of any shape."""
        scaled = numbers if self.factor == 1 else numbers * self.factor
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


@torch.inference_mode()
def scaling_of(model: Any) -> Scaling:
    """Run a causal LM over a few tokens, and return what it makes of its output layer's numbers.

    A warning where that is no factor and no cap that its config names: drafts by this layer are then worse than they
    could be, and texts stay what they are.
    """
    numbers, logits = _both(model)
    config = model.config.get_text_config()
    cap = next((cap for name in _CAPS if (cap := getattr(config, name, None))), None)
    fine = model.dtype.itemsize >= 4
    tried = [_fitted(numbers, logits, limit) for limit in dict.fromkeys((cap, None))]
    off, scaling = min(tried, key=lambda fit: fit[0])
    if not off <= (1e-3 if fine else 0.1):
        warnings.warn(
            f"the logits of {type(model).__name__} are not its output layer's numbers times a factor (off by "
            f"{off:.1%}): a head that reads this layer drafts by other probabilities, and worse than it could",
            stacklevel=3,
        )
        return Scaling()
    return scaling if abs(scaling.factor - 1) > (1e-5 if fine else 1e-2) else scaling._replace(factor=1.0)


def _both(model: Any) -> tuple[Tensor, Tensor]:
    """Return, of some rows, the output layer's numbers and the model's logits."""
    output, vocab = model.get_output_embeddings(), model.get_input_embeddings().weight.shape[0]
    tokens = torch.tensor([[(7 * row + 3) % vocab for row in range(_ROWS)]], device=model.device)
    logits, states = logits_and_states(model, tokens, (-1,))
    numbers = output(states[-1].to(*home_of(output)))
    return numbers.double().flatten(), logits.to(numbers.device).double().flatten()


def _fitted(numbers: Tensor, logits: Tensor, cap: float | None) -> tuple[float, Scaling]:
    """Return the scaling with this cap that fits best, and by how much of the logits it is off."""
    here = numbers.isfinite() & (logits.abs() < 1e4)  # some models shut tokens out
    numbers, logits = numbers[here], logits[here]
    free = torch.ones_like(logits, dtype=torch.bool) if cap is None else logits.abs() < 0.9 * cap
    linear = logits[free] if cap is None else cap * torch.atanh(logits[free] / cap)
    scaling = Scaling(float((linear @ numbers[free]) / (numbers[free] @ numbers[free])), cap)
    return float((scaling(numbers) - logits).norm() / logits.norm()), scaling
