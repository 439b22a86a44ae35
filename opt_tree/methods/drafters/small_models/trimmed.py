"""A draft model whose output layer has a part of the vocabulary (FR-Spec, arXiv:2502.14856): same body, fewer columns.

`draft_vocabulary.safetensors` beside the model's own file says which tokens these are (`draft_vocabulary.py`). In small
models the output layer is much of the arithmetic; rare tokens are not worth it.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from opt_tree.draft_model import CausalLMDrafter
from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.draft_vocabulary import read_vocabulary
from opt_tree.methods.drafters.registry import DrafterOptions, register
from opt_tree.methods.drafters.small_models.chain_lm import model_drafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import check_finite, load_causal_lm, load_tokenizer, refused
from opt_tree.models.quantised_layers import is_linear, rows_of
from opt_tree.models.vocabularies import shared_ids


class TrimmedDrafter(CausalLMDrafter):
    """Drafts the tokens of `tokens` only, with a causal LM whose output layer it replaces by their rows.

    The model is this drafter's from then on: its logits are `[rows, len(tokens)]`. Raises ValueError for tokens that
    the model or the target lacks, and for an output layer that is not linear.
    """

    def __init__(self, lm: CausalLM, tokens: Int[Tensor, " columns"], vocab: int | None = None) -> None:
        super().__init__(lm, vocab)
        output = lm.model.get_output_embeddings()
        if not is_linear(output):
            raise ValueError(f"the output layer of {lm.name} is a {type(output).__name__}, which cannot be trimmed")
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= self.vocab:
            raise ValueError(f"a draft vocabulary of tokens {tokens.tolist()[:3]}..., of which there are {self.vocab}")
        tokens = tokens.sort().values
        self.take_model(lm, self.vocab, vocab or lm.vocab, tokens)
        lm.model.set_output_embeddings(rows_of(output, tokens))
        lm.renew()  # the whole output layer is given back


@register("lm", about="an independent draft model with the target's tokenizer", paper="2211.17192", part="draft")
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    shared = None
    if options.tokenizer is not None:
        shared = shared_ids(options.tokenizer, load_tokenizer(path), target.name, path)
    dtype = target.dtype if options.dtype == "auto" else options.dtype
    lm = load_causal_lm(path, dtype, options.device, options.buckets, options.weights)
    check_finite(path, dict(lm.model.named_parameters()))
    tokens, vocab = read_vocabulary(path, lm.vocab), target.vocab
    if shared is not None:
        shared = shared[shared < min(lm.vocab, vocab)]
        if tokens is not None:
            tokens = tokens[torch.isin(tokens, shared)]
        elif len(shared) == int(shared[-1]) + 1:  # all that is not shared is behind
            vocab = len(shared)
        else:
            tokens = shared
    if tokens is None:
        return model_drafter(lm, vocab)
    with refused(f"cannot trim {path}"):
        if not isinstance(lm, CausalLM):
            raise ValueError("it is scored path by path, with the whole vocabulary only")
        return TrimmedDrafter(lm, tokens, target.vocab)
