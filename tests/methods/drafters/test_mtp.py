"""Native multi-token prediction: laws against transformers' own layers without a cache, texts, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from asking import Witness
from safetensors.torch import load_file, save_file
from texts import refused
from tiny_models import ARCHITECTURES, WIDTH, WINDOW, build, padded_to, prompt
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from opt_tree import Decoder, OptTree, Sampling, custom_generate, generate_batch, load_drafter
from opt_tree.methods.drafters.heads.mtp import MtpDrafter
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.static import Static
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.chain_lm import wrap

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
GROUPS |= {"first_k_dense_replace": 1}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3Config", GROUPS | LATENT | {"qk_nope_head_dim": 8}),
    "glm4_moe": ("Glm4MoeConfig", GROUPS | {"head_dim": 8}),
    "mellum": (
        "MellumConfig",
        EXPERTS
        | {"num_experts": 4, "head_dim": 8, "sliding_window": WINDOW}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ),
}
CASES = [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 1), ("mellum", 1)]
CLOSE = 1e-5
"""Laws that are equal: these families choose their experts in float32, by sums whose order depends on the rows."""
FLAT = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
"""Where Mellum's checkpoint has what belongs to its one MTP layer, not to the decoder layer inside."""


def published_name(name: str, family: str, layers: int) -> str:
    """By what name a family's checkpoint has a tensor of transformers' `MtpModel`."""
    _, index, rest = name.split(".", 2)
    own = rest.removeprefix("mtp_block.")
    if family != "mellum":
        return f"model.layers.{layers + int(index)}.{own}".replace("post_norm.", "shared_head.norm.")
    head, _, tail = own.partition(".")
    return f"mtp.{FLAT[head]}.{tail}" if head in FLAT else f"mtp.layers.{index}.{own}"


def publish(folder: Path, family: str, count: int) -> str:
    """Save a tiny random target with `count` random MTP layers as its family's checkpoints have them."""
    kind, more = FAMILIES[family]
    config = getattr(transformers, kind)(**(WIDTH | more | {"num_mtp_layers": count}))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        layers = MtpModel(model, count).double().layers
        for weight in layers.parameters():
            torch.nn.init.normal_(weight, std=0.3) if weight.dim() > 1 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in layers.state_dict().items():
        name = published_name(f"layers.{name}", family, config.num_hidden_layers)
        experts, _, part = name.rpartition(".")
        if part == "gate_up_proj":  # checkpoints have each expert by itself
            for index, both in enumerate(weight):
                for half, own in zip(("gate", "up"), both.chunk(2), strict=True):
                    tensors[f"{experts}.{index}.{half}_proj.weight"] = own.clone()
        elif part == "down_proj":
            tensors |= {f"{experts}.{index}.down_proj.weight": own.clone() for index, own in enumerate(weight)}
        else:
            tensors[name] = weight.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layers of a checkpoint are MTP layers, transformers knows by the numbers of the released models."""
    for kind in ("DeepseekV3", "Glm4Moe"):
        name = f"{kind}PreTrainedModel"
        module = getattr(transformers, f"{kind}ForCausalLM")
        base = next(each for each in module.__mro__ if each.__name__ == name)
        monkeypatch.setattr(base, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[2-9]\."])


@pytest.fixture(autouse=True)
def _small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    small_numbers(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    return {case: publish(tmp_path_factory.mktemp(f"{case[0]}{case[1]}"), *case) for case in CASES}


def model_at(folder: str, dtype: torch.dtype = torch.float64, experts: str = "eager", **more: Any) -> Any:
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=dtype, experts_implementation=experts, **more).eval()


def pair_at(folder: str) -> tuple[CausalLM, MtpDrafter]:
    target = CausalLM(model_at(folder))
    drafter = load_drafter("mtp", target)
    assert isinstance(drafter, MtpDrafter)
    return target, drafter


class Naive:
    """transformers' own first layer, all recomputed for every path. Below the root it reads what it made itself."""

    def __init__(self, folder: str) -> None:
        self.model = model_at(folder)
        self.layers = MtpModel.from_pretrained(self.model, device_map={"": "cpu"}).eval()

    @torch.no_grad()
    def law(self, context: list[int], path: list[int]) -> Tensor:
        read = self.model(torch.tensor([context]), output_hidden_states=True).hidden_states[-1][:, :-1]
        tokens = context[1:] + path
        while True:
            rows = read.shape[1]
            cache = MtpCache(config=self.model.config.get_mtp_config())
            places, some = torch.arange(1, rows + 1)[None], torch.tensor([tokens[:rows]])
            states = self.layers.forward_layer(0, read, places, cache, input_ids=some)
            if rows == len(tokens):
                return self.model.lm_head(states[0, -1]).log_softmax(-1)
            read = torch.cat([read, states[:, -1:]], 1)


PADDED = Buckets((1, 8, 16), (32, 64))


