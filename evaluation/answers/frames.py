"""Figures as a pandas table, and as pandas writes it for a paper: CSV, LaTeX or Markdown.

Owns the names of the columns. What the figures are is `metrics`' business. pandas is imported where a table is made.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

Labelled = tuple[Mapping[str, Any], Mapping[str, Any]]
"""What a row is about, and its figures by name (`metrics.summary`)."""


def figures_frame(rows: Sequence[Labelled]) -> "DataFrame":
    """A row for each summary: what it is about, then every figure as a number, intervals as two.

    Raises ValueError, in one line, where there is no pandas.
    """
    try:
        import pandas
    except ImportError as error:
        raise ValueError(f"tables need pandas: pip install pandas tabulate jinja2 ({error})") from error
    return pandas.DataFrame([{**about, **_flat(figures)} for about, figures in rows])


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


def formatted(table: "DataFrame", form: str) -> str:
    """The table as pandas writes it: `csv` in full, `latex` (booktabs) and `markdown` with two digits.

    Raises ValueError where a package is missing.
    """
    try:
        if form == "latex":
            return str(table.to_latex(index=False, escape=True, na_rep="", float_format="%.2f"))
        if form == "markdown":
            return str(table.to_markdown(index=False, floatfmt=".2f"))
        return str(table.to_csv(index=False))
    except ImportError as error:
        raise ValueError(f"--format {form} needs another package: pip install tabulate jinja2 ({error})") from error
