"""What the peers came to: figures a peer, and the one table."""

import statistics
from collections.abc import Sequence
from typing import Any

from evaluation.command_line import table
from evaluation.peers.measuring import Measured
from evaluation.peers.registry import BASE, REFERENCE


def figures(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The figures of each peer; `equal` counts the texts that are those of float32 greedy decoding."""
    found = []
    for one in measured:
        line: dict[str, Any] = {"peer": one.name, "cores": one.cores, "failed": one.failed}
        if one.answers:
            base = _of(measured, BASE, one.cores)
            reference = _of(measured, REFERENCE, one.cores)
            line |= {
                "tokens_per_second": _rate(one),
                "times_transformers": _rate(one) / _rate(base) if base else None,
                "first_token_seconds": statistics.median(answer["first_seconds"] or 0 for answer in one.answers),
                "load_seconds": one.load_seconds,
                "peak_mb": max(answer["peak_mb"] for answer in one.answers),
                "tokens": sum(len(answer["tokens"]) for answer in one.answers),
                "answers": len(one.answers),
                "equal": _equal(one, reference) if reference else None,
            }
        found.append(line)
    return found


def _of(measured: Sequence[Measured], name: str, cores: int) -> Measured | None:
    return next((one for one in measured if (one.name, one.cores) == (name, cores) and one.answers), None)


def _rate(one: Measured) -> float:
    return sum(len(answer["tokens"]) for answer in one.answers) / sum(answer["seconds"] for answer in one.answers)


def _equal(one: Measured, reference: Measured) -> int:
    pairs = zip(one.answers, reference.answers, strict=True)
    return sum(answer["tokens"] == expected["tokens"] for answer, expected in pairs)


def lay_out(found: Sequence[dict[str, Any]]) -> str:
    """The table, fastest first for each number of cores, and a line for each peer that is not in it."""
    ran = [line for line in found if not line["failed"]]
    rows = [
        {
            "peer": line["peer"],
            "cores": line["cores"],
            "tokens/s": f"{line['tokens_per_second']:.1f}",
            "x transformers": None if line["times_transformers"] is None else f"{line['times_transformers']:.2f}",
            "first token ms": f"{1000 * line['first_token_seconds']:.0f}",
            "load s": f"{line['load_seconds']:.1f}",
            "peak MB": f"{line['peak_mb']:.0f}",
            "float32's text": "" if line["equal"] is None else f"{line['equal']}/{line['answers']}",
        }
        for line in sorted(ran, key=lambda line: (line["cores"], -line["tokens_per_second"]))
    ]
    out = [f"{line['peer']}, {line['cores']} cores: left out, {line['failed']}" for line in found if line["failed"]]
    return "\n".join([table(rows), "", *out]).rstrip()
