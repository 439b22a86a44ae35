"""Two generations that part: rounding ties, defects, settings; in memory and from answer files."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, perturbed, prompt, tiny, tiny_tokenizer
from transformers import PreTrainedModel

import opt_tree
from evaluation import eval_opt_classic, exactness
from evaluation.answers.record import seed_of
from evaluation.divergence import LIMIT, Explainer
from opt_tree.cache import KVCache
from opt_tree.tools import presets

pytestmark = pytest.mark.slow

LENGTH = 32


def llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return copy.deepcopy(tiny("llama")).to(dtype)


def plain(model: PreTrainedModel, ids: list[int], sampling: opt_tree.Sampling = opt_tree.Sampling()) -> list[int]:
    return presets.plain(opt_tree.CausalLM(model)).generate(ids, LENGTH, sampling).tokens


def test_a_wrong_token_is_a_defect_of_whoever_wrote_it() -> None:
    model = llama(torch.bfloat16)
    tokens = plain(model, prompt(7))
    wrong = [*tokens[:11], (tokens[11] + 1) % VOCAB, *tokens[12:]]
    target = opt_tree.CausalLM(model)
    target.watch((-1,))
    explainer = Explainer(target)
    found = explainer.explain(torch.tensor([prompt(7)]), wrong, tokens)
    assert (found.position, found.verdict, found.tokens) == (11, "defect", (wrong[11], tokens[11]))
    assert found.best == tokens[11]
    assert found.reason.endswith("which is b's")
    assert found.gap > LIMIT * found.noise
    assert not found.reproduced
    assert explainer.explain(prompt(7), tokens, tokens) is None
    short = explainer.explain(prompt(7), tokens[:9], tokens)
    assert (short.verdict, short.position, short.tokens) == ("different length", 9, (None, tokens[9]))
    assert "a ends after 9 tokens" in short.reason
    assert target.append(prompt(7)).features[-1].dtype == torch.bfloat16, "an EAGLE head's hook stays with the target"


def test_logits_are_recomputed_along_the_shared_prefix() -> None:
    model = llama(torch.float64)
    tokens = plain(model, prompt(7))
    other = [*tokens[:5], (tokens[5] + 1) % VOCAB]
    found = Explainer(opt_tree.CausalLM(model)).explain(prompt(7), tokens, other)
    with torch.no_grad():
        logits = model(torch.tensor([prompt(7) + tokens[:5]])).logits[0, -1]
    assert found.scores == pytest.approx((float(logits[tokens[5]]), float(logits[other[5]])), abs=1e-9)
    assert found.gap == pytest.approx(float(logits.max() - logits[other[5]]), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_tokens_with_the_same_logit_are_a_tie(dtype: torch.dtype) -> None:
    model = llama(dtype)
    tokens = plain(model, prompt(7))
    twin = (tokens[4] + 1) % VOCAB
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[tokens[4]]
    # The twin changed the model, so the shared tokens are taken up to there only; the later ones are never read.
    found = Explainer(opt_tree.CausalLM(model)).explain(prompt(7), [*tokens[:5], 1], [*tokens[:4], twin, 2])
    assert (found.verdict, found.position) == ("rounding tie", 4)
    assert found.gap <= found.noise


def test_the_noise_is_the_dtypes_own() -> None:
    noise = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = llama(dtype)
        tokens = plain(model, prompt(7))
        found = Explainer(opt_tree.CausalLM(model)).explain(prompt(7), tokens, [*tokens[:9], (tokens[9] + 1) % VOCAB])
        noise[dtype] = found.noise
    # Three bits lie between bfloat16 and float16, thirteen between float16 and float32.
    assert 3 < noise[torch.bfloat16] / noise[torch.float16] < 25
    assert 1000 < noise[torch.float16] / noise[torch.float32] < 60000


def test_half_precision_trees_part_from_plain_decoding_by_ties_only() -> None:
    target = opt_tree.CausalLM(llama(torch.bfloat16))
    drafter = opt_tree.CausalLMDrafter(opt_tree.CausalLM(perturbed(llama(), 0.05)))
    explainer = Explainer(target)
    ties = 0
    for seed in range(4):
        ids = prompt(5, seed)
        ours = presets.opt(target, drafter, opt_tree.OptTree(nodes=12, threshold=0.0)).generate(ids, LENGTH).tokens
        found = explainer.explain(ids, ours, presets.plain(target).generate(ids, LENGTH).tokens)
        if found is not None:
            assert found.verdict == "rounding tie", found.reason
            ties += 1
    assert ties, "no divergence to judge: the test has lost its subject"


def test_a_cache_that_keeps_the_wrong_rows_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    model, commit = llama(), KVCache.commit
    target = opt_tree.CausalLM(model)
    drafter = opt_tree.CausalLMDrafter(opt_tree.CausalLM(perturbed(model, 0.05)))
    expected = presets.plain(target).generate(prompt(5), LENGTH).tokens
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "commit", lambda self, kept: commit(self, list(range(len(kept)))))
        tokens = (
            presets.opt(target, drafter, opt_tree.OptTree(nodes=12, threshold=0.0)).generate(prompt(5), LENGTH).tokens
        )
    found = Explainer(target).explain(prompt(5), tokens, expected)
    assert (found.verdict, found.best) == ("defect", expected[found.position])


@pytest.mark.parametrize("sampling", [opt_tree.Sampling(1.0), opt_tree.Sampling(0.7, top_p=0.9)])
def test_sampled_generations_are_judged_by_their_race(sampling: opt_tree.Sampling) -> None:
    model = llama(torch.bfloat16)
    target = opt_tree.CausalLM(model)
    tokens = presets.plain(target).generate(prompt(7), LENGTH, sampling, seed=3).tokens
    wrong = [*tokens[:20], (tokens[20] + 7) % VOCAB]
    found = Explainer(target).explain(prompt(7), wrong, tokens, sampling, seed=3)
    assert (found.verdict, found.best, found.gap) == ("defect", tokens[20], found.scores[1] - found.scores[0])
    assert set(found.choices.values()) == {tokens[20]}
    exact = opt_tree.CausalLM(llama())
    explainer, partings = Explainer(target), []
    for seed in range(4):
        # The same model in two dtypes, with the same random numbers, parts where two arrive together.
        pair = [
            presets.plain(lm).generate(prompt(7, seed), LENGTH, sampling, seed=seed).tokens for lm in (target, exact)
        ]
        if (parting := explainer.explain(prompt(7, seed), *pair, sampling, seed)) is not None:
            partings.append(parting)
    assert partings
    assert {parting.verdict for parting in partings} == {"rounding tie"}


# Answer files.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint on disk: the tiny Llama and its tokenizer."""
    path = tmp_path_factory.mktemp("target")
    llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, folder: Path) -> Write:
    """Write an answer file of two-turn conversations, and the header beside it."""

    def write(name: str, turns: list[list[tuple[list[int], list[int]]]], **settings: object) -> Path:
        path = tmp_path / name
        lines = []
        for index, question in enumerate(turns, 81):
            prompts, tokens = ([*part] for part in zip(*question, strict=True))
            choice = {"index": 0, "turns": ["text"] * len(question), "prompt_ids": prompts, "token_ids": tokens}
            lines.append({"question_id": index, "choices": [choice]})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        made = {"base_model_path": str(folder), "target_dtype": "float32", "temperature": 0.0, "max_new_token": LENGTH}
        header = {"settings": made | {"seed": 0, "method": "opt"} | settings, "sessions": []}
        Path(f"{path}.run.json").write_text(json.dumps(header))
        return path

    return write


