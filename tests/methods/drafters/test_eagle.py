"""EAGLE heads: the law against a naive head that recomputes everything, the published files, what is refused."""

import warnings
from typing import Any

import pytest
import torch
from asking import Witness, tiny_target
from methods.drafters.published_head import attended, behind
from texts import plain_texts
from tiny_models import ARCHITECTURES, HIDDEN, VOCAB, build, padded_to, prompt, publish, tiny, tiny_head
from torch import Tensor

from opt_tree.decoder import Decoder
from opt_tree.methods.drafters.heads.eagle import EagleDrafter, load_eagle
from opt_tree.methods.drafters.heads.eagle_head import EagleHead
from opt_tree.methods.policies.static import Static
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.policy import OptTree

POLICY = OptTree(nodes=7, threshold=0.0, max_depth=4)
PADDED = Buckets((1, 8, 16), (32, 64))


class NaiveHead:
    """The head as described: one sequence of pairs, no cache, everything recomputed for every path.

    Pair i is (embedding of token i + 1, feature of token i). The features of context tokens are the target's, those of
    drafted tokens the head's own outputs.
    """

    def __init__(self, head: EagleHead, target: Any) -> None:
        self.weights = {name: weight.detach() for name, weight in head.state_dict().items()}
        self.config, self.target = head.config, target

    @torch.no_grad()
    def law(self, context: list[int], path: list[int], lead: bool = False) -> Tensor:
        """Log-probabilities of the token after the context and the drafted path.

        `lead`: the prompt had one token, so that no feature came before its successor: a pair of zeros leads.
        """
        known = self.target.base_model(torch.tensor([context]), use_cache=False).last_hidden_state[0]
        features, tokens = list(known[:-1]), context[1:]
        if lead:
            features, tokens = [torch.zeros_like(known[0]), *features], list(context)
        estimate = self.layer(tokens, features)[-1]
        for token in path:
            features, tokens = [*features, estimate], [*tokens, token]
            estimate = self.layer(tokens, features)[-1]
        logits = self.target.get_output_embeddings()(estimate)
        if cap := getattr(self.target.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits.log_softmax(-1)

    def layer(self, tokens: list[int], features: list[Tensor]) -> list[Tensor]:
        """One Llama layer without its first norm over `fc(embedding, feature)`."""
        w, theta = self.weights, self.config.rope_parameters["rope_theta"]
        pairs = zip(w["embed_tokens.weight"][tokens], features, strict=True)
        rows = [w["fc.weight"] @ torch.cat(pair) + w.get("fc.bias", 0) for pair in pairs]
        added = attended(w, "layers.0", rows, theta=theta)
        return [behind(w, "layers.0", x + y) for x, y in zip(rows, added, strict=True)]


class TestLaw:
    @pytest.mark.quick("llama-changes0-None", "llama-changes2-None", "opt-changes5-None")
    @pytest.mark.parametrize(
        ("architecture", "changes", "buckets"),
        [
            ("llama", {}, None),
            ("llama", {"bias": False, "num_key_value_heads": 1}, PADDED),
            ("llama", {"num_key_value_heads": 4, "rope_theta": 500.0}, None),
            ("gemma3", {}, PADDED),  # caps its logits
            ("gpt2", {}, PADDED),
            ("opt", {}, None),
        ],
    )
    def test_every_law_is_that_of_a_head_without_a_cache(self, architecture, changes, buckets):
        """Steps that accept and steps that reject, so that committed pairs carry features of kept rows."""
        target = padded_to(buckets, CausalLM(build(ARCHITECTURES[architecture]())))
        head = tiny_head(target.model, **changes)
        naive = NaiveHead(head, tiny(architecture))
        witness = Witness(padded_to(buckets, EagleDrafter(head, target)))
        steps = list(Decoder(target, witness, POLICY).steps(prompt(9), 7))
        assert len(witness.laws) > 2 * len(steps), "trees should have layers"
        for context, path, law in witness.laws[::7]:
            assert (law - naive.law(context, path)).abs().max() < 1e-10

    @pytest.mark.slow
    def test_accepted_tokens_run_again_with_the_target_s_features(self):
        """The head of these weights agrees with the target now and then; then the next root must not reuse a row."""
        target = tiny_target()
        head = tiny_head(target.model)
        witness = Witness(EagleDrafter(head, target))
        steps = list(Decoder(target, witness, OptTree(60, 0.0, 3)).steps(prompt(9), 40))
        assert any(step.accepted for step in steps), "a tree of every token at depth 1 must accept something"
        naive = NaiveHead(head, tiny("llama"))
        roots = [law for law in witness.laws if not law[1]]
        for context, path, law in roots[-3:]:
            assert (law - naive.law(context, path)).abs().max() < 1e-10

    @pytest.mark.slow
    def test_a_prompt_of_one_token(self):
        target = tiny_target()
        head = tiny_head(target.model)
        witness = Witness(EagleDrafter(head, target))
        plain = Decoder(CausalLM(tiny("llama")), None, Static.empty()).generate([7], 20)
        assert Decoder(target, witness, POLICY).generate([7], 20).tokens == plain.tokens
        naive = NaiveHead(head, tiny("llama"))
        assert witness.laws[0][:2] == ([7], [])
        for context, path, law in witness.laws[:20]:
            assert (law - naive.law(context, path, lead=True)).abs().max() < 1e-10


class TestText:
    @pytest.mark.quick("mistral")
    @pytest.mark.parametrize("architecture", ["mistral", "gemma2", "mixtral"])
    def test_text_is_the_target_s_own(self, architecture):
        target = CausalLM(build(ARCHITECTURES[architecture]()))
        decoder = Decoder(target, EagleDrafter(tiny_head(target.model), target), POLICY)
        plain_texts(decoder, [prompt(20)], 20, model=tiny(architecture))

    @pytest.mark.slow
    def test_a_head_drafts_on_behind_what_it_was_trained_on(self):
        """`max_position_embeddings` of a head is no end of its positions: one warning, the laws of the formula."""
        target = tiny_target()
        head = tiny_head(target.model, max_position_embeddings=24)
        drafter = EagleDrafter(head, target)
        assert (drafter.trained, drafter.max_context) == (24, target.max_context)
        witness, naive = Witness(drafter), NaiveHead(head, tiny("llama"))
        plain = Decoder(CausalLM(tiny("llama")), None, Static.empty())
        for length in (15, 40):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                result = Decoder(target, witness, POLICY).generate(prompt(length), 20)
            assert len(told) == (length == 15), "once"
            assert result.tokens == plain.generate(prompt(length), 20).tokens
            assert all(step.tree.nodes for step in result.steps[:-1])
            context, path, law = witness.laws[-1]
            assert len(context) > 24 and (law - naive.law(context, path)).abs().max() < 1e-10

    @pytest.mark.slow
    def test_a_head_whose_rotary_factors_change_ends_where_they_do(self):
        target = tiny_target()
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        drafter = EagleDrafter(tiny_head(target.model, max_position_embeddings=24, rope_parameters=rope), target)
        assert drafter.max_context == 24
        plain = Decoder(CausalLM(tiny("llama")), None, Static.empty())
        for length in (15, 24, 40):
            drafter.ended = False
            with pytest.warns(UserWarning, match="behind the former nothing is drafted"):
                result = Decoder(target, drafter, POLICY).generate(prompt(length), 20)
            assert result.tokens == plain.generate(prompt(length), 20).tokens
            context = length
            for step in result.steps:
                assert context + step.tree.depths.max() <= 24 or step.tree.nodes == 0
                context += len(step.tokens)
            assert (result.steps[0].tree.nodes > 0) == (length < 24)
        # The drafter comes back to work with the next short prompt.
        assert Decoder(target, drafter, POLICY).generate(prompt(5), 5).steps[0].tree.nodes > 0

    @pytest.mark.slow
    def test_a_head_with_fewer_tokens_than_the_target(self):
        """The target's vocabulary is padded: its output layer knows tokens that the head cannot embed."""
        target = tiny_target()
        head = tiny_head(target.model, vocab_size=VOCAB - 20)
        decoder = Decoder(target, EagleDrafter(head, target), OptTree(VOCAB, 0.0, 3))
        result = decoder.generate([VOCAB - 1, *prompt(9)], 30)
        plain = Decoder(CausalLM(tiny("llama")), None, Static.empty())
        assert result.tokens == plain.generate([VOCAB - 1, *prompt(9)], 30).tokens
        assert max(result.tokens) >= VOCAB - 20, "the text should hold tokens that the head lacks"
        for step in result.steps:
            assert (step.tree.tokens[1:] < VOCAB - 20).all()


PUBLISHED_NAMES = {
    "embed_tokens.weight",
    "fc.weight",
    "fc.bias",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
}


class TestFiles:
    @pytest.fixture(scope="class")
    def target(self) -> CausalLM:
        return tiny_target()

    @pytest.fixture(scope="class")
    def head(self, target: CausalLM) -> EagleHead:
        """Weights that float32 holds, which is what the files hold."""
        return tiny_head(target.model).float().double()

    def test_tensors_have_the_published_names(self, target, head):
        assert set(head.state_dict()) == PUBLISHED_NAMES
        assert set(tiny_head(target.model, bias=False).state_dict()) == PUBLISHED_NAMES - {"fc.bias"}

    @pytest.mark.quick("bias-unsaid-pytorch_model.bin", "bias-model.safetensors")
    @pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
    @pytest.mark.parametrize("bias", [None, True, False], ids=["bias-unsaid", "bias", "no-bias"])
    def test_a_published_head_drafts_as_the_one_that_was_saved(self, tmp_path, target, file, bias):
        changes = {} if bias is None else {"bias": bias}
        head = tiny_head(target.model, **changes).float().double()
        loaded = load_eagle(publish(tmp_path, head, file, **changes), target)
        assert loaded.lm.dtype == torch.float64
        trees = [
            [step.tree for step in Decoder(target, drafter, POLICY).steps(prompt(9), 10)]
            for drafter in (EagleDrafter(head, target), loaded)
        ]
        for ours, theirs in zip(*trees, strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert abs(ours.path_log_probs - theirs.path_log_probs).max() < 1e-9

    def test_biases_of_queries_keys_and_values_are_those_of_the_file(self, tmp_path, target, head):
        """Heads of Qwen2, whose config says `qkv_bias`."""
        tensors = {name.removeprefix("model."): tensor for name, tensor in head.state_dict().items()}
        torch.manual_seed(5)
        for name in "qkv":
            rows = tensors[f"layers.0.self_attn.{name}_proj.weight"].shape[0]
            tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.randn(rows).double()
        loaded = load_eagle(publish(tmp_path, head, tensors=tensors, qkv_bias=True), target)
        assert loaded.lm.model.base_model.layer.self_attn.o_proj.bias is None
        witness, naive = Witness(loaded), NaiveHead(loaded.lm.model.base_model, tiny("llama"))
        list(Decoder(target, witness, POLICY).steps(prompt(6), 5))
        for context, path, law in witness.laws[-6:]:
            assert (law - naive.law(context, path)).abs().max() < 1e-10
        assert (witness.laws[0][2] - NaiveHead(head, tiny("llama")).law(*witness.laws[0][:2])).abs().max() > 1e-3

    def test_rope_of_the_old_words_is_understood(self, tmp_path, target, head):
        loaded = load_eagle(publish(tmp_path, head, rope_theta=500000.0), target)
        size = HIDDEN // 4
        expected = 500000.0 ** (-torch.arange(0, size, 2) / size)
        assert torch.allclose(loaded.lm.model.base_model.rotary.inv_freq.float(), expected.float())

    def test_a_cast_rounds_no_rotary_frequencies(self, tmp_path, head):
        low = CausalLM(build(ARCHITECTURES["llama"]()).to(torch.bfloat16))
        loaded = load_eagle(publish(tmp_path, head), low).lm.model.base_model
        frequencies = 10000.0 ** (-torch.arange(0, HIDDEN // 4, 2) / (HIDDEN // 4))
        assert loaded.fc.weight.dtype == torch.bfloat16
        assert torch.equal(loaded.rotary.inv_freq, frequencies)

    def test_embeddings_may_be_absent_then_the_target_s_are_used(self, tmp_path, target, head):
        """Rotary buffers of old checkpoints are ignored."""
        tensors = head.state_dict() | {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
        del tensors["embed_tokens.weight"]
        loaded = load_eagle(publish(tmp_path, head, tensors=tensors), target)
        embeddings = target.model.get_input_embeddings().weight
        assert torch.allclose(loaded.lm.model.base_model.embed_tokens.weight, embeddings)

    def test_every_missing_unexpected_and_misshapen_tensor_is_named(self, tmp_path, target, head):
        tensors = dict(head.state_dict())
        del tensors["fc.bias"], tensors["layers.0.mlp.up_proj.weight"]
        tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["fc.weight"] = torch.zeros(HIDDEN, 3 * HIDDEN)
        with pytest.raises(CheckpointError) as error:
            load_eagle(publish(tmp_path, head, tensors=tensors), target)
        message = str(error.value)
        for part in (
            str(tmp_path),
            "missing fc.bias",
            "missing layers.0.mlp.up_proj.weight",
            "unexpected layers.1.mlp.up_proj.weight",
            f"fc.weight is ({HIDDEN}, {3 * HIDDEN}), expected ({HIDDEN}, {2 * HIDDEN})",
        ):
            assert part in message
        assert "\n" not in message

    @pytest.mark.parametrize(
        ("changes", "message"),
        [({"hidden_size": 2 * HIDDEN}, f"{2 * HIDDEN} wide"), ({"vocab_size": VOCAB + 3}, f"{VOCAB + 3} tokens")],
    )
    def test_a_head_of_another_target_is_refused(self, target, changes, message):
        config = tiny_head(target.model).config.to_dict() | changes
        head = EagleHead(type(target.model.config)(**config))
        with pytest.raises(ValueError, match=f"wrong head for this target.*{message}"):
            EagleDrafter(head, target)

    def test_layers_that_the_file_does_not_hold_are_missed(self, tmp_path, target, head):
        with pytest.raises(CheckpointError, match=r"missing layers\.1\.self_attn\.q_proj\.weight"):
            load_eagle(publish(tmp_path, head, num_hidden_layers=2), target)
        tiny("llama").save_pretrained(tmp_path / "causal")
        with pytest.raises(CheckpointError, match=r"missing fc\.weight.*unexpected layers\.0\.input_layernorm"):
            load_eagle(str(tmp_path / "causal"), target)
