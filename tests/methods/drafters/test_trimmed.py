"""A draft model with a trimmed output layer: its scores are the whole ones' columns, the text is the target's own."""

import copy
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from asking import begin, root_of, tiny_lm_drafter
from safetensors.torch import load_file, save_file
from texts import refused
from tiny_models import VOCAB, prompt, publish, save_pair, tiny, tiny_drafter, tiny_head

from evaluation.run.baselines import assistant_of
from opt_tree import Decoder, OptTree, Static, load_drafter, load_pair
from opt_tree.methods.children.draws import over_vocabulary
from opt_tree.methods.drafters.draft_vocabulary import VOCABULARY, read_vocabulary
from opt_tree.methods.drafters.registry import folders_of
from opt_tree.methods.drafters.small_models.loading import NOTE, trimmed_model
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import CALIBRATION
from opt_tree.models.known import KNOWN, drafter_of
from opt_tree.models.named.places import resolve
from opt_tree.training.fitting import trim

TOKENS = torch.arange(0, VOCAB, 2)
POLICY = OptTree(nodes=8, threshold=0.0, max_depth=4)


def drafter(tokens=TOKENS):
    return TrimmedDrafter(CausalLM(copy.deepcopy(tiny_drafter("llama"))), tokens, VOCAB)


def test_scores_are_the_columns_of_the_whole_model_s():
    whole, trimmed, text = tiny_lm_drafter(), drafter(TOKENS.flip(0)), prompt(9)
    for one in (whole, trimmed):
        begin(one, text, None)
    scores = root_of(trimmed, text)
    assert scores.tokens.tolist() == TOKENS.tolist()
    kept = root_of(whole, text).values[:, TOKENS].log_softmax(-1)
    assert torch.allclose(scores.values, kept, atol=1e-12)
    wide = over_vocabulary(scores)
    assert wide.isneginf().sum() == wide.shape[1] - len(TOKENS)
    assert f"{len(TOKENS)} tokens of {VOCAB}" in trimmed.describe()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = save_pair(tmp_path_factory.mktemp("pair"))
    rows = [{"prompt": "ab", "answer": "ab" * 20 + "cdcd"}, {"prompt": "b", "answer": "aaab"}]
    (root / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def trimmed(folder, output, count=4):
    arguments = f"--draft {folder}/draft --answers {folder}/answers.jsonl --vocab {count} --output {output}"
    return trim.main(arguments.split())


@pytest.mark.slow
def test_the_command_keeps_the_frequent_tokens(folder, tmp_path, capsys):
    assert trimmed(folder, tmp_path / "small", 2) == 0
    assert "draft vocabulary of 2 tokens: 9" in capsys.readouterr().out
    pair = load_pair(f"{folder}/target", f"trimmed:{tmp_path}/small", dtype="float64", device="cpu")
    one = pair.drafter.bare
    assert isinstance(one, TrimmedDrafter) and assistant_of(pair.drafter) is None
    answers = [json.loads(line)["answer"] for line in (folder / "answers.jsonl").read_text().splitlines()]
    counts = Counter(token for answer in answers for token in pair.tokenizer(answer)["input_ids"])
    assert one.tokens.tolist() == sorted(token for token, _ in counts.most_common(2))
    plain = Decoder(pair.target, None, Static.empty()).generate(prompt(5), 9).tokens
    assert Decoder(pair.target, pair.drafter, POLICY).generate(prompt(5), 9).tokens == plain
    for count, complaint in ((0, "--vocab must be above 0, got 0"), (VOCAB + 1, f"where the model has {VOCAB}")):
        assert trimmed(folder, tmp_path / "bad", count) == 2
        assert complaint in capsys.readouterr().err and not (tmp_path / "bad").exists()


def test_a_trimmed_model_stays_where_it_is(folder, tmp_path, monkeypatch, capsys):
    """A known name keeps its meaning wherever the folder is taken, and the model's files are not copied."""
    monkeypatch.chdir(folder)
    Path("demo").mkdir()  # a name means what it means everywhere
    made = f"--answers {folder}/answers.jsonl --vocab 4 --output {tmp_path}"
    assert trim.main(f"--draft draft {made}/near".split()) == 0
    assert trimmed_model(f"{tmp_path}/near") == f"{folder}/draft"
    assert trim.main(f"--draft demo {made}/whole --tokenizer {folder}/target".split()) == 2
    assert trim.main(f"--draft nowhere {made}/none".split()) == 2
    said = capsys.readouterr().err
    assert "demo is a whole model with its own tokenizer" in said and "nowhere is no folder" in said
    assert trim.main(f"--draft demo {made}/small".split()) == 0
    assert json.loads((tmp_path / "small" / NOTE).read_text()) == {"model": "demo"}
    assert folders_of(f"trimmed:{tmp_path}/small") == [resolve("demo", "draft"), f"{tmp_path}/small"]
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == [CALIBRATION, VOCABULARY, NOTE]


def test_the_package_trims_the_draft_model_of_the_real_pair():
    """To tokens that it has, by a note that names it."""
    folder = resolve("qwen2.5-coder-0.5b", "trimmed")
    assert trimmed_model(folder) == "qwen2.5-coder-0.5b"
    kept = read_vocabulary(folder, KNOWN["qwen2.5-coder-0.5b"].shape["vocab_size"])
    assert len(kept) == 24576 and drafter_of("qwen2.5-coder-1.5b").endswith(":trimmed:qwen2.5-coder-0.5b")


def test_an_eagle_head_is_trimmed_beside_its_weights(folder, tmp_path, capsys):
    target = CausalLM(tiny("llama"))
    (tmp_path / "head").mkdir()
    publish(tmp_path / "head", tiny_head(target.model).float(), "model.safetensors")
    made = f"--draft {tmp_path}/head --answers {folder}/answers.jsonl --vocab 4 --output {tmp_path}/small"
    assert trim.main(made.split()) == 2
    assert f"{tmp_path}/head has no tokenizer" in capsys.readouterr().err and not (tmp_path / "small").exists()
    assert trim.main(f"{made} --tokenizer {folder}/target".split()) == 0
    whole, trimmed = (load_drafter(f"eagle:{tmp_path}/{name}", target) for name in ("head", "small"))
    assert f"4 tokens of {VOCAB}" in trimmed.describe() and "tokens of" not in whole.describe()
    plain = Decoder(target, None, Static.empty()).generate(prompt(5), 12).tokens
    result = Decoder(target, trimmed, POLICY).generate(prompt(5), 12)
    kept = load_file(tmp_path / "small" / VOCABULARY)["t2d"].nonzero().flatten().tolist()
    drafted = {token for step in result.steps for token in step.tree.tokens[1:].tolist()}
    assert result.tokens == plain and drafted and drafted <= set(kept) and len(kept) == 4
    tensors = load_file(tmp_path / "small" / "model.safetensors") | load_file(tmp_path / "small" / VOCABULARY)
    save_file(tensors, tmp_path / "small" / "model.safetensors")
    refused(f"eagle:{tmp_path}/small", target, f"a draft vocabulary of 4 tokens, and {VOCABULARY} names 4")


def test_a_wrong_vocabulary_is_one_line(folder, tmp_path):
    assert trimmed(folder, tmp_path / "small") == 0
    target, file = CausalLM(tiny("llama")), tmp_path / "small" / VOCABULARY
    save_file({"d2t": torch.tensor([VOCAB])}, file)
    refused(f"trimmed:{tmp_path}/small", target, f"d2t leads to tokens {VOCAB}")
    file.write_bytes(b"no tensors")
    refused(f"trimmed:{tmp_path}/small", target, "is no draft vocabulary")
    shutil.copytree(folder / "draft", tmp_path / "old")
    shutil.copy(file, tmp_path / "old")
    refused(f"lm:{tmp_path}/old", target, f"has a {VOCABULARY}: trim its model anew")
    file.unlink()
    refused(f"trimmed:{tmp_path}/small", target, f"has no {VOCABULARY}")
    (tmp_path / "small" / NOTE).write_text('{"model": 5}')
    refused(f"trimmed:{tmp_path}/small", target, f"{NOTE} does not say what is trimmed: ValueError: its model is 5")
    (tmp_path / "small" / NOTE).unlink()
    refused(f"trimmed:{tmp_path}/small", target, f"has no {NOTE}")
    with pytest.raises(ValueError, match="of which there are"):
        drafter(torch.tensor([VOCAB]))
