"""Drafters by name: `@register` stands in each one's file, above the function that loads it.

Owns what a spec is: a kind and, behind a colon, where it lies (`lm:JackFram/llama-68m`, `eagle:./head`, `eagle:demo`).
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from opt_tree.drafter import Drafter
from opt_tree.errors import one_line, require
from opt_tree.methods.own_files import files_in, split_name
from opt_tree.methods.registry import Method, Registry
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM, ChainLM
from opt_tree.models.checkpoints import CheckpointError, check_is_there, find_file, read_calibration, read_config
from opt_tree.models.named import check_model, resolve
from opt_tree.system.nearest import nearest


@dataclass(frozen=True)
class DrafterOptions:
    """What a drafter is loaded with, besides its spec."""

    tokenizer: PreTrainedTokenizerBase | None = None
    """The target's; what brings a tokenizer of its own is checked against it."""
    dtype: str | torch.dtype = "auto"
    """Of an independent model; "auto": the target's."""
    device: str = "cpu"
    bare: bool = False
    """Leave out the temperature that calibration stored beside the drafter."""
    weights: str | None = None
    """Of an independent model, on a CPU: "int8" or "int4"; None: as the dtype says."""
    layers: tuple[int, ...] | None = None
    """The target's layers whose outputs an EAGLE-3 head or a block drafter reads, in the order of `fc`'s columns; None:
    its file's."""


