"""Decoder layers in two native calls: which are taken, that they say what their own code says, and row by row."""

import copy
from typing import Any

import pytest
import torch
import transformers
from tiny_models import build
from torch import Tensor, nn

from opt_tree import CausalLMDrafter, Decoder, OptTree
from opt_tree.backends.canonical import same_bits
from opt_tree.backends.native_layers import NativeLayer, compute_natively
from opt_tree.backends.quantised import quantise
from opt_tree.models.canonical import make_canonical
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.quantised_layers import plain_copy
from opt_tree.tools.presets import plain

pytestmark = pytest.mark.usefixtures("kernel", "quantised_kernel")
WIDE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "rms_norm_eps": 0.05,
    "eos_token_id": None,
    "pad_token_id": None,
}
TAKEN = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 12},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
}
OTHER: dict[str, dict[str, Any]] = {
    "Granite": {"residual_multiplier": 0.5},  # named as Llama's, by another formula
    "Gemma": {"head_dim": 16},
    "Olmo2": {},
    "Phi3": {},
}


def model(kind: str, dtype: torch.dtype = torch.float32, weights: str = "int4", **changes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**WIDE | (TAKEN | OTHER)[kind] | changes)
    made = build(config, 5).to(dtype)
    numbers = torch.Generator().manual_seed(2)
    for name, weight in made.named_parameters():
        if "bias" in name or "norm" in name:  # else 0 and 1, and nobody misses them
            weight.data += 0.3 * torch.randn(weight.shape, generator=numbers).to(dtype)
    quantise(made, weights)
    return made


def layers(made: nn.Module) -> list[nn.Module]:
    return [module for module in made.modules() if type(module.__dict__.get("forward")) is NativeLayer]


