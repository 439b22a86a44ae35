"""One pass drafts every layer: a law for each depth from one forward, shared by all nodes of that depth.

Owns the look-up (`OnePass`) and a maker of such laws: Medusa's heads on the target's last feature (`MedusaHeads`,
arXiv:2401.10774, the published layout). `parallel_spec.py` and `dflash.py` have others. A tree over
marginals is the product of their probabilities along each path; its n best paths are a tree, by OPT-Tree's argument
(arXiv:2604.12989 finds the same one by a heap).
"""

import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from opt_tree.children import LogProbs
from opt_tree.drafter import Asked, Drafter
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.heads.eagle import LAST
from opt_tree.methods.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.capabilities import size_of
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, load_named, load_tensors, read_config, refused
from opt_tree.models.output_scaling import scaling_of
from opt_tree.models.quantised_layers import home_of
from opt_tree.models.tensor_parallel import check_whole
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Output, Work
from opt_tree.tree import send


class OnePass(Drafter):
    """A drafter whose laws depend on the root and the depth alone. `laws` is all that there is to write.

    It reads the target's feature of the last token before the root, which the forward that chose the root has left.
    """

    features: tuple[int, ...] = (LAST,)
    rows = 1
    """Tokens that its forward reads."""
    tokens: Int[Tensor, " columns"] | None = None
    """The target's ids of the columns of `laws`, in rising order; None: a column a token."""

    def __init__(self, target: CausalLM) -> None:
        check_whole(target, "a drafter that reads the target's output layer at every depth")
        self.target, self.max_context = target, target.max_context
        self._scaling = scaling_of(target.model)
        self.feature = torch.zeros(1, target.hidden, dtype=target.dtype, device=target.device)
        """The target's, of the last token before the root."""
        self.answers = LogProbs(torch.zeros(0, target.vocab))
        """Of this step, a row a depth."""
        self._done = Work()

    def logits_of(self, states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits that the target has where these are its last hidden states."""
        output: Any = self.target.model.get_output_embeddings()
        return self._scaling(output(states.to(*home_of(output))))

    def laws(self, root: Int[Tensor, " 1"], length: int) -> Float[Tensor, "depths columns"]:
        """Return the scores of the 1st, 2nd, ... token behind a context of `length` tokens, the root the last of them.

        Whoever asks for a forward writes `root`.
        """
        raise NotImplementedError(f"{type(self).__name__} says nothing of the depths")

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        super().begin(prompt, kept, prefill, sampling)
        # A one-token prompt has no earlier feature: its heads read zeros.
        self.feature = torch.zeros_like(self.feature) if prefill is None else prefill.features[LAST][-1:].clone()

    def root(self, context: list[int]) -> Asked:
        return self.answer(self.run(send(np.array(context[-1:]), self.target.device), len(context)))

    def run(self, root: Int[Tensor, " 1"], length: int) -> Float[Tensor, "depths columns"]:
        """Return `laws`, and count what they cost."""
        begin = time.perf_counter()
        scores = self.laws(root, length)
        self.ran(time.perf_counter() - begin)
        return scores

    def ran(self, seconds: float) -> None:
        """Count one forward."""
        self._done += Work(1, self.rows, seconds)

    def answer(self, scores: Float[Tensor, "depths columns"]) -> LogProbs:
        """Take the scores of all depths; return the answer of the first."""
        # All in one read: what follows needs no device.
        self.answers = LogProbs.of(scores.cpu(), self.tokens, self.scale)
        return self._at(0, 1)

    def expand(self, frontier: Frontier) -> LogProbs:
        """Look up the answer of the frontier's depth; nothing is known beyond the last head."""
        return self._at(int(frontier.depths[0]), len(frontier.tokens))

    def _at(self, depth: int, nodes: int) -> LogProbs:
        values = self.answers.values
        if depth >= len(values):
            return LogProbs(values.new_full((1, values.shape[1]), -torch.inf).expand(nodes, -1), self.tokens)
        return LogProbs(values[depth : depth + 1].expand(nodes, -1), self.tokens)

    def accept(self, outcome: Outcome) -> None:
        self.feature = outcome.features[LAST][-1:].clone()

    @property
    def work(self) -> Work:
        return self._done


class MedusaHeads(nn.Module):
    """Medusa's heads: `layers` residual blocks and an output layer each; head i speaks of the token i + 2 ahead.

    State-dict names are the published ones, `{i}.0.linear.weight`, `{i}.0.linear.bias`, `{i}.1.weight` for one block.
    Heads without an output layer of their own (ours) read through the target's.
    """

    def __init__(self, hidden: int, vocab: int, heads: int, layers: int = 1, own_output: bool = True) -> None:
        super().__init__()
        self.heads = nn.ModuleList()
        for _ in range(heads):
            parts: list[nn.Module] = [ResidualBlock(hidden) for _ in range(layers)]
            if own_output:
                parts.append(nn.Linear(hidden, vocab, bias=False))
            self.heads.append(nn.Sequential(*parts))

    def forward(self, feature: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "heads *rows columns"]:
        """Return each head's logits, or its estimate of a feature where it has no output layer."""
        return torch.stack([head(feature) for head in self.heads])


class ResidualBlock(nn.Module):
    """x + silu(linear(x)); zero weights leave x as it is."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        return x + F.silu(self.linear(x))


class MedusaDrafter(OnePass):
    """Drafts with Medusa's heads. They never saw the root itself: they read the feature that it was chosen from."""

    def __init__(self, heads: MedusaHeads, target: CausalLM) -> None:
        super().__init__(target)
        self.heads = heads

    def keeps(self, prompt: list[int]) -> int:
        return len(prompt)  # the one feature that it reads is among what is new

    def laws(self, root: Int[Tensor, " 1"], length: int) -> Float[Tensor, "depths vocab"]:
        states = self.heads(self.feature.to(next(self.heads.parameters()).dtype))[:, 0]
        return states if states.shape[1] == self.target.vocab else self.logits_of(states)

    def describe(self) -> str:
        return f"{len(self.heads.heads)} Medusa heads {self.name}: {size_of(self.heads)}"


@register(
    "medusa", about="Medusa's heads on the target's last feature, one pass a draft", paper="2401.10774", part="medusa"
)
def load_medusa(path: str, target: AnyLM, options: DrafterOptions) -> MedusaDrafter:
    """Load Medusa heads as published: `config.json` and `medusa_lm_head.pt` (or `.safetensors`, `model.safetensors`).

    Names may begin with `medusa_head.`, as in checkpoints that hold the base model too. Raises CheckpointError.
    """
    target, config = feature_target(target), read_config(path, "Medusa heads")
    count, layers = config.get("medusa_num_heads"), int(config.get("medusa_num_layers", 1))
    if not isinstance(count, int) or count < 1:
        raise CheckpointError(f"{path}/config.json is not the config of Medusa heads: medusa_num_heads is {count}")
    tensors = load_tensors(path, ("model.safetensors", "medusa_lm_head.safetensors"), "medusa_lm_head.pt")
    if any(name.startswith("medusa_head.") for name in tensors):
        tensors = {n.removeprefix("medusa_head."): t for n, t in tensors.items() if n.startswith("medusa_head.")}
    heads = MedusaHeads(target.hidden, target.vocab, count, layers, f"0.{layers}.weight" in tensors)
    with refused(f"cannot use {path}"):
        load_named(heads.heads, tensors, f"it has no Medusa heads for {target.name}")
    return MedusaDrafter(heads.to(target.device, target.dtype).eval().requires_grad_(False), target)
