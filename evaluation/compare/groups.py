"""Lines of a comparison, grouped by parts of their cells."""

from collections.abc import Iterable, Iterator

from evaluation.answers.file import Record
from evaluation.compare.figures import REFERENCE


def of_policy(records: Iterable[Record], family: str) -> Iterator[Record]:
    """The cells of a policy, whatever its parameters."""
    return (record for record in records if record["cell"]["policy"].partition(":")[0] == family)


def of_opt_tree(records: Iterable[Record]) -> list[Record]:
    return list(of_policy(records, REFERENCE))


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple, list[Record]]:
    """Records that agree in these parts of their cells."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record["cell"][key] for key in keys), []).append(record)
    return groups


def series(records: Iterable[Record], along: str, *keys: str) -> dict[tuple, list[Record]]:
    """Groups of `grouped` in the order of a number of the cell, where it takes two values at least."""
    groups = {}
    for key, members in grouped(records, *keys).items():
        at = {record["cell"][along]: record for record in members}
        if len(at) > 1:
            groups[key] = [at[value] for value in sorted(at)]
    return groups
