"""The network by the kernels that suit a tree best, kernel after kernel: what every other backend is compared with.

Weights are packed once for a CPU, and keys are not copied for the queries that share them. Forwards may be padded to
few shapes (`Buckets`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Self

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache

from opt_tree.backend import Inputs
from opt_tree.backends.canonical import ROWS
from opt_tree.backends.grouped_attention import grouped_attention
from opt_tree.backends.hidden_states import WithHiddenStates
from opt_tree.backends.prepacked import PackedWeights
from opt_tree.backends.snapshot import Change, Snapshot
from opt_tree.errors import require
from opt_tree.target import Output


@dataclass(frozen=True)
class Buckets:
    """Shapes a forward is padded to: the rows to the next of `rows`, the keys to the next of `keys` (then doubling).

    Few distinct shapes are what CUDA graphs and compiled kernels need. Padding is exact: pad rows see only themselves
    and no row sees them.
    """

    rows: tuple[int, ...] = (1, 8, 16, 32, 64, 128)
    keys: tuple[int, ...] = (512, 1024, 2048, 4096)

    def __post_init__(self) -> None:
        require(Sequence, rows=self.rows, keys=self.keys)
        for size in (*self.rows, *self.keys):
            require(Integral, size=size)
            if size < 1:
                raise ValueError(f"a bucket holds at least 1, got {size}")

    def pad(self, rows: int, start: int) -> tuple[int, int]:
        """Return the padded rows and keys of a forward whose first row goes to slot `start`.

        A forward larger than every row bucket (a prefill) keeps its rows.
        """
        rows = next((size for size in self.rows if size >= rows), rows)
        keys = start + rows
        size = next((size for size in self.keys if size >= keys), None)
        if size is None:
            size = self.keys[-1]
            while size < keys:
                size *= 2
        return rows, size


class Packed(WithHiddenStates):
    """Calls the network's own `forward` with its weights packed, where they can be, and its keys as they lie."""

    name = "eager"

    def __init__(self, network: Any, packed: PackedWeights | None = None) -> None:
        """`packed`: weights of a model that this network is a part of, whose owner looks after them."""
        super().__init__(network)
        self.buckets: Buckets | None = None
        """The shapes that forwards are padded to; None: to none."""
        self.packed = PackedWeights(network) if packed is None else packed
        self.changes = 0
        """How often the network was found to be another one."""
        self.change: Change | None = None
        """What was found last."""
        self.accepted = True
        """Whether whoever wrapped the network takes it as it is now."""
        self._snapshot = Snapshot(network) if packed is None else None

    @property
    def eager(self) -> Self:
        """Itself: who computes what a compiled backend does not."""
        return self

    @property
    def rows_at_once(self) -> int | None:  # type: ignore[override]
        """How many rows every forward of canonical arithmetic has on CUDA; None: as many as are asked for."""
        cuda = self.network.get_input_embeddings().weight.device.type == "cuda"
        return ROWS if self.packed.canonical and cuda else None

    def begin_text(self) -> bool:
        """See `Backend.begin_text`. What has changed is packed anew."""
        change = None if self._snapshot is None else self._snapshot.change()
        if change is None:
            return True
        self.renew()
        self.change, self.changes = change, self.changes + 1
        return False

    def renew(self) -> None:
        """Take the network as it is now for the one that is known."""
        self.packed.forget()
        self._snapshot = Snapshot(self.network)

    def shape(self, rows: int, first_slot: int) -> tuple[int, int]:
        rows = max(rows, self.rows_at_once or 0)
        return (rows, first_slot + rows) if self.buckets is None else self.buckets.pad(rows, first_slot)

    def forward(self, inputs: Inputs, cache: Cache) -> Output:
        with attention_kernels(inputs.numbers.device), self.packed, grouped_attention():
            return super().forward(inputs, cache)


def attention_kernels(device: torch.device) -> AbstractContextManager:
    """Keep masked attention off cuDNN, which plans anew for every key length: a tree has a new one at every step."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
