"""SPEED-Bench's files as its authors' two scripts write them, made here: the Hub is out of reach for the tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.questions import sets
from evaluation.questions.sets import PLACEHOLDER, SPEED_BENCH, load_set

CATEGORIES = [
    *("coding", "humanities", "math", "multilingual", "qa", "rag"),
    *("reasoning", "roleplay", "stem", "summarization", "writing"),
]


def row(index: int, category: str, *turns: str) -> dict[str, Any]:
    """A row of the Hub's table."""
    return {
        "question_id": f"{index:04x}", "category": category, "sub_category": "poems", "turns": list(turns),
        "source": "https://example.org", "src_id": str(index), "difficulty": "easy", "multiturn": len(turns) > 1,
    }  # fmt: skip


ROWS = [row(i, category, f"Say {category}.", *["Again."] * (i % 2)) for i, category in enumerate(CATEGORIES)]


def prepared(rows: list[dict[str, Any]]) -> str:
    """What NeMo-Skills' script writes: chat messages instead of turns."""
    lines = []
    for line in rows:
        rest = {key: value for key, value in line.items() if key != "turns"}
        lines.append(rest | {"messages": [{"role": "user", "content": turn} for turn in line["turns"]]})
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No data folder but those of the test, and no download."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(sets.DATA_VARIABLE, raising=False)
    monkeypatch.setattr(sets.urllib.request, "urlopen", lambda *_, **__: pytest.fail("something was downloaded"))
    return tmp_path


def test_the_prepared_files_are_found_by_name(nowhere: Path) -> None:
    (nowhere / "data" / "speed_bench").mkdir(parents=True)
    (nowhere / "data" / "speed_bench" / "qualitative.jsonl").write_text(prepared(ROWS))
    found = load_set("speed_bench/qualitative")
    assert [question.category for question in found.questions] == CATEGORIES
    assert found.questions[1] == sets.Question("0001", "humanities", ("Say humanities.", "Again."))


def test_parquet_is_read_as_the_same_questions(nowhere: Path) -> None:
    """As Model-Optimizer's script writes it: speed/PART/test.parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (nowhere / "speed" / "qualitative").mkdir(parents=True)
    file = nowhere / "speed" / "qualitative" / "test.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    (nowhere / "rows.jsonl").write_text(prepared(ROWS))
    found = load_set("", str(file))
    assert found.questions == load_set("", "rows.jsonl").questions and found.name == "qualitative"
    file.write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"test\.parquet is not parquet"):
        load_set("", str(file))


@pytest.mark.parametrize("part", SPEED_BENCH)
@pytest.mark.parametrize("fetch", [False, True])
def test_an_absent_part_is_never_downloaded_but_says_how_to_make_it(nowhere: Path, part: str, fetch: bool) -> None:
    with pytest.raises(FileNotFoundError, match=f"--config {part} --output_dir data/speed_bench$"):
        load_set(f"speed_bench/{part}", fetch=fetch)


def test_a_part_that_there_is_not_is_named_with_those_that_there_are(nowhere: Path) -> None:
    with pytest.raises(ValueError, match=r"'speed_bench/64k'.*speed_bench/PART.*qualitative, throughput_1k"):
        load_set("speed_bench/64k")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (prepared([ROWS[0], row(1, "rag", f"{PLACEHOLDER} USING SPECDEC_BENCH")]), "line 2: a placeholder stands"),
        (json.dumps({"messages": [{"role": "system", "content": "Be kind."}]}), "line 1: only a user's.*found system"),
        (json.dumps({"messages": ["Say rag."]}), "line 1: only a user's.*found None"),
        (json.dumps({"messages": []}), "line 1: needs `turns`"),
        (prepared([row(1, "rag", " ")]), "line 1: needs `turns`"),
    ],
)
def test_what_is_no_question_is_refused(nowhere: Path, lines: str, message: str) -> None:
    (nowhere / "q.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=message):
        load_set("", "q.jsonl")


def test_a_category_of_null_is_none_and_utf_16_is_named(tmp_path: Path) -> None:
    file, line = tmp_path / "mine.jsonl", json.dumps({"question": "Why?", "category": None})
    file.write_text(line)
    assert [question.category for question in load_set("any", str(file)).questions] == ["mine"]
    for encoding in ("utf-16", "utf-16-le"):
        file.write_bytes((line if encoding == "utf-16" else "\ufeff" + line).encode(encoding))
        with pytest.raises(ValueError, match=r"mine\.jsonl is UTF-16: save it as UTF-8"):
            load_set("any", str(file))
