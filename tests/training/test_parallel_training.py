"""Heads that draft in one pass, and exit layers, trained from hidden states: what each sees, and that a run learns."""

import json

import numpy as np
import pytest
import torch
from methods.drafters import test_parallel_spec
from methods.drafters.published_block import BLOCK
from methods.drafters.test_blocks import dspark_config
from methods.drafters.test_parallel_spec import DEPTHS, head_of
from safetensors.torch import save_file
from tiny_models import HIDDEN, VOCAB, drawn, tiny
from training import test_heads_training

from opt_tree import Decoder, OptTree, Static, load_drafter
from opt_tree.methods.drafters.heads.early_exit import ExitLayer
from opt_tree.methods.drafters.heads.one_pass import MedusaHeads
from opt_tree.models.causal_lm import CausalLM
from opt_tree.training.heads import block, early_exit, medusa, train
from opt_tree.training.heads.batches import Documents
from opt_tree.training.heads.block import BlockLoss
from opt_tree.training.heads.head_loss import Goal
from opt_tree.training.heads.parallel_spec import ParallelLoss, new_parallel_head
from opt_tree.training.heads.train import Training
from opt_tree.training.plans import BlockPlan, DSparkPlan, JetSpecPlan, ParallelPlan

folder, target, clock = test_heads_training.folder, test_heads_training.target, test_heads_training.clock


def test_a_group_sees_its_pairs_and_its_own_masks():
    """Every depth of every group, in one pass, is what the head says of that group alone."""
    head = head_of(CausalLM(tiny("llama")))
    torch.manual_seed(1)
    ids, given = torch.randint(0, VOCAB, (1, 7)), torch.randn(1, 7, HIDDEN).double()
    estimates = ParallelLoss.passes(head, ids, given, DEPTHS)
    assert [estimate.shape for estimate in estimates] == [(1, 7, HIDDEN)] * DEPTHS
    for root in range(7):
        own = VOCAB + torch.arange(DEPTHS - 1)[None]
        tokens = torch.cat([ids[:, : root + 1], own], 1)
        features = torch.cat([given[:, : root + 1], given[:, root : root + 1].expand(-1, DEPTHS - 1, -1)], 1)
        seen = torch.full((tokens.shape[1],) * 2, -torch.inf).double().triu(1)[None, None]
        (expected,) = head(tokens, features, torch.arange(tokens.shape[1])[None], attention_mask=seen)
        for depth in range(min(DEPTHS, 7 - root)):
            assert torch.allclose(estimates[depth][:, root + depth], expected[:, root + depth], atol=1e-5)


def learns(run, passes, least):
    """Whether twenty steps lower the loss of every pass by more than `least`."""
    before, _ = run.heldout(passes)
    order = run.order()
    for _ in range(20):
        run.step(run.documents[next(order)])
    return all(late < early - least for early, late in zip(before, run.heldout(passes)[0], strict=True))


@pytest.mark.slow
def test_every_depth_learns(folder, target, tmp_path):
    plan = ParallelPlan(minutes=1e9, lr=3e-3, tokens=200, depths=3)
    torch.manual_seed(0)
    head = new_parallel_head(target.model, plan.depths)
    output = target.model.get_output_embeddings().weight.detach().float()
    masks = head.masks.weight.detach().clone()
    loss = ParallelLoss(head, output, Goal())
    assert learns(Training(loss, Documents(folder / "features", 200, (-1,)), plan, tmp_path), 3, 0.05)
    assert not torch.equal(masks, head.masks.weight)


BLOCKS = ["--block", "3", "--layers", "0,1", "--depth", "1", "--mask", "60", "--anchors", "0.5"]
RUNS = [
    ("parallelspec", ["--depths", "3", "--vocab", "40"], 3),
    ("dspark", [*BLOCKS, "--rank", "8", "--vocab", "40", "--markov", "vanilla"], 3),
    ("dspark", [*BLOCKS, "--rank", "8", "--vocab", "40", "--markov", "gated"], 3),
    ("dflash", [*BLOCKS, "--vocab", "40"], 3),
    ("jetspec", [*BLOCKS, "--vocab", str(VOCAB)], 3),
    ("medusa", ["--depths", "3", "--average", "0.5", "--frequent", "0", "--drawn", "0"], 3),
    ("exit", ["--depth", "2", "--average", "0.5"], 1),
]