class Spec(NamedTuple):
    """A spec, understood."""

    kind: str
    path: str
    """A folder, a Hub id or "demo"; the specs that it is made of; or empty for a kind that reads no files."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}" if self.path else self.kind


Load = Callable[[str, AnyLM, DrafterOptions], Drafter]
"""From a path, the target and options. Raises CheckpointError with the path in it."""


@dataclass(frozen=True)
class Kind(Method[Load]):
    """A kind of drafter; `make` loads one."""

    others: Callable[[str], list[str]] | None = None
    """From the path, or the folder that it stands for, the specs of the drafters that it is made of; None: of none."""

    @property
    def needs_path(self) -> bool:
        return self.part is not None or self.others is not None


_LONGEST, _DEEPEST = 4096, 16  # letters of a spec, as of a path, and colons in it
MADE = "drafter.json"
"""A folder with this file is a drafter of several parts: its "spec", with {here} for the folder."""


def _of_object(name: str, made: Any) -> Load:
    """A function as it is; a class without arguments. An object would be shared by all that load it."""
    if isinstance(made, type) and issubclass(made, Drafter):
        return lambda path, target, options: made()
    if isinstance(made, type) or not callable(made):
        raise CheckpointError(
            f"{name} is {made!r:.80}: neither a class of drafters nor a function (path, target, options) that loads one"
        )
    return made


KINDS = Registry("drafter", Kind, _of_object, __package__)
"""Every kind of drafter, by the word in front of the colon."""
register = KINDS.register


def feature_target(target: AnyLM) -> CausalLM:
    """Return a target whose hidden states a drafter reads; CheckpointError where they cannot be read."""
    if not isinstance(target, CausalLM):
        raise CheckpointError(f"{target.name} is scored path by path: its hidden states are not there to be read")
    return target


def two_specs(kind: str, pair: str) -> list[str]:
    """Return the two of "SPEC+SPEC", the model's and the table's. CheckpointError for one alone."""
    first, plus, second = pair.rpartition("+")
    if not plus:
        raise CheckpointError(f"{kind}:SPEC+SPEC names a model and a table, got {kind}:{pair}")
    return [first, second]


def made_spec(folder: str) -> str:
    """Return the spec that `opt-tree train-drafter` noted in a folder. CheckpointError for a note that is none."""
    try:
        noted = json.loads((Path(folder) / MADE).read_text(encoding="utf-8"))["spec"]
        for part in re.split("[+:]", noted):  # else folders could name each other for ever
            if os.path.isfile(os.path.join(part.replace("{here}", str(folder)), MADE)):
                raise ValueError(f"spec {noted!r} names a folder that has such a note itself")
        # A folder of somebody else's names no file to be run.
        if (
            not isinstance(noted, str)
            or files_in([noted])
            or parse_spec(noted.replace("{here}", "x")).kind not in KINDS
        ):
            raise ValueError(f"spec {noted!r}")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{Path(folder) / MADE} does not say what drafts: {one_line(error)}") from error
    return noted.replace("{here}", str(folder))


def parse_spec(text: str) -> Spec:
    """Read a spec. What names no kind is the path of a draft model; "demo" is the embedded one.

    Raises CheckpointError for a kind that there is not, and for a path that is missing or not wanted.
    """
    if len(text) > _LONGEST or text.count(":") > _DEEPEST or any(len(name) > 255 for name in re.split("[/+:]", text)):
        raise CheckpointError(f"{text[:40]!r}... is no drafter: {len(text)} letters name neither files nor kinds")
    kind, colon, path = text.partition(":")
    if kind not in KINDS and (own := split_name(text)):
        KINDS.named(own[0])
        return Spec(*own)
    if kind not in KINDS and text.endswith(".py"):
        raise CheckpointError(f"{text} is a file: say which drafter of it is meant, {text}:NAME")
    if kind not in KINDS and os.path.isfile(os.path.join(text, MADE)):
        return parse_spec(made_spec(text))
    if kind not in KINDS:
        if colon and "/" not in kind and not os.path.exists(text):
            near = nearest(kind, KINDS)
            meant = f"; did you mean {near}:{path}?" if near else ""
            raise CheckpointError(f"unknown kind of drafter {kind!r} in {text!r}; there are {', '.join(KINDS)}{meant}")
        if "/" not in text and not os.path.exists(text) and (near := nearest(text, [*KINDS, "demo"])) and near != text:
            raise CheckpointError(f"no drafter is called {text!r}; did you mean {near!r}?")
        kind, path = "lm", text
    if path and not KINDS[kind].needs_path:
        raise CheckpointError(f"a drafter of kind {kind} reads no files, got {text!r}")
    if not path and KINDS[kind].needs_path:
        raise CheckpointError(f"{text!r} does not say where it lies: {kind}:PATH, or {kind}:demo")
    return Spec(kind, path)


def folders_of(spec: str) -> list[str]:
    """Return the folders, or Hub ids, of all that a spec is made of; none for tables that learn as they go."""
    name, path = parse_spec(spec)
    kind = KINDS.named(name)
    own = [] if kind.part is None else [resolve(path, kind.part)]
    others = kind.others(own[0] if own else path) if kind.others else []
    return [*(folder for other in others for folder in folders_of(other)), *own]


@contextmanager
def _told(spec: str) -> Iterator[None]:
    """Inside, an error about a bare name lists the kinds, too: it may be a kind of another library."""
    try:
        yield
    except CheckpointError as error:
        if re.search("[/:]", spec) or spec in KINDS or os.path.exists(spec):
            raise
        raise CheckpointError(f"{error}; and no kind of drafter: there are {', '.join(KINDS)}") from error


def is_whole(folder: str) -> bool:
    """Whether a checkpoint is a causal model by itself: by its config, which heads copy, and a tokenizer and layers."""
    try:
        config = read_config(folder, "a model")
        find_file(folder, "tokenizer_config.json")
    except CheckpointError:
        return False
    named = config.get("architectures") or []
    return config.get("num_hidden_layers") != 1 and any("CausalLM" in name or "LMHead" in name for name in named)


def check_drafter(spec: str) -> None:
    """Raise CheckpointError for a drafter of which anything is not there; nothing is loaded."""
    with _told(spec):
        for folder in folders_of(spec):
            check_model(folder)
            check_is_there(folder)


def load_drafter(spec: str, target: AnyLM, options: DrafterOptions = DrafterOptions()) -> Drafter:
    """Load a drafter for `target`: `lm:PATH`, `eagle:PATH`, ...; see `KINDS`. PATH may be a Hub id or "demo".

    A temperature that `opt_tree.training.fitting.calibrate` stored beside it sharpens it at temperature 0.
    Raises CheckpointError with the path in it where there is none, or none for this target.
    """
    require(str, spec=spec)
    require((CausalLM, ChainLM), target=target)
    require(DrafterOptions, options=options)
    name, path = parse_spec(spec)
    kind = KINDS.named(name)
    folder = path if kind.part is None else resolve(path, kind.part)
    with _told(spec):
        try:
            drafter = kind.make(folder, target, options)
        except TypeError as error:
            if name in KINDS:
                raise
            wanted = "name a function (path, target, options)"
            raise CheckpointError(f"{spec} cannot be loaded: {error}; {wanted}") from error
        except CheckpointError as error:
            if name != "lm" and kind.part is not None and is_whole(folder):
                raise CheckpointError(f"{folder} is a whole model, use lm:{path} ({error})") from error
            raise
    if not isinstance(drafter, Drafter):
        raise CheckpointError(f"{spec} is {drafter!r:.80}: no drafter")
    drafter.name = path
    temperature = read_calibration(folder) if kind.part and not options.bare and not drafter.names_few else None
    return drafter.calibrated(temperature) if temperature else drafter
