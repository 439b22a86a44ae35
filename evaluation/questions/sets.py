"""Question sets: found by name in data folders, fetched on request, or read from any JSONL or parquet file.

Owns where the files are and what a line may look like. Knows nothing of models and prompts.
"""

import codecs
import hashlib
import io
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opt_tree.system.files import whole

SHIPPED = {name: Path(__file__).parent / f"{name}.jsonl" for name in ("demo", "heldout")}
"""`heldout`: what figures of the embedded models are made on; README.md beside it says where its prompts are from."""
DATA_VARIABLE = "OPT_TREE_DATA"
USER_CACHE = Path("~/.cache/opt_tree/questions")


@dataclass(frozen=True)
class Source:
    """Where a named set comes from. Other projects' data: found or fetched, never shipped here."""

    url: str
    sha256: str
    """Of the file meant here; a download that differs is refused."""
    about: str


SOURCES = {
    "mt_bench": Source(
        "https://raw.githubusercontent.com/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        "80 questions of two turns, eight categories; FastChat, Apache-2.0",
    ),
    "gsm8k": Source(
        "https://raw.githubusercontent.com/SafeAILab/EAGLE/main/eagle/data/gsm8k/question.jsonl",
        "a55920b2f2aac724241124c59e5b8e8168dbbeb2ab0fdbee17d5b0ab6db5ff27",
        "80 questions of GSM8K as EAGLE runs them",
    ),
    "humaneval": Source(
        "https://raw.githubusercontent.com/SafeAILab/EAGLE/main/eagle/data/humaneval/question.jsonl",
        "ce0244e2b228339e9a11afc63a151719beede1e389fdaec7cd9751d33902180e",
        "80 questions of HumanEval as EAGLE runs them",
    ),
    "spec_bench": Source(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        "480 questions, MT-Bench and five single-turn tasks; Spec-Bench, Apache-2.0",
    ),
}

