"""What an EAGLE-3 head's files say: its config and layers in every layout, its tensors by one set of names.

Layouts: SpecForge, AngelSlim and the official one; ModelOpt's (NVIDIA), with settings under `eagle_config`; that of
`speculators`, with Llama's words under `transformer_layer_config`. Two conventions say which layers a head reads, and
most files do not say which of them is theirs: id i is what leaves layer i, or what enters it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import LlamaConfig

from opt_tree.errors import one_line
from opt_tree.methods.drafters.heads.eagle3_head import NORMS
from opt_tree.methods.drafters.heads.published_files import WINDOWS, refuse_windows, renamed
from opt_tree.models.checkpoints import CheckpointError

ENTERED = "eagle_aux_hidden_state_layer_ids"
"""The setting that names the layers a head reads; at the top level each by what enters it, as vLLM reads it."""
MIDDLE = "midlayer."
"""What the names of the first layer's tensors begin with."""
NAMED = ("layers named by what leaves them", "layers named by what enters them")
"""The two conventions, for a reader: id i is what leaves layer i, or what enters it."""
_NESTED = "eagle_config"
"""Under which SpecForge and ModelOpt keep what is no setting of a Llama layer. It counts before the top level."""
_LISTS = (ENTERED, "aux_hidden_state_layer_ids", "layer_ids")
_SEMANTICS = "eagle_aux_layer_semantics"
_LEFT = "target_layer_ids"
"""DeepSpec's name of such a list: of layers by what leaves them."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (0, 1),
}
"""ModelOpt's settings that nothing here follows, each with the values that change nothing; null is one of them."""
_FOREIGN = {
    "parallel_draft_heads.": "Medusa heads beside its layer",
    ".kv_a_proj": "latent attention (MLA)",
    ".experts.": "experts",
}
"""What some heads have, by a part of the names of its tensors."""
_QUERIES = "self_attn.q_proj.weight"
_SWITCHES = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
_OWN = (*NORMS, *_SWITCHES, "norm_before_residual", "draft_vocab_size", "target_hidden_size")
"""Settings of a head that are not Llama's."""
_MASK = ("mask_token_id", "pard_token")
"""P-EAGLE's settings that name the token of a mask, in SpecForge's and `speculators`' words, and in vLLM's."""
_KNOWN = (*_OWN, *_ONLY, *_LISTS, _SEMANTICS, "num_aux_hidden_states", "parallel_draft_heads_num_layers")


class Reading(NamedTuple):
    """Which layers' states a head reads, as its file names them."""

    ids: tuple[int, ...] | None = None
    """In the order in which `fc` reads them; None: the usual ones."""
    entered: bool = False
    """Whether id i means what enters layer i, and not what leaves it."""
    told: bool = True
    """Whether the file says which of both; else SGLang's rule does: a list that begins with 1 is one of outputs."""

    def layers(self, entered: bool | None = None) -> tuple[int, ...] | None:
        """Return the layers by their outputs, by the file's convention or the one asked for; None: the usual ones."""
        back = self.entered if entered is None else entered
        return None if self.ids is None else tuple(one - back for one in self.ids)


