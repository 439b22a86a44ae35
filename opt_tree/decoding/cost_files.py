"""What steps cost on another machine, read from a file: our own tables, and SGLang's table of steps per second.

Owns the two forms and what is taken for granted where a form says less than `Costs`.
"""

import bisect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opt_tree.policies import Costs
from opt_tree.policies.costs import LARGEST

SGLANG = {"sample_batch_tokens", "sample_steps_per_sec"}


def read_costs(path: str | Path, own: Costs) -> dict[str, Costs]:
    """The tables of a JSON file by name.

    Ours: the fields of `Costs` in seconds, or several such tables by name. SGLang's (`dspark_sps_profiler`): steps a
    second by the tokens of a batch. It says nothing of drafting, which is taken to cost as many plain steps as in
    `own`. Raises ValueError for anything else, with the path in it.
    """
    path = Path(path).expanduser()
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(known, dict) or not known:
        raise ValueError(f"{path} holds no table of costs, but {type(known).__name__} of {len(known or ())}")
    try:
        if known.keys() >= SGLANG:
            return {path.stem: _of_sglang(known, own)}
        if "scoring" in known:
            return {path.stem: Costs.read(known)}
        return {str(name): Costs.read(fields) for name, fields in known.items()}
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} is neither a table with the fields of Costs (scoring, first, drafting) nor SGLang's "
            f"({' and '.join(sorted(SGLANG))}): {' '.join(str(error).split())[:160]}"
        ) from error


def _of_sglang(table: Mapping[str, Any], own: Costs) -> Costs:
    """A table of steps per second: a batch of so many tokens takes what the next smaller one that was probed takes."""
    tokens, rates = [int(count) for count in table["sample_batch_tokens"]], table["sample_steps_per_sec"]
    if not tokens or len(tokens) != len(rates) or tokens != sorted(set(tokens)) or not min(rates) > 0:
        raise ValueError("sample_batch_tokens must rise, with a rate above 0 each")
    rows = range(1, min(max(tokens[-1], 2), LARGEST) + 1)
    scoring = tuple((n, 1 / float(rates[max(bisect.bisect_right(tokens, n) - 1, 0)])) for n in rows)
    scale = scoring[0][1] / own.plain
    return Costs(scoring, scale * own.first, tuple((n, scale * seconds) for n, seconds in own.drafting))
