"""A target and a drafter that belong together, loaded in one call."""

import re
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from os import PathLike, fspath
from types import NoneType
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from opt_tree.drafter import Drafter
from opt_tree.errors import require
from opt_tree.methods.drafters.registry import DrafterOptions, check_drafter, load_drafter
from opt_tree.models.canonical import make_canonical, make_exact
from opt_tree.models.capabilities import end_tokens
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, load_causal_lm, load_tokenizer, require_device
from opt_tree.models.compiling import captured_shapes, compile_forwards, warm_up
from opt_tree.models.named import check_model, drafter_of, resolve
from opt_tree.tools.chat_template import render
from opt_tree.tools.stop_strings import Stop


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer and a drafter for it."""

    target: AnyLM
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter

    def __post_init__(self) -> None:
        self.target.tokenizer_ends = end_tokens(self.tokenizer)

    def __repr__(self) -> str:
        return f"<Pair: {self.target!r} drafted by {self.drafter!r}>"

    @property
    def stop(self) -> Stop:
        """The stop tokens that the target's generation config (a list for many chat models) and the tokenizer name.

        They are what a generation stops at by itself.
        """
        return Stop(stop_tokens(self.target.model, self.tokenizer))

    def compile(self, make: bool = True) -> bool:
        """Compute the forwards of all its models by compiled packages from now on; return whether all could be.

        See `opt_tree.models.compiling.compile_forwards`: made once where `make`, else taken where they are there. On
        CUDA the graphs of usual sizes are captured at once (`warm_up`).
        """
        require(bool, make=make)
        self.target.watch(self.drafter.features)  # first, so that its package has them
        done = [compile_forwards(lm, make) for lm in (self.target, *self.drafter.models)]
        if make:
            self.warm_up()
        return all(done)

    def warm_up(self, nodes: int = 60, context: int = 1024) -> int:
        """Capture the graphs of trees of up to `nodes` nodes behind up to `context` tokens; return how many there are.

        What was not captured is when it first comes, in the middle of a text. 0 where no model's forwards are captured:
        on a CPU, and before `compile`.
        """
        require(Integral, nodes=nodes, context=context)
        if min(nodes, context) < 1:
            raise ValueError(f"graphs are captured for a node and a token at least, got {nodes} and {context}")
        models = [lm for lm in (self.target, *self.drafter.models) if isinstance(lm, CausalLM)]
        shapes = [(lm, some) for lm in models if (some := captured_shapes(lm, nodes, context))]
        count = sum(len(some) for _, some in shapes)
        captured = chain.from_iterable(warm_up(lm, some) for lm, some in shapes)
        for _ in tqdm(captured, total=count, desc="capturing graphs", unit="graph", disable=None if count else True):
            pass
        return count

    def pack(self, wanted: bool = True) -> None:
        """Have eager forwards of all its models take packed weights, as they do by themselves; see `CausalLM.pack`."""
        for lm in (self.target, *self.drafter.models):
            if isinstance(lm, CausalLM):
                lm.pack(wanted)

    def encode(self, message: str | list[dict[str, str]]) -> list[int]:
        """Token ids of a user's message, or of a conversation that is to be answered; see `encode`."""
        return encode(self.tokenizer, message)


def stop_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens at which a model's answers end, as its generation config and its tokenizer name them."""
    return end_tokens(getattr(model, "generation_config", None), tokenizer)


