"""One pass drafts every layer: what each head is asked and says, the texts, the files, and products with a table."""

import json

import numpy as np
import pytest
import torch
from conftest import TableDrafter, TableTarget, hashed_laws, log_rows
from drafters.test_parallel_spec import SOME
from drafters.test_parallel_spec import drafter_of as parallel_spec
from enumeration import LAWS, assert_lossless, first_token
from safetensors.torch import save_file
from tiny_models import ARCHITECTURES, HIDDEN, VOCAB, build, prompt, tiny

from opt_tree import CheckpointError, Decoder, OptTree, Sampling, Static, load_drafter, load_pair
from opt_tree.core.children import Few, Reduced
from opt_tree.core.pool import Frontier
from opt_tree.drafters import (
    MedusaDrafter,
    MedusaHeads,
    NGramDrafter,
    NGramRecycling,
    Product,
)
from opt_tree.drafters.combined.product import product
from opt_tree.drafters.tables.lookup import few
from opt_tree.models.causal_lm import CausalLM
from opt_tree.policies import Sampled
from opt_tree.verifiers import multi_round

POLICY = OptTree(nodes=9, threshold=0.0, max_depth=6)


def target_of(**changes):
    config = ARCHITECTURES["llama"]()
    for name, value in changes.items():
        setattr(config, name, value)
    return CausalLM(build(config))


def noisy(module, seed=5):
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=0.1)
    return module.double().eval().requires_grad_(False)


def medusa(target, own_output=True, layers=1):
    return MedusaDrafter(noisy(MedusaHeads(target.hidden, target.vocab, 3, layers, own_output)), target)


