"""Heads as files that others write, and a Llama layer once more, row by row and head by head in float64: no cache.

What drafters with one such layer, or several, are compared with.
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from asking import Witness
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
LAYER: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}
"""What the config of a head says of its layers."""
CONFIG: dict[str, Any] = LAYER | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": COLUMNS,
    "max_position_embeddings": 2048,
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


def layer_shapes(at: str, reads: int = HIDDEN, bias: str = "", qk_norm: bool = True) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer. `reads`: how wide what its attention reads is. `bias`: see `head_weights`."""
    rows = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}
    shapes: dict[str, tuple[int, ...]]
    shapes = {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes |= {f"{at}.self_attn.{name}_proj.weight": (count, reads) for name, count in rows.items()}
    shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * SIZE)
    shapes |= {f"{at}.self_attn.{name}_proj.bias": ((rows | {"o": HIDDEN})[name],) for name in bias}
    if qk_norm:
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (SIZE,) for name in "qk"}
    shapes |= {f"{at}.mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
    return shapes | {f"{at}.mlp.down_proj.weight": (HIDDEN, WIDE)}


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int, std: float) -> dict[str, Tensor]:
    """Random tensors of numbers that float32 holds, those of norms about 1."""
    torch.manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        made[name] = torch.randn(shape) * std if len(shape) > 1 or "bias" in name else torch.rand(shape) + 0.5
    return {name: tensor.double() for name, tensor in made.items()}


def head_weights(
    states: int = 3, layers: int = 1, bias: str = "", qk_norm: bool = False, seed: int = 1
) -> dict[str, Tensor]:
    """Random tensors by SpecForge's names. `states`: what `fc` reads; 0: there is none.

    `bias`: letters of the projections that have one.
    """
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (COLUMNS, HIDDEN), "norm.weight": (HIDDEN,)}
    if states:
        shapes["fc.weight"] = (HIDDEN, states * HIDDEN)
    for number in range(layers):
        at, reads = ("midlayer", 2 * HIDDEN) if number == 0 else (f"layers.{number}", HIDDEN)
        shapes |= layer_shapes(at, reads, bias, qk_norm)
    return random_weights(shapes | {"midlayer.hidden_norm.weight": (HIDDEN,)}, seed, 0.2)


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
    """RMSNorm of a row, or of each head of one, in float32 as in every Llama."""
    if weight is None:
        return x
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).double()


def turned(x: Tensor, position: int, theta: float = LAYER["rope_theta"]) -> Tensor:
    """The queries or keys of a position, `[heads, SIZE]`; number i and number i + SIZE / 2 are turned together."""
    angles = float(position) * (1 / theta ** (torch.arange(0, SIZE, 2, dtype=torch.float32) / SIZE))
    cos, sin = angles.cos().double(), angles.sin().double()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attended(
    w: dict[str, Tensor],
    at: str,
    reads: Sequence[Tensor],
    before: Sequence[Tensor] = (),
    sees: Callable[[int, int], bool] = lambda place, key: key <= place,
    **rotary: float,
) -> list[Tensor]:
    """What the attention of a layer adds to each row that it `reads`, row by row and head by head.

    `before`: rows that stand before these and are only looked at. `sees`: whether a place looks at another one.
    """

    def projected(name: str, x: Tensor) -> Tensor:
        out = w[f"{at}.self_attn.{name}_proj.weight"] @ x
        return out + w[f"{at}.self_attn.{name}_proj.bias"] if f"{at}.self_attn.{name}_proj.bias" in w else out

    def parts(name: str, x: Tensor, place: int) -> Tensor:
        heads = projected(name, x).view(-1, SIZE)
        return turned(normed(heads, w.get(f"{at}.self_attn.{name}_norm.weight")), place, **rotary)

    both = [*before, *reads]
    keys = [parts("k", x, place) for place, x in enumerate(both)]
    values = [projected("v", x).view(-1, SIZE) for x in both]
    rows = []
    for place, x in enumerate(reads, len(before)):
        seen, heads, queries = [key for key in range(len(both)) if sees(place, key)], [], parts("q", x, place)
        for head, query in enumerate(queries):
            group = head // (len(queries) // len(keys[0]))
            scores = torch.stack([query @ keys[key][group] / SIZE**0.5 for key in seen]).softmax(0)
            heads.append(scores @ torch.stack([values[key][group] for key in seen]))
        rows.append(projected("o", torch.cat(heads)))
    return rows


def behind(w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    """A row behind the second half of a layer."""
    y = normed(x, w[f"{at}.post_attention_layernorm.weight"])
    gate, up, down = (w[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + down @ (torch.nn.functional.silu(gate @ y) * (up @ y))


@torch.no_grad()
def states_of(model: PreTrainedModel, context: list[int]) -> list[Tensor]:
    """What enters each layer of a model, `[tokens, hidden]`, what leaves the last one, and that behind its norm.

    By hooks of its own: `model` is not one that is drafted for.
    """
    states: list[Tensor] = []
    layers = model.model.layers
    hooks = [layer.register_forward_pre_hook(lambda _, args: states.append(args[0][0])) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda _module, _args, out: states.append(out[0])))
    last = model.model(torch.tensor([context]), use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return [*states, last]


class Loops:
    """The head of `head_weights`, everything computed anew for every path.

    `ids`: which of hs[0], ..., hs[DEPTH] `fc` reads, hs[k] being what enters layer k; "final": the state behind the
    target's last norm.
    """

    def __init__(self, weights: dict[str, Tensor], ids: list[int] | str, **settings: bool) -> None:
        self.w, self.ids, self.settings = weights, ids, settings
        self.model = undrafted()

    def features(self, context: list[int]) -> list[Tensor]:
        """The first feature of every token but the last."""
        hs = states_of(self.model, context)
        if self.ids == "final":
            return list(hs[-1][:-1])
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
            last = normed(out, self.w.get("norm.weight"))
            if token is not None:
                features, tokens = [*features, last if self.settings.get("norm_output") else out], [*tokens, token]
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
