"""The demos and their baselines, on tiny random models saved to a folder: what they print, and what they refuse."""

import copy
import dataclasses
import io
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from tiny_models import ARCHITECTURES, build, perturbed, publish, tiny_head
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaModel

from evaluation.command_line import parse
from evaluation.demo import __main__ as demo
from evaluation.demo.__main__ import ColorStreamer
from evaluation.demo.comparison import ASSISTED, GREEDY, OURS, PLAIN, different_texts, notes, rows_of, table
from evaluation.demo.options import ABOVE_A_TABLE, ALONE, EagleOptions
from evaluation.run.baselines import (
    InLoop,
    assistant_of,
    assisted_by,
    transformers_batch,
    transformers_greedy,
)
from evaluation.timing import Timed, Timings, interleave
from opt_tree import OptTree, Pair, Sampling, load_causal_lm, load_pair
from opt_tree.methods.controllers.auto import Auto
from opt_tree.methods.policies.costs import Costs
from opt_tree.tools.presets import opt, plain

ROOT = Path(demo.__file__).parents[2]
INFLATE = f"{ROOT}/experiments/inflate.py:inflate_pair"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a target, a draft model that often agrees, an EAGLE head, and models that do not quite fit."""
    root = tmp_path_factory.mktemp("models")
    tokenizer, other = byte_tokenizer(chat_template=TEMPLATE), byte_tokenizer(["word"])
    config = ARCHITECTURES["llama"]()
    config.vocab_size = len(tokenizer)
    target = build(config, dtype=torch.float32)
    with torch.no_grad():  # a logit of 0 is never the best of 257: no answer ends early
        target.get_output_embeddings().weight[tokenizer.eos_token_id] = 0
    head = tiny_head(target, vocab_size=len(tokenizer))
    padded = build(ARCHITECTURES["llama"]().__class__(**config.to_dict() | {"vocab_size": len(tokenizer) + 7}), seed=4)
    for name, model, its in (
        ("target", target, tokenizer),
        ("draft", perturbed(target, 0.05), tokenizer),
        ("padded", padded.float(), tokenizer),
        ("other", target, other),
    ):
        model.save_pretrained(root / name)
        its.save_pretrained(root / name)
    (root / "head").mkdir()
    publish(root / "head", head, "model.safetensors")
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture(scope="module")
def pair(folders) -> Pair:
    return load_pair(folders["target"], folders["draft"], dtype="float32", draft_dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def classic(folders) -> list[str]:
    """What names the tiny pair on the command line."""
    return ["--base-model-path", folders["target"], "--draft-model-path", folders["draft"], "--dtype", "float32",
            "--device", "cpu"]  # fmt: skip


QUICK = ["--max-new-tokens", "24", "--rounds", "1", "--nodes", "8", "--threshold", "0.1", "--max_depth", "4"]


def run_demo(kind: str, arguments: list[str]) -> int:
    """Run a demo inside this process; its JSON line comes last."""
    return demo.main([*arguments, "--json"], EagleOptions if kind == "eagle" else demo.Options)


def options_of(*arguments: str) -> demo.Options:
    return parse(demo.Options, "", None, list(arguments))


def report_of(output: str) -> dict:
    return json.loads(output.strip().splitlines()[-1])


# --- the scripts ---------------------------------------------------------------------------------------------------


def run_script(name: str, arguments: list[str], monkeypatch) -> int:
    """Run a script as a user does, from another folder; return its exit status."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.chdir(ROOT.parent)
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    return exited.value.code


