"""Answer files as tables for pandas and for papers: a row a turn, or a row of figures; as CSV, LaTeX or Markdown.

Owns the names of the columns. What the figures are is `metrics`' business. pandas is imported where a table is made.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.answers.file import Record
from evaluation.answers.metrics import row
from evaluation.answers.reading import LISTS, PER_STEP, PER_TURN, read_timed

if TYPE_CHECKING:
    from pandas import DataFrame

Labelled = tuple[Mapping[str, Any], Mapping[str, Any]]
"""What a row is about, and its figures by name (`metrics.summary`)."""


def frame(rows: Iterable[Mapping[str, Any]]) -> "DataFrame":
    """Rows as a pandas DataFrame. Raises ValueError, in one line, where there is no pandas."""
    try:
        import pandas
    except ImportError as error:
        raise ValueError(f"tables need pandas: pip install pandas tabulate jinja2 ({error})") from error
    return pandas.DataFrame(list(rows))


def load(*files: str | Path) -> "DataFrame":
    """Read answer files, those of other people's tools as far as they go, into a row a turn.

    Columns: file, model_id, question_id, category, choice, turn, text, then the fields of an answer file (seconds,
    tokens; see docs/evaluating.md), those of steps as lists; and `tokens_per_step`, `tokens_per_second`. What a file
    does not say is missing.

        evaluation.load("a.jsonl").groupby("category").tokens_per_step.mean()

    Raises ValueError and OSError for files that cannot be read.
    """
    if not files:
        raise ValueError("no answer file is named")
    return frame(
        row
        for path in files
        for run in [read_timed(path)]
        for answer in run.answers
        for row in _turns(run.name, answer)
    )


def _turns(name: str, answer: Record) -> Iterable[dict[str, Any]]:
    about = {"file": name} | {key: answer.get(key) for key in ("model_id", "question_id", "category")}
    for number, choice in enumerate(answer["choices"]):
        counts, begin = choice.get("decoding_steps"), 0
        for turn, text in enumerate(choice["turns"]):
            line = about | {"choice": choice.get("index", number), "turn": turn, "text": text}
            for key in sorted((PER_TURN | LISTS | {"finish_reason"}) & choice.keys()):
                line[key] = choice[key][turn]
            taken = None if counts is None else counts[turn]
            if taken is not None:
                for key in sorted(PER_STEP & choice.keys()):
                    line[key] = choice[key][begin : begin + taken]
                begin += taken
            line["tokens_per_step"] = line["new_tokens"] / taken if taken else None
            alone = line.get("lanes", 1) == 1 and line["wall_time"]
            line["tokens_per_second"] = line["new_tokens"] / line["wall_time"] if alone else None
            yield line


def figures_frame(rows: Sequence[Labelled]) -> "DataFrame":
    """A row for each summary: what it is about, then every figure as a number, intervals as two."""
    return frame({**about, **_flat(figures)} for about, figures in rows)


def _flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """A speed-up and an exact match are several figures; which texts differ is no figure."""
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        if name == "speed_up":
            value = value or {}
            low, high = value.get("interval") or (None, None)
            flat |= {"speed_up": value.get("micro"), "speed_up_low": low, "speed_up_high": high}
            flat |= {"speed_up_decode": value.get("decode")}
        elif name == "exact_match":
            flat |= {"same_text": value["rate"], "turns_equal": value["equal"], "turns_compared": value["compared"]}
        else:
            flat[name] = value
    return flat


def formatted(rows: Sequence[Labelled], form: str) -> str:
    """The figures as text: CSV with every figure in full, LaTeX (booktabs) and Markdown as the report's table shows it.

    What is the same in all rows is no column of the latter two: it belongs under the table.

    Raises ValueError where a package is missing.
    """
    if form == "csv":
        return str(figures_frame(rows).to_csv(index=False)).rstrip("\n")
    shown = [{**about, **dict(list(row("", dict(figures)).items())[1:])} for about, figures in rows]
    table = frame(shown).fillna("").astype(str)
    nothing = {head: {"", "all"} if head == "category" else {""} for head in table}
    same = {head for head in rows[0][0] if len(rows) > 1 and table[head].nunique() == 1}
    table = table[[head for head in table if head not in same and not set(table[head]) <= nothing[head]]]
    sides = ["left" if head in rows[0][0] else "right" for head in table]
    try:
        if form == "latex":
            columns = "".join(side[0] for side in sides)
            return str(table.to_latex(index=False, escape=True, column_format=columns)).rstrip("\n")
        return str(table.to_markdown(index=False, disable_numparse=True, colalign=sides))
    except ImportError as error:
        raise ValueError(f"--format {form} needs another package: pip install tabulate jinja2 ({error})") from error