@pytest.mark.quick("medusa-options5-3")
@pytest.mark.parametrize(("kind", "options", "passes"), RUNS)
def test_a_run_goes_on_and_leaves_a_drafter(folder, tmp_path, target, kind, options, passes, clock, capsys):
    arguments = ["--kind", kind, "--target", f"{folder}/target", "--features", f"{folder}/features", *options]
    arguments += ["--output", str(tmp_path), "--tokens", "200", "--save-minutes", "0.02"]
    assert train.main([*arguments, "--minutes", "0.01"]) == 0
    assert train.main([*arguments, "--minutes", "0.03", "--resume"]) == 0
    records = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert [record["steps"] for record in records] == [3, 8]
    assert [len(record["loss"]) for record in records] == [passes] * 2
    assert records[-1]["loss"][0] < records[0]["loss"][0]
    drafter = load_drafter(capsys.readouterr().out.split()[-1], target)
    text = Decoder(target, drafter, OptTree(6, 0.0)).generate([3, 9, 7], 8)
    assert text.tokens == Decoder(target, None, Static.empty()).generate([3, 9, 7], 8).tokens
    assert max(step.tree.nodes for step in text.steps) > 0
    assert "40" not in options or len(drafter.tokens) == 40
    assert str(VOCAB) not in options or drafter.tokens is None  # as z-lab's files are


def test_a_parallel_head_begins_as_another_one(target, tmp_path):
    head = head_of(target)
    test_parallel_spec.TestFiles().write(tmp_path, target)
    assert torch.allclose(new_parallel_head(target.model, 3, tmp_path).fc.weight.double(), head.fc.weight, atol=1e-3)
    save_file({"fc.weight": head.fc.weight}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"is no EAGLE-1 head: it has no fc\.bias"):
        new_parallel_head(target.model, 3, tmp_path)