def test_the_classic_demo_prints_a_transcript_a_table_and_a_json_line(classic, monkeypatch, capsys):
    assert run_script("demo_opt_classic.py", [*classic, *QUICK, "--prompt", "hello", "--json"], monkeypatch) == 0
    out = capsys.readouterr().out
    report = report_of(out)
    assert report["options"]["drafter"].startswith("lm:")
    assert report["policy"] == {"nodes": 8, "threshold": 0.1, "max_depth": 4}
    assert report["tokens"] == dict.fromkeys([PLAIN, GREEDY, OURS, ASSISTED], report["tokens"][PLAIN])
    assert report["divergences"] == []
    rows = {row["method"]: row for row in report["rows"]}
    assert rows.keys() == {PLAIN, GREEDY, OURS, ASSISTED} and all(f"\n{name}  " in out for name in rows)
    assert rows[OURS]["tokens/step"] > 1.5  # the draft model is the target with little noise
    assert "\x1b" not in out  # a pipe is no terminal
    assert "([drafted and accepted] the target's own)" in out
    assert "1 thread" in out


@pytest.mark.slow
def test_a_slow_machine_compares_shorter_answers(classic, capsys, monkeypatch):
    monkeypatch.setattr(demo, "ANSWER_LIMIT", 0.0)
    assert run_demo("classic", [*classic, *QUICK, "--prompt", "hello"]) == 0
    found = capsys.readouterr().out
    assert "answers of 16 tokens at most, since 24 would" in found and "s; this process has " in found
    assert report_of(found)["tokens"][PLAIN] == 16


