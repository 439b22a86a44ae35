"""Loading a small model as a drafter: whole, trimmed, path by path, or in the words of another tokenizer.

Owns the note in the folder of a trimmed one: `trimmed.json`, whose "model" is a folder or a known name. The model's own
files stay where they are.
"""

import json
from pathlib import Path

import torch

from opt_tree.drafter import Drafter
from opt_tree.errors import one_line
from opt_tree.methods.drafters.draft_vocabulary import VOCABULARY, needed_vocabulary
from opt_tree.methods.drafters.registry import DrafterOptions, register
from opt_tree.methods.drafters.small_models.chain_lm import model_drafter
from opt_tree.methods.drafters.small_models.common_tokens import CommonTokens
from opt_tree.methods.drafters.small_models.other_vocabulary import OtherVocabulary
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import (
    CheckpointError,
    check_finite,
    find_file,
    load_causal_lm,
    load_config,
    load_tokenizer,
    refused,
)
from opt_tree.models.named import resolve
from opt_tree.models.vocabularies import same_files, same_tokens, shared_ids

NOTE = "trimmed.json"


def trimmed_model(folder: str) -> str:
    """The draft model that a folder trims, as its note names it. CheckpointError for a note that names none."""
    note = find_file(folder, NOTE)
    try:
        named = json.loads(note.read_text(encoding="utf-8"))["model"]
        if not isinstance(named, str) or not named:
            raise ValueError(f"its model is {named!r}")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{note} does not say what is trimmed: {one_line(error)}") from error
    return named


@register(
    "lm",
    about="an independent draft model; of another tokenizer, too, where the bytes of its tokens are known",
    paper="2211.17192",
    part="draft",
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    if (Path(path) / VOCABULARY).is_file():
        raise CheckpointError(f"{path} has a {VOCABULARY}: trim its model anew, for trimmed:PATH")
    return _loaded(path, target, options, None)


@register(
    "trimmed",
    about="an independent draft model that drafts frequent tokens only, by `opt-tree trim`: trimmed:qwen2.5-coder-0.5b",
    paper="2502.14856",
    part="trimmed",
    others=lambda folder: [f"lm:{trimmed_model(folder)}"],
)
def _load_trimmed(folder: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return _loaded(resolve(trimmed_model(folder), "draft"), target, options, folder)


def _loaded(path: str, target: AnyLM, options: DrafterOptions, listed: str | None) -> Drafter:
    """Load the model at `path`, with the draft vocabulary of the folder `listed`; None: with all its tokens."""
    shared, common = None, None
    load_config(path)  # whose every value is read here, also those that a dtype of the caller's would pass over
    if options.tokenizer is not None and not same_files(options.tokenizer, path):
        own = load_tokenizer(path)
        if same_tokens(options.tokenizer, own):
            shared = shared_ids(options.tokenizer, own, target.name, path)
        else:
            common = CommonTokens(options.tokenizer, own, target.name, path)
    dtype = target.dtype if options.dtype == "auto" else options.dtype
    lm = load_causal_lm(path, dtype, options.device, options.weights)
    check_finite(path, dict(lm.model.named_parameters()))
    tokens, vocab = None if listed is None else needed_vocabulary(listed, lm.vocab), target.vocab
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