@pytest.mark.quick("('deepseek_v3', 3)-None")
@pytest.mark.parametrize(
    ("case", "buckets"), [(case, PADDED if case in CASES[2:] else None) for case in CASES], ids=str
)
def test_every_law_is_that_of_transformers_layers(folders, case, buckets):
    target, drafter = (padded_to(buckets, made) for made in pair_at(folders[case]))
    naive, witness = Naive(folders[case]), Witness(drafter)
    steps = list(Decoder(target, witness, OptTree(40, 0.0, 5)).steps(prompt(9), 16))
    assert any(step.accepted for step in steps), "features of accepted tokens should be seen again"
    depths = {len(path) for _, path, _ in witness.laws}
    assert depths >= {0, 1, 2, 3}
    for context, path, law in witness.laws[:: max(len(witness.laws) // 6, 1)] + witness.laws[-2:]:
        assert (law - naive.law(context, path)).abs().max() < CLOSE


@pytest.mark.slow
def test_the_first_token_is_what_transformers_drafts(folders):
    """The token and logits of `MtpModel.forward`, greedy, behind a prompt; of several layers one is used, and named."""
    folder = folders["deepseek_v3", 3]
    target, drafter = pair_at(folder)
    naive, context = Naive(folder), prompt(12)
    states = naive.model(torch.tensor([context]), output_hidden_states=True).hidden_states[-1][:, :-1]
    with torch.no_grad():
        tokens, logits, _ = naive.layers(
            torch.tensor([context[1:]]),
            states,
            None,
            torch.arange(1, len(context))[None],
            MtpCache(config=naive.model.config.get_mtp_config()),
        )
    witness = Witness(drafter)
    step = next(Decoder(target, witness, Static.chain(1)).steps(context, 8))
    assert step.tree.tokens[1] == tokens[0, 0]
    assert (witness.laws[0][2] - logits[0, 0].log_softmax(-1)).abs().max() < CLOSE
    assert drafter.describe().startswith("first of 3 MTP layers of the target, ")


@pytest.mark.quick("('mellum', 1)")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_text_is_the_target_s_own(folders, case):
    target, drafter = pair_at(folders[case])
    plain = Decoder(CausalLM(model_at(folders[case])), None, Static.empty())
    for policy, sampling, texts in (
        (OptTree(12, 0.0, 4), Sampling(), ([7],)),
        (Static.chain(2), Sampling(temperature=0.8), ([7, 3], prompt(20))),
    ):
        decoder = Decoder(target, drafter, policy)
        for text in texts:
            assert decoder.generate(text, 8, sampling).tokens == plain.generate(text, 8, sampling).tokens


@pytest.mark.slow
def test_draws_reuse_and_prompts_side_by_side(folders):
    for case in (("deepseek_v3", 3), ("glm4_moe", 1)):
        target, drafter = pair_at(folders[case])
        plain = Decoder(CausalLM(model_at(folders[case])), None, Static.empty())
        drawn = Decoder(target, drafter, Sampled.kary(2, 3), multi_round)
        assert len(drawn.generate(prompt(9), 12, Sampling(1.0), seed=5).tokens) == 12
        decoder = Decoder(target, drafter, OptTree(8, 0.0, 3))
        texts = [prompt(12), prompt(12)[:7], prompt(30)]
        expected = [plain.generate(text, 10).tokens for text in texts]
        assert [one.tokens for one in generate_batch(decoder, texts, max_new_tokens=10, width=2)] == expected
        first = decoder.generate(texts[0], 10).tokens
        longer = texts[0] + first + prompt(5)
        assert decoder.generate(longer, 10, reuse=True).tokens == plain.generate(longer, 10).tokens


@pytest.mark.slow
def test_generate_of_transformers_takes_it(folders):
    target, drafter = pair_at(folders["glm4_moe", 1])
    ids = torch.tensor([prompt(9)])
    own = target.model.generate(ids, max_new_tokens=12, do_sample=False, use_mtp=True)
    ours = target.model.generate(
        ids,
        max_new_tokens=12,
        do_sample=False,
        custom_generate=custom_generate(Decoder(target, drafter, OptTree(8, 0.0, 3))),
    )
    assert ours.tolist() == own.tolist()


def test_what_has_no_such_layers_is_refused_in_one_line(folders, tmp_path):
    model = build(ARCHITECTURES["llama"]())
    refused("mtp", CausalLM(model), "has no MTP layers that transformers loads: its config says none")
    target = CausalLM(model_at(folders["glm4_moe", 1]))
    target.model.config.name_or_path = str(tmp_path / "nowhere")
    refused("mtp", target, r"cannot load the MTP layers of .*nowhere")
    target = CausalLM(model_at(folders["glm4_moe", 1]))
    target.model.config.num_mtp_layers = 2
    refused("mtp", target, r"cannot load the MTP layers of .* weights are missing")
    target.model.config.quantization_config = {"quant_method": "fp8"}
    refused("mtp", target, "is quantised, and transformers reads MTP layers as they are stored")


@pytest.mark.slow
def test_a_target_without_trees_is_refused():
    config = transformers.BailingHybridConfig(
        **WIDTH
        | EXPERTS
        | {"experts_implementation": "eager"}
        | {"num_key_value_heads": 4, "num_local_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8}
        | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}
    )
    refused("mtp", wrap(build(config)), "is scored path by path: its hidden states are not there to be read")