PARALLEL = ["--kind", "parallelspec", "--vocab", "40"]
JUDGED_OVER = f"--frequent 1024 and --drawn 256 of a draft vocabulary of {VOCAB}: both 0 judge over all of it"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([*PARALLEL, "--depths", "1"], "--depths is at least 2"),
        ([*PARALLEL, "--frequent", "30", "--drawn", "20"], "--frequent 30 and --drawn 20 of a draft vocabulary of 40"),
        (["--kind", "medusa"], JUDGED_OVER),
        (["--kind", "exit", "--depth", "4"], "--depth must be between 1 and 3, the target has 4 layers"),
        (["--kind", "dflash", "--markov", "gated"], "--markov is for --kind dspark, not for dflash"),
        (["--kind", "dspark", "--depths=3"], "--depths is for --kind medusa, parallelspec, not for dspark"),
        (["--kind", "dspark", "--mask", str(VOCAB), "--vocab", "40"], "--mask is a token of the target"),
        (["--kind", "dspark", "--average", "1"], "--average stays below 1"),
        (["--kind", "medusas"], "invalid choice: 'medusas'"),
        (["--kind"], "expected one argument"),
    ],
)
def test_what_cannot_be_trained_is_one_line(folder, tmp_path, capsys, options, complaint):
    arguments = ["--target", f"{folder}/target", "--features", f"{folder}/features", "--output", str(tmp_path)]
    assert train.main([*arguments, *options]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1 and not list(tmp_path.iterdir())


def dspark_of(target, columns=VOCAB, **changes):
    head = block.BlockModel(dspark_config(**changes), columns)
    head.block, head.heads = drawn(head.block), drawn(head.heads)
    return head


def batch_of(folder, layers):
    documents = Documents(folder / "features", 200, (-1, *layers))
    return documents[documents.train[0]]


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_sees_what_was_before_it_and_itself(folder, target, causal):
    """Each of a batch's blocks, in one forward, is what the drafter's model says behind that anchor alone."""
    layers = (0, 1)
    batch = batch_of(folder, layers)
    head = dspark_of(target, markov_rank=0, causal_head=causal).float()
    loss = BlockLoss(head, target.model.float(), torch.arange(VOCAB), 0.5)
    anchors, real = loss.draw(batch)
    assert real.any() and batch.judged.gather(1, anchors)[real].all()
    states = loss.states(batch, anchors)
    embedding, size = target.model.get_input_embeddings(), head.config["block_size"]
    for row, anchor in ((0, int(anchors[0, 0])), (len(batch.ids) - 1, int(anchors[-1, 1]))):
        given = torch.cat([batch.features[layer][row : row + 1, :anchor].float() for layer in layers], -1)
        noise = embedding(torch.tensor([[int(batch.ids[row, anchor]), *[0] * (size - 1)]]))
        places = torch.arange(anchor + size)[None]
        seen = torch.cat([torch.ones(size, anchor), torch.ones(size, size).tril(0 if causal else size)], 1).bool()
        alone = head.block(
            noise_embeds=noise,
            context_hidden_states=given,
            position_ids=places,
            attention_mask={"full_attention": seen[None, None]},
        ).last_hidden_state[0]
        column = (anchors[row] == anchor).nonzero()[0, 0]
        assert torch.allclose(states[row, column], alone, atol=1e-4)
    target.model.double()


def test_the_losses_are_those_of_equations_8_to_10():
    torch.manual_seed(0)
    logits, sure = torch.randn(5, 7).double(), torch.randn(5).double()
    law, follower = torch.randn(5, 7).double().softmax(-1), torch.tensor([0, 3, 6, -1, 2])
    found = block.dspark_losses(logits, sure, law, follower)
    hard, soft = block.surprises(logits, follower), block.divergences(logits, law)
    for row in range(5):
        drafted, wanted = logits[row].softmax(0), law[row]
        accepted = torch.minimum(drafted, wanted).sum()  # which is 1 - L1 / 2
        confidence = torch.sigmoid(sure[row])
        expected = 0.9 * (drafted - wanted).abs().sum()
        expected -= accepted * confidence.log() + (1 - accepted) * (1 - confidence).log()
        if follower[row] >= 0:
            expected -= 0.1 * drafted[follower[row]].log()
        assert found[row] == pytest.approx(float(expected), abs=1e-9)
        assert soft[row] == pytest.approx(float((wanted * (wanted / drafted).log()).sum()), abs=1e-9)
        assert hard[row] == pytest.approx(-float(drafted[follower[row]].log()) if follower[row] >= 0 else 0, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "loss_of"), [(DSparkPlan, "dspark_losses"), (BlockPlan, "surprises"), (JetSpecPlan, "divergences")]
)
def test_every_place_of_a_block_is_asked_what_follows_its_parent(folder, target, monkeypatch, options, loss_of):
    """Place k is row k of a DSpark block, and the row behind it in the others, whose anchor's row says nothing."""
    batch, plan = batch_of(folder, (0, 1)), options(block=BLOCK, depth=1)
    head = block.BlockModel(block.new_config(target.model, plan, (0, 1), 60), VOCAB)
    loss = BlockLoss(head, target.model.float(), torch.arange(VOCAB), 0.5)
    anchors, real = loss.draw(batch)
    monkeypatch.setattr(loss, "draw", lambda _: (anchors, real))
    taken, scored, score = {}, [], loss.score
    for name in ("dspark_losses", "surprises", "divergences"):
        monkeypatch.setattr(block, name, lambda *given, of=name: taken.update({of: given}) or given[0][:, 0])
    monkeypatch.setattr(loss, "score", lambda *given: scored.append(given) or score(*given))
    loss(batch, BLOCK)
    expected = []
    output = target.model.get_output_embeddings().weight
    for row, column in ((row, column) for row, places in enumerate(anchors) for column in range(len(places))):
        anchor, length = int(anchors[row, column]), int(batch.judged[row].nonzero().max()) + 1
        expected += [(row, column, place, anchor + place) for place in range(min(BLOCK, length - 1 - anchor))]
    rows, columns, rank, places = torch.tensor(expected).T
    assert real.all() and len(expected) > 20
    ((states, parents),), (given,) = scored, taken.values()
    assert [*taken] == [loss_of] and torch.equal(parents, batch.ids[rows, places])
    first = 0 if options is DSparkPlan else 1
    assert head.config["block_size"] == BLOCK + first
    assert torch.equal(states, loss.states(batch, anchors)[rows, columns, rank + first])
    if options is not JetSpecPlan:
        assert torch.equal(given[-1], batch.ids[rows, places + 1])
    if options is not BlockPlan:
        goals = (batch.features[-1][rows, places].float() @ output.T).softmax(-1)
        assert torch.allclose(given[1 if options is JetSpecPlan else 2], goals, atol=1e-3)
    target.model.double()


