"""Loading a small model as a drafter: whole, trimmed, path by path, or in the words of another tokenizer."""

import torch

from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.draft_vocabulary import read_vocabulary
from opt_tree.methods.drafters.registry import DrafterOptions, register
from opt_tree.methods.drafters.small_models.chain_lm import model_drafter
from opt_tree.methods.drafters.small_models.common_tokens import CommonTokens
from opt_tree.methods.drafters.small_models.other_vocabulary import OtherVocabulary
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import check_finite, load_causal_lm, load_tokenizer, refused
from opt_tree.models.vocabularies import same_tokens, shared_ids


@register(
    "lm",
    about="an independent draft model; of another tokenizer, too, where the bytes of its tokens are known",
    paper="2211.17192",
    part="draft",
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    shared, common = None, None
    if options.tokenizer is not None:
        own = load_tokenizer(path)
        if same_tokens(options.tokenizer, own):
            shared = shared_ids(options.tokenizer, own, target.name, path)
        else:
            common = CommonTokens(options.tokenizer, own, target.name, path)
    dtype = target.dtype if options.dtype == "auto" else options.dtype
    lm = load_causal_lm(path, dtype, options.device, options.buckets, options.weights)
    check_finite(path, dict(lm.model.named_parameters()))
    tokens, vocab = read_vocabulary(path, lm.vocab), target.vocab
    if common is not None:
        with refused(f"{path} cannot draft for {target.name}"):
            if not isinstance(lm, CausalLM):
                raise ValueError("it has another tokenizer, and is scored path by path")
            return OtherVocabulary(lm, common, vocab, tokens)
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
