"""What the files of block drafters say, in every layout: conventions, sizes, and tensors by one set of names.

Layouts: transformers' (`muse_glimmer_assistant`); that of z-lab, SpecForge, ModelOpt and JetSpec, with what is no
setting of a layer under `dflash_config` or beside it; DeepSpec's, flat; that of `speculators`, with the layers under
`transformer_layer_config`. What a law adds to a block's scores, its tensors tell.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import AutoConfig, MuseGlimmerAssistantConfig, Qwen3Config

from opt_tree.errors import one_line
from opt_tree.methods.drafters.heads.block_laws import KINDS, BlockLaw, DominoHead, DSparkHeads, SelectorLaw
from opt_tree.methods.drafters.heads.block_network import BlockSight, Sights, two_sided
from opt_tree.methods.drafters.heads.eagle3_files import Reading, checked_ids, fitting
from opt_tree.methods.drafters.heads.families import BLOCKS, DFLASH, DFLASH2, DOMINO, DSPARK, family
from opt_tree.methods.drafters.heads.published_files import renamed
from opt_tree.models.output_scaling import Scaling

FULL, SLIDING = "full_attention", "sliding_attention"
TRANSFORMERS = "muse_glimmer_assistant"
_NESTED = "dflash_config"
_LAYERS = "transformer_layer_config"
_NETWORK = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act", "layer_types"),
)
"""What the network takes of a config of layers."""
_ONLY: dict[str, tuple[Any, ...]] = {"use_swa": (False, None), "use_aux_hidden_norms": (False, None)}
"""Settings that nothing here follows, each with the values that change nothing."""
_RENAMED = (
    (r"logit_head\.(.*)", r"\1"),  # SpecForge's old files
    (r"fc\.(.*)", r"encoder.fc.\1"),
    (r"hidden_norm\.(.*)", r"encoder.output_norm_enc.\1"),
    (r"(markov_w[12]|gate_proj|joint_proj)\.(.*)", r"markov_head.\1.\2"),  # ModelOpt
    (r"confidence_proj\.(.*)", r"confidence_head.proj.\1"),
    (r"candidate_selector\.(predecessor_codebook|successor_codebook)", r"candidate_selector.\1.weight"),  # z-lab
)
LAWS = {
    "markov_head.": DSPARK,
    "confidence_head.": DSPARK,
    "candidate_selector.": DFLASH2,
    "prefix_gru.": DOMINO,
    "embed_proj.": DOMINO,
}
"""What the names of a law's tensors begin with, and whose they are."""
COLUMNS = ("lm_head.weight", "markov_head.markov_w2.weight", "embed_proj.2.weight")
"""Tensors that have a row for each token that is drafted."""


@dataclass(frozen=True)
class BlockFile:
    """What a block drafter's config says."""

    family: str
    config: MuseGlimmerAssistantConfig
    """Of the network, in transformers' words."""
    reading: Reading
    """Which of the target's layers it reads."""
    normed: bool
    """Whether what leaves the last layer is read behind the target's norm, as transformers gives it."""
    first: int
    """The row of a block that speaks of the first token: 0 the anchor's, 1 that of the first mask."""
    told: bool
    """Whether no other row can be meant."""
    sights: Sights
    own: Mapping[str, Any]
    """All its settings, nested ones before others."""

    @property
    def published(self) -> bool:
        """Whether it reads embeddings and an output layer as they are, as all layouts but transformers' do."""
        return self.own.get("model_type") != TRANSFORMERS

    @property
    def scaling(self) -> Scaling:
        """What its scores are made of an output layer's numbers: `output_multiplier`, `final_logit_softcapping`."""
        cap = self.own.get("final_logit_softcapping")
        return Scaling(float(self.own.get("output_multiplier") or 1), float(cap) if cap else None)

    @property
    def convolution(self) -> tuple[int, int] | None:
        """Size and group of DFlash 2's kernels."""
        if self.family != DFLASH2:
            return None
        return int(self.own.get("conv_kernel_size", 2)), int(self.own.get("conv_group_size", 16))