def logits(made: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        rows = torch.full((ids.shape[1],) * 2, torch.finfo(made.dtype).min, dtype=made.dtype).triu(1)
        return made(ids, attention_mask=rows[None, None].expand(len(ids), 1, -1, -1)).logits


IDS = torch.tensor([[3, 41, 5, 9, 77, 20, 6], [8, 8, 1, 90, 4, 33, 2]])


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_say_what_their_own_code_says(kind: str, dtype: torch.dtype) -> None:
    made = model(kind, dtype, num_hidden_layers=1)
    own = logits(made, IDS)
    assert compute_natively(made) == 1 and len(layers(made)) == 1
    found = logits(made, IDS)
    assert (found - own).norm() <= (1e-3 if dtype == torch.float32 else 0.06) * own.norm()
    assert not torch.equal(found, own)  # it is another computation


@pytest.mark.parametrize("kind", OTHER)
def test_layers_by_another_formula_stay_as_they_are(kind: str) -> None:
    made = model(kind)
    own = logits(made, IDS)
    assert compute_natively(made) == 0
    assert torch.equal(logits(made, IDS), own)


@pytest.mark.parametrize("what", ["eps", "scaling", "order", "twice", "angles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_answers_otherwise_is_left_alone(
    what: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a class of somebody's could do differently under the same names."""
    made = model("Llama", dtype, num_hidden_layers=1)
    kind = type(made.model.layers[0])
    forward = kind.forward
    changed = {
        "eps": lambda self, x, **given: forward(self, x * 0.2, **given),
        "scaling": lambda self, x, **given: forward(self, x, **given) * 1.1,
        "order": lambda self, x, **given: forward(self, x.flip(1), **given),
        "twice": lambda self, x, **given: x + forward(self, x, **given),
        "angles": lambda self, x, position_embeddings, **given: forward(
            self, x, position_embeddings=position_embeddings[::-1], **given
        ),
    }
    monkeypatch.setattr(kind, "forward", changed[what])
    assert compute_natively(made) == 0


def test_a_layer_with_an_attention_of_its_own_is_left_alone() -> None:
    made = model("Llama", num_hidden_layers=1)
    made.set_attn_implementation("eager")
    assert compute_natively(made) == 0


def test_a_layer_with_another_eps_in_a_norm_is_left_alone() -> None:
    made = model("Qwen2", num_hidden_layers=1)
    made.model.layers[0].post_attention_layernorm.variance_epsilon = 0.5
    assert compute_natively(made) == 0


def test_a_layer_whose_norms_have_another_dtype_is_left_alone() -> None:
    made = model("Qwen3", torch.bfloat16, num_hidden_layers=1)
    made.model.layers[0].self_attn.q_norm.float()
    assert compute_natively(made) == 0


def test_angles_of_a_part_of_a_head_go_to_the_layers_own_code() -> None:
    """Taken for those of a whole head they would be those of twice as many heads, in silence."""
    made = model("Llama", num_hidden_layers=1, hidden_size=128)
    compute_natively(made)
    (layer,) = layers(made)
    x, angles = torch.ones(1, 3, 128), (torch.ones(1, 3, 16), torch.ones(1, 3, 16))
    with pytest.raises(RuntimeError, match="must match the size"):
        layer(x, position_embeddings=angles)


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_are_its_own(kind: str, dtype: torch.dtype) -> None:
    """A target passes the check of canonical arithmetic, and a tree's text is plain decoding's."""
    made = model(kind, dtype)
    assert compute_natively(made) == 2
    target = CausalLM(made)
    make_canonical(target)
    prompt = IDS[0].tolist()
    expected = plain(target).generate(prompt, 40).tokens
    drafter = CausalLMDrafter(CausalLM(copy.deepcopy(made)))
    found = Decoder(target, drafter, OptTree(nodes=12)).generate(prompt, 40)
    assert found.tokens == expected
    assert found.mean_acceptance_length > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_beside_it_and_threads_decide_nothing(dtype: torch.dtype) -> None:
    """Both calls over 40 rows of two texts, and over single ones."""
    made = model("Qwen3", dtype, num_hidden_layers=1)
    compute_natively(made)
    (own,) = [layer.__dict__["forward"] for layer in layers(made)]
    numbers = torch.Generator().manual_seed(1)
    x, attended = (torch.randn(2, 20, width, generator=numbers).to(dtype) for width in (64, 128))
    angles = tuple(torch.randn(2, 20, 32, generator=numbers).to(dtype) for _ in range(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        whole = [*own.before_attention(x, angles), own.behind_attention(attended, x)]
        torch.set_num_threads(1)
        for text, row in ((0, 0), (0, 19), (1, 7)):
            at = slice(text, text + 1), slice(row, row + 1)
            alone = own.before_attention(x[at], tuple(one[at].contiguous() for one in angles))
            for one, of_all in zip(alone, whole[:3], strict=True):
                assert same_bits(one[0, :, 0], of_all[text, :, row])
            assert same_bits(own.behind_attention(attended[at], x[at])[0, 0], whole[3][text, row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", ["rows", "angles", "norm", "dtype"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    made = model("Llama", num_hidden_layers=1)
    compute_natively(made)
    (own,) = [layer.__dict__["forward"] for layer in layers(made)]
    x, angles = torch.zeros(1, 3, 64), (torch.zeros(1, 3, 16), torch.zeros(1, 3, 16))
    own.before_attention(x, angles)
    with pytest.raises(RuntimeError, match=r"fit|for bfloat16 and float32"):
        if wrong == "rows":
            own.before_attention(x[..., :32], angles)
        elif wrong == "angles":
            own.before_attention(x, (angles[0][:, :2], angles[1]))
        elif wrong == "dtype":
            own.before_attention(x.double(), angles)
        else:
            own.norms[1].weight = nn.Parameter(torch.zeros(8), False)
            own.behind_attention(torch.zeros(1, 3, 64), x)


def test_whoever_watches_or_replaces_a_part_has_the_layers_own_code() -> None:
    made = model("Llama", num_hidden_layers=1)
    own = logits(made, IDS)
    compute_natively(made)
    native = logits(made, IDS)
    seen: list[Tensor] = []
    handle = made.model.layers[0].mlp.register_forward_hook(lambda *call: seen.append(call[2]))
    assert torch.equal(logits(made, IDS), own) and len(seen) == 1
    handle.remove()
    assert torch.equal(logits(made, IDS), native)
    mlp = made.model.layers[0].mlp
    gate, mlp.act_fn = mlp.act_fn, nn.Identity()
    assert (logits(made, IDS) - native).norm() > 0.1 * native.norm()
    mlp.act_fn, mlp.up_proj = gate, nn.Linear(64, 96)
    assert (logits(made, IDS) - native).norm() > 0.1 * native.norm()


def test_a_copy_has_its_own_weights() -> None:
    made = model("Llama")
    compute_natively(made)
    native, copied = logits(made, IDS), copy.deepcopy(made)
    made.model.layers[0].mlp.up_proj.packed.zero_()
    assert torch.equal(logits(copied, IDS), native) and not torch.equal(logits(made, IDS), native)
    whole = plain_copy(copied)
    assert not any(type(module).__name__ == "QuantisedLinear" for module in whole.modules())
    assert (logits(whole, IDS) - native).norm() < 0.2 * native.norm()
