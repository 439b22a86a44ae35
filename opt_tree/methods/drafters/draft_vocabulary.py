"""The reduced vocabulary of a drafter's output layer (FR-Spec, arXiv:2502.14856): which tokens have a column.

Owns its layout in checkpoints, which is EAGLE-3's: `d2t[i]` is the target's id of column i less i, `t2d` marks the
target's tokens that have a column. They lie among a head's tensors, or in a file of their own beside weights that stay
as they were published.
"""

import warnings
from collections.abc import Mapping

import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from opt_tree.errors import one_line
from opt_tree.models.checkpoints import CheckpointError, find_file

VOCABULARY = "draft_vocabulary.safetensors"


def take_vocabulary(tensors: dict[str, Tensor], vocab: int) -> Int[Tensor, " columns"] | None:
    """Take `d2t` and `t2d` out of a checkpoint; return which token of the target each column is, None without `d2t`.

    A `d2t` of zeros makes column i token i, and a `t2d` that marks no token or all of them is no reason against it: so
    SpecForge begins. A warning says that it may never have been filled in, unless it is the whole vocabulary. Raises
    ValueError where they are no vocabulary of a target of `vocab` tokens.
    """
    offsets, marks = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        return None
    if offsets.ndim != 1 or offsets.is_floating_point():
        raise ValueError(f"d2t is {tuple(offsets.shape)} of {offsets.dtype}, expected a row of integers")
    tokens = offsets.long() + torch.arange(len(offsets))  # `d2t` holds each token less its column
    if not len(tokens):
        raise ValueError("d2t is empty: no token has a column")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise ValueError(f"d2t leads to tokens {tokens.min()} to {tokens.max()}, the target has {vocab}")
    if not offsets.any() and (marks is None or not marks.any() or bool(marks.all())):
        if len(tokens) == vocab:
            return tokens if marks is None or marks.any() else None
        warnings.warn(
            f"d2t holds zeros alone: the first {len(tokens)} tokens of {vocab} are drafted, which may be a draft "
            "vocabulary that was never filled in",
            stacklevel=3,
        )
        return tokens
    if marks is not None and not marks.any():
        raise ValueError("t2d marks no token: the draft vocabulary was never filled in")
    if len(tokens.unique()) < len(tokens):
        raise ValueError("d2t leads to some tokens twice")
    if marks is not None and not torch.equal(marks.nonzero().flatten(), tokens.sort().values):
        raise ValueError("t2d marks other tokens than d2t leads to")
    return tokens


def vocabulary_tensors(tokens: Int[Tensor, " columns"], vocab: int) -> Mapping[str, Tensor]:
    """Return `d2t` and `t2d` for a checkpoint."""
    marks = torch.zeros(vocab, dtype=torch.bool)
    marks[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": marks}


def trimmed_further(path: str, own: Int[Tensor, " columns"] | None, vocab: int) -> Int[Tensor, " columns"] | None:
    """Return the draft vocabulary of a head at `path`: its `own`, or that of a file beside its weights.

    Raises ValueError where it has both, and CheckpointError as `read_vocabulary` does.
    """
    beside = read_vocabulary(path, vocab)
    if beside is None:
        return own
    if own is not None:
        raise ValueError(f"it has a draft vocabulary of {len(own)} tokens, and {VOCABULARY} names {len(beside)}")
    return beside


def read_vocabulary(path: str, vocab: int) -> Int[Tensor, " columns"] | None:
    """Return the tokens that a folder trims its drafter to by a file of their own, None where it has no such file.

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


def needed_vocabulary(path: str, vocab: int) -> Int[Tensor, " columns"]:
    """Return what `read_vocabulary` does; CheckpointError where there is no such file."""
    tokens = read_vocabulary(path, vocab)
    if tokens is None:
        raise CheckpointError(f"{path} has no {VOCABULARY}")
    return tokens
