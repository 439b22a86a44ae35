"""What the lines of `evaluation.compare` say: figures of a cell, differences between cells, the table. Arithmetic only.

A cell's answers are those of an answer file (`evaluation.conversation`), so that `evaluation.metrics` reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from evaluation.answers import metrics
from evaluation.answers.metrics import Record
from evaluation.card import table

Counts = Float[np.ndarray, "questions 2"]
REFERENCE = "opt"
"""The policies that the others are compared with."""


def figures(answers: Sequence[Record], plain: Sequence[Record], efficiency: Sequence[Mapping]) -> dict[str, Any]:
    """The figures of one cell, from its answers, plain decoding's, and the expectations of each question's trees."""
    known = metrics.summary(answers)
    drafted = metrics.total(answers, "draft_tokens") or 0
    taken = metrics.steps(answers)
    assert taken is not None and taken.expected is not None
    equal = metrics.exact_match(answers, plain)
    return {
        **known,
        "interval": length_interval(answers),
        "expected_length": float(taken.expected.mean()),
        "draft_tokens_per_step": drafted / known["steps"],
        "speed_up": metrics.speed_up(answers, plain),
        "plain_tokens_per_second": metrics.summary(plain)["tokens_per_second"],
        "same_as_plain": [equal["equal"], equal["compared"]],
        "block_efficiency": mean_efficiency(efficiency),
    }


def mean_efficiency(efficiency: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The mean over all trees of what each verifier would emit on them, by its name."""
    names = efficiency[0] if efficiency else {}
    values = {name: [value for question in efficiency for value in question[name]] for name in names}
    return {name: float(np.mean(known)) for name, known in values.items() if known}


def counts(answers: Sequence[Record]) -> Counts:
    """New tokens and steps of each question."""
    keys = ("new_tokens", "decoding_steps")
    return np.array([[metrics.total([answer], key) for key in keys] for answer in answers], dtype=float)


def length(of: Counts, rows: Int[np.ndarray, "... rows"]) -> Float[np.ndarray, "..."]:
    """Mean acceptance length over some of the questions."""
    sums = of[rows].sum(-2)
    return sums[..., 0] / sums[..., 1]


def bootstrap(statistic: Callable[[Any], Any], questions: int) -> list[float] | None:
    """A 95 % interval by resampling questions; None for a single one."""
    if questions < 2:
        return None
    draws = np.random.default_rng(0).integers(questions, size=(metrics.RESAMPLES, questions))
    return [float(edge) for edge in np.percentile(statistic(draws), (2.5, 97.5))]


def length_interval(answers: Sequence[Record]) -> list[float] | None:
    of = counts(answers)
    return bootstrap(lambda rows: length(of, rows), len(of))


def difference(ours: Record, theirs: Record) -> dict[str, Any]:
    """Mean acceptance length of one cell minus another's, on the questions of both, with its interval."""
    a, b = (counts(answers) for answers in metrics.paired(ours["answers"], theirs["answers"]))

    def minus(rows: Int[np.ndarray, "... rows"]) -> Float[np.ndarray, "..."]:
        return length(a, rows) - length(b, rows)

    return {"difference": float(minus(np.arange(len(a)))), "interval": bootstrap(minus, len(a))}


def group(record: Record) -> tuple[str, float, int]:
    """What cells must share to stand in one group of the table."""
    cell = record["cell"]
    return cell["drafter"], cell["temperature"], cell["budget"]


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Cell and figures of each line, best first within its group, with the difference to OPT-Tree under each law."""
    references: dict[tuple, Record] = {}
    for record in records:  # of several thresholds the first one asked for
        if record["cell"]["policy"].partition(":")[0] == REFERENCE:
            references.setdefault((*group(record), record["cell"]["law"]), record)
    lines = []
    for record in sorted(records, key=lambda r: (*group(r), -r["figures"]["tokens_per_step"])):
        own = record["cell"]["law"]
        minus = {
            law: difference(record, theirs)
            for law in ("bare", "sharpened")
            if own in (law, "either") and (theirs := references.get((*group(record), law))) not in (None, record)
        }
        lines.append({**record["cell"], **record["figures"], "minus_opt": minus})
    return lines


def brief(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a machine wants to know of a cell; the rest is in its line of the output."""
    keys = ("policy", "budget", "drafter", "law", "temperature", "children", "verifier", "tokens_per_step", "interval")
    known = {key: line[key] for key in (*keys, "block_efficiency", "tokens_per_second", "minus_opt")}
    return {**known, "speed_up": line["speed_up"]["micro"]}


def text(lines: Sequence[Mapping[str, Any]], header: Mapping[str, Any] | None) -> str:
    """The table for people, a block for each drafter, temperature and budget."""
    blocks = []
    if header is not None:
        place = header["sessions"][-1]["environment"]
        machine = f"{place['device']}, {place['threads']} threads, torch {place['torch']}"
        blocks.append(f"{machine}, target {header['settings']['target_dtype']}; 95 % intervals over questions")
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["drafter"], line["temperature"], line["budget"]), []).append(line)
    for (drafter, temperature, budget), members in groups.items():
        head = f"{drafter}, temperature {temperature:g}, at most {budget} nodes, {members[0]['questions']} questions:"
        blocks.append(f"{head}\n{table([_row(line) for line in members])}")
    return "\n\n".join(blocks)


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    efficiency = line["block_efficiency"].get(line["verifier"])
    speed = line["speed_up"]
    row = {
        "tree": line["policy"],
        "children": line["children"],
        "verifier": line["verifier"],
        "law": line["law"],
        "tokens/step": with_interval(line["tokens_per_step"], line["interval"]),
        **({} if efficiency is None else {"block efficiency": efficiency}),
        # Of equal siblings, drawn independently, at most one can be accepted: their sum is no expectation.
        "E(A)+1": "" if line["children"] == "IID" else line["expected_length"],
        "draft forwards": line["draft_forwards_per_step"],
        "draft tokens": f"{line['draft_tokens_per_step']:.0f}",
        "verified": f"{line['verified_tokens_per_step']:.1f}",
        "accepted/node": "" if line["nodes_accepted"] is None else f"{line['nodes_accepted']:.3f}",
        "tokens/s": f"{line['tokens_per_second']:.0f}",
        "speed-up": with_interval(speed["micro"], speed["interval"]),
        **({"= plain": "{}/{}".format(*line["same_as_plain"])} if line["verifier"] == "greedy" else {}),
    }
    for law, minus in line["minus_opt"].items():
        row[f"minus opt, {law}"] = with_interval(minus["difference"], minus["interval"], "+")
    return row


def with_interval(value: float, interval: Sequence[float] | None, sign: str = "") -> str:
    """A figure and its interval, to two digits."""
    edges = "" if interval is None else f" [{interval[0]:{sign}.2f}, {interval[1]:{sign}.2f}]"
    return f"{value:{sign}.2f}{edges}"
