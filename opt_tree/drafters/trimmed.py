"""A draft model whose output layer has a part of the vocabulary (FR-Spec, arXiv:2502.14856): same body, fewer columns.

Owns the file that says which tokens these are, `draft_vocabulary.safetensors` beside the model's own, and the drafter.
In small models the output layer is much of the arithmetic; rare tokens are not worth it.
"""

from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from opt_tree.checkpoints import CheckpointError, find_file, one_line
from opt_tree.children import Reduced
from opt_tree.drafters.causal_lm import CausalLMDrafter
from opt_tree.drafters.eagle_head import rows_of
from opt_tree.drafters.reduced import take_vocabulary
from opt_tree.lm import CausalLM
from opt_tree.target import Output

VOCABULARY = "draft_vocabulary.safetensors"


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


def read_vocabulary(path: str, vocab: int) -> Int[Tensor, " columns"] | None:
    """Return the tokens that a folder trims its draft model to, None where it has no such file.

    `vocab`: tokens of the model. Raises CheckpointError where the file is not a vocabulary of it.
    """
    try:
        file = find_file(path, VOCABULARY)
    except (FileNotFoundError, CheckpointError):
        return None
    try:
        tokens = take_vocabulary(load_file(file), vocab)
        if tokens is None:
            raise ValueError("it has no d2t")
        return tokens
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} is no draft vocabulary: {one_line(error)}") from error
