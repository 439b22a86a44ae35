"""What a law of a block drafter knows beside its depth: nothing, the parent's token, or the path above it.

A block's states give scores U_k of each depth; a `BlockLaw` adds to them what the tokens above say. DSpark's Markov
heads (arXiv:2607.05147, eq. 4 and 5) and DFlash 2's selector know the parent; DSpark's RNN head and Domino's GRU know
the path, of which a node carries a state that its children read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

KINDS = ("vanilla", "gated", "rnn")
"""DSpark's Markov heads."""


class Place(NamedTuple):
    """A depth of a block that was run."""

    depth: int
    """1: behind the root."""
    unary: Float[Tensor, " columns"]
    """Its scores, by the depth alone."""
    state: Float[Tensor, " hidden"]
    """What its row of the block became."""
    embed: Callable[[Int[Tensor, " rows"]], Float[Tensor, "rows hidden"]]
    """The embeddings that the block's rows have."""


class Below(NamedTuple):
    """What is said below some parents."""

    scores: Float[Tensor, "parents columns"]
    carried: Float[Tensor, "parents width"]
    """What their children read."""


class BlockLaw(nn.Module, ABC):
    """What is added to the scores of a depth below each parent; trained tensors under their published names."""

    width: int = 0
    """Numbers that a node carries for its children; 0: laws know the parent alone."""

    @abstractmethod
    def forward(self, place: Place, parents: Int[Tensor, " parents"], carried: Float[Tensor, "parents width"]) -> Below:
        """Return the scores of children at a place, below these tokens. `carried`: by the nodes above the parents."""

    def start(self, skipped: Float[Tensor, "places hidden"], root: Int[Tensor, " 1"]) -> Float[Tensor, "1 width"]:
        """Return what the node above the root carries. `skipped`: what rows above the first depth's became."""
        return skipped.new_zeros(1, self.width)


class MarkovHead(nn.Module):
    """What the parent's token a adds: W2 W1[a]; gated, W2 (sigmoid(Wg [h; W1[a]]) * W1[a]); rnn, W2 tanh(o).

    The RNN: (g, c, o) = Wj [s; W1[a]; h], and s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c) goes to the children.
    State-dict names are the published ones: `markov_w1.weight` [vocab, rank], `markov_w2.weight` [columns, rank],
    `gate_proj.*` [rank, hidden + rank], `joint_proj.*` [3 * rank, 2 * rank + hidden].
    """

    def __init__(self, sizes: tuple[int, int, int, int], kind: str = KINDS[0]) -> None:
        """`sizes`: vocabulary, columns, rank, and the width of the states."""
        super().__init__()
        vocab, columns, rank, hidden = sizes
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, columns, bias=False)
        self.gate_proj = nn.Linear(hidden + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank) if kind == "rnn" else None

    @property
    def kind(self) -> str:
        return "rnn" if self.joint_proj is not None else KINDS[0] if self.gate_proj is None else "gated"

    def latent(
        self, states: Float[Tensor, "*rows hidden"], tokens: Int[Tensor, "*rows"]
    ) -> Float[Tensor, "*rows rank"]:
        """Return what W2 reads of parents and the states at their children's depth, without an RNN."""
        parents = self.markov_w1(tokens)
        if self.gate_proj is None:
            return parents
        return torch.sigmoid(self.gate_proj(torch.cat([states, parents], -1))) * parents

    def step(
        self,
        states: Float[Tensor, "rows hidden"],
        tokens: Int[Tensor, " rows"],
        carried: Float[Tensor, "rows width"],
    ) -> tuple[Float[Tensor, "rows rank"], Float[Tensor, "rows width"]]:
        """Return what W2 reads, and what the children of these parents do."""
        if self.joint_proj is None:
            return self.latent(states, tokens), carried
        gate, candidate, out = self.joint_proj(torch.cat([carried, self.markov_w1(tokens), states], -1)).chunk(3, -1)
        kept = torch.sigmoid(gate)
        return torch.tanh(out), kept * carried + (1 - kept) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """sigmoid(w [h_k; W1[a]] + b): how likely a child drawn below a is accepted, if a was (eq. 7)."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)

    def forward(
        self, states: Float[Tensor, "*rows hidden"], parents: Float[Tensor, "*rows rank"]
    ) -> Float[Tensor, "*rows"]:
        """Return logits; `rank` is 0 where it reads the states alone."""
        return self.proj(torch.cat([states, parents], -1)).squeeze(-1)


class DSparkHeads(BlockLaw):
    """DSpark's heads on the states of a block: the Markov head and the confidence head, where there are such.

    Below a parent whose confidence is under `least` nothing is drafted; it looks at the parent, never at what was drawn
    below it, so children may be drawn. 0, as the paper's tables are made: all is drafted.
    """

    def __init__(self, config: dict[str, Any], columns: int, least: float = 0.0) -> None:
        """`config`: DeepSpec's words, and `hidden_size` and `vocab_size`. A `markov_rank` of 0: no Markov head."""
        super().__init__()
        hidden, rank = int(config["hidden_size"]), int(config["markov_rank"])
        kind = config.get("markov_head_type", KINDS[0])
        sizes = (int(config["vocab_size"]), columns, rank, hidden)
        self.markov_head = MarkovHead(sizes, kind) if rank else None
        self.width, self.least = rank if kind == "rnn" else 0, least
        self.reads_parent = rank > 0 and bool(config.get("confidence_head_with_markov", True))
        wanted = config.get("enable_confidence_head", False)
        self.confidence_head = ConfidenceHead(hidden, rank if self.reads_parent else 0) if wanted else None

    def forward(self, place: Place, parents: Int[Tensor, " parents"], carried: Float[Tensor, "parents width"]) -> Below:
        states, scores = place.state.expand(len(parents), -1), place.unary.expand(len(parents), -1)
        if self.markov_head is not None:
            latent, carried = self.markov_head.step(states, parents, carried)
            scores = scores + self.markov_head.markov_w2(latent).to(scores.dtype)
        if self.least and (confidence := self.confidence(states, parents)) is not None:
            scores = scores.masked_fill((confidence.sigmoid() < self.least)[:, None], -torch.inf)
        return Below(scores, carried)

    def start(self, skipped: Float[Tensor, "places hidden"], root: Int[Tensor, " 1"]) -> Float[Tensor, "1 width"]:
        """An RNN was trained from the anchor's row on, though nothing is drafted there; its parent is the anchor."""
        carried = super().start(skipped, root)
        if self.markov_head is not None:
            for state in skipped:
                _, carried = self.markov_head.step(state[None], root, carried)
        return carried

    def confidence(
        self, states: Float[Tensor, "*rows hidden"], tokens: Int[Tensor, "*rows"]
    ) -> Float[Tensor, "*rows"] | None:
        """Return the logits of the confidence below these parents; None: there is no such head."""
        if self.confidence_head is None:
            return None
        if self.markov_head is None or not self.reads_parent:
            return self.confidence_head(states, states[..., :0])
        return self.confidence_head(states, self.markov_head.markov_w1(tokens))

    def __str__(self) -> str:
        if self.markov_head is None:
            return "no Markov head"
        kind = {"gated": "a gated", "rnn": "an RNN"}.get(self.markov_head.kind, "a")
        return f"{kind} Markov head of rank {self.markov_head.markov_w1.embedding_dim}"


