"""A draft model whose output layer has a part of the vocabulary (FR-Spec, arXiv:2502.14856): same body, fewer columns.

`draft_vocabulary.safetensors` beside the model's own file says which tokens these are
(`opt_tree.drafters.draft_vocabulary`). In small models the output layer is much of the arithmetic; rare tokens are not
worth it.
"""

from jaxtyping import Int
from torch import Tensor, nn

from opt_tree.core.children import Reduced
from opt_tree.core.target import Output
from opt_tree.drafters.heads.eagle_head import rows_of
from opt_tree.drafters.small_models.causal_lm import CausalLMDrafter
from opt_tree.models.causal_lm import CausalLM


class TrimmedDrafter(CausalLMDrafter):
    """Drafts the tokens of `tokens` only, with a causal LM whose output layer it replaces by their rows.

    The model is this drafter's from then on: its logits are `[rows, len(tokens)]`. Raises ValueError for tokens that
    the model or the target lacks, and for an output layer that is not linear.
    """

    def __init__(self, lm: CausalLM, tokens: Int[Tensor, " columns"], vocab: int | None = None) -> None:
        super().__init__(lm, vocab)
        output = lm.model.get_output_embeddings()
        if type(output) is not nn.Linear:
            raise ValueError(f"the output layer of {lm.name} is a {type(output).__name__}, which cannot be trimmed")
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= self.vocab:
            raise ValueError(f"a draft vocabulary of tokens {tokens.tolist()[:3]}..., of which there are {self.vocab}")
        self.tokens, self._whole = tokens.sort().values, vocab or lm.vocab
        lm.model.set_output_embeddings(rows_of(output, self.tokens))
        lm.columns = len(tokens)

    def _scores(self, output: Output) -> Reduced:
        answer = Reduced(output.logits, self.tokens, self._whole)
        if output.laws is not None:
            self._said = answer, output.laws._replace(tokens=self.tokens)
        return answer

    def describe(self) -> str:
        return f"{super().describe()}, {len(self.tokens)} tokens of {self._whole}"
