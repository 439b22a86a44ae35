"""The one table of drafters, for people: all of them, under every tree and budget, beside plain decoding and others."""

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.answers.file import Record
from evaluation.answers.metrics import tokens_per_second, with_interval
from evaluation.command_line import Value, table
from evaluation.compare.peers import PLAIN, Yardstick, peers_of


def overview(lines: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> str:
    """A block for each temperature, the fastest of each budget first; `lines` are those of `figures.summarise`."""
    blocks = []
    for temperature in sorted({line["temperature"] for line in lines}):
        plain = Yardstick(records, temperature)
        rows = []
        for name, answers in peers_of(records).get(temperature, {}).items():
            row = _shown({"drafter": name, "tokens/s": tokens_per_second(answers)}, answers, plain)
            # Above temperature 0 others draw with other random numbers: their texts are not ours.
            rows.append(row if name == PLAIN or not temperature else {**row, "= plain": None})
        own = [line for line in lines if line["temperature"] == temperature]
        for line in sorted(own, key=lambda line: (line["budget"], -line["tokens_per_second"])):
            rows.append(_row(line, plain))
        blocks.append(f"temperature {temperature:g}, {own[0]['questions']} questions:\n{table(rows)}")
    return "\n\n".join(blocks)


def _row(line: Mapping[str, Any], plain: Yardstick) -> dict[str, Value]:
    drawn = line["children"] == "IID"  # of equal siblings at most one can be accepted: their sum is no expectation
    row: dict[str, Value] = {
        "drafter": line["drafter"],
        "tree": line["policy"],
        "nodes": line["budget"],
        "tokens/step": with_interval(line["tokens_per_step"], line["interval"]),
        "E(A)": None if drawn else line["expected_length"] - 1,
        "A": line["tokens_per_step_untrimmed"] - 1 if line["tokens_per_step_untrimmed"] else None,
        "draft forwards": line["draft_forwards_per_step"],
        "draft ms": line["draft_ms_per_step"],
        "tokens/s": line["tokens_per_second"],
    }
    row = _shown(row, line["answers"], plain)
    size, minutes = line.get("weights_bytes"), line.get("training_minutes")
    row["weights MB"] = "-" if size is None else f"{size / 1e6:.1f}"
    row["trained min"] = "-" if minutes is None else f"{minutes:.1f}"
    return row


def _shown(row: dict[str, Value], answers: Sequence[Record], plain: Yardstick) -> dict[str, Value]:
    """The row with what plain decoding is needed for."""
    equal, compared = plain.equal(answers)
    speed = row["tokens/s"]
    assert isinstance(speed, float)
    return {**row, "tokens/s": f"{speed:.0f}", "x plain": plain.times(answers), "= plain": f"{equal}/{compared}"}
