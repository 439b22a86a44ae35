"""What steps cost on another machine, read from a file."""

import json
from pathlib import Path

from opt_tree.methods.policies.costs import Costs


def read_costs(path: str | Path) -> dict[str, Costs]:
    """The tables of a JSON file by name: the fields of `Costs` in seconds, or several such tables by name.

    Raises ValueError for anything else, with the path in it.
    """
    path = Path(path).expanduser()
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(known, dict) or not known:
        raise ValueError(f"{path} holds no table of costs, but {type(known).__name__} of {len(known or ())}")
    try:
        if "scoring" in known:
            return {path.stem: Costs.read(known)}
        return {str(name): Costs.read(fields) for name, fields in known.items()}
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} is no table with the fields of Costs (scoring, first, drafting): "
            f"{' '.join(str(error).split())[:160]}"
        ) from error