def encode(tokenizer: PreTrainedTokenizerBase, message: str | list[dict[str, str]]) -> list[int]:
    """Return the token ids of a user's message, or of a conversation that is to be answered.

    By the tokenizer's chat template; where it has none, the bare text of the last message.

    Args:
        message: A text, or messages of a "role" and a "content".

    Raises TypeError for anything else, and ValueError for no message, for text that UTF-8 has no form for (half of a
    surrogate pair) and for messages that the chat template refuses or leaves out.
    """
    require((str, list), message=message)
    messages = [{"role": "user", "content": message}] if isinstance(message, str) else message
    if not messages:
        raise ValueError("there is no message to answer")
    for one in messages:
        require(dict, message=one)
        if re.search("[\ud800-\udfff]", str(one.get("content"))):
            raise ValueError("the text has half of a surrogate pair, which UTF-8 has no form for: decode it anew")
    if not getattr(tokenizer, "chat_template", None):
        require(str, content=messages[-1].get("content"))
        return tokenizer(messages[-1]["content"]).input_ids
    return tokenizer(render(tokenizer, messages), add_special_tokens=False).input_ids


def _named(target: Any, drafter: Any, eagle: Any, **switches: Any) -> str:
    """The target's name; TypeError where one of these is not of its type, CheckpointError for two drafters."""
    require(bool, **switches)
    require((str, PathLike), target=target)
    require((str, NoneType), drafter=drafter, eagle=eagle)
    if drafter and eagle:
        raise CheckpointError("name a drafter or an EAGLE head, not both")
    return fspath(target)


def _spec(target: str, named: str | None) -> str:
    """The spec of what drafts for a target: what is named, else what belongs to it. CheckpointError for none."""
    check_model(target)
    if spec := named or drafter_of(target):
        return spec
    raise CheckpointError(
        f"no drafter named, and none belongs to {target}: name one, drafter='ngram' (learns from the text, needs "
        "no file), 'lm:PATH' (a small model), 'eagle:PATH' (a head trained for it)"
    )


def load_pair(
    target: str | PathLike[str] = "demo",
    drafter: str | None = None,
    eagle: str | None = None,
    *,
    weights: str | None = None,
    dtype: str | torch.dtype = "auto",
    draft_dtype: str | torch.dtype = "auto",
    device: str | None = None,
    bare: bool = False,
    compile: bool = False,
    canonical: bool = False,
    exact: bool = True,
    **model_options: Any,
) -> Pair:
    """Load a target and a drafter by its spec (`opt_tree.methods.drafters.registry`).

    `target`: a folder, a .gguf file, a Hub id, "demo", or a name that `python -m opt_tree.models` lists ("smollm2"),
    which is fetched and converted once. `drafter`: `lm:PATH`, `eagle:PATH`, ...; a bare path is a draft model's.
    `eagle=PATH`: short for `drafter="eagle:PATH"`. With nothing named, what belongs to the target is taken. `bare`:
    without the temperature that calibration stored beside the drafter, which sharpens it at temperature 0.
    dtype "auto": bfloat16 on a CPU that multiplies it (avx512_bf16, amx), float32 on another CPU, the checkpoint's own
    on an accelerator. draft_dtype "auto", of an independent drafter: the target's. `weights`: "int8" or "int4", of the
    target and of an independent drafter, on a CPU. `compile`: on a CPU, makes packages of both models' forwards, once,
    or takes those that are there. On CUDA it captures graphs (`Pair.compile`).
    `exact`: in bfloat16 and quantised, too, a tree changes no text on a CPU, if the target can be canonical; else a
    warning and `target.not_canonical` say why. `canonical`: in float32, too, and NotCanonicalError if it cannot be.
    `model_options` go to transformers (`device_map=`, `quantization_config=`, ...).
    """
    target = _named(target, drafter, eagle, bare=bare, compile=compile, canonical=canonical, exact=exact)
    spec = _spec(target, f"eagle:{eagle}" if eagle else drafter)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    check_drafter(spec)  # before the target is loaded
    folder = resolve(target, "target")
    lm = load_causal_lm(folder, dtype, device, weights, **model_options)
    if canonical or exact:
        (make_canonical if canonical else make_exact)(lm)
    tokenizer = load_tokenizer(folder)
    options = DrafterOptions(tokenizer, draft_dtype, device, bare, weights)
    pair = Pair(lm, tokenizer, load_drafter(spec, lm, options))
    if compile:
        pair.compile()
    return pair
