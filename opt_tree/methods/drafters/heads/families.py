"""Which family of heads a config.json belongs to, where configs look alike, and the refusal of those not meant.

DFlash 2 (PyPI dflash), JetSpec (arXiv:2606.18394), P-EAGLE (arXiv:2602.01469) and DSpark (arXiv:2607.05147) share their
layers, and much of their configs, with DFlash and EAGLE-3. Loaded as these they would draft, and badly.
"""

from collections.abc import Mapping
from typing import Any

from opt_tree.models.checkpoints import CheckpointError

DSPARK = "DSpark"


def family(config: Mapping[str, Any]) -> str | None:
    """Return the family that a config names itself as; None: none of these."""
    nested = config.get("dflash_config")
    own = {**config, **(nested if isinstance(nested, Mapping) else {})}
    names = config.get("architectures") or []
    name = "".join([*names, str(config.get("speculators_model_type", ""))]).lower() if isinstance(names, list) else ""
    if "dflash2" in name or own.get("selector_top_k"):
        return "DFlash 2"
    if "jetspec" in name or own.get("causal_head"):
        return "JetSpec"
    if "peagle" in name or own.get("parallel_drafting"):
        return "P-EAGLE"
    if "dspark" in name or own.get("markov_rank"):
        return DSPARK
    return None


def refuse_others(path: str, config: Mapping[str, Any], own: str | None = None) -> None:
    """Raise CheckpointError for a config of another of these families than `own`; None: for any of them."""
    found = family(config)
    if found in (None, own):
        return
    hint = f": name it dspark:{path}" if found == DSPARK else ", which nothing here drafts with"
    raise CheckpointError(f"{path} is a {found} model by its config{hint}")
