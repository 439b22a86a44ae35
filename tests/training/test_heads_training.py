"""Heads trained from hidden states on disk: what lies there, what is judged, and that a run learns and goes on."""

import copy
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from asking import Witness, begin, root_of
from methods.drafters.test_eagle3 import KNOWN, target_of
from safetensors.torch import load_file
from tiny_models import VOCAB, prompt, tiny, tiny_tokenizer
from torch import nn
from transformers import LlamaConfig

from opt_tree import Decoder, OptTree, load_drafter
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.heads.eagle3 import Eagle3Drafter, published_layers
from opt_tree.methods.drafters.heads.eagle3_head import Eagle3Head
from opt_tree.methods.drafters.heads.eagle_head import EagleHead
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.text_states import text_states
from opt_tree.training.heads import features, train
from opt_tree.training.heads.batches import Batch, Documents, most_frequent
from opt_tree.training.heads.eagle import EagleLoss, new_head, passes, save_head
from opt_tree.training.heads.eagle3 import new_eagle3_head
from opt_tree.training.heads.features import COUNTS, load_part
from opt_tree.training.heads.head_loss import Goal, JudgedEntropy, TargetSide
from opt_tree.training.heads.train import Training
from opt_tree.training.plans import Eagle3Plan


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return target_of()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target) -> Path:
    """A tiny target's folder, answers to it, and the hidden states of both kinds of head."""
    path = tmp_path_factory.mktemp("heads")
    target.model.float().save_pretrained(path / "target")
    target.model.double()
    tiny_tokenizer().save_pretrained(path / "target")
    random = np.random.default_rng(0)
    with (path / "answers.jsonl").open("w") as file:
        for _ in range(60):
            words = ["".join(chr(97 + x) for x in divmod(int(token), 8)) for token in random.integers(0, 40, 30)]
            row = {"prompt": "".join(words[:6]), "answer": "".join(words[6:]), "finished": bool(random.random() < 0.5)}
            file.write(json.dumps(row) + "\n")
    tokenizer = json.loads((path / "target" / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = "{{ messages[0]['content'] }}"
    (path / "target" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    command(path)
    return path


def command(path: Path) -> None:
    layers = ",".join(map(str, (-1, *published_layers(4))))
    files = ["--target", f"{path}/target", "--answers", f"{path}/answers.jsonl", "--output", f"{path}/features"]
    sizes = ["--part-tokens", "600", "--batch-tokens", "100", "--prompt-tokens", "4"]
    assert features.main([*files, *sizes, f"--layers={layers}"]) == 0


@pytest.fixture
def clock(monkeypatch):
    """A clock by which every step takes a quarter of a second: how many a run has is not the machine's affair."""
    now = itertools.count(0.0, 0.25)
    monkeypatch.setattr(train, "time", SimpleNamespace(process_time=lambda: next(now)))


def test_one_batch_is_too_few(folder, tmp_path):
    shutil.copy(folder / "features" / "part-0000.safetensors", tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path} holds one batch, which is held out"):
        Documents(tmp_path, 10**6, (-1,))


def test_the_hidden_states_of_every_document_are_kept(folder, target):
    paths = sorted((folder / "features").glob("part-*.safetensors"))
    assert len(paths) > 2
    stop = tiny_tokenizer().eos_token_id
    documents = 0
    for path in paths:
        part = load_part(path)
        documents += len(part.answers)
        for i in (0, len(part.answers) - 1):
            tokens = part.tokens[part.starts[i] : part.starts[i + 1]].long()
            assert part.answers[i] == 4 and len(tokens) == 28 + (tokens[-1] == stop)
            states = target.model.model(tokens[None], output_hidden_states=True)
            expected = {-1: states.last_hidden_state} | {k: states.hidden_states[k + 1] for k in published_layers(4)}
            for layer, kept in part.features.items():
                apart = (kept[part.starts[i] : part.starts[i + 1]] - expected[layer][0]).norm()
                assert apart < 0.1 * expected[layer].norm(), "bf16 of the same forward"
    assert documents == 60


def test_what_is_there_is_not_made_again(folder):
    paths = sorted((folder / "features").glob("part-*.safetensors"))
    paths[1].unlink()
    before = {path: path.stat().st_mtime_ns for path in paths[:1] + paths[2:]}
    command(folder)
    assert paths[1].exists() and all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_batches_hold_every_document_once_and_judge_answers_alone(folder):
    documents = Documents(folder / "features", 100, (-1,))
    assert documents.heldout and not set(documents.heldout) & set(documents.train)
    rows = 0
    for group in documents.heldout + documents.train:
        batch = documents[group]
        rows += len(batch.ids)
        assert batch.ids.numel() <= 100 or len(batch.ids) == 1
        assert not batch.judged[:, :3].any() and batch.judged[:, 3:28].all()
    assert rows == 60


def test_the_draft_vocabulary_is_the_most_frequent_tokens(folder):
    counts = np.load(folder / "features" / "counts.npy")
    kept = most_frequent(np.load(folder / "features" / COUNTS), 16, "target")
    assert len(kept) == 16 and (kept.diff() > 0).all()
    assert counts[kept].min() >= np.delete(counts, kept).max()
    with pytest.raises(ValueError, match=f"a draft vocabulary of {VOCAB + 1} tokens, where the target has {VOCAB}"):
        most_frequent(np.load(folder / "features" / COUNTS), VOCAB + 1, "target")


@pytest.mark.parametrize("hard", [0.0, 0.3])
@pytest.mark.parametrize("shared", [True, False])
def test_the_judgement_is_the_cross_entropy_of_whole_laws(hard, shared):
    """Through the target's rows, which stay, and through rows of the head's own, which learn."""
    torch.manual_seed(0)
    estimates, states = torch.randn(2, 300, 8, requires_grad=True), torch.randn(300, 8)
    output, weights = torch.randn(20, 8), (torch.rand(2, 300) < 0.7).float()
    own = output if shared else torch.randn(20, 8, requires_grad=True)
    loss, equal = JudgedEntropy.apply(estimates, weights, own, TargetSide(states, output, hard))
    law = (states @ output.T).softmax(-1)
    goal = (1 - hard) * law + hard * nn.functional.one_hot(law.argmax(-1), 20)
    logits = estimates @ own.T
    each = -(goal * logits.log_softmax(-1)).sum(-1)
    expected = (each * weights).sum(1) / weights.sum(1)
    assert torch.allclose(loss, expected, atol=1e-5)
    hits = (logits.argmax(-1) == law.argmax(-1)).float()
    assert torch.allclose(equal, (hits * weights).sum(1) / weights.sum(1), atol=1e-6)
    learn = [estimates] if shared else [estimates, own]
    ours, theirs = (torch.autograd.grad((x * torch.tensor([1.0, 0.5])).sum(), learn) for x in (loss, expected))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_pass_s_is_what_the_head_computes_s_levels_below_the_root(kind, target):
    """Pair i of pass s, recomputed: its own estimates for the last s pairs, true features before them."""
    head = (new_head(target.model) if kind == "eagle" else new_eagle3_head(target.model, VOCAB)).double().eval()
    torch.manual_seed(1)
    nn.init.normal_(head.layer.self_attn.o_proj.weight, std=0.3)
    ids, given = torch.randint(0, VOCAB, (1, 9)), torch.randn(1, 9, target.hidden).double()
    estimates = passes(head, ids, given, 3)
    for last in (5, 8):
        rows = given[:, : last + 1].clone()
        positions = torch.arange(last + 1)[None]
        for level in range(3):
            seen = last - 2 + level + 1
            out = head(ids[:, :seen], rows[:, :seen], positions[:, :seen])[0]
            assert torch.allclose(out[0, -1], estimates[level][0, seen - 1], rtol=1e-4, atol=1e-4)  # softmax: float32
            rows[:, seen : seen + 1] = out[:, -1:]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_what_enters_a_head_is_the_same_with_the_embeddings_share_computed_first(kind, normed, target):
    """For biases everywhere too, and for features of another dtype than the head's."""
    config = LlamaConfig(
        **{**target.model.config.to_dict(), "num_hidden_layers": 1, "attention_bias": True, "bias": True},
        norm_before_residual=normed,
    )
    torch.manual_seed(0)
    head = (EagleHead if kind == "eagle" else Eagle3Head)(config).double().requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter) / 4)
    embedded = torch.randn(2, 5, target.hidden).double()
    enter, attention = head.entered(embedded), head.layer.self_attn
    for dtype in (torch.float64, torch.float32):
        features = torch.randn(2, 5, target.hidden).to(dtype)
        read, residual = head.enter(embedded, features.double())
        expected = [attention.q_proj(read), attention.k_proj(read), attention.v_proj(read), residual]
        for ours, theirs in zip(enter(features), expected, strict=True):
            assert torch.allclose(ours.double(), theirs, atol=1e-6)


def test_the_share_of_the_embedding_is_computed_once_for_all_passes(target):
    head = new_eagle3_head(target.model, VOCAB).double()
    seen = []
    head.layer.input_layernorm.register_forward_hook(lambda *_: seen.append("embedding"))
    head.layer.hidden_norm.register_forward_hook(lambda *_: seen.append("feature"))
    passes(head, torch.randint(0, VOCAB, (1, 9)), torch.randn(1, 9, target.hidden).double(), 4)
    assert seen == ["embedding"] + 4 * ["feature"]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_feature_loss_is_on_what_the_output_layer_reads(kind, folder, target):
    """EAGLE-3: on the output behind its norm, as the target's last state stands behind its own."""
    layers = () if kind == "eagle" else published_layers(4)
    documents = Documents(folder / "features", 200, (-1, *layers))
    batch = documents[documents.train[0]]
    head = (new_head(target.model) if kind == "eagle" else new_eagle3_head(target.model, VOCAB)).float()
    output = target.model.get_output_embeddings().weight.detach().to(torch.bfloat16)
    weighted, bare = (EagleLoss(head, output, Goal(feature=weight)) for weight in (0.3, 0.0))
    near = (weighted(batch, 3)[0] - bare(batch, 3)[0]).detach() / 0.3
    goals = batch.features[-1][:, 1:].float()
    for number, estimate in enumerate(bare.estimates(batch, 3)):
        chosen = batch.judged[:, 1:].clone()
        chosen[:, :number] = False
        own = head.norm(estimate) if kind == "eagle3" else estimate
        assert torch.allclose(near[number], nn.functional.smooth_l1_loss(own[chosen], goals[chosen]), atol=1e-4)


@pytest.mark.quick("eagle3")
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_laws_of_the_passes_are_those_of_the_drafter(kind):
    """Pass s of training on the context and s drafted tokens, and what the drafter says there with its cache."""
    target = CausalLM(target_of().model.float())
    layers, sizes = ((), ()) if kind == "eagle" else ((0, 1, 3), (0.5, 2.0, 3.0))
    head = new_head(target.model) if kind == "eagle" else new_eagle3_head(target.model, len(KNOWN), True, 3.0)
    nn.init.normal_(head.fc.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    output = target.model.get_output_embeddings().weight.detach()[KNOWN].clone()
    model = EagleLoss(head.eval().requires_grad_(False), output, sizes=sizes)
    folded = copy.deepcopy(model)
    folded.fold()
    if kind == "eagle":
        drafter: EagleDrafter = EagleDrafter(folded.head, target, tokens=KNOWN)
    else:
        folded.head.lm_head.weight.data.copy_(output)
        drafter = Eagle3Drafter(folded.head, target, tokens=KNOWN, layers=layers)
    witness = Witness(drafter)
    list(Decoder(target, witness, OptTree(20, 0.0, 4)).steps(prompt(9), 12))
    depths = set()
    for context, path, law in witness.laws[:30] + witness.laws[-30:]:
        ids = torch.tensor([context + path])
        states = text_states(target.model, ids, (-1, *layers))
        batch = Batch(ids, torch.ones_like(ids).bool(), states, (-1, *layers))
        estimate = model.estimates(batch, len(path) + 1)[-1][0, -1]
        assert torch.allclose((head.read(estimate) @ output.T).log_softmax(-1), law, atol=1e-3)
        depths.add(len(path))
    assert depths >= {0, 1, 2}


def test_a_head_begins_alike_whatever_its_features_are_divided_by(target):
    ids, given = torch.randint(0, VOCAB, (1, 9)), torch.randn(1, 9, target.hidden)
    heads_of = []
    for size in (1.0, 4.0):
        torch.manual_seed(0)
        heads_of.append(new_eagle3_head(target.model, VOCAB, True, size).float())
    one, other = heads_of
    laws = one.read(one(ids, given, torch.arange(9)[None])[0])
    assert torch.allclose(other.read(other(ids, given / 4, torch.arange(9)[None])[0]), laws, atol=1e-3)


def test_a_head_begins_alike_whether_its_residual_is_normed_or_not():
    """On features of size 1, as those of training are."""
    model = target_of().model
    nn.init.uniform_(model.model.layers[-1].input_layernorm.weight, 0.5, 1.5, generator=torch.manual_seed(2))
    ids, given = torch.randint(0, VOCAB, (1, 9)), torch.randn(1, 9, model.config.hidden_size)
    given /= given.square().mean(-1, keepdim=True).sqrt()
    outputs = []
    for normed in (False, True):
        torch.manual_seed(0)
        head = new_eagle3_head(model, VOCAB, True, 2.0, normed).float()
        assert head.residual_normed == normed
        outputs.append(head(ids, given, torch.arange(9)[None])[0])
    assert torch.allclose(*outputs, atol=1e-4)
    larger = head(ids, 3 * given, torch.arange(9)[None])[0]
    assert torch.allclose(larger, outputs[1], atol=1e-4), "a normed residual does not carry the feature's size on"


def test_a_pair_begins_by_seeing_its_own_token(target):
    torch.manual_seed(0)
    head = new_eagle3_head(target.model, VOCAB, warm=True)
    width, attention = target.hidden, head.layer.self_attn
    read = head.layer.input_layernorm(head.embed_tokens.weight)
    split = (VOCAB, -1, attention.head_dim)
    query = (read @ attention.q_proj.weight[:, :width].T).view(split)
    key = (read @ attention.k_proj.weight[:, :width].T).view(split).repeat_interleave(attention.num_key_value_groups, 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * attention.scaling
    own = scores.diagonal(dim1=1, dim2=2)
    assert 3 < own.mean() < 7 and scores.mean().abs() < 1


@pytest.mark.parametrize("architecture", ["qwen2", "qwen2-window", "qwen3", "mistral"])
def test_a_head_is_one_llama_layer_in_the_target_s_width_whatever_the_target_s_layers_are(architecture):
    """`layer_types` of Qwen2's config has an entry a layer, and a Llama layer refuses it."""
    target = tiny(architecture)
    ids = torch.arange(12).view(2, 6)
    for head in (new_head(target), *(new_eagle3_head(target, 40, warm, normed=warm) for warm in (False, True))):
        config, theirs = head.config, target.config
        assert config.num_hidden_layers == 1 and not config.tie_word_embeddings
        assert (config.hidden_size, config.num_key_value_heads) == (theirs.hidden_size, theirs.num_key_value_heads)
        assert config.rope_parameters["rope_theta"] == theirs.rope_parameters["rope_theta"]
        features = torch.randn(2, 6, config.hidden_size)
        assert passes(head.float(), ids, features, 2)[1].isfinite().all()


@pytest.mark.quick("eagle")
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "warm"])
def test_a_run_goes_on_and_leaves_heads(folder, tmp_path, kind, target, clock):
    arguments = ["--kind", kind, "--target", f"{folder}/target", "--features", f"{folder}/features", "--vocab", "40"]
    if kind == "warm":
        arguments[1:2] = ["eagle3", "--warm", "--layers", "0,1,1", "--norm-before-residual"]
    arguments += ["--output", str(tmp_path), "--tokens", "200", "--unroll", "0.5:1,0.5:2", "--save-minutes", "0.02"]
    assert train.main([*arguments, "--minutes", "0.02"]) == 0
    assert train.main([*arguments, "--minutes", "0.05", "--resume"]) == 0
    records = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert [record["steps"] for record in records] == [5, 10, 12]
    assert [record["seconds"] for record in records] == [1.25, 2.5, 3.0]
    assert len(records[-1]["loss"]) == 2 and np.isfinite(records[-1]["loss"]).all()
    assert json.loads((tmp_path / "final" / "training.json").read_text())["minutes"] == 0.05
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert ("lm_head.weight" in saved) == (kind == "eagle3"), "EAGLE-3's output layer is its own"
    drafter = load_drafter(f"eagle:{tmp_path}/final", target)
    assert drafter.features == {"eagle": (-1,), "eagle3": published_layers(4), "warm": (0, 1, 1)}[kind]
    assert getattr(drafter.lm.model.base_model, "residual_normed", False) == (kind == "warm")
    begin(drafter, [7], None)
    answer = root_of(drafter, [7])
    assert answer.tokens is not None and answer.values.shape == (1, 40)


@pytest.mark.parametrize("multiplies", [False, True])
def test_a_run_computes_in_what_the_cpu_is_fast_in_and_keeps_bfloat16(folder, tmp_path, multiplies, monkeypatch):
    """Without products of bfloat16 a run in bfloat16 takes three to ten times as long."""
    monkeypatch.setattr("opt_tree.training.files.fast_bfloat16", lambda: multiplies)
    seen = []

    def whole(self, *_):
        first = self.documents[self.documents.train[0]]
        with self.fast:
            seen.append((self.model.output.dtype, self.model.head.layer.mlp(first.features[-1].float()).dtype))
        seen.append(bool(self.step(first)[0].isfinite().all()))

    monkeypatch.setattr(Training, "run", whole)
    arguments = ["--kind", "eagle", "--target", f"{folder}/target", "--features", f"{folder}/features"]
    assert train.main([*arguments, "--output", str(tmp_path / "head"), "--vocab", "40"]) == 0
    dtype = torch.bfloat16 if multiplies else torch.float32
    assert seen == [(dtype, dtype), True]
    shutil.copytree(folder, tmp_path / "all", ignore=shutil.ignore_patterns("part-*"))
    command(tmp_path / "all")
    part = load_part(tmp_path / "all" / "features" / "part-0000.safetensors")
    assert part.features[-1].dtype == torch.bfloat16


def test_each_kind_is_trained_by_its_papers_recipe_unless_told_otherwise(folder, tmp_path, monkeypatch):
    """EAGLE-1: feature loss ten times the cross-entropy, noise, one pass. EAGLE-3: neither, seven, all of it learns."""
    seen = []
    monkeypatch.setattr(Training, "run", lambda training, *_: seen.append(training))
    arguments = ["--target", f"{folder}/target", "--features", f"{folder}/features", "--output", f"{tmp_path}/x"]
    arguments += ["--vocab", "40"]
    for more in (["--kind", "eagle"], ["--kind", "eagle3"], ["--kind", "eagle", "--noise", "0", "--unroll", "1:2"]):
        assert train.main([*arguments, *more]) == 0
    one, three, other = seen
    assert (one.plan.passes(0.5), one.model.goal.feature, one.model.goal.noise) == (1, 10.0, 0.1)
    assert (three.plan.passes(0.5), three.model.goal.feature, three.model.goal.noise) == (7, 0.0, 0.0)
    assert (other.plan.passes(0.5), other.model.goal.feature, other.model.goal.noise) == (2, 10.0, 0.0)
    still = {name for name, weight in three.model.head.named_parameters() if not weight.requires_grad}
    assert still == {"embed_tokens.weight"} and three.documents.layers == (-1, *published_layers(4))
    target_rows = one.model.output
    assert torch.equal(three.model.output, target_rows), "both are judged by the target's distribution"
    assert not torch.allclose(three.model.head.lm_head.weight.to(target_rows.dtype), target_rows, atol=0.1)


def test_nothing_is_judged_where_the_answer_leaves_the_draft_vocabulary(folder, target):
    documents = Documents(folder / "features", 200, (-1,))
    batch = documents[documents.train[0]]
    known = torch.tensor(sorted(set(batch.ids[:, 2::2].flatten().tolist())))
    assert 0 < len(known) < VOCAB
    output = target.model.get_output_embeddings().weight.detach().to(torch.bfloat16)
    head = new_head(target.model).float().eval()
    told = EagleLoss(head, output[known], tokens=known)(batch, 1)[0]
    follower = torch.full_like(batch.ids, int(known[0]))
    follower[:, :-1] = batch.ids[:, 1:]
    fewer = Batch(batch.ids, batch.judged & torch.isin(follower, known), batch.features, batch.layers)
    assert fewer.judged[:, 1:].sum() < batch.judged[:, 1:].sum()
    assert torch.allclose(told, EagleLoss(head, output[known])(fewer, 1)[0])


def test_features_are_divided_by_their_size_in_training_alone(folder, tmp_path, clock):
    arguments = ["--target", f"{folder}/target", "--features", f"{folder}/features", "--vocab", "40"]
    arguments += ["--output", str(tmp_path), "--tokens", "200", "--unroll", "1:1", "--warm"]
    assert train.main([*arguments, "--minutes", "0.01"]) == 0
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    states = load_part(min((folder / "features").glob("part-*.safetensors"))).features
    sizes = torch.tensor([states[layer].float().square().mean(-1).sqrt().median() for layer in published_layers(4)])
    assert torch.allclose(torch.tensor(state["sizes"]), sizes) and not torch.allclose(sizes, torch.ones(3), rtol=0.1)
    trained, width = state["head"]["fc.weight"], state["head"]["fc.weight"].shape[0]
    saved = load_file(tmp_path / "final" / "model.safetensors")["fc.weight"].float()
    assert torch.allclose(saved * sizes.repeat_interleave(width), trained, rtol=0.01)
    assert train.main([*arguments, "--minutes", "0.02", "--resume"]) == 0
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["sizes"] == state["sizes"]


def test_a_head_goes_on_and_is_saved_with_its_embedding(folder, tmp_path, target, clock):
    (tmp_path / "given").mkdir()
    head = new_head(target.model)
    nn.init.normal_(head.embed_tokens.weight)
    save_head(head, tmp_path / "given")
    arguments = ["--target", f"{folder}/target", "--features", f"{folder}/features", "--init", f"{tmp_path}/given"]
    arguments += ["--kind", "eagle", "--tokens", "200", "--vocab", str(VOCAB), "--unroll", "1:1", "--lr", "1e-4"]
    given = load_file(tmp_path / "given" / "model.safetensors")
    assert {"embed_tokens.weight", "fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"} <= given.keys()
    assert not [name for name in given if "input_layernorm" in name or "lm_head" in name or name == "norm.weight"]
    for name, more in (("still", []), ("moved", ["--embedding"])):
        assert train.main([*arguments, "--output", str(tmp_path / name), "--minutes", "0.01", *more]) == 0
        saved = load_file(tmp_path / name / "final" / "model.safetensors")
        assert saved.keys() == given.keys()
        assert torch.equal(saved["embed_tokens.weight"], given["embed_tokens.weight"]) == (name == "still")
        assert 0 < (saved["fc.weight"] - given["fc.weight"]).float().norm() < 0.2 * given["fc.weight"].float().norm()


@pytest.mark.slow
def test_the_mean_of_the_weights_is_what_is_kept(folder, tmp_path, target):
    head = new_head(target.model).float()
    output = target.model.get_output_embeddings().weight.detach().to(torch.bfloat16)
    documents = Documents(folder / "features", 200, (-1,))
    plan = Eagle3Plan(lr=1e-2, average=0.5)
    training = Training(EagleLoss(head, output), documents, plan, tmp_path)
    mean = head.fc.weight.detach().clone()
    for step in range(1, 13):
        training.step(documents[documents.train[0]])
        mean = torch.lerp(mean, head.fc.weight.detach(), 1 - min(0.5, step / (step + 10)))
    assert torch.allclose(training.kept.head.fc.weight, mean, atol=1e-6)
    assert not torch.allclose(head.fc.weight, mean, atol=1e-3)
    training.save()
    other = Training(EagleLoss(new_head(target.model).float(), output), documents, plan, tmp_path)
    other.resume()
    assert torch.equal(other.kept.head.fc.weight, training.kept.head.fc.weight)
    assert torch.equal(other.model.head.fc.weight, head.fc.weight)


def test_a_batch_is_judged_over_frequent_tokens_and_others_drawn_anew(target):
    """The same rows of the head's output layer and of the target's."""
    output = torch.arange(40.0)[:, None]
    head = new_eagle3_head(target.model, 40)
    head.lm_head.weight = nn.Parameter(output + 100)
    model = EagleLoss(head, output, Goal(often=torch.tensor([3, 7, 30]), drawn=9))
    pairs = [model.judging() for _ in range(80)]
    assert all(torch.equal(own, theirs + 100) and own.requires_grad for own, theirs in pairs)
    draws = [theirs[:, 0].int().tolist() for _, theirs in pairs]
    assert all(draw[:3] == [3, 7, 30] and len(set(draw)) == 12 for draw in draws)
    assert len({tuple(draw) for draw in draws}) == 80 and {x for draw in draws for x in draw} == set(range(40))
    head.lm_head.requires_grad_(False)
    assert all(torch.equal(rows, output) for rows in model.eval().judging()), "rows that stay are the target's"


@pytest.mark.slow
def test_the_loss_falls_on_what_is_seen_again(folder, target):
    documents = Documents(folder / "features", 200, (-1, *published_layers(4)))
    kept = most_frequent(np.load(folder / "features" / COUNTS), 40, "target")
    output = target.model.get_output_embeddings().weight.detach()[kept].to(torch.bfloat16)
    head = new_eagle3_head(target.model, 40).float()
    training = Training(EagleLoss(head, output, tokens=kept), documents, Eagle3Plan(lr=1e-2), Path())
    batch = documents[documents.train[0]]
    before = head.lm_head.weight.detach().clone()
    losses = [float(training.step(batch)[0][-1]) for _ in range(25)]
    assert len(training.step(batch)[0]) == 7 and losses[-1] < losses[0] - 0.05
    assert not torch.allclose(head.lm_head.weight, before, atol=1e-2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--unroll", "0.5:1"], "the shares of '0.5:1' must sum to 1"),
        (["--resume"], "no checkpoint in .* to go on from"),
        (["--layers", "0,1"], r"reads three of the target's 4 layers, not \(0, 1\)"),
        (["--layers", "0,1,4"], r"reads three of the target's 4 layers, not \(0, 1, 4\)"),
        (
            ["--layers", "0,1", "--kind", "eagle"],
            "--layers is for --kind eagle3, dspark, dflash, jetspec, not",
        ),
        (["--norm-before-residual", "--kind", "eagle"], "--norm-before-residual is for --kind eagle3, not for eagle"),
        (["--features", "."], "No such file|no features"),
        (["--hard", "1.5"], "--hard goes up to 1"),
        (["--average", "1"], "--average stays below 1"),
        (["--drawn", "8"], "--frequent 0 and --drawn 8 of a draft vocabulary of 40"),
        (["--frequent", "33", "--drawn", "8"], "--frequent 33 and --drawn 8 of a draft vocabulary of 40"),
        (["--embedding"], "--embedding is for --kind eagle, not for eagle3"),
        (["--embedding", "--kind", "eagle"], f"--embedding goes with the whole vocabulary, --vocab {VOCAB}"),
        (["--vocab", "0"], "--vocab must be above 0, got 0"),
    ],
)
def test_what_is_asked_wrongly_is_refused(folder, tmp_path, capsys, more, message):
    arguments = ["--target", f"{folder}/target", "--features", f"{folder}/features", "--output", f"{tmp_path}/x"]
    assert train.main([*arguments, "--vocab", "40", *more]) == 2
    assert re.search(message, capsys.readouterr().err)
