"""EAGLE-3 heads draft with features of several of the target's layers (arXiv:2503.01840; 3.1: arXiv:2605.09992).

Owns the drafter, and how a checkpoint becomes one. The network is in `eagle3_head.py`; what configs and tensor names
mean in the layouts that there are is in `eagle3_files.py`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.draft_vocabulary import take_vocabulary, trimmed_further
from opt_tree.methods.drafters.heads.eagle import LAST, EagleDrafter, lend_embeddings, load_eagle
from opt_tree.methods.drafters.heads.eagle3_files import (
    NAMED,
    Reading,
    fit,
    head_tensors,
    is_eagle3,
    read_layers,
    read_masks,
    understood,
)
from opt_tree.methods.drafters.heads.eagle3_head import Eagle3Head
from opt_tree.methods.drafters.heads.eagle_head import HeadedEagle, take_biases
from opt_tree.methods.drafters.heads.families import PEAGLE, refuse_others
from opt_tree.methods.drafters.heads.layer_probe import Convention, Probed, States, probe
from opt_tree.methods.drafters.heads.parallel_spec import PEagleDrafter
from opt_tree.methods.drafters.heads.published_files import read_head
from opt_tree.methods.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.capabilities import cast_weights
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, load_named, read_config, refused
from opt_tree.models.output_scaling import Scaling, scaling_of
from opt_tree.models.quantised_layers import rows_of
from opt_tree.models.tensor_parallel import replicated


def published_layers(count: int) -> tuple[int, int, int]:
    """Return the layers whose outputs an EAGLE-3 head reads, of `count`: what enters layers 2, count / 2, count - 3."""
    return 1, count // 2 - 1, count - 4


def chosen_layers(layers: Sequence[int] | None, count: int, states: int = 3) -> tuple[int, ...]:
    """Return the layers whose outputs a head of so many states reads, None or none being the usual three.

    ValueError unless they are as many, of the `count` that there are.
    """
    chosen = tuple(layers or published_layers(count))
    if len(chosen) != states or not 0 <= min(chosen) <= max(chosen) < count:
        words = {1: "one", 2: "two", 3: "three"}.get(states, states)
        raise ValueError(f"an EAGLE-3 head reads {words} of the target's {count} layers, not {chosen}")
    return chosen


class Eagle3Drafter(EagleDrafter):
    """Drafts with an EAGLE-3 head; rows are kept and run again as `EagleDrafter` does."""

    probed: Probed | None = None
    """What a probe of its layers found; None: its file says which they are."""

    def __init__(
        self,
        head: Eagle3Head,
        target: CausalLM,
        tokens: Int[Tensor, " columns"] | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        """`tokens`: the draft vocabulary; None: all tokens. `layers`: those whose outputs it reads; None: the usual."""
        width = head.fc.in_features // head.states if head.states else head.config.hidden_size
        self.features = chosen_layers(layers, layers_of(target), head.states) if head.states else (LAST,)
        if width != target.hidden:
            raise ValueError(
                f"wrong head for this target: the head reads features {width} wide, {target.name} has {target.hidden}"
            )
        own = getattr(head, "lm_head", None)
        output = own or replicated(target.model.get_output_embeddings())
        if output.weight.shape[1] != head.config.hidden_size:
            raise ValueError(f"wrong head for this target: it is {head.config.hidden_size} wide and has no lm_head")
        if tokens is not None and output.weight.shape[0] != len(tokens):
            output = rows_of(output, tokens)
        scaling = Scaling() if own else scaling_of(target.model)
        self._begin(HeadedEagle(head, output, scaling), target, tokens)

    def inputs(self, features: Mapping[int, Float[Tensor, "tokens hidden"]]) -> Float[Tensor, "tokens hidden"]:
        head: Any = self.lm.model.base_model
        return head.fuse([features[layer].to(self.lm.device, self.lm.dtype) for layer in self.features])

    def probe(self, reading: Reading, target: CausalLM, options: DrafterOptions) -> None:
        """Take the convention by which the head agrees more with its target, if clearly more; else the reading's."""
        layers, other = reading.layers(), reading.layers(not reading.entered)
        if layers is None or other is None or not 0 <= min(other) <= max(other) < layers_of(target):
            return
        names = (NAMED[reading.entered], NAMED[not reading.entered])
        tries = [Convention(name, partial(self._best, one)) for name, one in zip(names, (layers, other), strict=True)]
        self.probed = probe(target, (*layers, *other), tries, options.tokenizer, "SGLang's rule")
        self.features = (layers, other)[self.probed.taken]

    def _best(self, layers: Sequence[int], ids: Int[Tensor, "1 tokens"], states: States) -> Int[Tensor, " tokens"]:
        """The token that the head drafts behind each pair by these layers: pair i has token i + 1 of the text."""
        head: Any = self.lm.model.base_model
        weight = head.embed_tokens.weight
        features = head.fuse([states[layer][:, :-1].to(weight.device, weight.dtype) for layer in layers])
        read = ids[:, 1:].to(weight.device).clamp(max=head.config.vocab_size - 1)
        rows = read.shape[1]
        mask = torch.full((rows, rows), torch.finfo(weight.dtype).min, dtype=weight.dtype, device=weight.device).triu(1)
        positions = torch.arange(rows, device=weight.device)[None]
        model: Any = self.lm.model
        best = model(read, features, position_ids=positions, attention_mask=mask[None, None]).logits[0].argmax(-1)
        best = best.cpu() if self.tokens is None else self.tokens[best.cpu()]
        return torch.nn.functional.pad(best, (1, 0), value=-1)

    def describe(self) -> str:
        return f"EAGLE-3 head {self.name}: {self._size()}{'' if self.probed is None else f', {self.probed}'}"


