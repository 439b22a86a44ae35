"""Early exit: drafted in the target's own cache. Its laws, its texts, which rows run, the files, what is refused."""

import copy
import json

import numpy as np
import pytest
import torch
from asking import Witness
from safetensors.torch import save_file
from texts import plain_texts, refused
from tiny_models import ARCHITECTURES, build, padded_to, perturbed, prompt

from opt_tree import (
    CheckpointError,
    Decoder,
    OptTree,
    Sampling,
    Static,
    UnsupportedModelError,
    generate_batch,
    load_drafter,
)
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.heads.early_exit import EarlyExit, ExitLayer
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.split_target import SplitTarget
from opt_tree.training.heads.early_exit import save_exit
from opt_tree.tree import Tree

POLICY = OptTree(nodes=7, threshold=0.0, max_depth=4)


def deep(architecture="llama", layers=4, **changes):
    """A tiny model of several layers, the upper ones weak: what leaves it early is then often right."""
    config = ARCHITECTURES[architecture]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * layers
    for name, value in changes.items():
        setattr(config, name, value)
    model = build(config)
    with torch.no_grad():
        for layer in model.base_model.layers[2:]:
            for weight in layer.parameters():
                if weight.ndim > 1:
                    weight.mul_(0.4)
    return model


def exit_of(target, depth=2):
    """An exit layer that is not the target's own last layer."""
    layer = ExitLayer(target.model, depth).eval().requires_grad_(False)
    layer.layer = perturbed(layer.layer, 0.05)
    return layer


def pair_of(architecture="llama", depth=2, buckets=None, **changes):
    target = padded_to(buckets, CausalLM(deep(architecture, **changes)))
    return target, padded_to(buckets, EarlyExit(exit_of(target, depth), target))


