"""Which family of heads a config.json belongs to, where configs look alike, and the refusal of those not meant.

DFlash, DFlash 2, JetSpec (arXiv:2606.18394), DSpark (arXiv:2607.05147), Domino (arXiv:2607.08642 drafts with it),
XPress and P-EAGLE (arXiv:2602.01469) share their layers, and much of their configs, with one another and with EAGLE-3.
Loaded as another one they would draft, and badly.
"""

from collections.abc import Mapping
from typing import Any

from opt_tree.models.checkpoints import CheckpointError

DFLASH, DFLASH2, JETSPEC, DSPARK, DOMINO = BLOCKS = ("DFlash", "DFlash 2", "JetSpec", "DSpark", "Domino")
"""Families whose files `dflash:` loads: blocks of masked tokens that read the target's hidden states."""
PEAGLE = "P-EAGLE"
_OTHERS = {"xpress": "XPress"}
_NAMES = {"dflash2": DFLASH2, "jetspec": JETSPEC, "peagle": PEAGLE, "dspark": DSPARK, "domino": DOMINO} | _OTHERS
"""By a part of the name of a class, or of `speculators_model_type`, or a `projector_type`."""
_KEYS = {
    "selector_rank": DFLASH2,
    "selector_top_k": DFLASH2,
    "causal_head": JETSPEC,
    "parallel_drafting": PEAGLE,
    "pard_token": PEAGLE,
    "markov_rank": DSPARK,
    "gru_hidden_dim": DOMINO,
    "xpress_rank": "XPress",
}
"""By a setting that is not 0, null or false."""


def family(config: Mapping[str, Any]) -> str | None:
    """Return the family that a config names itself as; None: none of these.

    What `speculators` names it counts first, then its `projector_type`, a setting of its own, the name of its class.
    """
    nested = config.get("dflash_config")
    own = {**config, **(nested if isinstance(nested, Mapping) else {})}
    architectures = config.get("architectures") or []
    classes = "".join(map(str, architectures)) if isinstance(architectures, list) else ""
    for name in (str(own.get(key, "")).lower() for key in ("speculators_model_type", "projector_type")):
        if name in _NAMES:
            return _NAMES[name]
        if name == "dflash":
            return DFLASH
    found = next((named for key, named in _KEYS.items() if own.get(key)), None)
    if found is None:
        found = next((named for part, named in _NAMES.items() if part in classes.lower()), None)
    if found is None and ("dflash" in classes.lower() or nested or own.get("model_type") == "muse_glimmer_assistant"):
        return DFLASH
    return found


def refuse_others(path: str, config: Mapping[str, Any], own: tuple[str, ...] = ()) -> None:
    """Raise CheckpointError for a config of another of these families than its `own`."""
    found = family(config)
    if found is None or found in own:
        return
    kind = "eagle" if found == PEAGLE else "dflash" if found in BLOCKS else None
    hint = f": name it {kind}:{path}" if kind else ", which nothing here drafts with"
    article = "an" if found.startswith("X") else "a"
    raise CheckpointError(f"{path} is {article} {found} model by its config{hint}")
