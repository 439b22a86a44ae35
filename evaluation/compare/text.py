"""The table of a comparison, for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.answers.file import Record
from evaluation.answers.metrics import percent, with_interval
from evaluation.command_line import table
from evaluation.compare.overview import overview

MANY = 3
"""Drafters from which on they are what is compared."""


def text(lines: Sequence[Mapping[str, Any]], records: Sequence[Record], header: Mapping[str, Any] | None) -> str:
    """The table for people: a block for each drafter, temperature and budget; of many drafters the one table."""
    blocks = []
    if header is not None:
        place = header["sessions"][-1]["environment"]
        machine = f"{place['device']}, {place['threads']} threads, torch {place['torch']}"
        blocks.append(f"{machine}, target {header['settings']['target_dtype']}; 95 % intervals over questions")
    if len({line["drafter"] for line in lines}) >= MANY:
        return "\n\n".join([*blocks, overview(lines, records)])
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["drafter"], line["temperature"], line["budget"]), []).append(line)
    for (drafter, temperature, budget), members in groups.items():
        head = f"{drafter}, temperature {temperature:g}, at most {budget} nodes, {members[0]['questions']} questions:"
        blocks.append(f"{head}\n{table([_row(line) for line in members])}")
    return "\n\n".join(blocks)


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    efficiency = line["block_efficiency"].get(line["verifier"])
    speed, promise = line["speed_up"], line.get("promise")  # which older lines lack
    row = {
        "tree": line["policy"],
        "children": line["children"],
        "verifier": line["verifier"],
        "sharpening": line["sharpening"],
        "tokens/step": with_interval(line["tokens_per_step"], line["interval"]),
        **({} if efficiency is None else {"block efficiency": efficiency}),
        # Of equal siblings, drawn independently, at most one can be accepted: their sum is no expectation.
        "E(A)+1": "" if line["children"] == "IID" else line["expected_length"],
        **(
            {}
            if line["children"] == "IID" or not promise
            else {"E(A)/A": with_interval(promise["ratio"], promise["interval"])}
        ),
        "draft forwards": line["draft_forwards_per_step"],
        "draft tokens": f"{line['draft_tokens_per_step']:.0f}",
        **({"draft ms": f"{line['draft_ms_per_step']:.2f}"} if "draft_ms_per_step" in line else {}),
        "verified": f"{line['verified_tokens_per_step']:.1f}",
        "accepted/node": "" if line["nodes_accepted"] is None else f"{line['nodes_accepted']:.3f}",
        "repeated": percent(line["repeated_8grams"]),
        "ended": f"{line['turns_ended']}/{line['turns']}",
        **(_speeds(line) if speed else {}),  # of a batch nobody knows them
        **({"= plain": "{}/{}".format(*line["same_as_plain"])} if line["verifier"] == "greedy" else {}),
    }
    for sharpening, minus in line["minus_opt"].items():
        row[f"minus opt, {sharpening}"] = with_interval(minus["difference"], minus["interval"], "+")
    return row


def _speeds(line: Mapping[str, Any]) -> dict[str, str]:
    speed = line["speed_up"]
    return {
        "tokens/s": f"{line['tokens_per_second']:.0f}",
        "speed-up": with_interval(speed["micro"], speed["interval"]),
    }