@pytest.mark.slow
def test_every_place_of_a_block_learns(folder, target, tmp_path):
    plan = DSparkPlan(minutes=1e9, block=BLOCK, anchors=0.5)
    torch.manual_seed(0)
    head = block.BlockModel(dspark_config(), VOCAB).float()
    documents = Documents(folder / "features", 200, (-1, 0, 1))
    loss = BlockLoss(head, target.model.float(), torch.arange(VOCAB), plan.anchors)
    run = Training(loss, documents, plan, tmp_path)
    state = torch.get_rng_state()
    before, _ = run.heldout(BLOCK)
    assert run.heldout(BLOCK)[0] == before and torch.equal(torch.get_rng_state(), state), "draws of its own"
    assert learns(run, BLOCK, 0.02)
    target.model.double()


def test_layers_are_spread_as_dflash_spreads_them():
    assert block.spread(36, 5) == (1, 9, 17, 25, 33)
    assert block.spread(12, 3) == (1, 5, 9) and block.spread(12, 1) == (6,)


@torch.no_grad()
def test_medusa_s_heads_are_each_asked_what_the_target_says_so_many_tokens_ahead(folder, target):
    """The loss of head d is the cross-entropy with the target's law d + 1 places behind the feature that it reads."""
    batch = batch_of(folder, ())
    torch.manual_seed(0)
    heads = MedusaHeads(HIDDEN, VOCAB, 3, own_output=False)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    output = target.model.get_output_embeddings().weight.detach().float()
    found, _ = medusa.MedusaLoss(heads, output.bfloat16())(batch, 3)
    states = batch.features[-1].float()
    laws, estimates = (states @ output.T).softmax(-1), heads(states)
    for depth in range(3):
        losses = []
        for row, place in batch.judged.nonzero().tolist():
            if place > depth:  # the feature so many places back
                law = (estimates[depth, row, place - depth - 1] @ output.T).log_softmax(-1)
                losses.append(-(laws[row, place] * law).sum())
        assert found[depth].item() == pytest.approx(float(torch.stack(losses).mean()), rel=2e-2)


@torch.no_grad()
def test_an_exit_layer_is_asked_what_the_target_says_at_the_same_token(folder, target):
    batch = batch_of(folder, (1,))
    torch.manual_seed(0)
    layer = ExitLayer(target.model.float(), 2)
    output = target.model.get_output_embeddings().weight.detach().float()
    (found,), (equal,) = early_exit.ExitLoss(layer, output.bfloat16())(batch, 1)
    states, given = batch.features[-1].float(), batch.features[1].float()
    laws = (states @ output.T).softmax(-1)
    losses, hits = [], []
    for row, place in batch.judged.nonzero().tolist():
        if place:  # of the first token nothing is asked
            hidden = layer.hidden(given[row : row + 1, : place + 1], torch.arange(place + 1)[None])[0, -1]
            law = (hidden @ output.T).log_softmax(-1)
            losses.append(-(laws[row, place] * law).sum())
            hits.append(float(law.argmax() == laws[row, place].argmax()))
    assert found.item() == pytest.approx(float(torch.stack(losses).mean()), rel=2e-2)
    assert equal.item() == pytest.approx(np.mean(hits), abs=0.05)
    target.model.double()


def test_a_kind_has_its_own_weights_of_places(folder, tmp_path, monkeypatch):
    arguments = ["--target", f"{folder}/target", "--features", f"{folder}/features", "--output", str(tmp_path)]
    arguments += [*BLOCKS, "--vocab", "40"]
    decays = []
    monkeypatch.setattr(Training, "run", lambda training: decays.append(training.plan.decay))
    for options in (["dflash"], ["jetspec"], ["dspark"], ["jetspec", "--decay", "0.5"]):
        assert train.main([*arguments, "--kind", *options]) == 0
    assert decays == pytest.approx([0.7788, 1, 0.7788, 0.5], abs=1e-4)