@torch.no_grad()
def naive_law(layer, model, text):
    """All layers over all tokens: no cache, no mask, no tree."""
    hooked = copy.deepcopy(model.base_model)  # transformers hooks into what it asks for hidden states
    states = hooked(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    hidden = layer.hidden(states[layer.depth], torch.arange(len(text))[None])
    return model.get_output_embeddings()(hidden)[0, -1].log_softmax(-1)


@pytest.mark.quick("qwen3-2-None")
@pytest.mark.parametrize(
    ("architecture", "depth", "buckets"),
    [("llama", 1, None), ("llama", 3, Buckets((1, 8, 16), (32, 64))), ("qwen2", 2, None), ("qwen3", 2, None)],
)
def test_every_law_is_that_of_the_lower_layers_and_the_exit(architecture, depth, buckets):
    target, drafter = pair_of(architecture, depth, buckets)
    witness = Witness(drafter)
    result = Decoder(target, witness, POLICY).generate(prompt(9), 16)
    assert 1.5 < result.mean_acceptance_length < 5, "steps should accept some and reject some"
    assert len(witness.laws) > 2 * len(result.steps)
    layer = drafter.lm.model
    for context, path, law in witness.laws[::3]:
        assert (law - naive_law(layer, target.model, [*context, *path])).abs().max() < 1e-9


@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("architecture", ["qwen3", "mixtral"])
def test_text_is_the_target_s_own(architecture):
    """In other architectures; the target is as good as before for whoever decodes without a draft."""
    target, drafter = pair_of(architecture)
    for decoder in (Decoder(target, drafter, POLICY), Decoder(target, None, Static.empty())):
        plain_texts(decoder, [prompt(20)], 16, [Sampling()], deep(architecture))


@pytest.mark.slow
def test_a_target_with_adapters_is_cut_as_the_model_inside(tmp_path):
    """The adapters are in both halves. The exit's own layer has none: its files are those of the bare target."""
    peft = pytest.importorskip("peft")
    bare, _ = target, drafter = pair_of()
    save_exit(drafter.lm.model, target.model.config, tmp_path)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = CausalLM(peft.get_peft_model(deep(), config).double().eval())
    drafter = load_drafter(f"exit:{tmp_path}", adapted)
    assert drafter.lm.model.layer.state_dict().keys() == bare.model.model.layers[0].state_dict().keys()
    found, expected = (
        Decoder(adapted, one, tree).generate(prompt(9), 24) for one, tree in ((drafter, POLICY), (None, Static.empty()))
    )
    assert found.tokens == expected.tokens and found.mean_acceptance_length > 1.1
    assert found.tokens != Decoder(bare, None, Static.empty()).generate(prompt(9), 24).tokens


def test_drafted_rows_are_not_run_again(monkeypatch):
    """The lower half runs each row of draft and tree once; the upper half the rows of the tree."""
    target, drafter = pair_of()
    split, rows = drafter.split, {"lower": [], "upper": [], "whole": []}
    halves = ("lower", split.lower), ("lower", split.leaves), ("upper", split.upper)
    for name, lm in (*halves, ("whole", target)):
        run = lm.backend.run

        def counted(inputs, cache, count, run=run, name=name):
            rows[name].append(count)
            return run(inputs, cache, count)

        monkeypatch.setattr(lm.backend, "run", counted)
    result = Decoder(target, drafter, POLICY).generate(prompt(9), 20)
    assert rows["whole"] == [8], "the whole target runs the prompt and nothing else"
    trees = [step.tree for step in result.steps]
    assert rows["upper"] == [len(tree) for tree in trees]
    leaves = sum(int((tree.draft_rows < 0).sum()) for tree in trees)
    expanded = sum(step.draft_tokens for step in result.steps)
    # The exit layer alone runs the prompt and, in the next step, an accepted leaf.
    caught_up = expanded - 8 - (sum(rows["lower"]) - leaves)
    assert 0 <= caught_up < len(trees) and leaves > 0
    assert drafter.work.tokens == expanded


def test_the_cache_is_what_a_fresh_prefill_leaves():
    target, drafter = pair_of()
    result = Decoder(target, drafter, POLICY).generate(prompt(9), 30)
    text = [*prompt(9), *result.tokens][: target.length]
    fresh = CausalLM(deep())
    fresh.append(text)
    for ours, theirs in zip(target.cache.views, fresh.cache.views, strict=True):
        assert torch.allclose(ours[:, :, : len(text)], theirs[:, :, : len(text)], atol=1e-10)


def test_features_of_every_layer_are_there_for_others():
    target, drafter = pair_of()
    other = CausalLM(deep())
    layers = (-1, 0, 1, 2, 3)
    for lm in (target, other):
        lm.watch(layers)
    context = [*prompt(9), *prompt(3, seed=5)]
    for lm in (target, other):
        lm.reset()
        lm.append(context[:-1])
    hidden = drafter.split.begin(context[-1])
    drafter.split.extend(np.array([4, 5]), np.full(2, len(context)), np.array([[1, 1, 0], [1, 0, 1]], dtype=bool))
    rows = np.array([0, 2, -1, -1])
    tree = Tree(np.array([context[-1], 5, 6, 7]), np.array([-1, 0, 0, 1]), np.zeros(4), rows)
    ours, theirs = target.score(tree), other.score(tree)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-10)
    assert set(ours.features) == set(theirs.features) == set(layers)
    for layer in layers:
        assert torch.allclose(ours.features[layer], theirs.features[layer], atol=1e-10)
    assert torch.allclose(hidden, ours.features[1][:1], atol=1e-10)


@pytest.mark.quick("chains")
@pytest.mark.parametrize(
    "policy", [Sampled.chains(3, 3), Sampled.kary(2, 2, replacement=False)], ids=["chains", "kary"]
)
def test_drawn_children_by_the_target_s_own_draws(policy):
    """`match` draws the target's token: the text is that of plain decoding, whatever was drafted, equal texts too."""
    target, drafter = pair_of()
    plain = Decoder(CausalLM(deep()), None, Static.empty()).generate(prompt(9), 20, Sampling(1.0), seed=3)
    assert Decoder(target, drafter, policy).generate(prompt(9), 20, Sampling(1.0), seed=3).tokens == plain.tokens