def judge(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, dict, str]:
    """Run the command; return its exit status, its JSON line and everything it printed."""
    status = exactness.main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    last = captured.out.strip().rpartition("\n")[2]
    return status, json.loads(last) if last.startswith("{") else {}, captured.out + captured.err


def test_files_that_agree(write: Write, capsys: pytest.CaptureFixture) -> None:
    turns = [[(prompt(5), [1, 2, 3]), (prompt(9), [4, 5])]]
    status, result, printed = judge(capsys, write("a.jsonl", turns), write("b.jsonl", turns))
    assert (status, result["turns"], result["equal"], result["verdicts"]) == (0, 2, 2, {})
    assert "2 of 2 turns with the same prompt are equal" in printed


def test_a_defect_in_a_file_is_found_and_what_follows_it_is_not_judged(write, capsys):
    good = plain(llama(), prompt(5))
    bad = [*good[:6], (good[6] + 1) % VOCAB]
    a = write("a.jsonl", [[(prompt(5), good), (prompt(9), [4, 5])], [(prompt(6), [3])]])
    b = write("b.jsonl", [[(prompt(5), bad), (prompt(8), [6, 5])], [(prompt(6), [3])]])
    status, result, printed = judge(capsys, a, b)
    assert status == 1
    assert result["verdicts"] == {"defect": 1, "different prompt": 1}
    assert [d["position"] for d in result["divergences"]] == [6, 0]
    assert "1 of 2 turns with the same prompt are equal" in printed
    assert repr(tiny_tokenizer().decode([good[6]])) in printed


