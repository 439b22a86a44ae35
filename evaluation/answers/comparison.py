"""What the lines of `evaluation.compare` say: figures of a combination, differences between two; and reading them.

A combination's answers are those of an answer file, so that `evaluation.answers` reads them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from evaluation.answers.file import AnswerFile, Record
from evaluation.answers.metrics import estimate, speed_up, summary, totals
from evaluation.answers.record import exact_match, paired
from evaluation.answers.steps import alone, steps_of, total
from opt_tree.errors import one_line

Counts = Float[np.ndarray, "questions 2"]
Efficiency = Mapping[str, Sequence[float]]
"""By verifier: how many tokens it would emit on each tree."""
SHARPENING = ("bare", "fitted")
REFERENCE = "opt"
"""The policies that the others are compared with."""
PLAIN = "plain decoding"
SIZES = {"weights_bytes": ("weights MB", 1e6), "training_minutes": ("trained min", 1.0)}
"""Of drafters: the head of a column, and its unit."""
ABOUT = {"drafter": "drafter", "sharpening": "sharpening", "tree": "policy", "nodes": "budget"} | {
    name: name for name in ("children", "verifier")
}
"""Of a combination: the head of a column, and what stands in it. Of transformers' ways `tree` has the name alone."""
OF_DRAFTERS = ("draft_ms_per_step", *SIZES)


def figures(answers: Sequence[Record], plain: Sequence[Record], efficiency: Efficiency) -> dict[str, Any]:
    """The figures of one cell, from its answers, plain decoding's, and what was expected of its trees."""
    known = summary(answers)
    drafted = total(answers, "draft_tokens") or 0
    taken = steps_of(answers)
    assert taken is not None and taken.expected is not None
    equal, timed = exact_match(answers, plain), alone(answers)
    _, interval = estimate(counts(answers), lambda sums: sums[..., 0] / sums[..., 1])
    return {
        **known,
        "interval": interval,
        "expected_length": float(taken.expected.mean()),
        "promise": promise(answers),
        "draft_tokens_per_step": drafted / known["steps"],
        **({"draft_ms_per_step": 1000 * (total(answers, "draft_time") or 0.0) / known["steps"]} if timed else {}),
        "speed_up": speed_up(answers, plain),
        "plain_tokens_per_second": summary(plain)["tokens_per_second"],
        "same_as_plain": [equal["equal"], equal["compared"]],
        "block_efficiency": {name: float(np.mean(known)) for name, known in efficiency.items() if known},
    }


def promise(answers: Sequence[Record]) -> dict[str, Any] | None:
    """E(A) over A, both of the same steps, with its interval over questions; None where nothing was accepted.

    Steps that a stop may have trimmed are left out: their trees held more than the answer has.
    """
    sums = np.zeros((len(answers), 2))
    for own, answer in zip(sums, answers, strict=True):
        taken = steps_of([answer])
        assert taken is not None and taken.expected is not None
        own[:] = (taken.expected[taken.whole] - 1).sum(), (taken.lengths[taken.whole] - 1).sum()
    if not sums[:, 1].any():
        return None
    # A resample may accept nothing.
    ratio, interval = estimate(sums, lambda drawn: drawn[..., 0] / np.maximum(drawn[..., 1], 1))
    return {"ratio": ratio, "interval": interval}


def counts(answers: Sequence[Record]) -> Counts:
    """New tokens and steps of each question."""
    return totals(answers, "new_tokens", "decoding_steps")


def difference(ours: Record, theirs: Record) -> dict[str, Any]:
    """Mean acceptance length of one cell minus another's, on the questions of both, with its interval."""
    both = np.hstack([counts(answers) for answers in paired(ours["answers"], theirs["answers"])])
    minus, interval = estimate(both, lambda sums: sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3])
    return {"difference": minus, "interval": interval}


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Cell and figures of each line, best first within its budget, with the difference to OPT-Tree, bare and fitted.

    All that the table shows is here, for a machine; the answers are in the lines themselves.
    """
    references: dict[tuple, Record] = {}
    for record in records:  # of several thresholds the first one asked for
        if record["cell"]["policy"].partition(":")[0] == REFERENCE:
            references.setdefault((*_place(record), record["cell"]["sharpening"]), record)
    lines = []
    for record in sorted(records, key=lambda r: (*_place(r)[1:], -r["figures"]["tokens_per_step"])):
        own = record["cell"]["sharpening"]
        minus = {
            known: difference(record, theirs)
            for known in SHARPENING
            if own in (known, "either") and (theirs := references.get((*_place(record), known))) not in (None, record)
        }
        lines.append({**record["cell"], **record["figures"], "ceiling": ceiling(record), "minus_opt": minus})
    return lines


def ceiling(record: Record) -> float | None:
    """Tokens a step that a rule exact given these trees emits at most: what `match` emits on them, or `greedy`."""
    known = record["figures"]
    greedy = record["cell"]["verifier"] == "greedy"
    return known["tokens_per_step_untrimmed"] if greedy else known["block_efficiency"].get("match")


def _place(record: Record) -> tuple[str, float, int]:
    """What cells share that are compared with each other."""
    cell = record["cell"]
    return cell["drafter"], cell["temperature"], cell["budget"]


# The file as it is read.


def is_comparison(path: str | Path) -> bool:
    """Whether a file is the output of `evaluation.compare`."""
    return any({"cell", "peers"} & record.keys() for record in AnswerFile(path).read())


def read(path: str | Path) -> list[Record]:
    """The lines of a comparison: those of combinations have a "cell", those of transformers' ways "peers"."""
    records = AnswerFile(path).read()
    if not all({"cell", "peers"} & record.keys() for record in records):
        raise ValueError(f"{path} is another command's: python -m evaluation.report reads answers")
    return records


@contextmanager
def as_written(path: str | Path) -> Iterator[None]:
    """Inside, lines that are not as `evaluation.compare` writes them become a ValueError with the path in it."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{path} has lines that `evaluation.compare` did not write: {one_line(error)}") from error


def rows_of(path: str | Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each combination, and each of transformers' ways: what it is, and its figures beside plain decoding's."""
    rows = []
    with as_written(path):
        for record in read(path):
            temperature, peers = record.get("cell", record)["temperature"], record.get("peers", {})
            plain, known = record["plain"] if "plain" in record else peers[PLAIN], record.get("figures", {})
            cell = {head: record["cell"][key] for head, key in ABOUT.items()} if "cell" in record else {}
            for name, answers in (peers or {"": record["answers"]}).items():
                what = cell or dict.fromkeys(ABOUT, "") | {"tree": name}
                about = {"file": Path(path).stem, **what, "temperature": temperature}
                rows.append((about, summary(answers, plain) | {key: known.get(key) for key in OF_DRAFTERS}))
    return rows