def read_block_file(raw: Mapping[str, Any], count: int) -> BlockFile:
    """Return what a config says to a target of `count` layers; ValueError for what is not there or not followed."""
    found = family(raw)
    if found not in BLOCKS:
        raise ValueError("its config is not that of a block drafter")
    nested = raw.get(_NESTED) or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"its config's {_NESTED} is no group of settings: {nested!r:.80}")
    own = {**raw, **{name: value for name, value in nested.items() if value is not None}}
    for name, harmless in _ONLY.items():
        if own.get(name) not in harmless:
            raise ValueError(f"its config sets {name} to {own[name]!r}, which nothing here drafts with")
    speculators = "speculators_model_type" in raw
    layers = _layers_of(raw, speculators)
    reading = _reading(own, layers.num_hidden_layers, count, speculators)
    size: Any = own.get("block_size", 8 if speculators else 16)
    mask: Any = own.get("mask_token_id")
    if missing := [name for name, value in (("block_size", size), ("mask_token_id", mask)) if type(value) is not int]:
        raise ValueError(f"its config names no {', '.join(missing)}")
    first = _first_row(own, found, speculators)
    network = {name: getattr(layers, name) for name in _NETWORK}
    config = MuseGlimmerAssistantConfig(
        **network,
        sliding_window=getattr(layers, "sliding_window", None) or 1,
        block_size=size,
        mask_token_id=mask,
        target_layer_ids=list(reading.layers() or ()),
    )
    if size - first < 1:
        raise ValueError(f"a {found} model with blocks of {size} drafts nothing")
    told = found in (DFLASH, DFLASH2)
    return BlockFile(
        found, config, reading, not speculators, first, told, _sights(own, layers, found, speculators), own
    )


def asked_for(file: BlockFile, layers: Sequence[int] | None, count: int) -> BlockFile:
    """Return a file with these of the target's layers, by what leaves them; None: those that it names.

    ValueError unless they are as many, of the `count` that there are.
    """
    if layers is None:
        return file
    if len(layers) != len(file.reading.ids or ()):
        raise ValueError(f"it reads {len(file.reading.ids or ())} states, and these are {len(layers)} layers: {layers}")
    return replace(file, reading=fitting(Reading(tuple(layers)), count))


def _layers_of(raw: Mapping[str, Any], speculators: bool) -> Any:
    """The config of the layers, with its model's defaults for what it does not say: `speculators` leaves these out."""
    own = dict(raw.get(_LAYERS) or {}) if speculators else dict(raw)
    kind = own.pop("model_type", None)
    own = {name: value for name, value in own.items() if name not in ("architectures", _NESTED, "auto_map")}
    try:
        if kind == TRANSFORMERS:
            return MuseGlimmerAssistantConfig(**own)
        if speculators and kind is not None:
            return AutoConfig.for_model(kind, **own)
        return Qwen3Config(**own)
    except Exception as error:  # strict configs raise errors of their own kind
        raise ValueError(f"its config is not one of a block's layers: {one_line(error)}") from error