def layers_of(target: CausalLM) -> int:
    """Return how many layers a target has."""
    return int(target.model.config.get_text_config().num_hidden_layers)


def load_eagle3(
    path: str,
    target: CausalLM,
    options: DrafterOptions = DrafterOptions(),
    tensors: dict[str, Tensor] | None = None,
) -> Drafter:
    """Load an EAGLE-3 head as SpecForge, ModelOpt, AngelSlim or `speculators` write it (see `eagle3_files.py`).

    One that has a `mask_hidden` is a P-EAGLE head, and drafts all layers in one forward.

    Weights come to the target's dtype and device. `embed_tokens` and `lm_head` may be absent: then the target's are
    used, of the latter the rows of the draft vocabulary. That one may be `draft_vocabulary.safetensors` beside the
    weights. `tensors`: those of the checkpoint, if they are read already. CheckpointError names what cannot be used, in
    one line. Where the config names layers and not by which convention, both are tried (`layer_probe.py`), and
    `describe` says what was found; `options.layers` decides otherwise.
    """
    tensors, raw = read_head(path) if tensors is None else tensors, read_config(path, "an EAGLE head")
    refuse_others(path, raw, (PEAGLE,))
    if not is_eagle3(tensors):
        raise CheckpointError(f"{path} is no EAGLE-3 head: it has neither midlayer.* nor layers.0.hidden_norm.weight")
    with refused(f"cannot use {path}"):
        config, reading, tensors = understood(raw), read_layers(raw, layers_of(target)), head_tensors(path, tensors)
        fit(config, tensors, reading, options.layers)
        tokens = take_vocabulary(tensors, target.vocab)
        lend_embeddings(tensors, target, config.vocab_size)
        columns = getattr(config, "draft_vocab_size", None) or config.vocab_size
        if columns != (config.vocab_size if tokens is None else len(tokens)):
            raise ValueError(f"draft_vocab_size is {columns}, d2t has {'none' if tokens is None else len(tokens)}")
        tokens = trimmed_further(path, tokens, target.vocab)
        head = Eagle3Head(config, "lm_head.weight" in tensors)
        take_biases(head, tensors)
        load_named(head, tensors, "it is not an EAGLE-3 head of this config")
        cast_weights(head, target.device, target.dtype).eval().requires_grad_(False)
        drafter = Eagle3Drafter(head, target, tokens, options.layers or reading.layers())
        if options.layers is None and not reading.told and target.ranks is None and drafter.features != (LAST,):
            drafter.probe(reading, target, options)
        return PEagleDrafter(drafter, target, *read_masks(raw)) if "mask_hidden" in tensors else drafter


@register(
    "eagle", about="an EAGLE head of this target; which EAGLE, its tensors tell", paper="2401.15077", part="eagle"
)
def _load_either(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    tensors = read_head(path)
    if is_eagle3(tensors):
        return load_eagle3(path, feature_target(target), options, tensors)
    if options.layers is not None:
        raise CheckpointError(f"{path} is a head of EAGLE-1 or EAGLE-2, which reads no layers that could be named")
    return load_eagle(path, feature_target(target), tensors)


@register(
    "eagle3", about="an EAGLE-3 or EAGLE-3.1 head of this target, and nothing else", paper="2503.01840", part="eagle3"
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return load_eagle3(path, feature_target(target), options)
