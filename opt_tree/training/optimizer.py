"""Muon for the hidden matrices, AdamW for everything else, as one optimizer that `Trainer` can step, save and resume.

Also the loop that trains the small networks of controllers.
Muon: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from opt_tree.training.files import working_dtype

_READ = ("embed", "lm_head", "markov_w2", "confidence")
"""In the names of matrices that look up tokens or read them, and of one row: AdamW has them, as it has vectors."""


class Float32Muon(torch.optim.Muon):
    """torch's Muon with Nesterov momentum and updates of AdamW's size, all in float32.

    torch rounds the matrices to bfloat16 for the products of the Newton-Schulz iteration, whatever they come in.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters from their gradients."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if (gradient := matrix.grad) is None:
                    continue
                mean = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(gradient))
                mean.lerp_(gradient, 1 - group["momentum"])
                update = _orthogonal(gradient.lerp(mean, group["momentum"]), group["ns_coefficients"])
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def _orthogonal(
    matrix: Float[Tensor, "rows columns"], coefficients: tuple[float, float, float]
) -> Float[Tensor, "rows columns"]:
    """Return nearly U V^T of a matrix U S V^T, by five Newton-Schulz iterations."""
    one, three, five = coefficients
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = one * wide + (three * gram + five * gram @ gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


class MuonAdamW(torch.optim.Optimizer):
    """Step two optimizers over disjoint parameters.

    Invariant: `param_groups` holds the very dictionaries of the inner optimizers, so a learning-rate scheduler that
    writes into this optimizer's groups steers both.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        tables = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
        hidden, others = list[nn.Parameter](), list[nn.Parameter]()
        for name, p in model.named_parameters():
            if p.requires_grad:
                matrix = p.ndim == 2 and p not in tables and not any(word in name for word in _READ)
                (hidden if matrix else others).append(p)
        # match_rms_adamw: one learning rate serves both, because a Muon update is scaled to AdamW's size.
        kind = torch.optim.Muon if working_dtype() is torch.bfloat16 else Float32Muon
        self.muon = kind(hidden, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        super().__init__([*hidden, *others], {"lr": lr})
        self._link()

    def _link(self) -> None:
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters from their gradients."""
        self.muon.step()
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self._link()


def epochs(
    optimizer: torch.optim.Optimizer, loss_of: Callable[[Tensor], Tensor], count: int, batch: int, most: int
) -> Iterator[None]:
    """Train on `count` examples, in another order in each of `most` epochs; yield after each.

    `loss_of` gives the loss of the examples of some numbers. The learning rate falls to nothing by a cosine.
    """
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, most * -(-count // batch))
    for _ in tqdm(range(most), desc="training", unit="epoch", disable=None):
        for rows in torch.randperm(count).split(batch):
            optimizer.zero_grad()
            loss_of(rows).backward()
            optimizer.step()
            schedule.step()
        yield
