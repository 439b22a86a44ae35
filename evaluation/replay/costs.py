"""What steps are priced by: tables of costs, and the seconds of generations under one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from opt_tree import Generation
from opt_tree.policies import Costs

COSTS = {
    "eager": Costs.straight(5.4e-3, 5.5e-3, 1e-4, 1.05e-3, 3e-5, 3e-4, 2e-4),
    "compiled": Costs.straight(1.9e-3, 2e-3, 7e-5, 5.5e-4, 2e-5, 4e-4, 3e-4),
    "344M": Costs.straight(60e-3, 60e-3, 1e-3, 1.05e-3, 2.5e-5, 3e-4, 2e-4),
    "344M, compiled": Costs.straight(28e-3, 28e-3, 6e-4, 5.5e-4, 1.5e-5, 3e-4, 2e-4),
    "dear drafter": Costs.straight(5e-3, 5e-3, 8e-4, 4e-3, 1e-4),
}
"""About what was measured on one CPU core (RESULTS.md), and a drafter that does not pay."""


def read_costs(path: str | None) -> Mapping[str, Costs]:
    """The tables of a JSON file; without one, those above. ValueError for a file that holds none."""
    if path is None:
        return COSTS
    try:
        return {name: Costs.read(known) for name, known in json.loads(Path(path).read_text()).items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of costs: {error}") from error


def seconds(generations: Sequence[Generation], costs: Costs) -> float:
    """What the steps of these generations cost."""
    total = 0.0
    for generation in generations:
        context = len(generation.prompt)
        for step, emitted in zip(generation.steps, generation.accept_lengths, strict=True):
            total += costs.at(context).of(step)
            context += emitted
    return total
