"""Block drafters as files that others write, and their forward once more in float64: a row and a head at a time."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from asking import Witness
from methods.drafters.published_head import (
    DEPTH,
    LAYER,
    attended,
    layer_shapes,
    normed,
    random_weights,
    states_of,
    undrafted,
)
from safetensors.torch import save_file
from tiny_models import HIDDEN, VOCAB, prompt
from torch import Tensor

from opt_tree import Decoder, OptTree

BLOCK, MASK, RANK, GRU, KERNEL, GROUP = 4, 60, 6, 5, 3, 8
IDS = [1, 3, 6]
"""Layers by what leaves them."""
LAYERS: dict[str, Any] = LAYER | {"num_hidden_layers": 2, "max_position_embeddings": 512}


def nested(
    architecture: str = "DFlashDraftModel", top: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """A config of z-lab's layout, which SpecForge, ModelOpt and JetSpec share."""
    own = {"mask_token_id": MASK, "target_layer_ids": IDS, **settings}
    named = {"architectures": [architecture], "model_type": "qwen3", "num_target_layers": DEPTH, "block_size": BLOCK}
    return {**LAYERS, **named, "dflash_config": own, **(top or {})}


def flat(**settings: Any) -> dict[str, Any]:
    """A config of DeepSpec's layout."""
    named = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": BLOCK, "mask_token_id": MASK}
    return {**LAYERS, **named, "target_layer_ids": IDS, "markov_rank": RANK, "num_anchors": 8, **settings}


def speculators(kind: str, **settings: Any) -> dict[str, Any]:
    """A config of the layout of `speculators`, which names layers by what enters them."""
    layers = {**LAYERS, "model_type": "qwen3", **settings.pop("layers", {})}
    named = {"speculators_model_type": kind, "block_size": BLOCK, "mask_token_id": MASK}
    named["speculators_config"] = {"algorithm": kind, "proposal_methods": [{"speculative_tokens": 3}]}
    return {"transformer_layer_config": layers, **named, "aux_hidden_state_layer_ids": IDS, **settings}


