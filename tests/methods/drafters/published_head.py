"""EAGLE-3 heads as files that others write, and their layer once more, row by row in float64."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from methods.drafters.test_eagle import Witness
from safetensors.torch import save_file
from tiny_models import ARCHITECTURES, HIDDEN, VOCAB, build, prompt
from torch import Tensor
from transformers import PreTrainedModel

from opt_tree import Decoder
from opt_tree.models.causal_lm import CausalLM

DEPTH = 8
"""Layers of the target."""
HEADS, GROUPS, SIZE, WIDE = 4, 2, 8, 48
COLUMNS = VOCAB // 2
KNOWN = torch.arange(1, VOCAB, 2)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "vocab_size": VOCAB,
    "draft_vocab_size": COLUMNS,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}


def model_of(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    config = ARCHITECTURES["llama"]()
    config.num_hidden_layers = DEPTH
    return build(config, dtype=dtype)


def target_of(dtype: torch.dtype = torch.float64) -> CausalLM:
    return CausalLM(model_of(dtype))


@functools.cache
def undrafted() -> PreTrainedModel:
    """The target's model once more, for the loops alone: nobody drafts for it or watches its layers."""
    return model_of()


def head_weights(
    states: int = 3, layers: int = 1, bias: str = "", qk_norm: bool = False, seed: int = 1
) -> dict[str, Tensor]:
    """Random tensors by SpecForge's names, of numbers that float32 holds. `states`: what `fc` reads; 0: there is none.

    `bias`: letters of the projections that have one.
    """
    torch.manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (COLUMNS, HIDDEN), "norm.weight": (HIDDEN,)}
    if states:
        shapes["fc.weight"] = (HIDDEN, states * HIDDEN)
    for number in range(layers):
        at, reads = ("midlayer", 2 * HIDDEN) if number == 0 else (f"layers.{number}", HIDDEN)
        norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if number == 0 else [])]
        shapes |= {f"{at}.{name}.weight": (HIDDEN,) for name in norms}
        rows = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (count, reads) for name, count in rows.items()}
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * SIZE)
        shapes |= {f"{at}.self_attn.{name}_proj.bias": ((rows | {"o": HIDDEN})[name],) for name in bias}
        if qk_norm:
            shapes |= {f"{at}.self_attn.{name}_norm.weight": (SIZE,) for name in "qk"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, WIDE)
    made = {}
    for name, shape in shapes.items():
        made[name] = torch.randn(shape) * 0.2 if len(shape) > 1 or "bias" in name else torch.rand(shape) + 0.5
    return {name: tensor.double() for name, tensor in made.items()}


def write_head(folder: Path, tensors: dict[str, Tensor], known: Tensor | None = KNOWN, **changes: Any) -> str:
    """Write a head as a folder; a setting of None is left out."""
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.float().clone() for name, tensor in tensors.items()}
    if known is not None:
        tensors["d2t"] = known - torch.arange(len(known))
    save_file(tensors, folder / "model.safetensors")
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def normed(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """RMSNorm of a row, in float32 as in every Llama."""
    if weight is None:
        return x
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean() + eps)).double()


def turned(x: Tensor, position: int) -> Tensor:
    """One head's query or key at a position, number by number."""
    half, out = SIZE // 2, x.clone()
    for i in range(half):
        angle = torch.tensor(float(position)) * (1 / 10000.0 ** (torch.tensor(2.0 * i) / SIZE))
        cos, sin = angle.cos().double(), angle.sin().double()
        out[i], out[half + i] = x[i] * cos - x[half + i] * sin, x[half + i] * cos + x[i] * sin
    return out


def attended(w: dict[str, Tensor], at: str, reads: list[Tensor]) -> list[Tensor]:
    """What the attention of a layer adds to each row, row by row and head by head."""

    def projected(name: str, x: Tensor) -> Tensor:
        out = w[f"{at}.self_attn.{name}_proj.weight"] @ x
        return out + w[f"{at}.self_attn.{name}_proj.bias"] if f"{at}.self_attn.{name}_proj.bias" in w else out

    def parts(name: str, x: Tensor, position: int) -> list[Tensor]:
        own = [normed(one, w.get(f"{at}.self_attn.{name}_norm.weight")) for one in projected(name, x).split(SIZE)]
        return [turned(one, position) for one in own]

    keys = [parts("k", x, i) for i, x in enumerate(reads)]
    values = [projected("v", x).split(SIZE) for x in reads]
    rows = []
    for i, x in enumerate(reads):
        heads = []
        for head, query in enumerate(parts("q", x, i)):
            group = head // (HEADS // GROUPS)
            scores = torch.stack([query @ keys[j][group] / SIZE**0.5 for j in range(i + 1)]).softmax(0)
            heads.append(sum(scores[j] * values[j][group] for j in range(i + 1)))
        rows.append(projected("o", torch.cat(heads)))
    return rows


