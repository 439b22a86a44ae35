"""The certificate of a canonical answer file: complete where it is true, and not otherwise."""

import copy
import json
from pathlib import Path

import pytest
from tiny_models import VOCAB, prompt, save_pair, tiny

from evaluation import exactness
from evaluation.certify import certify
from evaluation.eval_opt_classic import main as answer
from opt_tree import CausalLM, make_canonical
from opt_tree.tools.presets import plain

NEW = 30


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]


@pytest.mark.parametrize("asked", [prompt(1), prompt(40)])
def test_a_text_is_whole_and_a_wrong_token_is_counted(asked: list[int]) -> None:
    lm = CausalLM(copy.deepcopy(tiny("llama")).bfloat16())
    make_canonical(lm)
    text = plain(lm).generate(asked, NEW).tokens
    assert certify(lm, asked, text) == (NEW, NEW, NEW, NEW) and certify(lm, asked, text).whole
    wrong = [*text[:-1], (text[-1] + 1) % VOCAB]
    assert certify(lm, asked, wrong) == (NEW, NEW - 1, NEW, NEW) and not certify(lm, asked, wrong).whole


def test_other_arithmetic_is_not_certified() -> None:
    lm = CausalLM(copy.deepcopy(tiny("llama")).bfloat16())
    found = certify(lm, prompt(40), plain(lm).generate(prompt(40), NEW).tokens)
    assert found.equal < found.rows == NEW and not found.whole


def test_a_file_is_certified_and_others_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "a.jsonl"
    pair = save_pair(tmp_path)
    (tmp_path / "q.jsonl").write_text(json.dumps({"turns": ["aabbcc"]}))
    given = f"--base-model-path {pair}/target --draft-model-path {pair}/draft --question-file {tmp_path}/q.jsonl"
    asked = [*f"{given} --nodes 6 --max-new-token 12 --dtype bfloat16 --answer-file".split(), str(file)]
    assert answer([*asked, "--canonical"]) == 0
    capsys.readouterr()
    assert exactness.main(["--certify", str(file), "--json"]) == 0
    said = capsys.readouterr().out
    figures = json.loads(said.splitlines()[-1])
    assert figures["rows"] == figures["equal"] == figures["tokens"] == figures["chosen"] > 0
    assert f"{figures['equal']} of {figures['rows']} rows of trees are bit-equal" in said

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-1]["choices"][0]["token_ids"][0][-1] += 1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert exactness.main(["--certify", str(file)]) == 1

    plainly = tmp_path / "b.jsonl"
    assert answer([*asked[:-1], str(plainly), "--no-exact"]) == 0
    capsys.readouterr()
    for arguments, why in (
        (["--certify", str(plainly)], "only greedy answers of a --canonical run"),
        (["--certify", str(file), str(plainly)], "takes one answer file"),
        ([str(file)], "Name another answer file, or --certify"),
    ):
        assert exactness.main(arguments) == 2
        assert why in capsys.readouterr().err


def test_what_is_not_canonical_here_is_one_line(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    asked = ["--dtype", "float16", "--canonical", "--answer-file", str(tmp_path / "c.jsonl")]
    assert answer(asked) == 2
    assert "is not canonical in float16 on cpu" in capsys.readouterr().err