@pytest.mark.slow
def test_prompts_of_a_batch_are_decoded_one_after_the_other():
    target, drafter = pair_of()
    decoder = Decoder(target, Grafted(drafter, NGramDrafter(), 2), POLICY)
    plain = Decoder(CausalLM(deep()), None, Static.empty())
    texts = [prompt(9), prompt(5)]
    with pytest.warns(
        UserWarning, match="one sequence after the other: an early exit drafts in the target's own cache"
    ):
        results = generate_batch(decoder, texts, max_new_tokens=8)
    assert [result.tokens for result in results] == [plain.generate(text, 8).tokens for text in texts]


class TestRefused:
    @pytest.mark.parametrize(
        ("architecture", "why"),
        [
            ("gpt2", "GPT2LMHeadModel cannot be cut in two: it is not built of embed_tokens, layers and norm"),
            ("mistral", "MistralForCausalLM cannot be cut in two: it has layers of kind sliding_attention"),
        ],
    )
    def test_models_without_halves(self, architecture, why):
        with pytest.raises(UnsupportedModelError, match=why):
            SplitTarget(CausalLM(build(ARCHITECTURES[architecture]())), 1)

    @pytest.mark.parametrize("depth", [0, 4, 9])
    def test_a_cut_outside_the_model(self, depth):
        with pytest.raises(UnsupportedModelError, match=f"has 4 layers: it cannot be cut behind {depth}"):
            SplitTarget(CausalLM(deep()), depth)

    def test_halves_that_say_something_else(self, monkeypatch):
        """A model that adds something to its embeddings does so in both halves, as Gemma would."""
        model = deep()
        forward = type(model.base_model).forward

        def doubled(self, input_ids=None, inputs_embeds=None, **others):
            inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            return forward(self, inputs_embeds=2 * inputs_embeds, **others)

        monkeypatch.setattr(type(model.base_model), "forward", doubled)
        with pytest.raises(UnsupportedModelError, match="cannot be cut behind layer 2: in two halves its logits are"):
            SplitTarget(CausalLM(model), 2)


class TestFiles:
    @pytest.fixture
    def target(self):
        return CausalLM(deep())

    @pytest.fixture
    def folder(self, tmp_path, target):
        save_exit(exit_of(target), target.model.config, tmp_path / "exit")
        return tmp_path / "exit"

    def test_what_was_saved_drafts(self, folder, target):
        drafter = load_drafter(f"exit:{folder}", target)
        assert isinstance(drafter, EarlyExit) and drafter.split.depth == 2 and drafter.settings == {"exit_after": 2}
        assert drafter.describe().startswith(f"early exit {folder}: 2 layers of the target and one of 0.0 M")
        assert Decoder(target, drafter, POLICY).generate(prompt(9), 16).mean_acceptance_length > 1.5

    def test_another_target_s(self, folder):
        refused(
            f"exit:{folder}",
            CausalLM(deep(layers=3)),
            r"the exit of another target .*layers is 3, it wants 4",
        )

    def test_missing_unexpected_and_misshapen_tensors_are_named(self, folder, target):
        tensors = {name: weight.clone() for name, weight in exit_of(target).layer.state_dict().items()}
        del tensors["mlp.up_proj.weight"]
        tensors |= {"extra": torch.zeros(1), "mlp.down_proj.weight": torch.zeros(2, 2)}
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            load_drafter(f"exit:{folder}", target)
        for part in ("missing mlp.up_proj.weight", "unexpected extra", "mlp.down_proj.weight is (2, 2), expected"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("config", "why"),
        [
            ("{", "config.json is not the config of"),
            ("[]", "is no early exit"),
            ('{"model_type": "llama"}', "is no early exit"),
        ],
    )
    def test_what_is_no_exit(self, folder, target, config, why):
        (folder / "config.json").write_text(config)
        refused(f"exit:{folder}", target, why)

    def test_torn_files(self, folder, target):
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])
        refused(f"exit:{folder}", target, "corrupt")
        config = json.loads((folder / "config.json").read_text())
        del config["depth"]
        (folder / "config.json").write_text(json.dumps(config))
        refused(f"exit:{folder}", target, "depth")