def behind(w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    """A row behind the second half of a layer."""
    y = normed(x, w[f"{at}.post_attention_layernorm.weight"])
    gate, up, down = (w[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + down @ (torch.nn.functional.silu(gate @ y) * (up @ y))


class Loops:
    """The head of `head_weights`, everything computed anew for every path.

    `ids`: which of hs[0], ..., hs[DEPTH] `fc` reads, hs[k] being what enters layer k; "final": the state behind the
    target's last norm.
    """

    def __init__(self, weights: dict[str, Tensor], ids: list[int] | str, **settings: bool) -> None:
        self.w, self.ids, self.settings = weights, ids, settings
        self.model = undrafted()

    @torch.no_grad()
    def features(self, context: list[int]) -> list[Tensor]:
        """The first feature of every token but the last."""
        hs = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args: hs.append(args[0][0])) for layer in self.model.model.layers
        ]
        last = self.model.model.layers[-1].register_forward_hook(lambda _module, _args, out: hs.append(out[0]))
        final = self.model.model(torch.tensor([context]), use_cache=False).last_hidden_state[0]
        for hook in (*hooks, last):
            hook.remove()
        if self.ids == "final":
            return list(final[:-1])
        rows = []
        for i in range(len(context) - 1):
            read = [hs[k][i] for k in self.ids]
            if "fc_norm.0.weight" in self.w:
                read = [normed(one, self.w[f"fc_norm.{j}.weight"]) for j, one in enumerate(read)]
            rows.append(self.w["fc.weight"] @ normed(torch.cat(read), self.w.get("input_norm.weight")))
        return rows

    def law(self, context: list[int], path: list[int]) -> Tensor:
        """Log-probabilities over the draft vocabulary behind a context and a drafted path."""
        embeddings = self.w.get("embed_tokens.weight", self.model.get_input_embeddings().weight.detach().float())
        features, tokens = self.features(context), context[1:]
        for token in [*path, None]:
            out = self.layers([embeddings[one].double() for one in tokens], features)[-1]
            if token is not None:
                features, tokens = [*features, out], [*tokens, token]
        last = normed(out, self.w.get("norm.weight"))
        return (self.w["lm_head.weight"] @ last).log_softmax(-1)

    def layers(self, embedded: list[Tensor], features: list[Tensor]) -> list[Tensor]:
        at = "midlayer"
        normal = [normed(one, self.w[f"{at}.hidden_norm.weight"]) for one in features]
        first = self.w.get(f"{at}.input_layernorm.weight")
        reads = [torch.cat([normed(one, first), two]) for one, two in zip(embedded, normal, strict=True)]
        kept = normal if self.settings.get("norm_before_residual") else features
        rows = [behind(self.w, at, x + y) for x, y in zip(kept, attended(self.w, at, reads), strict=True)]
        number = 1
        while f"layers.{number}.input_layernorm.weight" in self.w:
            at = f"layers.{number}"
            reads = [normed(one, self.w[f"{at}.input_layernorm.weight"]) for one in rows]
            rows = [behind(self.w, at, x + y) for x, y in zip(rows, attended(self.w, at, reads), strict=True)]
            number += 1
        return rows


def check_laws(drafter: Any, target: CausalLM, loops: Any, policy: Any, most: int = 4) -> None:
    """Every law that a drafter gave while decoding under a policy is that of the loops."""
    witness = Witness(drafter)
    steps = list(Decoder(target, witness, policy).steps(prompt(6), 5))
    assert any(step.tree.nodes for step in steps)
    assert {len(path) for _, path, _ in witness.laws} >= {0, 1}, "deeper rows read the head's own outputs"
    some = [one for one in witness.laws if one[1]][-most:] + witness.laws[:2]
    for context, path, law in some:
        assert (law - loops.law(context, path)).abs().max() < 1e-10