def block_weights(
    law: str = "", states: int = 3, columns: int = VOCAB, bias: str = "", layers: int = 2
) -> dict[str, Tensor]:
    """Random tensors by z-lab's names, and DeepSpec's for the Markov head.

    `law`: vanilla, gated, rnn, domino, selector, or nothing. `bias`: letters of the projections that have one.
    """
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, states * HIDDEN)}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for number in range(layers):
        at = f"layers.{number}"
        shapes |= layer_shapes(at, bias=bias)
        if law == "selector":
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{at}.{conv}.base_kernel"] = (2, KERNEL, HIDDEN)
                shapes[f"{at}.{conv}.kernel_projection.weight"] = (2 * KERNEL * HIDDEN // GROUP, HIDDEN)
    return random_weights(shapes | LAW_SHAPES.get(law, lambda columns: {})(columns), 2, 0.3)


def _markov(columns: int) -> dict[str, tuple[int, ...]]:
    return {"markov_head.markov_w1.weight": (VOCAB, RANK), "markov_head.markov_w2.weight": (columns, RANK)}


def _with(name: str, rows: int, wide: int) -> Any:
    at = f"markov_head.{name}"
    return lambda columns: _markov(columns) | {f"{at}.weight": (rows, wide), f"{at}.bias": (rows,)}


LAW_SHAPES: dict[str, Any] = {
    "vanilla": _markov,
    "gated": _with("gate_proj", RANK, HIDDEN + RANK),
    "rnn": _with("joint_proj", 3 * RANK, 2 * RANK + HIDDEN),
    "domino": lambda columns: {
        "prefix_gru.weight_ih_l0": (3 * GRU, HIDDEN),
        "prefix_gru.weight_hh_l0": (3 * GRU, GRU),
        "embed_proj.0.weight": (RANK, HIDDEN + GRU),
        "embed_proj.2.weight": (columns, RANK),
    },
    "selector": lambda columns: {
        "candidate_selector.predecessor_codebook": (VOCAB, RANK),
        "candidate_selector.successor_codebook": (VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, HIDDEN),
    },
}


def write_block(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """Write a block drafter as a folder."""
    folder.mkdir(exist_ok=True)
    tensors = {name: (w.float() if w.is_floating_point() else w).clone().contiguous() for name, w in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@dataclass
class Blocks:
    """The forward of `block_weights`, everything computed anew for every context."""

    w: dict[str, Tensor]
    law: str = ""
    first: int = 1
    ids: Any = tuple(one + 1 for one in IDS)
    """Which of hs[0], ..., hs[DEPTH] `fc` reads, hs[k] being what enters layer k; DEPTH stands behind the norm."""
    normed_last: bool = True
    sees: Any = None
    """From the number of a layer, the places of query, key and anchor, and whether the key is of the block."""
    best: int = 16
    plain: int = 0
    multiplier: float = 1.0
    cap: float | None = None
    embedded: float = 1.0
    model: Any = None
    """Of the target, where it is another one than `undrafted`."""
    known: dict[Any, list[Tensor]] = field(default_factory=dict)

    def states(self, context: list[int]) -> list[Tensor]:
        """What the target's layers say of every token before the last, through `fc` and its norm."""
        *hs, last = states_of(self.model or undrafted(), context)
        if self.normed_last:
            hs[-1] = last
        rows = [torch.cat([hs[k][i] for k in self.ids]) for i in range(len(context) - 1)]
        return [normed(self.w["fc.weight"] @ row, self.w["hidden_norm.weight"]) for row in rows]

    def embedding(self, token: int) -> Tensor:
        own = self.w.get("embed_tokens.weight", (self.model or undrafted()).get_input_embeddings().weight.detach())
        return own[token].double() * self.embedded

    def around(self, at: str, x: list[Tensor], read: list[Tensor], side: int) -> list[Tensor]:
        """DFlash 2's convolution of rows, with kernels of what the sublayer reads; number by number."""
        if f"{at}.base_kernel" not in self.w:
            return x
        base, out = self.w[f"{at}.base_kernel"], []
        for j in range(len(x)):
            delta = (self.w[f"{at}.kernel_projection.weight"] @ read[j]).view(2, KERNEL, HIDDEN // GROUP)
            row = torch.zeros(HIDDEN).double()
            for back in range(min(KERNEL, j + 1)):
                for channel in range(HIDDEN):
                    weight = base[side, back, channel] + delta[side, back, channel // GROUP]
                    row[channel] += weight * x[j - back][channel]
            out.append(row)
        return out

    def seen(self, number: int, anchor: int) -> Callable[[int, int], bool]:
        """Whether a place looks at another one in a layer; the block begins at `anchor`."""
        if self.sees is None:
            return lambda place, key: True
        return lambda place, key: self.sees(number, place, key, anchor, key >= anchor)

    def block(self, context: list[int], size: int = BLOCK) -> list[Tensor]:
        """What the rows of a block become."""
        before = self.states(context)
        rows = [self.embedding(context[-1]), *[self.embedding(MASK)] * (size - 1)]
        number = 0
        while f"layers.{number}.input_layernorm.weight" in self.w:
            at = f"layers.{number}"
            read = [normed(one, self.w[f"{at}.input_layernorm.weight"]) for one in rows]
            given = self.around(f"{at}.attention_conv", read, read, 0)
            out = attended(self.w, at, given, before, self.seen(number, len(before)))
            rows = [x + y for x, y in zip(rows, self.around(f"{at}.attention_conv", out, read, 1), strict=True)]
            read = [normed(one, self.w[f"{at}.post_attention_layernorm.weight"]) for one in rows]
            gate, up, down = (self.w[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            given = self.around(f"{at}.mlp_conv", read, read, 0)
            out = [down @ (torch.nn.functional.silu(gate @ y) * (up @ y)) for y in given]
            rows = [x + y for x, y in zip(rows, self.around(f"{at}.mlp_conv", out, read, 1), strict=True)]
            number += 1
        return [normed(one, self.w["norm.weight"]) for one in rows]

    def scores(self, state: Tensor) -> Tensor:
        output = self.w.get("lm_head.weight", (self.model or undrafted()).get_output_embeddings().weight.detach())
        found = output.double() @ state * self.multiplier
        return found if self.cap is None else self.cap * torch.tanh(found / self.cap)

    def law_of(self, context: list[int], path: list[int]) -> Tensor:
        """Log-probabilities behind a context and a drafted path."""
        rows, above = self.known.setdefault(tuple(context), []) or self.block(context), [context[-1], *path]
        self.known[tuple(context)] = rows
        slot = len(path) + self.first
        unary, z, w = self.scores(rows[slot]), rows[slot], self.w
        if self.law in ("vanilla", "gated", "rnn"):
            return (unary + w["markov_head.markov_w2.weight"] @ self.latent(rows, above)).log_softmax(-1)
        if self.law == "domino" and len(path) >= self.plain:
            read = torch.cat([z, self.gru([self.embedding(token) for token in above])])
            middle = torch.nn.functional.silu(w["embed_proj.0.weight"] @ read)
            return (unary + w["embed_proj.2.weight"] @ middle).log_softmax(-1)
        if self.law == "selector":
            at, law = "candidate_selector", torch.full((VOCAB,), -torch.inf).double()
            for token in unary.argsort(descending=True)[: self.best].tolist():
                three = w[f"{at}.predecessor_codebook"][above[-1]], w[f"{at}.hidden_projection.weight"] @ z
                law[token] = unary[token] + (three[0] * three[1] * w[f"{at}.successor_codebook"][token]).sum()
            return law.log_softmax(-1)
        return unary.log_softmax(-1)

    def latent(self, rows: list[Tensor], above: list[int]) -> Tensor:
        """What W2 of the Markov head reads. An RNN ran from the anchor's row on, whose parent is the anchor itself."""
        w1 = self.w["markov_head.markov_w1.weight"]
        if self.law == "vanilla":
            return w1[above[-1]]
        if self.law == "gated":
            given = torch.cat([rows[len(above) - 1 + self.first], w1[above[-1]]])
            gate = self.w["markov_head.gate_proj.weight"] @ given + self.w["markov_head.gate_proj.bias"]
            return torch.sigmoid(gate) * w1[above[-1]]
        carried, out = torch.zeros(RANK).double(), torch.zeros(RANK).double()
        for row, token in enumerate([above[0]] * self.first + above):
            given = torch.cat([carried, w1[token], rows[row]])
            gate, candidate, out = (
                self.w["markov_head.joint_proj.weight"] @ given + self.w["markov_head.joint_proj.bias"]
            ).split(RANK)
            carried = torch.sigmoid(gate) * carried + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
        return torch.tanh(out)

    def gru(self, inputs: list[Tensor]) -> Tensor:
        state = torch.zeros(GRU).double()
        for x in inputs:
            r, z, n = (self.w["prefix_gru.weight_ih_l0"] @ x).split(GRU)
            hr, hz, hn = (self.w["prefix_gru.weight_hh_l0"] @ state).split(GRU)
            kept = torch.sigmoid(z + hz)
            state = (1 - kept) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + kept * state
        return state


def check_block_laws(drafter: Any, target: Any, loops: Blocks, most: int = 5) -> None:
    """Every law that a drafter gave while decoding is that of the loops, impossible tokens among them."""
    witness = Witness(drafter)
    steps = list(Decoder(target, witness, OptTree(20, 0.0)).steps(prompt(6), 6))
    assert len(steps) > 2
    deep = sorted(witness.laws[2:], key=lambda one: -len(one[1]))[:most]
    assert len(deep[0][1]) > 1
    for context, path, law in witness.laws[:2] + deep:
        expected = loops.law_of(context, path) if len(path) < BLOCK - loops.first else None
        if expected is None:
            assert law.isneginf().all()
            continue
        assert torch.equal(law.isneginf(), expected.isneginf())
        assert (law - expected)[~expected.isneginf()].abs().max() < 1e-10