def test_settings_are_named(write: Write, capsys: pytest.CaptureFixture) -> None:
    good = plain(llama(), prompt(5))
    bad = [*good[:6], (good[6] + 1) % VOCAB, 3]
    a = write("a.jsonl", [[(prompt(5), good)]])
    status, result, _ = judge(capsys, a, write("b.jsonl", [[(prompt(5), bad)]], temperature=0.5))
    assert (status, result["verdicts"]) == (0, {"different settings": 1})
    assert "temperature 0.0 and 0.5" in result["divergences"][0]["reason"]
    status, result, _ = judge(capsys, a, write("b.jsonl", [[(prompt(5), good[:7])]], max_new_token=7))
    assert "max_new_token 32 and 7" in result["divergences"][0]["reason"]
    # A dtype explains rounding only; a token that no rounding yields is still put down to it, with the figures.
    status, result, _ = judge(capsys, a, write("b.jsonl", [[(prompt(5), bad)]], target_dtype="bfloat16"))
    assert "target_dtype 'float32' and 'bfloat16'; rounding cannot explain it" in result["divergences"][0]["reason"]
    # Without a setting that says so, an early end is a defect.
    status, result, _ = judge(capsys, a, write("b.jsonl", [[(prompt(5), good[:7])]]))
    assert (status, result["verdicts"]) == (1, {"defect": 1})


def test_quantised_targets_are_judged_where_both_runs_are_canonical(write, capsys):
    """No copy of full weights says what rounding may do to weights of eight bits."""
    turns = [[[(prompt(5), [1, 2, token])]] for token in (3, 4)]
    for canonical, status, verdict in ((True, 1, "defect"), (False, 0, "different settings")):
        files = [
            write(name, turn, weights="int8", canonical=canonical)
            for name, turn in zip(("a.jsonl", "b.jsonl"), turns, strict=True)
        ]
        found, result, _ = judge(capsys, *files)
        assert (found, result["verdicts"]) == (status, {verdict: 1})


def test_sampled_files_take_the_seed_of_each_turn(write: Write, capsys: pytest.CaptureFixture) -> None:
    target, sampling = opt_tree.CausalLM(llama()), opt_tree.Sampling(0.8)
    seeds = [seed_of(5, 81, 0, turn) for turn in range(2)]
    first, second = (presets.plain(target).generate(prompt(5), 12, sampling, seed=seed).tokens for seed in seeds)
    wrong = [*second[:9], (second[9] + 1) % VOCAB]
    a = write("a.jsonl", [[(prompt(5), first), (prompt(5), second)]], temperature=0.8, seed=5)
    b = write("b.jsonl", [[(prompt(5), first), (prompt(5), wrong)]], temperature=0.8, seed=5)
    status, result, _ = judge(capsys, a, b)
    assert status == 1
    (found,) = result["divergences"]
    assert (found["position"], found["best"]) == (9, second[9])
    assert found["gap"] == pytest.approx(found["scores"][0] - found["scores"][1], abs=1e-12) and found["gap"] > 0
    # transformers draws other numbers: nothing to judge.
    b = write("b.jsonl", [[(prompt(5), first), (prompt(5), wrong)]], temperature=0.8, seed=5, method="transformers")
    status, result, _ = judge(capsys, a, b)
    assert (status, result["verdicts"]) == (0, {"different settings": 1})


def test_bad_input_gives_one_line(write: Write, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    a = write("a.jsonl", [[(prompt(5), [1, 2])]])
    b = write("b.jsonl", [[(prompt(5), [1, 3])]])

    def complaint(*arguments: object) -> str:
        status, _, printed = judge(capsys, *arguments)
        assert status == 2 and printed.startswith("error: ") and printed.count("\n") == 1
        return printed

    assert "no answer file" in complaint(a, tmp_path / "missing.jsonl")
    (tmp_path / "foreign.jsonl").write_text('{"question_id": 81, "choices": [{"index": 0, "turns": ["hello"]}]}\n')
    assert "foreign.jsonl: question 81 has no prompt_ids: only answer files of this project's commands" in complaint(
        a, tmp_path / "foreign.jsonl"
    )
    for path in (a, b):
        Path(f"{path}.run.json").unlink()
    assert "pass --base-model-path" in complaint(a, b)
    other = tmp_path / "other.jsonl"
    other.write_text(a.read_text().replace("81", "99"))
    assert "no question in common" in complaint(a, other)
    (tmp_path / "broken.jsonl").write_text("{]\n")
    assert "broken.jsonl, line 1" in complaint(a, tmp_path / "broken.jsonl")


@pytest.mark.usefixtures("kernel")
def test_what_is_not_canonical_here_is_one_line(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    asked = ["--dtype", "float16", "--canonical", "--answer-file", str(tmp_path / "c.jsonl")]
    assert eval_opt_classic.main(asked) == 2
    assert "is not canonical in float16 on cpu" in capsys.readouterr().err