def is_eagle3(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of an EAGLE-3 head, in any layout."""
    return any(name.startswith(MIDDLE) or name == "layers.0.hidden_norm.weight" for name in tensors)


def head_tensors(path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a head's tensors by the names of `Eagle3Head`: `midlayer` first, `layers.1` and on behind it.

    Read are vLLM's and `speculators`' `layers.{i}`, ModelOpt's `midlayer.{i}`, SGLang's `additional_layers.{i}`, the
    first norm of which is a `hidden_norm`. CheckpointError for what is no layer of a head like that.
    """
    names = {name: _own_name(name) for name in tensors}
    for part, told in _FOREIGN.items():
        if found := [name for name in tensors if part in name]:
            raise CheckpointError(f"{path} has {told} ({found[0]}), which nothing here drafts with")
    widths = {own: tensors[name].shape[-1] for name, own in names.items() if own.endswith(_QUERIES)}
    if any(width == widths.get(MIDDLE + _QUERIES) for own, width in widths.items() if not own.startswith(MIDDLE)):
        raise CheckpointError(f"{path} is an Osprey head: each of its layers reads embeddings, which none does here")
    return renamed(path, tensors, names)


def _own_name(name: str) -> str:
    """The name that `Eagle3Head` has for a published tensor."""
    found = re.fullmatch(r"(layers|midlayer|additional_layers)\.(\d+)\.(.*)", name)
    if found is None:
        return name
    kind, number, rest = found[1], int(found[2]), found[3]
    if number + (kind == "additional_layers") == 0:
        return MIDDLE + rest
    # What enters a layer behind the first one is hidden states alone: they have one norm, whatever it is called.
    rest = rest.replace("hidden_norm.", "input_layernorm.")
    return f"layers.{number + (kind == 'additional_layers')}.{rest}"


def understood(raw: Mapping[str, Any]) -> LlamaConfig:
    """Return a head's config from config.json; ValueError names a setting that it cannot follow.

    What is no setting of Llama's becomes an attribute (see `Eagle3Head`). `speculators` norms before the residual
    unless told otherwise, P-EAGLE's heads excepted.
    """
    apart = _apart(raw)
    if foreign := [f"{_NESTED}.{name}" for name in apart if name not in _KNOWN]:
        raise ValueError(f"its config sets {', '.join(foreign)}, which is not understood")
    for name, harmless in _ONLY.items():
        place = f"{_NESTED}." if name in apart else ""
        value = apart.get(name, raw.get(name))
        if value is not None and value not in harmless:
            raise ValueError(f"its config sets {place}{name} to {value!r}, which nothing here drafts with")
    if (nested := raw.get("transformer_layer_config")) is not None:
        normed = raw.get("speculators_model_type") != "peagle"
        own = {"num_hidden_layers": 1, "norm_before_residual": normed, **nested}
    else:
        own = dict(raw)
    for source in (raw, apart):
        own |= {name: source[name] for name in _OWN if source.get(name) is not None}
    refuse_windows(own)
    aside = ("architectures", "model_type", _NESTED, _SEMANTICS, *_LISTS, *_ONLY, *WINDOWS)
    try:
        return LlamaConfig(**{key: value for key, value in own.items() if key not in aside})
    except Exception as error:  # strict configs raise errors of their own kind
        raise ValueError(f"its config is not one of a Llama layer: {one_line(error)}") from error


def read_layers(raw: Mapping[str, Any], count: int) -> Reading:
    """Return which of a target's `count` layers a config names; ValueError for a list that names none of them.

    Nested lists were read as outputs by SGLang until its #25454, then only if they begin with 1; ModelOpt's own dumps
    hold both kinds. An id that is `count` can only be what leaves the last layer, counted by what enters.
    """
    apart = _apart(raw)
    top, nested = _list_of(raw, count), _list_of(apart, count)
    if nested and top and nested != top and [one + 1 for one in nested] != list(top):
        raise ValueError(f"its config names layers twice: {list(nested)} in {_NESTED}, and {list(top)} beside it")
    number = apart.get("num_aux_hidden_states", raw.get("num_aux_hidden_states"))
    ids = nested or top
    if ids and number is not None and number != len(ids):
        raise ValueError(f"its config names {len(ids)} layers, and num_aux_hidden_states is {number}")
    if ids is None:
        left = checked_ids(_LEFT, raw.get(_LEFT), count)
        return Reading() if left is None else fitting(Reading(left, False), count)
    semantics = apart.get(_SEMANTICS, raw.get(_SEMANTICS))
    if semantics not in (None, "vllm", "sglang"):
        raise ValueError(f"its config sets {_SEMANTICS} to {semantics!r}; there are 'vllm' and 'sglang'")
    if semantics is not None:
        return fitting(Reading(ids, semantics == "vllm"), count)
    if nested and top and nested != top:
        return fitting(Reading(ids, False), count)
    speculators = "speculators_model_type" in raw or "transformer_layer_config" in raw
    if not nested or speculators or count in ids:
        return fitting(Reading(ids, True), count)
    return fitting(Reading(ids, ids[0] != 1, told=False), count)


def fit(config: LlamaConfig, tensors: dict[str, Tensor], reading: Reading, layers: Sequence[int] | None) -> None:
    """Write into a config what only the tensors tell: how many states `fc` reads, and whether queries are normed.

    `layers`: those that are asked for in place of the file's. ValueError unless `fc` reads a state of each. A head that
    reads no captured states has no use for an `fc`, which is left out then.
    """
    config.masks = "mask_hidden" in tensors  # type: ignore[attr-defined]
    config.qk_norm = any(name.endswith(".q_norm.weight") for name in tensors)  # type: ignore[attr-defined]
    if not getattr(config, "use_aux_hidden_state", True):
        if layers is not None:
            raise ValueError("it reads the target's last state alone (use_aux_hidden_state is False), and no layers")
        tensors.pop("fc.weight", None)
        return
    width = getattr(config, "target_hidden_size", None) or config.hidden_size
    columns = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else 3 * width
    if not columns or columns % width:
        raise ValueError(f"fc.weight has {columns} columns: no whole number of states that are {width} wide")
    config.states = states = columns // width  # type: ignore[attr-defined]
    named = reading.ids if layers is None else tuple(layers)
    if named is None and states != 3:
        raise ValueError(f"fc.weight reads {states} states, and its config does not name their layers")
    if named is not None and len(named) != states:
        raise ValueError(f"fc.weight reads {states} states, and these are {len(named)} layers: {list(named)}")


def read_masks(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Return the token of a P-EAGLE head's masks, and how many depths it drafts: 8 unless its config says.

    ValueError where no token is named.
    """
    mask = next((raw[name] for name in _MASK if type(raw.get(name)) is int), None)
    if mask is None:
        raise ValueError(f"it has a mask_hidden, and its config names no {' or '.join(_MASK)}")
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    told = raw.get("num_depths", methods[0].get("speculative_tokens"))
    return mask, 8 if told is None else int(told)


def _apart(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is nested in a config, if anything is."""
    apart = raw.get(_NESTED) or {}
    if not isinstance(apart, Mapping):
        raise ValueError(f"its config's {_NESTED} is no group of settings: {apart!r:.80}")
    return apart


def _list_of(settings: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
    """The layers that some settings name, None for null, an empty list and none at all."""
    found = {name: checked_ids(name, settings[name], count) for name in _LISTS if settings.get(name)}
    if len({*found.values()}) > 1:
        raise ValueError(f"its config names layers twice: {', '.join(found)}")
    return next(iter(found.values()), None)


def checked_ids(name: str, ids: Any, count: int) -> tuple[int, ...] | None:
    """Return a config's list of layers of a target that has `count`; None for null, an empty list and none at all."""
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(one) is int and -1 <= one <= count for one in ids):
        raise ValueError(f"its config's {name} is {ids!r:.80}: no list of layers of a target of {count}")
    return tuple(ids)


def fitting(reading: Reading, count: int) -> Reading:
    """The reading, if the target has these layers. ValueError, also for embeddings, which nobody passes on here."""
    layers = reading.layers() or ()
    if -1 in layers:
        raise ValueError(f"it reads the target's embeddings (layer ids {list(reading.ids or ())}), not layers alone")
    if bad := [one for one in layers if not 0 <= one < count]:
        raise ValueError(f"it reads the output of layer {bad[0]}, the target has layers 0 to {count - 1}")
    return reading