MAKERS = {
    "medusa": medusa,
    "medusa, the target's output layer": lambda target: medusa(target, False),
    "parallelspec, some tokens x n-grams": lambda target: Product(parallel_spec(target, SOME), NGramDrafter()),
    "medusa x n-grams": lambda target: Product(medusa(target), NGramDrafter()),
    "parallelspec x recycling": lambda target: Product(parallel_spec(target), NGramRecycling(), (0.7, 0.7)),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_text_is_the_target_s_own(maker):
    """Greedy and drawn, several prompts with the same drafter, one of a single token; one pass a step at most."""
    target = target_of()
    decoder = Decoder(target, MAKERS[maker](target), POLICY)
    plain = Decoder(CausalLM(tiny("llama")), None, Static.empty())
    for text, sampling in ((prompt(7) * 3, Sampling()), ([7], Sampling()), (prompt(9), Sampling(0.8))):
        result = decoder.generate(text, 16, sampling, seed=1)
        assert result.tokens == plain.generate(text, 16, sampling, seed=1).tokens
        assert {step.draft_forwards for step in result.steps} <= {0, 1}
        assert max(step.tree.nodes for step in result.steps) > 0


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_s_heads_read_the_feature_that_chose_the_root(layers, monkeypatch):
    """Head i speaks of the token i + 2 behind the feature: i + 1 behind the root."""
    target = target_of()
    drafter = medusa(target, layers=layers)
    root, seen = drafter.root, []

    def asked(context):
        answer = root(context)
        seen.append((list(context), drafter.scores.clone()))
        return answer

    monkeypatch.setattr(drafter, "root", asked)
    for _ in Decoder(target, drafter, POLICY).steps(prompt(6), 12):
        pass
    assert len(seen) > 3
    for context, laws in seen:
        with torch.no_grad():
            states = tiny("llama").base_model(torch.tensor([context[:-1]]), use_cache=False).last_hidden_state[0, -1]
            for law, head in zip(laws, drafter.heads.heads, strict=True):
                x = states
                for block in head[:-1]:
                    x = x + torch.nn.functional.silu(block.linear(x))
                assert torch.allclose(law, head[-1].weight @ x, atol=1e-9)


def test_nothing_is_known_beyond_the_last_head():
    target = target_of()
    for step in Decoder(target, medusa(target), OptTree(30, 0.0, 9)).steps(prompt(6), 8):
        assert step.tree.depths.max() <= 3


def test_drawn_children_come_from_whole_laws():
    """Exact enumeration on a vocabulary of three tokens: two chains, judged by SpecInfer's rule."""
    target = target_of(vocab_size=3)
    decoder = Decoder(target, medusa(target), Sampled.chains(2, 1), multi_round)
    law = first_token(lambda _: decoder, (text := (0, 1, 2, 2, 0)), 3)
    expected = build(target.model.config)(torch.tensor([text])).logits[0, -1].softmax(-1)
    assert law == pytest.approx({(token,): p for token, p in enumerate(expected.tolist())}, abs=1e-9)


class TestProduct:
    @pytest.mark.parametrize("exponents", [(1.0, 0.5), (0.6, 0.9), (1.0, 0.0), (0.2, 1.0)])
    def test_is_the_product_of_both_laws_over_the_whole_vocabulary(self, exponents):
        a, b = exponents
        laws = hashed_laws(4, 50)
        law = log_rows(laws, [(0,), (1,)])
        rows = [{3: 0.5, 17: 0.3}, {}]
        answer = product(law, few(rows), exponents)
        for row, known in enumerate(rows):
            table = np.full(50, (1 - sum(known.values())) / 50)
            for token, probability in known.items():
                table[token] += probability
            expected = laws((row,)) ** a * table**b
            expected /= expected.sum()
            named = {
                token: np.exp(value)
                for token, value in zip(answer.tokens[row].tolist(), answer.log_probs[row].tolist(), strict=True)
                if value > -np.inf
            }
            assert set(named) >= {*known, *np.argsort(-laws((row,)))[:32].tolist()}
            assert len(named) <= 34 and named == {token: pytest.approx(expected[token], abs=1e-9) for token in named}

    def test_where_the_model_knows_nothing_the_table_stands(self):
        answer = product(torch.full((1, 40), -torch.inf), few([{3: 0.5, 7: 0.25}]), (1.0, 0.5))
        named = {t: v for t, v in zip(answer.tokens[0].tolist(), answer.log_probs[0].exp().tolist(), strict=True) if v}
        assert named == {3: pytest.approx(0.5), 7: pytest.approx(0.25)}

    @pytest.mark.parametrize("exponents", [(1.0, 0.5), (0.4, 0.8)])
    def test_tokens_without_a_column_share_a_hundredth_of_the_model(self, exponents):
        a, b = exponents
        tokens, scores = torch.tensor([1, 4, 7, 30]), torch.tensor([[0.3, 2.0, -1.0, 0.0]])
        drafter = Product(TableDrafter(hashed_laws(4, 50)), NGramDrafter(), exponents)
        answer = drafter._product(Reduced(scores, tokens, 50), few([{4: 0.5, 9: 0.3}]), exponents)
        law, table = np.full(50, 0.01 / 46), np.full(50, 0.2 / 50)
        law[tokens] = 0.99 * scores[0].softmax(0)
        table[[4, 9]] += (0.5, 0.3)
        expected = law**a * table**b / (law**a * table**b).sum()
        pairs = zip(answer.tokens[0].tolist(), answer.log_probs[0].exp().tolist(), strict=True)
        said = {token: prob for token, prob in pairs if prob}
        assert {token: said[token] for token in (1, 4, 7, 9, 30)} == {
            token: pytest.approx(expected[token], rel=1e-5) for token in (1, 4, 7, 9, 30)
        }

    def test_one_law_for_all_rows_is_that_of_each(self):
        law, known = log_rows(hashed_laws(4, 50), [(0,)]), few([{3: 0.5}, {5: 0.2, 6: 0.1}])
        shared, each = (product(rows, known, (1.0, 0.5)) for rows in (law.expand(2, -1), law.repeat(2, 1)))
        assert torch.equal(shared.log_probs, each.log_probs) and torch.equal(shared.tokens, each.tokens)

    @pytest.mark.parametrize("laws", ["random", "zeros", "certain drafter"])
    def test_the_emitted_law_is_the_targets(self, laws):
        target, model = LAWS[laws]
        drafter = Product(TableDrafter(model), NGramRecycling(keep=False))
        decoder = Decoder(TableTarget(target, 3), drafter, OptTree(4, 0.0, 2))
        assert_lossless(decoder, target)

    def test_drawn_children_are_refused_with_the_reason(self):
        with pytest.raises(TypeError, match="Product names a few tokens of each node only"):
            drafter = Product(TableDrafter(hashed_laws(2, 5)), NGramDrafter())
            Decoder(TableTarget(hashed_laws(1, 5), 5), drafter, Sampled.chains(2, 2), multi_round)

    @pytest.mark.parametrize("exponents", [(1.0,), (1.0, -1.0), (0.0, 1.0), (1.0, 1.0, 0.5), (1.0, 1.0, 0.0, 1.0)])
    def test_exponents_that_are_none(self, exponents):
        with pytest.raises(ValueError, match="a product has two exponents"):
            Product(TableDrafter(hashed_laws(2, 5)), NGramDrafter(), exponents)

    def test_two_tables_are_refused(self):
        with pytest.raises(TypeError, match="names a few tokens only: a product takes a whole law and a table"):
            Product(NGramDrafter(), NGramDrafter())

    def test_by_spec(self):
        target = CausalLM(tiny("llama"))
        with pytest.raises(CheckpointError, match=r"product:SPEC.SPEC names a model and a table"):
            load_drafter("product:ngram", target)
        with pytest.raises(CheckpointError, match="a product has two exponents"):
            load_drafter("product:0,0:eagle:demo+ngram", CausalLM(demo_like()))
        drafter = load_drafter("product:0.5,0.25:eagle:demo+ngram", CausalLM(demo_like()))
        assert isinstance(drafter, Product) and drafter.exponents == (0.5, 0.25)
        assert drafter.describe().endswith(")^0.5 x (n-grams of the text at hand)^0.25")

    def test_the_root_may_have_exponents_of_its_own(self):
        context = [1, 2, 3, 1, 2]
        frontier = Frontier(np.array([3]), np.array([0]), np.array([1]), np.ones((1, 1), dtype=bool))
        answers = []
        for exponents in ((1.5, 0.1), (0.5, 0.7), (1.5, 0.1, 0.5, 0.7)):
            drafter = Product(TableDrafter(hashed_laws(4, 50)), NGramDrafter(), exponents)
            drafter.reset(context, None)
            answers.append([answer.log_probs for answer in (drafter.root(context), drafter.expand(frontier))])
        root, below, both = answers
        assert torch.equal(both[0], root[0]) and torch.equal(both[1], below[1])
        assert not torch.equal(root[0], below[0]) and not torch.equal(root[1], below[1])
        assert drafter.describe().endswith(")^1.5 x (n-grams of the text at hand)^0.1 (^0.5 x ^0.7 below the root)")


def demo_like():
    """A tiny target as wide as the embedded EAGLE head, with its vocabulary."""
    config = ARCHITECTURES["llama"]()
    config.hidden_size, config.vocab_size = 256, 8192
    return build(config, dtype=torch.float32)


class TestFiles:
    def publish(self, folder, heads, prefix="", file="medusa_lm_head.pt", **config):
        tensors = {prefix + name: weight.float() for name, weight in heads.heads.state_dict().items()}
        if prefix:
            tensors["lm_head.weight"] = torch.zeros(2, 2)
        if file.endswith(".pt"):
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file)
        numbers = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
        (folder / "config.json").write_text(json.dumps(numbers | config))
        return f"medusa:{folder}"

    @pytest.mark.parametrize(
        ("prefix", "file"),
        [("", "medusa_lm_head.pt"), ("", "medusa_lm_head.safetensors"), ("medusa_head.", "model.safetensors")],
    )
    def test_published_medusa_heads_draft(self, tmp_path, prefix, file):
        target = target_of()
        ours = medusa(target)
        assert set(ours.heads.heads.state_dict()) == {
            f"{head}.{name}" for head in range(3) for name in ("0.linear.weight", "0.linear.bias", "1.weight")
        }
        loaded = load_drafter(self.publish(tmp_path, ours.heads, prefix, file), target)
        for ours_, theirs in zip(ours.heads.parameters(), loaded.heads.parameters(), strict=True):
            assert theirs.dtype == torch.float64 and torch.allclose(ours_, theirs, atol=1e-7)
        plain = Decoder(CausalLM(tiny("llama")), None, Static.empty()).generate(prompt(9), 12)
        assert Decoder(target, loaded, POLICY).generate(prompt(9), 12).tokens == plain.tokens

    def test_heads_of_another_target(self, tmp_path):
        target = target_of()
        spec = self.publish(tmp_path, MedusaHeads(HIDDEN, VOCAB + 3, 3))
        with pytest.raises(
            CheckpointError, match=r"no Medusa heads for .*: 0.1.weight is \(64, 32\), expected \(61, 32\)"
        ):
            load_drafter(spec, target)
        spec = self.publish(tmp_path, MedusaHeads(HIDDEN, VOCAB, 2))
        with pytest.raises(CheckpointError, match=r"missing 2.0.linear.weight"):
            load_drafter(spec, target)

    @pytest.mark.parametrize("config", ["{", "[]", "{}", '{"medusa_num_heads": 0}'])
    def test_a_config_that_is_none(self, tmp_path, config):
        spec = self.publish(tmp_path, MedusaHeads(HIDDEN, VOCAB, 3))
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(CheckpointError, match="is not the config of Medusa heads"):
            load_drafter(spec, target_of())

    def test_torn_weights(self, tmp_path):
        spec = self.publish(tmp_path, MedusaHeads(HIDDEN, VOCAB, 3))
        file = tmp_path / "medusa_lm_head.pt"
        file.write_bytes(file.read_bytes()[:-200])
        with pytest.raises(CheckpointError, match=r"medusa_lm_head.pt is corrupt"):
            load_drafter(spec, target_of())


def test_the_embedded_heads_draft_the_target_s_text():
    pair = load_pair("demo", "product:1.33,0.1,0.4,0.8:parallelspec:demo+store:demo", dtype="float32")
    text = pair.encode("Tell me about a river.")
    answer = Decoder(pair.target, pair.drafter, OptTree(12, 0.02)).generate(text, 48)
    assert answer.tokens == Decoder(pair.target, None, Static.empty()).generate(text, 48).tokens
    assert answer.mean_acceptance_length > 2
    assert {step.draft_forwards for step in answer.steps} <= {0, 1}


def test_a_whole_law_is_no_few():
    target = target_of()
    drafter = medusa(target)
    drafter.reset([1], None)
    assert not drafter.sparse and not isinstance(drafter.root([1]), Few)
