"""Muon for the hidden matrices, AdamW for everything else, as one optimizer that `Trainer` can step, save and resume.

Also the loop that trains the small networks of controllers.
Muon: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

_READ = ("embed", "lm_head", "markov_w2", "confidence")
"""In the names of matrices that look up tokens or read them, and of one row: AdamW has them, as it has vectors."""


class MuonAdamW(torch.optim.Optimizer):
    """Step two optimizers over disjoint parameters.

    Invariant: `param_groups` holds the very dictionaries of the inner optimizers, so a learning-rate scheduler that
    writes into this optimizer's groups steers both.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        tables = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
        hidden = [
            parameter
            for name, parameter in trainable.items()
            if parameter.ndim == 2 and parameter not in tables and not any(word in name for word in _READ)
        ]
        others = [p for p in trainable.values() if all(p is not q for q in hidden)]
        # match_rms_adamw: one learning rate serves both, because a Muon update is scaled to AdamW's size.
        self.muon = torch.optim.Muon(hidden, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
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
