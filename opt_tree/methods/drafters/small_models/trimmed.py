"""A draft model whose output layer has a part of the vocabulary (FR-Spec, arXiv:2502.14856): same body, fewer columns.

`draft_vocabulary.safetensors` says which tokens these are (`draft_vocabulary.py`). In small models the output layer is
much of the arithmetic; rare tokens are not worth it.
"""

from jaxtyping import Int
from torch import Tensor

from opt_tree.draft_model import CausalLMDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.quantised_layers import is_linear, rows_of


class TrimmedDrafter(CausalLMDrafter):
    """Drafts the tokens of `tokens` only, with a causal LM whose output layer it replaces by their rows.

    The model is this drafter's from then on: its logits are `[rows, len(tokens)]`. Raises ValueError for tokens that
    the model or the target lacks, and for an output layer that is not linear.
    """

    def __init__(self, lm: CausalLM, tokens: Int[Tensor, " columns"], vocab: int | None = None) -> None:
        super().__init__(lm, vocab)
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= self.vocab:
            raise ValueError(f"a draft vocabulary of tokens {tokens.tolist()[:3]}..., of which there are {self.vocab}")
        tokens = tokens.sort().values
        self.take_model(lm, self.vocab, vocab or lm.vocab, tokens)
        cut_output(lm, tokens)


def cut_output(lm: CausalLM, rows: Int[Tensor, " columns"]) -> None:
    """Replace the output layer of a model by some of its rows. Raises ValueError for one that is not linear."""
    output = lm.model.get_output_embeddings()
    if not is_linear(output):
        raise ValueError(f"the output layer of {lm.name} is a {type(output).__name__}, which cannot be trimmed")
    lm.model.set_output_embeddings(rows_of(output, rows))
    lm.renew()  # the whole output layer is given back