def _reading(own: Mapping[str, Any], depth: int, count: int, speculators: bool) -> Reading:
    """Which layers' states it reads; without a list as its own code does, by its number of layers."""
    if speculators:
        name = "aux_hidden_state_layer_ids"
        return fitting(Reading(checked_ids(name, own.get(name), count) or (2, count // 2, count - 3), True), count)
    name = "target_layer_ids"
    ids = checked_ids(name, own.get(name), count) or spread(count, depth)
    # ModelOpt's dumps by vLLM hold what enters these layers, in files that look like z-lab's.
    told = own.get("model_type") == TRANSFORMERS or (_NESTED not in own and name in own)
    return fitting(Reading(ids, False, told), count)


def spread(count: int, depth: int) -> tuple[int, ...]:
    """Return the layers of a target's `count` that z-lab's code reads with `depth` of its own, if none are named."""
    if depth == 1:
        return (count // 2,)
    return tuple(round(1 + place * (count - 4) / (depth - 1)) for place in range(depth))


def _first_row(own: Mapping[str, Any], found: str, speculators: bool) -> int:
    """Which row of the block speaks of the first token, by its settings, or by the layout where they do not say."""
    if speculators:
        return 0 if own.get("sample_from_anchor", found == DSPARK) else 1
    shifted = own.get("shift_label", own.get("draft_shift", found == DSPARK and _NESTED not in own))
    return 0 if shifted else 1


def _sights(own: Mapping[str, Any], layers: Any, found: str, speculators: bool) -> Sights:
    """What rows see in layers of each kind that there are."""
    kinds = {*(layers.layer_types or [FULL])}
    if unknown := kinds - {FULL, SLIDING}:
        raise ValueError(f"its layers are of kind {', '.join(sorted(map(str, unknown)))}, in which nothing here drafts")
    window = getattr(layers, "sliding_window", None) if SLIDING in kinds else None
    if SLIDING in kinds and not window:
        raise ValueError("its config has sliding layers, and no sliding_window")
    if speculators:
        open_ = own.get("sliding_window_non_causal", found == DFLASH2)
        return {FULL: BlockSight(), SLIDING: BlockSight(not open_, window, from_anchor=True)}
    said = [own[name] for name in ("is_causal", "causal", "causal_head") if own.get(name) is not None]
    causal: bool | None = said[0] if said else None
    if own.get("model_type") == TRANSFORMERS:
        return two_sided(window or 0)
    return {FULL: BlockSight(bool(causal)), SLIDING: BlockSight(causal is not False, window)}


def block_tensors(path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors by the names of transformers' network and of the laws. CheckpointError for twins."""
    names = {name: name for name in tensors}
    for pattern, new in _RENAMED:
        names = {name: re.sub(pattern, new, own) if re.fullmatch(pattern, own) else own for name, own in names.items()}
    return renamed(path, tensors, names)


def law_of(file: BlockFile, tensors: Mapping[str, Tensor], vocab: int, columns: int) -> BlockLaw | None:
    """Return the untrained law of a file for a target of `vocab` tokens; None: laws are those of their depths.

    ValueError where settings and tensors are at odds.
    """
    found = {whose for name in tensors for start, whose in LAWS.items() if name.startswith(start)}
    if strange := found - {file.family}:
        raise ValueError(f"it is a {file.family} model by its config, and has tensors of a {min(strange)} model")
    hidden = int(file.config.hidden_size)
    if file.family == DFLASH2:
        if columns != vocab:
            raise ValueError(f"a DFlash 2 model selects among all tokens, this one drafts {columns} of {vocab}")
        rank = _sized(tensors, "candidate_selector.predecessor_codebook.weight")
        return SelectorLaw(vocab, hidden, rank, int(file.own.get("selector_top_k", 16)))
    if file.family == DOMINO:
        width, rank = _sized(tensors, "prefix_gru.weight_hh_l0"), _sized(tensors, "embed_proj.2.weight")
        return DominoHead(hidden, width, rank, columns, int(file.own.get("pure_draft_prefix_len", 0)))
    if file.family != DSPARK or not (found or file.own.get("markov_rank")):
        return None
    return _dspark_heads(file, tensors, vocab, columns)


def _dspark_heads(file: BlockFile, tensors: Mapping[str, Tensor], vocab: int, columns: int) -> DSparkHeads:
    """DSpark's heads as its tensors have them."""
    hidden, first = int(file.config.hidden_size), "markov_head.markov_w1.weight"
    rank = _sized(tensors, first) if file.own.get("markov_rank") or first in tensors else 0
    gates = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}
    kind = next((kind for kind, name in gates.items() if name in tensors), KINDS[0])
    if (said := file.own.get("markov_head_type")) not in (None, kind):
        raise ValueError(f"its config names a Markov head {said}, its tensors are of one that is {kind}")
    sure = tensors.get("confidence_head.proj.weight")
    config = {"hidden_size": hidden, "vocab_size": vocab, "markov_rank": rank, "markov_head_type": kind}
    config["enable_confidence_head"] = sure is not None
    config["confidence_head_with_markov"] = sure is not None and sure.shape[-1] != hidden
    return DSparkHeads(config, columns, float(file.own.get("confidence_threshold", 0.0)))


def _sized(tensors: Mapping[str, Tensor], name: str) -> int:
    """How many columns a tensor has; ValueError where it is not there."""
    if name not in tensors:
        raise ValueError(f"it has no {name}")
    return int(tensors[name].shape[-1])
