"""A transformers model as a target or a drafter's model, as today's callers wrap it: `Model` behind its doors.

Owns the choice of a backend, what is refused when a model is wrapped or has changed, and the spellings of the outside.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from opt_tree.backend import Inputs
from opt_tree.backends.canonical import NotCanonicalError
from opt_tree.backends.hybrids import Hybrid
from opt_tree.backends.packed import Buckets, Packed
from opt_tree.backends.recurrent import RecurrentCache
from opt_tree.backends.recurrent_layers import recurrent_layers
from opt_tree.backends.windows import WithWindows
from opt_tree.errors import UnsupportedModelError, require
from opt_tree.models.canonical import check
from opt_tree.models.capabilities import (
    check_layers,
    check_model,
    check_unchanged,
    key_limit,
    logits_per_row,
)
from opt_tree.models.given_rows import adopt, begins_with
from opt_tree.models.left_out import TellsLeftOut
from opt_tree.models.positions import context_limit, rope_border
from opt_tree.models.probe import check_tree_mask
from opt_tree.models.quantised_layers import weights_of
from opt_tree.models.tensor_parallel import Spread, ranks_of, tell
from opt_tree.target import Forward, Output, shared

if TYPE_CHECKING:
    from opt_tree.models.split_target import SplitTarget

__all__ = ["Buckets", "CausalLM", "Forward", "UnsupportedModelError", "check_tree_mask"]


class CausalLM(TellsLeftOut, WithWindows):
    """One transformers causal LM with one KV cache; batch size 1. Final: wrap it, do not subclass it.

    Committed rows are the context; `extend` scores rows behind them that stay pending until `commit` keeps some.
    A model is probed once, when it is wrapped: a forward over a small tree must give the logits of plain causal
    forwards, otherwise `UnsupportedModelError` says why.
    """

    not_canonical = ""
    """Why it is not `canonical` where it was to be, if it could."""
    key_limit: int | None = None
    """How many keys a forward may have; None: any number."""

    def __init__(self, model: Any, probe: bool = True) -> None:
        check_model(model)
        check_layers(model)
        self._logits, self.ranks = logits_per_row(model), ranks_of(model)
        super().__init__(model, _backend_of(model, self.ranks is not None))
        self.vocab, (self.max_context, self.context_note) = self._logits, context_limit(model)
        self.key_limit = key_limit(model)
        self.ahead: SplitTarget | None = None
        """Who scores the next tree, having run rows of it through the lower layers of this cache; None: nobody has."""
        self.places: Int[np.ndarray, " rows"] | None = None
        """Which pending row each row of the scored tree is, where `ahead` scored it."""
        self._given: Cache | None = None
        if self.device.type == "cpu":
            _keep_freed_memory()
        if probe:
            check_tree_mask(self)

    @property
    def eager(self) -> Packed:
        """The backend without compiled code, which every other one is compared with."""
        backend: Any = self.backend
        return backend.eager

    @property
    def buckets(self) -> Buckets | None:
        """The shapes that forwards are padded to, where they are captured (`compile_forwards`)."""
        return self.eager.buckets

    @buckets.setter
    def buckets(self, buckets: Buckets | None) -> None:
        if buckets is not None and self.recurrent:
            raise UnsupportedModelError(f"{self.name} has layers with a running state, which score a tree as it is")
        self.eager.buckets = buckets

    @property
    def canonical(self) -> bool:
        """Whether a token's logits are a function of the tokens before it alone; see `opt_tree.models.canonical`."""
        return self.eager.packed.canonical

    @property
    def quantised(self) -> bool:
        """Whether some weights have eight or four bits. Rows are then rounded coarsely, in float32, too."""
        return weights_of(self.model) is not None

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state of the whole context, which cannot be taken back."""
        return isinstance(self.cache, RecurrentCache)

    def renew(self) -> None:
        """Take the model as it is now for the one that was wrapped, as whoever replaces a layer of it on purpose."""
        self.eager.renew()
        self._logits = logits_per_row(self.model)

    def pack(self, wanted: bool = True) -> None:
        """Have eager forwards on a CPU take packed copies of the weights, as they do by themselves; or not.

        A tree's rows are scored in about half the time, in as much memory again. A weight that was changed is packed
        anew: at once, or before the next text where it was changed through `.data` (see `Snapshot`).
        A canonical target is checked again, which forgets its context: NotCanonicalError says what is not then.
        """
        require(bool, wanted=wanted)
        before = self.eager.packed.wanted
        self.eager.packed.pack(wanted)
        if self.canonical and wanted != before:
            try:
                check(self)
            except NotCanonicalError:
                self.eager.packed.pack(before)
                raise

    def begin(self) -> bool:
        """Look at the model before a text; return whether it is what it was before the last one.

        If not, nothing is computed as it was: neither by packed weights nor by compiled forwards. Raises
        UnsupportedModelError where it is no longer the kind of model that was wrapped.
        """
        check_unchanged(self.model, self.dtype, self.device)
        if super().begin() and self.eager.accepted:
            return True
        self.eager.accepted = False  # until it has passed: what is refused once is refused again
        check_model(self.model)
        if (logits := logits_per_row(self.model)) != self._logits:
            raise UnsupportedModelError(
                f"{self.name} had {self._logits} logits a row when it was wrapped and has {logits} now: wrap it again"
            )
        self.eager.accepted = True
        change = self.eager.change
        if change is not None and change.rebuilt and self.canonical:
            check(self)
        return False

    def reset(self) -> None:
        """Forget the context. Raises UnsupportedModelError where the model is no longer what was wrapped."""
        super().reset()
        self.ahead = self.places = None

    def keep(self, prompt: list[int], most: int) -> int:
        """See `Target.keep`."""
        return super().keep(prompt, 0 if self._given is not None else most)

    def cut(self, length: int) -> None:
        """Forget every row from `length` on."""
        super().cut(length)
        self.ahead = self.places = None

    def text(
        self,
        tokens: Sequence[int],
        features: Float[Tensor, "tokens hidden"] | None = None,
        all_logits: bool = False,
    ) -> Forward:
        """See `Target.text`. `features` are inputs of a head that drafts in the target's feature space."""
        if self._given is not None and self.length == 0:
            adopt(self.cache, self._given)
            self._tokens = [-1] * self.length
            tokens = tokens[self.length :]
            if not len(tokens):
                nothing = np.zeros(0, dtype=np.int64)
                return Forward(self, nothing, nothing, np.zeros((0, 0), dtype=bool))
        return super().text(tokens, features, all_logits)

    def append(
        self,
        tokens: list[int],
        all_logits: bool = False,
        features: Float[Tensor, "tokens hidden"] | None = None,
    ) -> Output:
        """Run a `text` by itself."""
        return self.run(self.text(tokens, features, all_logits))

    def extend(
        self,
        tokens: Int[np.ndarray, " rows"],
        positions: Int[np.ndarray, " rows"],
        visible: Bool[np.ndarray, "rows columns"],
        features: Float[Tensor, "rows hidden"] | None = None,
    ) -> Output:
        """Add pending rows and return their logits; see `Forward`."""
        return self.run(Forward(self, tokens, positions, visible, features))

    def run(self, forward: Forward) -> Output:
        """See `Model.run`. Whoever has run lower layers of a tree's rows goes on from there."""
        if forward.tree is not None:
            ahead, self.ahead, self.places = self.ahead, None, None
            if ahead is not None:
                return ahead.run(forward)
        return super().run(forward)

    def commit(self, path: list[int]) -> None:
        """See `Model.commit`."""
        if self.places is not None:
            path, self.places = self.places[path].tolist(), None
        super().commit(path)

    def prepare(self, forward: Forward) -> Inputs:
        """See `Model.prepare`."""
        if self.ranks is not None:
            tell(self, forward)
        if isinstance(self.cache, RecurrentCache):
            self.cache.expect(forward)
        if self.key_limit is not None:
            rows, columns = forward.visible.shape
            _, keys = self.backend.shape(rows, self.length + columns - rows)
            if keys > self.key_limit:
                raise UnsupportedModelError(
                    f"{self.name} is not causal beyond {self.key_limit} keys (its keep_window_size), and a forward "
                    f"over {self.length} tokens and a tree has {keys}"
                )
        return super().prepare(forward)

    def begins_with(self, past: Cache, tokens: list[int]) -> bool:
        """Whether a transformers cache holds the first rows of this context, which are those of these tokens."""
        alike = shared(self._tokens, tokens) >= past.get_seq_length()
        return alike and not self.recurrent and begins_with(self.cache, past)

    @contextmanager
    def given(self, rows: Cache) -> Iterator[None]:
        """Inside, every context begins with these rows of its first tokens, which transformers computed.

        The first `text` then has logits and features of the other tokens only.
        """
        if self.ranks is not None:
            raise ValueError("cache: the model is spread over processes, each with rows of its own; leave it out")
        if self.recurrent:
            raise ValueError("cache: its layers with a running state go on from their own; leave it out")
        if rope_border(self.model) is not None:
            raise ValueError(
                f"{self.name} may have rotated these rows by other factors (LongRoPE): pass the text alone"
            )
        self._given = rows
        try:
            yield
        finally:
            self._given = None

    def forget(self) -> None:
        """See `WithWindows.forget`."""
        super().forget()
        self._given = None


def _backend_of(model: Any, spread: bool) -> Packed:
    """The backend that a model needs: it is spread over processes, has layers with a state, or neither."""
    if recurrent_layers(model):
        if spread:
            raise UnsupportedModelError(
                f"{model.config.name_or_path or type(model).__name__} is spread over processes, and has layers "
                "with a running state, which score a tree as it is"
            )
        return Hybrid(model)
    return Spread(model) if spread else Packed(model)


def _keep_freed_memory() -> None:
    """Let the C library reuse the memory of a forward in the next one instead of giving it back to the system.

    glibc gives back what is larger than the largest block ever freed; a step of 60 nodes then pays for 600 page faults,
    or for none, as the heap happens to lie. Freeing one large block, never touched, settles it for the process.
    """
    torch.empty(31 << 20, dtype=torch.uint8)
