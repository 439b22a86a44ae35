"""The other doors: a custom_generate repository as the Hub lays it out, and a model for lm-eval."""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import prompt, tiny, tiny_drafter

from opt_tree import CausalLM, Decoder, Static, custom_generate

REPOSITORY = Path(__file__).parents[2] / "examples" / "custom_generate_repo"
IDS = torch.tensor([prompt(12)])
NO_HARNESS = "no lm-eval here: pip install -r requirements/integrations.txt"


@pytest.fixture
def copied(tmp_path, monkeypatch) -> str:
    """The repository, with a cache of its own for the code that transformers copies."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    return str(REPOSITORY)


@pytest.mark.quick("ngram")
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_the_repository_generates_what_the_model_does(copied, drafter):
    model = tiny("llama")
    given = {"input_ids": IDS, "max_new_tokens": 20, "do_sample": False}
    chosen = tiny_drafter("llama") if drafter == "model" else drafter
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        found = model.generate(**given, custom_generate=copied, trust_remote_code=True, drafter=chosen, nodes=8)
    drafted = len(calls) / 2
    expected = model.generate(**given)
    hook.remove()
    assert torch.equal(found, expected)
    assert drafter == "ngram" or drafted < 20


def test_the_repository_samples_by_seed_and_names_what_it_lacks(copied):
    model = tiny("llama")
    given = {"custom_generate": copied, "trust_remote_code": True, "max_new_tokens": 12, "do_sample": True}
    one, same = (model.generate(IDS, **given, drafter="ngram", seed=3) for _ in range(2))
    assert torch.equal(one, same) and one.shape[1] == IDS.shape[1] + 12
    with pytest.raises(ValueError, match="no drafter named"):
        model.generate(IDS, **given)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(IDS, custom_generate=copied, trust_remote_code=False, drafter="ngram")


def test_the_repository_is_laid_out_as_the_hub_asks():
    assert "tags:\n  - custom_generate\n" in (REPOSITORY / "README.md").read_text()
    assert (REPOSITORY / "custom_generate" / "requirements.txt").read_text().split() == [
        "torch>=2.11",
        "transformers>=5.17",
    ]


def test_a_criterion_may_answer_with_a_plain_bool():
    """lm-eval's does, and transformers takes it."""
    model = tiny("llama")
    long = model.generate(IDS, max_new_tokens=12, do_sample=False)
    decoder = Decoder(CausalLM(model), None, Static.empty())
    given = {"max_new_tokens": 12, "do_sample": False, "stopping_criteria": [lambda ids, _: ids.shape[1] > 16]}
    found = model.generate(IDS, **given, custom_generate=custom_generate(decoder))
    assert torch.equal(found, long[:, :17])


@pytest.mark.slow
def test_lm_eval_s_requests_are_answered_the_same_with_and_without_trees():
    pytest.importorskip("lm_eval", reason=NO_HARNESS)
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import model_registry

    from opt_tree.integrations.lm_eval_model import NAME, register

    register()
    register()
    texts = ["Once upon a time", "The king went to"]
    options = {"max_gen_toks": 16, "until": ["<|end|>"], "do_sample": False}
    asked = [Instance("generate_until", {}, (text, dict(options)), at) for at, text in enumerate(texts)]
    choices = [(text, ending) for text in texts for ending in (" there was", " no more")]
    compared = [Instance("loglikelihood", {}, choice, at) for at, choice in enumerate(choices)]
    found = {}
    for nodes in (0, 8, None):
        options = {"pretrained": "demo", "dtype": "float32", "nodes": nodes or 0, "threshold": 0.2, "batch_size": 2}
        model = model_registry.get(NAME)(**options)
        if nodes is None:
            model._model_generate = super(type(model), model)._model_generate  # lm-eval's own model
        before = model.decoder.target.work.forwards
        answers = model.generate_until(asked, disable_tqdm=True)
        forwards = model.decoder.target.work.forwards - before
        assert len(answers) == 2 and all(len(text) > 20 for text in answers)
        found[nodes] = answers, model.loglikelihood(compared, disable_tqdm=True), forwards
    assert found[None][0] == found[0][0] == found[8][0], "texts"
    assert found[None][1] == found[0][1] == found[8][1] and len(found[0][1]) == 4, "log-likelihoods"
    assert found[8][2] < found[0][2], "the drafts saved no forward"


TASK = """
task: own_questions
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 16, until: ["<|end|>"], do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
def test_lm_evals_command_line_runs_a_task_of_ones_own(tmp_path, monkeypatch):
    """As documented, without --device: lm-eval's default is cuda:0, wherever it runs. Its own 14,000 task files, which
    take eight seconds to list, are left out.
    """
    lm_eval = pytest.importorskip("lm_eval.tasks", reason=NO_HARNESS)
    from opt_tree.integrations.lm_eval_model import main

    (tmp_path / "questions.jsonl").write_text('{"question": "Once upon a time", "answer": "there was"}\n')
    (tmp_path / "own.yaml").write_text(TASK.replace("QUESTIONS", str(tmp_path / "questions.jsonl")))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    manager = functools.partial(lm_eval.TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)
    command = "lm-eval run --model opt-tree --model_args pretrained=demo,nodes=8 --tasks own_questions --include_path "
    command += f"{tmp_path} --output_path {tmp_path / 'out'} --log_samples"
    monkeypatch.setattr(sys, "argv", command.split())
    main()
    (samples,) = tmp_path.glob("out/**/samples_own_questions_*.jsonl")
    ((text,),) = json.loads(samples.read_text())["resps"]
    assert len(text) > 20