SPEED_BENCH = {
    "qualitative": "880 questions, 80 in each of eleven categories",
    **{
        f"throughput_{length}": f"1,536 prompts of about {length} tokens, as many of low, mixed and high entropy"
        for length in ("1k", "2k", "8k", "16k", "32k")
    },
}
"""Its parts (arXiv:2604.09557), called speed_bench/PART here. Licences forbid to ship or to fetch them as one file."""
PREPARE = (
    "curl -LsSf https://raw.githubusercontent.com/NVIDIA-NeMo/Skills/refs/heads/main/nemo_skills/dataset/speed-bench/"
    "prepare.py | python3 - --config {part} --output_dir {folder}"
)
"""NVIDIA's script: it needs `datasets`, `pandas`, `tiktoken`, and a token of the Hub for a source that is gated."""
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How a prompt of the Hub's files begins where the script has to put in another data set's text."""


@dataclass(frozen=True)
class Question:
    """One question of one or more turns."""

    id: int | str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class QuestionSet:
    """A question file as read: `sha256` tells two files of one name apart."""

    name: str
    path: Path
    sha256: str
    questions: tuple[Question, ...]


def load_set(name: str, file: str | None = None, data_dir: str | None = None, fetch: bool = False) -> QuestionSet:
    """Read the set called `name`, or `file` whatever its name. ValueError and OSError say what to put where."""
    path = Path(file).expanduser() if file else find(name, data_dir, fetch)
    if not path.is_file():
        raise FileNotFoundError(f"no question file at {path}")
    if file is not None:
        name = path.parent.name if path.stem.split("-")[0] in ("question", "test") else path.stem
    data = path.read_bytes()
    return QuestionSet(name, path, hashlib.sha256(data).hexdigest(), tuple(read(data, path, name)))


def find(name: str, data_dir: str | None = None, fetch: bool = False) -> Path:
    """Find a named set in the data folders; download it to the user cache if `fetch`."""
    if name in SHIPPED:
        return SHIPPED[name]
    folders = [Path(folder).expanduser() for folder in (data_dir, os.environ.get(DATA_VARIABLE), "data") if folder]
    folders.append(Path(os.path.expanduser(USER_CACHE)))
    for folder in folders:
        for path in (folder / name / "question.jsonl", folder / f"{name}.jsonl"):
            if path.is_file():
                return path
    looked = ", ".join(str(folder) for folder in folders)
    whole, _, part = name.partition("/")
    if whole == "speed_bench" and part in SPEED_BENCH:
        raise FileNotFoundError(
            f"question set {name} ({SPEED_BENCH[part]}) is not here (looked in {looked}), and --fetch cannot bring it: "
            "NVIDIA's script makes it of data sets with licences of their own: "
            + PREPARE.format(part=part, folder=folders[0] / whole)
        )
    if name not in SOURCES:
        raise ValueError(
            f"unknown question set {name!r}: not one of {', '.join((*SHIPPED, *SOURCES))}, speed_bench/PART with PART "
            f"of {', '.join(SPEED_BENCH)}, and no {name}/question.jsonl or {name}.jsonl in {looked}; any JSONL with "
            "`turns` or `question` runs with --question-file"
        )
    source, target = SOURCES[name], folders[-1] / name / "question.jsonl"
    if not fetch:
        raise FileNotFoundError(
            f"question set {name} is not here (looked in {looked}): save {source.url} ({source.about}) as "
            f"{folders[0] / name / 'question.jsonl'}, or pass --fetch to download it to {target.parent}"
        )
    return download(source, target)


def download(source: Source, target: Path) -> Path:
    """Download a set and check that it is the file meant."""
    try:
        with urllib.request.urlopen(source.url, timeout=30) as response:
            data = response.read()
    except (urllib.error.URLError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        raise OSError(f"cannot fetch {source.url} ({reason}); save the file as {target} yourself") from error
    found = hashlib.sha256(data).hexdigest()
    if found != source.sha256:
        raise ValueError(
            f"{source.url} is not the file known here (sha256 {found[:12]}, expected {source.sha256[:12]}); if its "
            "new text is wanted, save it and name it with --question-file"
        )
    with whole(target) as partial:
        partial.write_bytes(data)
    return target


def read(data: bytes, path: Path, name: str) -> Iterable[Question]:
    """Parse JSONL, or parquet where the file is called so.

    A line has `turns` (a list of texts), or `question` (a text), or `messages` (the user's, as chat messages); also
    `question_id` (else the line's index) and `category`. ValueError names the line that has not.
    """
    seen: dict[int | str, str] = {}
    for where, line in _rows(data, path) if path.suffix == ".parquet" else _lines(data, path):
        turns = _turns(line, f"{path}, {where}")
        key = line.get("question_id", len(seen))
        if not isinstance(key, (int, str)) or isinstance(key, bool):
            raise ValueError(f"{path}, {where}: question_id must be a number or a text, got {key!r}")
        if key in seen:
            raise ValueError(f"{path}, {where}: question_id {key!r} is already that of {seen[key]}")
        seen[key] = where
        category = line.get("category")
        yield Question(key, name if category is None else str(category), tuple(turns))


def _lines(data: bytes, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of JSONL, each with the number of its line. In UTF-8; another encoding is refused by its mark."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path} is UTF-16: save it as UTF-8")
    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: broken JSON: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, found {type(line).__name__}")
        yield f"line {number}", line


def _rows(data: bytes, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a parquet file. pyarrow is imported here only."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading parquet needs pyarrow: pip install pyarrow ({error})") from error
    try:
        rows = parquet.read_table(io.BytesIO(data)).to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path} is not parquet: {error}") from error
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _turns(line: dict[str, Any], where: str) -> list[str]:
    """What the user says in each turn of a question."""
    turns = line.get("turns", [line["question"]] if "question" in line else None)
    if isinstance(turns, list) and "question" in line and [line["question"]] != turns[:1]:
        raise ValueError(f"{where}: `question` is not the first of its `turns`: which is asked?")
    if turns is None and isinstance(messages := line.get("messages"), list):
        roles = {message.get("role") if isinstance(message, dict) else None for message in messages}
        if roles - {"user"}:
            others = ", ".join(sorted(map(str, roles - {"user"})))
            raise ValueError(f"{where}: only a user's `messages` are questions, found {others}")
        turns = [message.get("content") for message in messages]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError(f"{where}: needs `turns` (a list of texts) or `question` (a text), none empty")
    if lone := [character for turn in turns for character in turn if "\ud800" <= character <= "\udfff"]:
        raise ValueError(f"{where}: \\u{ord(lone[0]):04x} is half of a character, which no tokenizer takes")
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        command = PREPARE.format(part="PART", folder="data/speed_bench")
        raise ValueError(
            f"{where}: a placeholder stands for another data set's text; NVIDIA's script puts it in: {command}"
        )
    return turns


def select(questions: tuple[Question, ...], begin: int | None, end: int | None, limit: int | None) -> list[Question]:
    """Take the slice `begin:end` as FastChat does, then at most `limit` of it."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    chosen = list(questions[begin:end])[:limit]
    if not questions:
        raise ValueError("the question set is empty")
    if not chosen:
        raise ValueError(f"no questions left: --question-begin {begin} and --question-end {end} of {len(questions)}")
    return chosen