def test_a_mistake_is_one_line_and_status_two(monkeypatch, capsys):
    assert run_script("demo_opt_eagle.py", ["--nodes", "0"], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: nodes must be at least 1, got 0")
    assert len(err.splitlines()) == 1 and out == ""


# --- inside one process --------------------------------------------------------------------------------------------


@pytest.fixture
def eagle(folders) -> list[str]:
    return ["--base-model-path", folders["target"], "--ea-model-path", folders["head"], "--dtype", "float32",
            "--device", "cpu", "--prompt", "hello", *QUICK]  # fmt: skip


def test_what_transformers_says_of_a_checkpoint_is_shown(classic, monkeypatch):
    """Of weights that no layer takes, say: the demo is silent about transformers' own generate only."""
    heard: list[int] = []

    def load(*_: object) -> None:
        heard.append(transformers.logging.get_verbosity())
        raise ValueError("enough")

    transformers.logging.set_verbosity_warning()
    monkeypatch.setattr(demo, "load", load)
    assert run_demo("classic", classic) == 2 and heard == [transformers.logging.WARNING]


@pytest.mark.slow
def test_the_eagle_demo_says_that_a_head_cannot_assist_and_writes_its_page(eagle, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert run_demo("eagle", [*eagle, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    report = report_of(out)
    assert report["tokens"] == dict.fromkeys([PLAIN, GREEDY, OURS], 24)
    assert report["divergences"] == []
    assert "name one with --assistant" in out
    written = page.read_text(encoding="utf-8")
    assert '"policies":["this run","eagle2","binary","chain"]' in written
    assert "Other policies" in written and "<th>ceiling</th>" in written


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "eagle"])
def test_every_row_of_the_table_decodes_with_the_inflated_target(kind, classic, folders, capsys, monkeypatch):
    widths: dict[str, set[int]] = {}

    def watched(methods, prompts, *rest):
        for name, method in methods.items():
            seen = widths.setdefault(name, set())
            hook = register_module_forward_pre_hook(
                lambda module, _, seen=seen: (
                    seen.add(module.config.hidden_size) if isinstance(module, LlamaModel) else None
                )
            )
            method(prompts[0], 4, 0)
            hook.remove()
        return interleave(methods, prompts, *rest)

    monkeypatch.setattr(demo, "interleave", watched)
    models = ["--base-model-path", folders["target"], "--dtype", "float32", "--device", "cpu"]
    head = ["--ea-model-path", folders["head"], "--assistant", folders["draft"]]
    arguments = [*(models + head if kind == "eagle" else classic), *QUICK, "--prompt", "hello"]
    assert run_demo(kind, arguments) == 0
    small = report_of(capsys.readouterr().out)
    assert set().union(*widths.values()) == {32}
    widths.clear()
    assert run_demo(kind, [*arguments, "--through", f"{INFLATE}:64x4"]) == 0
    out = capsys.readouterr().out
    large = report_of(out)
    ours = {64} if kind == "eagle" else {32, 64}  # 32: the draft model
    assert widths == {PLAIN: {64}, GREEDY: {64}, OURS: ours, ASSISTED: {32, 64}}
    assert (large["tokens"], large["divergences"]) == (small["tokens"], [])
    steps = [{row["method"]: row.get("tokens/step") for row in found["rows"]} for found in (small, large)]
    assert steps[0] == steps[1]
    assert large["options"]["through"] == f"{INFLATE}:64x4" and "inflate_pair:64x4: " in large["models"]
    said = out[out.index("tokens/s") :]
    assert "Inflated target: " in said and "blown up to" in said and "(4 layers, hidden 64," in said
    assert ("the EAGLE head keeps its own size" in said) == (kind == "eagle")


def test_threads_are_as_asked_and_else_one_or_the_environments(monkeypatch):
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)  # a real pool of threads would not outlive a fork
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    options_of("--threads", "2").set_threads(torch.device("cpu"))
    options_of().set_threads(torch.device("cpu"))
    assert chosen == [2]
    monkeypatch.delenv("OMP_NUM_THREADS")
    options_of().set_threads(torch.device("cuda"))
    assert chosen == [2]  # only where the CPU decodes
    options_of().set_threads(torch.device("cpu"))
    assert chosen == [2, 1]


@pytest.mark.slow
def test_sampled_texts_are_the_same_with_and_without_a_tree(classic, capsys):
    assert run_demo("classic", [*classic, *QUICK, "--prompt", "hello", "--temperature", "0.8", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert report_of(out)["divergences"] == []
    assert "its texts are other samples" in out
    same = {row["method"]: row["same text"] for row in report_of(out)["rows"]}
    assert same == {PLAIN: "1/1", OURS: "1/1", GREEDY: None, ASSISTED: None}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nodes", "0"], "nodes must be at least 1, got 0"),
        (["--nodes", "many"], "--nodes: neither a number nor auto: 'many'"),
        (["--max-depth", "0"], "max_depth must be at least 1, got 0"),
        (["--top-p", "0.5"], "act at temperature > 0 only"),
        (["--max_new_tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--through", f"{INFLATE}:16x4"], "16 wide is less than the target's 32"),
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", "\udcff"], "the prompt b'\\xff' is no utf-8, this terminal's encoding; PYTHONUTF8=1"),
        (["--prompt", "x" * 300], "the prompt has 301 tokens, which leaves no room in 256 of context"),
        (["--html", "."], "cannot write to .: . is a folder"),
        (["--ea-model-path", "head"], "each say what drafts"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--eager", "--compile"], "--compile makes what --eager leaves alone"),
    ],
)
def test_mistakes_of_the_classic_demo(classic, capsys, arguments, line):
    assert run_demo("classic", [*classic, *QUICK, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert line in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "asked", "line"),
    [
        ([], [{"make": False}], "forwards: eager; faster with --compile\n"),
        (["--eager"], [], "forwards: eager\n"),
        (["--compile"], [{"make": False}, {}], "compiling for this CPU, once: minutes"),
    ],
)
def test_when_forwards_are_compiled(classic, capsys, monkeypatch, given, asked, line):
    """Without a flag only packages that are there are taken, silently."""
    calls: list[dict[str, bool]] = []
    monkeypatch.setattr(Pair, "compile", lambda self, **options: calls.append(options))
    assert run_demo("classic", [*classic, *QUICK, "--rounds", "1", "--max-new-tokens", "2", *given]) == 0
    assert calls == asked
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("spec", ["lm:{draft}", "graft:1:lm:{draft}+ngram", "ngram"])
def test_the_assistant_is_the_draft_model_or_has_the_targets_dtype(folders, spec):
    models = ["--base-model-path", folders["target"], "--drafter", spec.format(**folders), "--device", "cpu"]
    options = parse(demo.Options, "demo", "", models)
    pair = load_pair(options.base_model_path, options.drafter, dtype="bfloat16", device="cpu", exact=False)
    own = pair.drafter.models[0].model if pair.drafter.models else None
    assert demo.load_assistant(options, None, pair) is own
    named = demo.load_assistant(options, folders["draft"], pair)
    assert named is not None and named is not own and named.dtype == torch.bfloat16


def test_mistakes_that_name_other_models(folders, classic, capsys):
    target = ["--base-model-path", folders["target"], "--device", "cpu"]
    for kind, arguments, line in (
        ("classic", target, f"no drafter named for {folders['target']}: give --drafter"),
        ("eagle", target, f"no drafter named for {folders['target']}: give --drafter"),
        ("eagle", [*target, "--ea-model-path", folders["draft"]], "is a whole model, use lm:"),
        ("eagle", [*target, "--ea-model-path", folders["head"], "--assistant", folders["other"]],
         "different tokenizers"),
    ):  # fmt: skip
        assert run_demo(kind, arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1
        assert line in err


def test_options_replace_single_fields_of_the_default_tree():
    assert options_of().policy() == OptTree(*ABOVE_A_TABLE)
    assert options_of("--nodes=9").policy() == dataclasses.replace(OptTree(*ABOVE_A_TABLE), nodes=9)
    assert options_of("--drafter", "lm:demo").policy() == OptTree(*ALONE)  # each further layer costs a forward
    named = options_of("--base_model_path", "some/model", "--drafter", "ngram", "--max_depth", "3")
    assert named.policy() == OptTree(max_depth=3)


@pytest.mark.parametrize(
    ("given", "device", "by_cost"),
    [
        (["--base-model-path", "some/model", "--drafter", "ngram"], "cpu", True),
        (["--base-model-path", "some/model", "--drafter", "ngram", "--max-depth", "3"], "cpu", True),
        (
            ["--base-model-path", "some/model", "--drafter", "ngram"],
            "cuda",
            False,
        ),  # the paper's tree is meant for it
        (["--base-model-path", "some/model", "--drafter", "ngram", "--nodes", "60"], "cpu", False),
        (["--base-model-path", "some/model", "--drafter", "ngram", "--threshold", "0.5"], "cpu", False),
        (["--base-model-path", "smollm2"], "cpu", False),
        ([], "cpu", False),
        (["--nodes", "auto"], "cuda", True),
    ],
)
def test_a_model_that_nobody_chose_a_tree_for_gets_one_by_its_costs(given, device, by_cost):
    assert options_of(*given).asks_costs(device) == by_cost


@pytest.mark.slow
def test_what_was_chosen_is_said_with_the_way_out(classic, capsys, monkeypatch):
    asked = []
    costs = Costs.straight(5e-3, 5e-3, 1e-4, 1e-3, 3e-5)
    monkeypatch.setattr(demo, "auto", lambda target, drafter, max_depth: asked.append(max_depth) or Auto(costs))
    short = [*classic, "--prompt", "hello", "--max-new-tokens", "4", "--rounds", "1"]
    assert run_demo("classic", [*short, "--max-depth", "3"]) == 0
    out = capsys.readouterr().out
    line = "nodes and layers by what they cost here, measured once; --nodes N --threshold T choose otherwise"
    assert asked == [3] and out.count(line) == 1 and "scoring" in report_of(out)["policy"]
    assert run_demo("classic", [*short, "--nodes", "4"]) == 0
    assert asked == [3] and line not in capsys.readouterr().out


@pytest.mark.parametrize(("color", "text"), [(True, "\x1b[36mab\x1b[0mc\x1b[36md\x1b[0m☃"), (False, "[ab]c[d]☃")])
def test_the_streamer_shows_each_step_at_once(color, text):
    tokenizer, out = byte_tokenizer(), io.StringIO()
    streamer = ColorStreamer(tokenizer, out, color)
    streamer.put(torch.tensor([tokenizer("prompt").input_ids]))
    assert out.getvalue() == ""
    streamer.put(torch.tensor(tokenizer("abc").input_ids))
    assert out.getvalue() == text[: text.index("c") + 1]
    snowman = tokenizer("☃").input_ids
    streamer.put(torch.tensor([*tokenizer("d").input_ids, snowman[0]]))
    streamer.put(torch.tensor([snowman[1]]))
    streamer.put(torch.tensor([snowman[2]]))
    streamer.put(torch.tensor([tokenizer.eos_token_id]))
    assert out.getvalue() == text
    streamer.end()
    assert "drafted and accepted" in out.getvalue()


# --- baselines -----------------------------------------------------------------------------------------------------


def transformers_assisted(pair, prompt, limit, sampling=Sampling(), seed=0, assistant=None):
    options = assisted_by(assistant or assistant_of(pair.drafter), pair, sampling)
    return transformers_greedy(pair, prompt, limit, seed, sampling, **options)


@pytest.mark.slow
def test_transformers_decodes_what_the_plain_loop_does(pair):
    prompt = pair.encode("hello")
    expected = plain(pair.target).generate(prompt, 30, stop=pair.stop).tokens
    for timed in (transformers_greedy(pair, prompt, 30), transformers_assisted(pair, prompt, 30)):
        assert timed.tokens == expected
        assert timed.seconds > 0


def test_the_baselines_stop_where_the_loop_does(pair):
    prompt = pair.encode("hello")
    expected = plain(pair.target).generate(prompt, 30).tokens
    stop = next(token for token in expected[5:] if token not in expected[:5])
    stopping = dataclasses.replace(pair, tokenizer=copy.deepcopy(pair.tokenizer))
    stopping.tokenizer.eos_token_id = stop
    until = expected[: expected.index(stop) + 1]
    assert plain(pair.target).generate(prompt, 30, stop=stopping.stop).tokens == until
    assert transformers_greedy(stopping, prompt, 30).tokens == until
    assert transformers_assisted(stopping, prompt, 30).tokens == until


@pytest.mark.slow
def test_the_checkpoints_own_generation_defaults_do_not_bend_the_baseline(pair, monkeypatch):
    prompt = pair.encode("hello")
    expected = plain(pair.target).generate(prompt, 30).tokens
    monkeypatch.setattr(pair.target.model.generation_config, "repetition_penalty", 3.0)
    monkeypatch.setattr(pair.target.model.generation_config, "do_sample", True)
    monkeypatch.setattr(pair.target.model.generation_config, "suppress_tokens", expected[:1])
    monkeypatch.setattr(pair.target.model.generation_config, "num_beams", 3)
    own = pair.target.model.generation_config
    assert transformers_greedy(pair, prompt, 30).tokens == expected
    assert transformers_batch(pair, [prompt], 30) == [expected]
    assert pair.target.model.generation_config is own and own.num_beams == 3
    drawn = transformers_greedy(pair, prompt, 30, sampling=Sampling(1.0)).tokens
    monkeypatch.setattr(own, "min_p", 0.9)
    assert transformers_greedy(pair, prompt, 30, sampling=Sampling(1.0)).tokens == drawn


def test_the_baselines_stop_at_the_end_of_the_context(pair):
    prompt = pair.encode("x" * 240)
    expected = plain(pair.target).generate(prompt, 30).tokens
    assert len(expected) == 256 - len(prompt)
    assert transformers_greedy(pair, prompt, 30).tokens == expected
    assert transformers_assisted(pair, prompt, 30).tokens == expected


def test_an_assistant_padded_to_another_vocabulary_assists(pair, folders):
    padded = load_causal_lm(folders["padded"], "float32").model
    prompt = pair.encode("hello")
    expected = plain(pair.target).generate(prompt, 12).tokens
    assert transformers_assisted(pair, prompt, 12, assistant=padded).tokens == expected
    with pytest.raises(ValueError, match="transformers samples no assistant of 264 tokens for a target of 257"):
        transformers_assisted(pair, prompt, 12, Sampling(0.8), assistant=padded)


def test_a_bfloat16_target_takes_a_float32_assistant(folders):
    mixed = load_pair(folders["target"], folders["draft"], dtype="bfloat16", draft_dtype="float32", device="cpu")
    assert len(transformers_assisted(mixed, mixed.encode("hello"), 12).tokens) == 12


@pytest.mark.slow
def test_sampled_baselines_obey_their_seed(pair):
    prompt, sampling = pair.encode("hello"), Sampling(1.5, top_p=0.95)
    for method in (transformers_greedy, transformers_assisted):
        first, again, other = (method(pair, prompt, 20, sampling=sampling, seed=seed).tokens for seed in (1, 1, 2))
        assert first == again != other


def test_only_a_causal_lm_assists(folders, pair):
    with_head = load_pair(folders["target"], eagle=folders["head"], dtype="float32", device="cpu")
    assert assistant_of(with_head.drafter) is None
    assert assistant_of(pair.drafter.calibrated(0.5)) is pair.drafter.lm.model


# --- comparison ----------------------------------------------------------------------------------------------------


def test_methods_take_turns_and_stop_at_the_limit():
    calls = []

    def method(name: str):
        return lambda prompt, count, seed: calls.append((name, prompt[0], count)) or Timed([1] * count, 1.0)

    methods = {"a": method("a"), "b": method("b")}
    compared = interleave(methods, [[7], [8], [9]], 5, rounds=2)
    warm_up, rest = calls[:2], calls[2:]
    assert [name for name, _, _ in warm_up] == ["a", "b"]
    turns = zip([7, 8, 9] * 2, ["ab", "ba"] * 3, strict=True)
    assert rest == [(name, prompt, 5) for prompt, order in turns for name in order]
    assert [len(repeated) for repeated in compared.runs["a"]] == [2, 2, 2]
    cut = interleave(methods, [[7], [8], [9]], 5, rounds=2, limit=0.0)
    assert {name: [len(repeated) for repeated in runs] for name, runs in cut.runs.items()} == {"a": [1], "b": [1]}


def test_rates_are_sums_over_sums_of_medians():
    runs = [[Timed([1] * 30, 1.0), Timed([1] * 30, 9.0), Timed([1] * 30, 2.0)], [Timed([1] * 10, 3.0)]]
    compared = Timings({"a": runs})
    assert compared.spent("a") == [(30, 2.0), (10, 3.0)]
    assert compared.rate("a") == 8.0
    assert compared.texts("a") == [[1] * 30, [1] * 10]


def test_a_text_that_differs_is_counted_and_judged(pair):
    prompt = pair.encode("hello")
    decoder = opt(pair.target, pair.drafter, OptTree(8, 0.1, 4))
    compared = interleave({PLAIN: InLoop(plain(pair.target)), OURS: InLoop(decoder)}, [prompt], 12, 1)
    assert different_texts(compared, pair, [prompt], Sampling()) == []
    timed = compared.runs[OURS][0][0]
    wrong = [*timed.tokens[:7], (timed.tokens[7] + 1) % 200, *timed.tokens[8:]]
    compared.runs[OURS][0][0] = dataclasses.replace(timed, tokens=wrong)
    different = different_texts(compared, pair, [prompt], Sampling())
    assert [(one.method, one.prompt, one.position) for one in different] == [(OURS, 0, 7)]
    line = notes(compared, pair, different, Sampling())[-1]
    assert "OPT-Tree leaves plain decoding at new token 8 of prompt 1" in line and "defect" in line
    rows = rows_of(compared, Sampling())
    same = {row["method"]: row["same text"] for row in rows}
    assert same == {PLAIN: "1/1", OURS: "0/1"} and table(rows).count("/1\n") == 1
