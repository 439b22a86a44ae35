"""The seam between shapes and kernels: `lm.py` decides what a forward is, an engine computes it.

Everything a model computes goes through `Engine.run`. Knows nothing of trees, contexts and who asked.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.core.children import TopK
from opt_tree.core.target import Output

Mask = Bool[Tensor, "lanes 1 rows keys"]


class Inputs(NamedTuple):
    """One forward, ready to run: its tensors lie on the model's device, padded as far as they ever will be.

    The model's cache is open for it: room is reserved, and `slots` are the ones to write.
    """

    ints: Int[Tensor, "3 rows"]
    """Tokens, positions, and slots: where the rows go in the cache."""
    mask: Mask | dict[str, Mask]
    """True where a row sees a key; one for each kind of attention layer where the model has several."""
    slots: Int[Tensor, " rows"] | None
    """The slots, unless the rows go right behind those in use, one after the other."""
    features: Float[Tensor, "rows hidden"] | None = None
    """Inputs of a head that drafts in the target's feature space."""
    last_only: bool = False
    """Only the last row's logits are needed; an engine may compute more."""
    scale: Float[Tensor, ""] | None = None
    """Laws are asked for: of the logits times this; see `probabilities.grouped_log_probs`."""
    columns: int = 0
    """Of the laws: the tokens that the asker knows."""
    children: TopK | None = None
    """The children to pick from the laws, where the engine `picks`."""
    above: Float[Tensor, " rows"] | None = None
    """Path log-probabilities of the rows, for them; -inf: none are picked there."""


class Engine(ABC):
    """Computes forwards of one model over one cache."""

    name: str
    """In a word, for a reader: "eager", "aot"."""
    least_rows: int = 1
    """Forwards of fewer rows are padded to this many before they get here."""
    picks: bool = False
    """Whether it picks the children of a draft layer in its forward (`Inputs.children`)."""
    layers: tuple[int, ...] = ()
    """The layers whose hidden states are returned."""

    @abstractmethod
    def changed(self, what: str) -> None:
        """The model was changed, as a text that begins found: keep nothing of what it was. `what`: a clause."""

    @abstractmethod
    def run(self, forward: Inputs) -> Output:
        """Write the rows into the cache; return their logits (or the last row's) and the watched features."""

    @abstractmethod
    def watch(self, layers: tuple[int, ...]) -> None:
        """Return features of these layers from now on; ValueError names one that the model does not have."""
