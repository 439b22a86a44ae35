"""What drafters of one model have in common: its vocabulary beside the target's, and laws beside its scores.

Owns how a forward of a `CausalLM` becomes an answer. Knows nothing of what the model reads.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.core.children import Picking, Reduced
from opt_tree.core.pool import Frontier
from opt_tree.core.target import Laws, Output
from opt_tree.drafters.base import Drafter, normalised
from opt_tree.models.causal_lm import CausalLM


class OfModel(Drafter):
    """A drafter that answers by one forward of a `CausalLM`, which normalises its scores where it computes them.

    A subclass says which model (`take_model`), passes `_picking` to its forward, and answers by `_scores`. Who changes
    an answer on its way (a subclass of it) is heard: laws of another one are not taken.
    """

    lm: CausalLM
    vocab: int
    """The target's first tokens, as many as the model knows."""
    tokens: Int[Tensor, " columns"] | None = None
    """The draft vocabulary: those of them that it drafts; None: all."""
    _picking: Picking | None = None
    """Of the laws that are wanted now; None: none are."""
    _said: tuple[Any, Laws | None] = (None, None)
    """The last answer, and the laws of just this."""

    def take_model(self, lm: CausalLM, vocab: int, whole: int, tokens: Int[Tensor, " columns"] | None = None) -> None:
        """Draft with this model for a target of `whole` tokens."""
        self.lm, self.models, self.vocab, self._whole = lm, (lm,), vocab, whole
        self.tokens = None if tokens is None else tokens.to(lm.device)
        self._names = None if tokens is None else tokens.cpu()  # where children are read
        lm.columns = vocab if tokens is None else len(tokens)

    def _known(self, tokens: list[int]) -> list[int]:
        """Return tokens for the model to read: 0 for those that only the target knows (a padded vocabulary)."""
        return [token if token < self.vocab else 0 for token in tokens]

    def _scores(self, output: Output) -> Float[Tensor, "rows vocab"] | Reduced:
        """Return what a forward says of the tokens that are drafted; its laws, where it made any, are kept for `_laws`.

        Tokens that only the target knows are never proposed, nor columns that the target has not.
        """
        if self.tokens is None:
            logits = output.logits
            answer: Tensor | Reduced = logits if logits.shape[1] == self.vocab else logits[:, : self.vocab]
        else:
            answer = Reduced(output.logits, self.tokens, self._whole)
        if output.laws is not None:
            self._said = answer, output.laws._replace(tokens=self._names)
        return answer

    @property
    def settings(self) -> dict[str, Any]:
        return {"draft_dtype": str(self.lm.dtype).removeprefix("torch.")}

    def _size(self) -> str:
        """The model's size and, where there is one, its draft vocabulary's, for a reader."""
        return self.lm.size if self.tokens is None else f"{self.lm.size}, {len(self.tokens)} tokens of {self._whole}"

    def root_laws(self, context: list[int], picking: Picking = Picking()) -> Laws:
        return self._laws(self.root, context, picking)

    def expand_laws(self, frontier: Frontier, picking: Picking = Picking()) -> Laws:
        return self._laws(self.expand, frontier, picking)

    def _laws(self, ask: Callable[[Any], Any], about: Any, picking: Picking) -> Laws:
        self._picking = picking
        try:
            answer = ask(about)
            said, laws = self._said
        finally:
            self._picking, self._said = None, (None, None)
        return laws if laws is not None and said is answer else normalised(answer, picking.scale)
