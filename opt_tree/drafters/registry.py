"""Drafters by name: the one list from which commands, demos and `load_pair` take theirs.

A spec is a kind and, behind a colon, where it lies: `lm:JackFram/llama-68m`, `eagle:./head`, `eagle:demo`. A new kind
of drafter is one file beside this one and one line in `KINDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from opt_tree.checkpoints import (
    CheckpointError,
    check_same_tokenizer,
    load_causal_lm,
    load_tokenizer,
    read_calibration,
    resolve,
)
from opt_tree.drafters.base import Drafter
from opt_tree.drafters.causal_lm import CausalLMDrafter
from opt_tree.drafters.eagle import load_eagle
from opt_tree.drafters.sharpened import Sharpened
from opt_tree.lm import Buckets, CausalLM


@dataclass(frozen=True)
class DrafterOptions:
    """What a drafter is loaded with, besides its spec."""

    tokenizer: PreTrainedTokenizerBase | None = None
    """The target's; what brings a tokenizer of its own is checked against it."""
    dtype: str | torch.dtype = "auto"
    """Of an independent model; "auto": float32 on a CPU, else the checkpoint's own."""
    device: str = "cpu"
    buckets: Buckets | None = None
    bare: bool = False
    """Leave out the temperature that calibration stored beside the drafter."""


class Spec(NamedTuple):
    """A spec, understood."""

    kind: str
    path: str
    """A folder, a Hub id or "demo"; empty for a kind that reads no files."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}" if self.path else self.kind


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: what it is, and how one is loaded."""

    about: str
    load: Callable[[str, CausalLM, DrafterOptions], Drafter]
    """From a path, the target and options. Raises CheckpointError with the path in it."""
    part: str | None
    """The folder of the embedded one, which "demo" stands for; None for a kind that reads no files."""


def _load_lm(path: str, target: CausalLM, options: DrafterOptions) -> Drafter:
    if options.tokenizer is not None:
        check_same_tokenizer(options.tokenizer, load_tokenizer(path), target.name, path)
    dtype = options.dtype
    if dtype == "auto" and torch.device(options.device).type == "cpu":
        dtype = torch.float32
    return CausalLMDrafter(load_causal_lm(path, dtype, options.device, options.buckets), target.vocab)


def _load_eagle(path: str, target: CausalLM, options: DrafterOptions) -> Drafter:
    return load_eagle(path, target, options.buckets)


KINDS: dict[str, Kind] = {
    "lm": Kind("an independent draft model with the target's tokenizer", _load_lm, "draft"),
    "eagle": Kind("an EAGLE-1/2 head of this target", _load_eagle, "eagle"),
}
"""Every kind of drafter, by the word in front of the colon."""


def parse_spec(text: str) -> Spec:
    """Read a spec. What names no kind is the path of a draft model; "demo" is the embedded one.

    Raises CheckpointError for a kind that there is not, and for a path that is missing or not wanted.
    """
    kind, colon, path = text.partition(":")
    if kind not in KINDS:
        if colon and "/" not in kind and not Path(text).exists():
            raise CheckpointError(f"unknown kind of drafter {kind!r} in {text!r}; there are {', '.join(KINDS)}")
        kind, path = "lm", text
    if KINDS[kind].part is None and path:
        raise CheckpointError(f"a drafter of kind {kind} reads no files, got {text!r}")
    if KINDS[kind].part is not None and not path:
        raise CheckpointError(f"{text!r} does not say where it lies: {kind}:PATH, or {kind}:demo")
    return Spec(kind, path)


def load_drafter(spec: str, target: CausalLM, options: DrafterOptions = DrafterOptions()) -> Drafter:
    """Load a drafter for `target`: `lm:PATH`, `eagle:PATH`, ...; see `KINDS`. PATH may be a Hub id or "demo".

    A temperature that `opt_tree.training.calibrate` stored beside it sharpens it at temperature 0.
    Raises CheckpointError with the path in it where there is none, or none for this target.
    """
    kind, path = parse_spec(spec)
    folder = resolve(path, KINDS[kind].part or "")
    drafter = KINDS[kind].load(folder, target, options)
    drafter.name = path
    temperature = read_calibration(folder) if path and not options.bare and not drafter.sparse else None
    return Sharpened(drafter, temperature) if temperature else drafter
