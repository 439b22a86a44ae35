"""Drafters by name: the one list from which commands, demos and `load_pair` take theirs.

A spec is a kind and, behind a colon, where it lies: `lm:JackFram/llama-68m`, `eagle:./head`, `eagle:demo`. A new kind
of drafter is one file beside this one and one line in `KINDS`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from opt_tree.core.errors import require
from opt_tree.drafters.base import Drafter
from opt_tree.drafters.combined.copying import Copying
from opt_tree.drafters.combined.grafted import Grafted
from opt_tree.drafters.combined.product import EXPONENTS, Product
from opt_tree.drafters.combined.rasd import Rasd
from opt_tree.drafters.combined.sharpened import Sharpened
from opt_tree.drafters.draft_vocabulary import read_vocabulary
from opt_tree.drafters.heads.dflash import load_dflash
from opt_tree.drafters.heads.eagle import load_eagle
from opt_tree.drafters.heads.eagle3 import is_eagle3, load_eagle3
from opt_tree.drafters.heads.early_exit import load_early_exit
from opt_tree.drafters.heads.one_pass import load_medusa
from opt_tree.drafters.heads.residual import load_residual_heads, read_base
from opt_tree.drafters.small_models.chain_lm import model_drafter
from opt_tree.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.drafters.tables.file_format import fingerprint
from opt_tree.drafters.tables.lookup import Lookup
from opt_tree.drafters.tables.ngram import NGramDrafter
from opt_tree.drafters.tables.ngram_recycling import NGramRecycling
from opt_tree.drafters.tables.recycling import TokenRecycling
from opt_tree.drafters.tables.store import Store, StoreDrafter
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.chain_lm import AnyLM, ChainLM
from opt_tree.models.checkpoints import (
    CheckpointError,
    check_finite,
    check_same_tokenizer,
    load_causal_lm,
    load_tensors,
    load_tokenizer,
    read_calibration,
    refused,
)
from opt_tree.models.named import resolve


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
    load: Callable[[str, AnyLM, DrafterOptions], Drafter]
    """From a path, the target and options. Raises CheckpointError with the path in it."""
    part: str | None
    """The folder of the embedded one, which "demo" stands for; None for a kind that reads no files."""


def _load_lm(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    if options.tokenizer is not None:
        check_same_tokenizer(options.tokenizer, load_tokenizer(path), target.name, path)
    dtype = options.dtype
    if dtype == "auto" and torch.device(options.device).type == "cpu":
        dtype = torch.float32
    lm = load_causal_lm(path, dtype, options.device, options.buckets)
    check_finite(path, dict(lm.model.named_parameters()))
    tokens = read_vocabulary(path, lm.vocab)
    if tokens is None:
        return model_drafter(lm, target.vocab)
    with refused(f"cannot trim {path}"):
        if not isinstance(lm, CausalLM):
            raise ValueError("it is scored path by path, with the whole vocabulary only")
        return TrimmedDrafter(lm, tokens, target.vocab)


def _read(target: AnyLM) -> CausalLM:
    """Return a target whose hidden states a drafter reads."""
    if not isinstance(target, CausalLM):
        raise CheckpointError(f"{target.name} is scored path by path: its hidden states are not there to be read")
    return target


def _load_eagle(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    tensors = load_tensors(path)
    load = load_eagle3 if is_eagle3(tensors) else load_eagle
    return load(path, _read(target), options.buckets, tensors)


def _load_eagle3(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return load_eagle3(path, _read(target), options.buckets)


def _load_exit(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return load_early_exit(path, _read(target), options.buckets)


def _load_medusa(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return load_medusa(path, _read(target))


def _load_dflash(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return load_dflash(path, _read(target))


def _load_onepass(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return load_residual_heads(path, load_drafter(read_base(path), target, options).bare, _read(target))


def _load_store(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    known = None if options.tokenizer is None else fingerprint(options.tokenizer)
    return StoreDrafter(Store.load(path, target.vocab, known))


def _load_graft(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    depth, _, pair = path.partition(":")
    if not depth.isdigit():
        raise CheckpointError(f"graft:DEPTH:SPEC+SPEC names the model's layers, the model, the table; got graft:{path}")
    model, table = _load_two(f"graft:{depth}", pair, target, options)
    with refused(f"graft:{path}"):
        return Grafted(model, table, int(depth))


def _load_copy(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    with refused(f"copy:{path}"):
        return Copying(load_drafter(path, target, options))


def _load_rasd(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    model, table = _load_two("rasd", path, target, options)
    if isinstance(table, StoreDrafter):  # as published: the longest match alone
        table = StoreDrafter(table.store, longest=True)
    return Rasd(model, table)


def _load_product(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    given = re.match(r"([\d.]+(?:,[\d.]+)+):", path)
    model, table = _load_two("product", path[given.end() :] if given else path, target, replace(options, bare=True))
    with refused(f"product:{path}"):
        return Product(model, table, [float(number) for number in given[1].split(",")] if given else EXPONENTS)


def _load_two(kind: str, pair: str, target: AnyLM, options: DrafterOptions) -> tuple[Drafter, Lookup]:
    """Load the two drafters of "SPEC+SPEC", of which the second one looks up."""
    first, plus, second = pair.rpartition("+")
    if not plus:
        raise CheckpointError(f"{kind}:SPEC+SPEC names a model and a table, got {kind}:{pair}")
    table = load_drafter(second, target, options)
    if not isinstance(table, Lookup):
        raise CheckpointError(f"{kind}: {second} is no table; below a model stand ngram, store, recycling")
    return load_drafter(first, target, options), table


KINDS: dict[str, Kind] = {
    "lm": Kind("an independent draft model with the target's tokenizer", _load_lm, "draft"),
    "eagle": Kind("an EAGLE head of this target; which EAGLE, its tensors tell", _load_eagle, "eagle"),
    "eagle3": Kind("an EAGLE-3 head of this target, and nothing else", _load_eagle3, "eagle3"),
    "exit": Kind("the target's first layers and a trained one, in the target's cache", _load_exit, "exit"),
    "medusa": Kind("Medusa's heads on the target's last feature, one pass a draft", _load_medusa, "medusa"),
    "onepass": Kind("residual heads behind one forward of an EAGLE head", _load_onepass, "onepass"),
    "dflash": Kind("a DFlash model of transformers, one pass a block", _load_dflash, "dflash"),
    "ngram": Kind("what followed the same tokens before, in this text", lambda *_: NGramDrafter(), None),
    "store": Kind("what followed them in a store of the target's answers, and in this text", _load_store, "store"),
    "recycling": Kind("Token Recycling, as published", lambda _, target, options: TokenRecycling(target.vocab), None),
    "ngram-recycling": Kind("Token Recycling by the last one to three tokens", lambda *_: NGramRecycling(), None),
    "graft": Kind("a model for the first layers, a table below: graft:1:eagle:demo+store:demo", _load_graft, "graft"),
    "copy": Kind("a model that also copies from the text at hand: copy:eagle:demo", _load_copy, "copy"),
    "product": Kind("a model's law times a table's: product:eagle:demo+store:demo", _load_product, "product"),
    "rasd": Kind("retrieved branches grafted by RASD's rules: rasd:eagle:demo+store:demo", _load_rasd, "rasd"),
}
"""Every kind of drafter, by the word in front of the colon."""
AROUND = ("graft", "product", "rasd")
"""Kinds that are made of two others."""


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


def folders_of(spec: str) -> list[str]:
    """Return the folders, or Hub ids, of all that a spec is made of; none for tables that learn as they go."""
    kind, path = parse_spec(spec)
    if kind in AROUND:
        first, plus, second = re.sub(r"^(\d+|[\d.]+(,[\d.]+)+):", "", path).rpartition("+")
        return [*folders_of(first), *folders_of(second)] if plus else []
    if (part := KINDS[kind].part) is None:
        return []
    folder = resolve(path, part)
    return [*(folders_of(read_base(folder)) if kind == "onepass" else []), folder]


def load_drafter(spec: str, target: AnyLM, options: DrafterOptions = DrafterOptions()) -> Drafter:
    """Load a drafter for `target`: `lm:PATH`, `eagle:PATH`, ...; see `KINDS`. PATH may be a Hub id or "demo".

    A temperature that `opt_tree.training.fitting.calibrate` stored beside it sharpens it at temperature 0.
    Raises CheckpointError with the path in it where there is none, or none for this target.
    """
    require(str, spec=spec)
    require((CausalLM, ChainLM), target=target)
    require(DrafterOptions, options=options)
    kind, path = parse_spec(spec)
    folder = resolve(path, KINDS[kind].part or "")
    drafter = KINDS[kind].load(folder, target, options)
    drafter.name = path
    temperature = read_calibration(folder) if path and not options.bare and not drafter.sparse else None
    return Sharpened(drafter, temperature) if temperature else drafter