class SelectorLaw(BlockLaw):
    """DFlash 2's selector: below a, the `best` tokens b of U_k have U_k(b) + sum over r of P[a]_r (H z)_r S[b]_r.

    All others are impossible: what children are drawn from, and what a verifier is told, has these zeros. Published
    names, behind `candidate_selector.`: `predecessor_codebook.weight`, `successor_codebook.weight` [vocab, rank], which
    are P and S, and `hidden_projection.weight` [rank, hidden], which is H.
    """

    def __init__(self, vocab: int, hidden: int, rank: int, best: int) -> None:
        super().__init__()
        self.candidate_selector = nn.ModuleDict(
            {
                "predecessor_codebook": nn.Embedding(vocab, rank),
                "successor_codebook": nn.Embedding(vocab, rank),
                "hidden_projection": nn.Linear(hidden, rank, bias=False),
            }
        )
        self.best = best

    def forward(self, place: Place, parents: Int[Tensor, " parents"], carried: Float[Tensor, "parents width"]) -> Below:
        parts = self.candidate_selector
        unary, named = place.unary.topk(min(self.best, len(place.unary)))
        above = parts["predecessor_codebook"](parents) * parts["hidden_projection"](place.state)
        scores = unary + (above @ parts["successor_codebook"](named).T).to(unary.dtype)
        nothing = place.unary.new_full((len(parents), len(place.unary)), -torch.inf)
        return Below(nothing.index_copy(1, named, scores), carried)

    def __str__(self) -> str:
        return f"a selector of {self.best} tokens"


class DominoHead(BlockLaw):
    """Domino's correction: a GRU over the root and the path, and W2 silu(W1 [z_k; gru]) on the scores of depth k.

    The first `plain` depths have none (`pure_draft_prefix_len`). Published names: `prefix_gru.*` without biases,
    `embed_proj.0.weight` [rank, hidden + width], `embed_proj.2.weight` [columns, rank].
    """

    def __init__(self, hidden: int, width: int, rank: int, columns: int, plain: int) -> None:
        super().__init__()
        self.prefix_gru = nn.GRU(hidden, width, bias=False, batch_first=True)
        middle = nn.Linear(hidden + width, rank, bias=False)
        self.embed_proj = nn.Sequential(middle, nn.SiLU(), nn.Linear(rank, columns, bias=False))
        self.width, self.plain = width, plain

    def forward(self, place: Place, parents: Int[Tensor, " parents"], carried: Float[Tensor, "parents width"]) -> Below:
        _, read = self.prefix_gru(place.embed(parents)[:, None].to(carried.dtype), carried[None].contiguous())
        scores = place.unary.expand(len(parents), -1)
        if place.depth > self.plain:
            states = place.state.expand(len(parents), -1)
            scores = scores + self.embed_proj(torch.cat([states, read[0]], -1)).to(scores.dtype)
        return Below(scores, read[0])

    def __str__(self) -> str:
        return f"a GRU of {self.width} over the path"
