"""A question set answered from Python, in a notebook: what the evaluation commands do, and the figures as a table."""

import contextlib
import dataclasses
import io
import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.answers.file import AnswerFile
from evaluation.eval_opt_classic import run
from evaluation.report import figures
from evaluation.run.options import Options
from evaluation.run.work import files_beside
from opt_tree import Pair, TreePolicy

if TYPE_CHECKING:
    from pandas import DataFrame

_OF_ARGUMENTS = {"base_model_path", "bench_name", "question_file", "answer_file", "json"}
"""Options that the arguments say, or that print."""
_OF_LOADING = ("device", "dtype", "weights", "compile", "unpacked", "canonical", "no_exact", "through", "drafter")
"""Options that say how a pair is loaded."""


def evaluate(
    model: str | Pair = "demo",
    questions: str | Path | Sequence[str] = "demo",
    output: str | Path | None = None,
    policy: TreePolicy | None = None,
    **options: Any,
) -> "DataFrame":
    """Answer questions, and return the figures of each category and of all: a row a method.

        evaluation.evaluate("demo", limit=10, baseline=True)
        evaluation.evaluate(pair, ["Why is the sky blue?"], nodes=16, threshold=0.2)

    Args:
        model: What `load_pair` takes, or a pair that is loaded.
        questions: The name of a question set, a file of questions, or the questions themselves.
        output: The answer file, for `evaluation.load` and the commands; one that is there goes on where it stopped.
            Without it nothing is kept.
        policy: What chooses the trees, of the library or your own: `policy=Trunk(24)`; by default what the options say.
        options: Any other of `python -m evaluation.eval_opt_classic --help`, in Python's spelling:
            `drafter="eagle:demo"`, `max_new_tokens=64`, `baseline=True`.

    Returns:
        What `evaluation.figures` returns of all files; with `baseline=True` beside plain decoding.

    Raises ValueError and OSError for bad input, and a warning names the questions that failed.
    """
    pair = None if isinstance(model, str) else model
    told = _named(options) | (_of_pair(pair, options) if pair else {"base_model_path": model})
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        asked = _asked(questions, Path(scratch))
        file = Path(scratch, "answers.jsonl") if output is None else Path(output)
        given = Options(**told, **asked, answer_file=str(file))
        failed = run(given, pair, policy)
        if failed:
            lost = [str(record["question_id"]) for record in AnswerFile(file).read_failed()]
            warnings.warn(f"questions without an answer: {', '.join(lost)}", stacklevel=2)
        others = list(files_beside(file, given).values())
        return figures(file, *others, baseline=others[0] if others else None)


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """The options under the names of their fields; ValueError for one that there is not."""
    told = {"max_new_token" if name == "max_new_tokens" else name: value for name, value in options.items()}
    known = {field.name for field in dataclasses.fields(Options)} - _OF_ARGUMENTS
    if unknown := sorted(told.keys() - known):
        raise ValueError(f"no option is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return told


def _of_pair(pair: Pair, options: dict[str, Any]) -> dict[str, Any]:
    """What the options of loading say where a pair is loaded; `run` notes its own drafter."""
    if loaded := [name for name in _OF_LOADING if name in options]:
        raise ValueError(f"the pair is loaded: {', '.join(loaded)} cannot be chosen any more")
    return {"base_model_path": pair.target.name, "drafter": "ngram", "device": str(pair.target.device)}


def _asked(questions: str | Path | Sequence[str], scratch: Path) -> dict[str, str]:
    """The options that name the questions."""
    if isinstance(questions, str) and not questions.endswith((".jsonl", ".parquet")):
        return {"bench_name": questions}
    if isinstance(questions, str | Path):
        return {"question_file": str(questions)}
    file = scratch / "questions.jsonl"
    lines = [json.dumps({"question_id": place, "question": text}) for place, text in enumerate(questions)]
    file.write_text("\n".join(lines), encoding="utf-8")
    return {"question_file": str(file)}
