"""From logits to the target's law, how siblings are picked, and the one source of randomness.

Owns `Sampling` (temperature, top-k, top-p and logits processors, applied alike to every node and to plain decoding),
the `Children` types (`TopK`, `IID`, `WithoutReplacement`), and `Random`. Knows nothing of models, caches and policies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation import logits_process

from opt_tree.tree import Tree, fetch, on_host

# Processors whose output depends on the logits row alone; everything else is shown the row's own history.
_MEMORYLESS = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "TopHLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    )
    if hasattr(logits_process, name)
)
# These keep state between calls (a second model's cache, a random seed per call): one call a node would corrupt it.
_STATEFUL = tuple(
    getattr(logits_process, name)
    for name in ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
    if hasattr(logits_process, name)
)


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become its law: temperature 0 means argmax, above 0 a draw.

    The warpers are transformers' own, in its order (temperature, top-k, top-p), after `processors`, which may be any
    transformers `LogitsProcessor`s; those that need history see the context followed by the node's own path.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    processors: tuple[Callable, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < np.inf:
            raise ValueError(f"temperature must be 0 (greedy) or more, and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        for processor in self.processors:
            if isinstance(processor, _STATEFUL):
                raise ValueError(
                    f"{type(processor).__name__} keeps state between calls: it cannot judge a tree of nodes"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def warpers(self) -> list[LogitsProcessor]:
        """The transformers warpers that `temperature`, `top_k` and `top_p` stand for."""
        warpers: list[LogitsProcessor] = []
        if self.temperature not in (0.0, 1.0):
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k and not self.greedy:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1 and not self.greedy:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers

    def warp(self, scores: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """Return the log of the drafter's law that children are sampled from, at the target's temperature and cuts.

        Any law would be exact, as long as the verifier is shown the one that was sampled from; this one is near the
        target's. Processors that need history are the target's alone. At temperature 0 the law is left as it is: as a
        point mass it would draw the same child over and over.
        """
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        for process in self.warpers():
            scores = process(None, scores)  # type: ignore[arg-type]
        return log_law(scores)

    def scores(
        self, logits: Float[Tensor, "rows vocab"], tree: Tree, context: list[int]
    ) -> Float[Tensor, "rows vocab"]:
        """Return the processed logits of every row of `tree`; softmax of them is the target's law there.

        `context` ends with the root. Half-precision logits are widened to float32 when they are to be sampled from
        or processed, as in `transformers.generate`; at temperature 0 without processors they pass through untouched.
        """
        steps: list[Callable] = [*self.processors, *self.warpers()]
        if steps or not self.greedy:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for process in steps:
            if isinstance(process, _MEMORYLESS):
                logits = process(None, logits)  # type: ignore[arg-type]
            else:
                logits = torch.cat(
                    [
                        process(history, logits[row : row + 1])
                        for row, history in enumerate(_histories(tree, context, logits))
                    ]
                )
        return logits


def _histories(tree: Tree, context: list[int], like: Tensor) -> list[Int[Tensor, "1 length"]]:
    """The token history of every row: the context (which ends with the root) and the path down to the row."""
    base = torch.tensor(context, device=like.device)
    return [
        torch.cat([base, torch.tensor(tree.tokens[tree.path_to(row)[1:]], device=like.device)])[None]
        for row in range(len(tree))
    ]


def log_law(scores: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """Return the log-probabilities that scores stand for, in float32 or wider."""
    return scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def law(scores: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """Return the probabilities that scores or log-probabilities stand for, in float64.

    The one way from a drafter's row to what its children are drawn from and to what a verifier is told of them: two
    roundings of the same law would be two laws.
    """
    return scores.softmax(-1, dtype=torch.float64)


class Layer(NamedTuple):
    """What the drafter said of a frontier, and what a child of it must be to matter."""

    log_probs: Float[Tensor, "frontier vocab"]
    above: Float[np.ndarray, " frontier"]
    """Path log-probabilities of the frontier."""
    depth: int
    """Of the frontier; 0 is the root."""
    floor: float
    """Children whose reach is at or below it need not be returned."""


class Picked(NamedTuple):
    """The children of one layer; where they are sampled, grouped by frontier row and, below one, as they were drawn."""

    log_probs: Float[np.ndarray, " children"]
    """Log-probabilities of the paths from the root."""
    tokens: Int[np.ndarray, " children"]
    rows: Int[np.ndarray, " children"]
    """Rows of the frontier that they are children of."""
    reach: Float[np.ndarray, " children"] | None = None
    """Log of the estimated probability that verification gets to a child, *as known before its token was drawn*.

    Nodes may be ranked by this and kept or dropped accordingly; dropping them by their own probability would be a
    hidden rejection. None for deterministic children, where it is `log_probs`.
    """


@runtime_checkable
class Children(Protocol):
    """How siblings are picked from a drafter's law. A type, because verifiers are valid for some laws only."""

    def pick(self, layer: Layer, random: "Random") -> Picked:
        """Return the children of a layer; tokens of log-probability -inf are never among them."""
        ...

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn; verifiers are then shown the laws they were drawn from."""
        ...

    @property
    def budget(self) -> int | None:
        """How many candidates of the whole pool can matter; None: all of them."""
        ...


@dataclass(frozen=True)
class TopK:
    """The most probable tokens: `per_node` of them under every node, or whichever are among the pool's `total` best."""

    per_node: int | None = None
    total: int | None = None
    sampled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if (self.per_node is None) == (self.total is None):
            raise ValueError("TopK takes either per_node or total")

    @property
    def budget(self) -> int | None:
        return self.total

    def pick(self, layer: Layer, random: "Random") -> Picked:
        """See `Children.pick`; nothing here is random."""
        log_probs, floor = layer.log_probs, layer.floor
        width, vocab = log_probs.shape
        if self.total is not None and on_host(log_probs):
            return _survivors(log_probs.numpy(), layer.above, floor, self.total)
        above = torch.from_numpy(layer.above).to(log_probs)
        if self.per_node is not None:
            best, tokens = log_probs.topk(min(self.per_node, vocab))
            values = best + above[:, None]
            rows = torch.arange(width, device=values.device)[:, None].expand_as(tokens)
            real = values > -torch.inf
            return Picked(*fetch(values[real], tokens[real], rows[real]))
        assert self.total is not None
        if floor > -np.inf:
            # Comparing against a bound a row and listing the few survivors is cheaper than a top-k of all.
            flat = (log_probs > (floor - above)[:, None]).flatten().nonzero().squeeze(-1)
            values = log_probs.flatten()[flat] + above[flat // vocab]
        else:
            values, flat = (log_probs + above[:, None]).flatten().topk(min(self.total, log_probs.numel()))
        if len(values) > self.total:
            keep = values.topk(self.total).indices.sort().values
            values, flat = values[keep], flat[keep]
        host_values, host_flat = fetch(values, flat)
        possible = host_values > -np.inf
        return Picked(host_values[possible], host_flat[possible] % vocab, host_flat[possible] // vocab)


_LEAST = float(np.finfo(np.float32).min)


def _survivors(
    log_probs: Float[np.ndarray, "frontier vocab"], above: Float[np.ndarray, " frontier"], floor: float, total: int
) -> Picked:
    """Return the `total` best children above the floor.

    In numpy and in few operations: between two forwards each of them is paid for in cold caches, several times what it
    costs alone.
    """
    vocab = log_probs.shape[1]
    above = above.astype(log_probs.dtype)
    if floor == -np.inf:
        sums = log_probs if len(above) == 1 else log_probs + above[:, None]
        promising = sums >= max(_lower_bound(sums, total), _LEAST)
    else:
        promising = log_probs > (floor - above)[:, None]
    rows, tokens = np.divmod(promising.ravel().nonzero()[0], vocab)
    values = log_probs[rows, tokens] + above[rows]
    if len(values) > total:
        keep = (-values).argsort(kind="stable")[:total]
        keep.sort()
        values, tokens, rows = values[keep], tokens[keep], rows[keep]
    return Picked(values, tokens, rows)


def _lower_bound(values: Float[np.ndarray, "rows columns"], total: int) -> float:
    """Return a number that at least `total` of the values reach, or -inf. Far cheaper than finding the `total` best.

    Dealt into groups, the values have a maximum a group; the `total`-th greatest of those is such a number.
    """
    groups = max(4 * total, 256)
    flat = values.ravel()
    flat = flat[: len(flat) - len(flat) % groups]
    if not len(flat):
        return -np.inf
    maxima = flat.reshape(-1, groups).max(0)
    maxima.sort()
    return float(maxima[-total])


@dataclass(frozen=True)
class IID:
    """Independent draws: equal siblings are separate nodes, in the order of the draws."""

    per_node: int | tuple[int, ...]
    """Children of every node, or of a node by its depth, the root's first."""
    sampled: ClassVar[bool] = True
    budget: ClassVar[None] = None

    def __post_init__(self) -> None:
        _check_siblings(self.per_node)

    def pick(self, layer: Layer, random: "Random") -> Picked:
        """See `Children.pick`. Every draw of a node has the same reach: the node's."""
        tokens = random.iid(law(layer.log_probs), _siblings(self.per_node, layer.depth))
        above = torch.from_numpy(layer.above).to(layer.log_probs)[:, None].expand_as(tokens)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
        values = layer.log_probs.gather(1, tokens) + above
        return Picked(*fetch(values.flatten(), tokens.flatten(), rows.flatten(), above.flatten()))


@dataclass(frozen=True)
class WithoutReplacement:
    """Distinct siblings, each drawn from the law without the ones before it: `per_node` of them, or as many as pay.

    With `total`, another sibling is drawn while its reach, the node's path probability times the mass that the siblings
    before it left over, is among the pool's `total` best (DySpec, arXiv:2410.11744). Law (.5, .3, .2), drawn b, a:

        reach          1     .7 = 1 - .3     .2 = 1 - .3 - .5       known before each draw
        probability   .3     .5                                     of the token that came out
    """

    per_node: int | tuple[int, ...] | None = None
    """Children of every node, or of a node by its depth, the root's first; fewer where a law has fewer tokens."""
    total: int | None = None
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.per_node is None) == (self.total is None):
            raise ValueError("WithoutReplacement takes either per_node or total")
        _check_siblings(self.per_node if self.total is None else self.total)

    @property
    def budget(self) -> int | None:
        return self.total

    def pick(self, layer: Layer, random: "Random") -> Picked:
        """See `Children.pick`."""
        probs = law(layer.log_probs)
        most = self.total if self.total is not None else _siblings(self.per_node, layer.depth)
        tokens = random.distinct(probs, min(most, probs.shape[-1]))
        above = torch.from_numpy(layer.above).to(layer.log_probs)[:, None].expand_as(tokens)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
        drawn = probs.gather(1, tokens)
        left = 1 - (drawn.cumsum(1) - drawn)
        reach = above + left.clamp(min=0).log()
        # Either condition holds for the first few siblings and for none further: the possible ones come first, and
        # reach falls, so that ending there is a decision about a sibling that has not been drawn yet.
        real = drawn > 0
        if self.total is not None:
            real &= reach > layer.floor
        values = layer.log_probs.gather(1, tokens) + above
        return Picked(*fetch(values[real], tokens[real], rows[real], reach[real]))


@dataclass(frozen=True)
class BestAndDraw:
    """The best token for certain, one draw from the rest of the law, then the best of the others, while they pay.

    RheoSampling's sibling groups (arXiv:2609.21827), for the pool's `total` best. The draw is ranked by min(q_best,
    1 - q_best), at least what any token of the rest has, whichever comes out. Law (.5, .3, .2):

        best a, drawn c, then b:      reach  .5   .5   .3       probability  .5   .2   .3
    """

    total: int
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_siblings(self.total)

    @property
    def budget(self) -> int:
        return self.total

    def pick(self, layer: Layer, random: "Random") -> Picked:
        """See `Children.pick`. A law of one token has one child."""
        probs = law(layer.log_probs)
        above = torch.from_numpy(layer.above).to(layer.log_probs)[:, None]
        values = layer.log_probs + above
        best = probs.argmax(1, keepdim=True)
        rest = probs.scatter(1, best, 0.0)
        more = rest.sum(1, keepdim=True) > 0
        drawn = random.iid(torch.where(more, rest, probs), 1)
        top = values.gather(1, best).double()
        proxy = torch.minimum(top, above + (1 - probs.gather(1, best)).log())
        reach = torch.minimum(values, proxy).scatter(1, drawn, proxy).scatter(1, best, top)
        # In the order of judgement: the best, the draw, the others by falling reach (log-probabilities, none above 0).
        order = reach.scatter(1, drawn, 1.0).scatter(1, best, 2.0).topk(min(self.total, probs.shape[1])).indices
        reach, values = reach.gather(1, order), values.gather(1, order)
        real = (values > -torch.inf) & (reach > layer.floor)
        rows = torch.arange(len(order), device=order.device)[:, None].expand_as(order)
        return Picked(*fetch(values[real], order[real], rows[real], reach[real]))


def _siblings(per_node: int | tuple[int, ...] | None, depth: int) -> int:
    """How many children a node of that depth has."""
    assert per_node is not None
    return per_node[depth] if isinstance(per_node, tuple) else per_node


def _check_siblings(per_node: int | tuple[int, ...] | None) -> None:
    counts = per_node if isinstance(per_node, tuple) else (per_node,)
    if not counts or min(count or 0 for count in counts) < 1:
        raise ValueError(f"a sampled node has at least one child, got {per_node}")


class Random:
    """Every random number of a generation, from one seed.

    The uniform behind the t-th emitted token is fixed by (seed, t) alone: all nodes of one depth share it, and those
    drawn for positions that were not reached are kept for the next step. Only one node of a depth is ever on the
    accepted path, so its draw is an independent draw from the target's law there; and the text of a seed is the same
    whatever the tree, the drafter or the budget, plain decoding included.

    Sampled drafts and the decisions of verifiers other than `match` take fresh numbers from streams of their own, used
    once: the text then depends on the tree as well, its law does not.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._ahead: list[float] = []
        self._fresh = np.random.default_rng((seed % 2**64, 1))
        self._races: dict[torch.device, torch.Generator] = {}

    def draw(self, probs: Float[Tensor, "rows vocab"], depths: Int[np.ndarray, " rows"]) -> Int[Tensor, " rows"]:
        """Draw one token a row by inverting the cumulative law. `depths`: how many tokens ahead a row's draw is."""
        self._look_ahead(int(depths.max()) + 1)
        uniforms = torch.tensor(self._ahead, dtype=torch.float64)[torch.from_numpy(depths)].to(probs.device)
        return _invert(probs, uniforms[:, None]).squeeze(-1)

    def advance(self, tokens: int) -> None:
        """`tokens` more tokens are committed: their uniforms are spent, looked at or not."""
        self._look_ahead(tokens)
        del self._ahead[:tokens]

    def _look_ahead(self, tokens: int) -> None:
        while len(self._ahead) < tokens:
            self._ahead += torch.rand(32, generator=self._generator, dtype=torch.float64).tolist()

    def choose(self, probs: Float[np.ndarray, " vocab"]) -> int:
        """Draw one token from a law on the host, with fresh randomness. The law need not be normalised."""
        return int(_invert(torch.from_numpy(probs)[None], torch.tensor([[self._fresh.random()]])))

    def accept(self, probability: float) -> bool:
        """Toss a coin of the given probability, with fresh randomness."""
        return bool(self._fresh.random() < probability)

    def iid(self, probs: Float[Tensor, "rows vocab"], k: int) -> Int[Tensor, "rows k"]:
        """Draw `k` tokens a row, independently."""
        return _invert(probs, torch.from_numpy(self._fresh.random((len(probs), k))).to(probs.device))

    def distinct(self, probs: Float[Tensor, "rows vocab"], k: int) -> Int[Tensor, "rows k"]:
        """Draw `k` different tokens a row, each from the law without those before it; impossible ones come last.

        An exponential race: of independent arrival times with the tokens' probabilities as rates the first is a draw
        from the law, the second one from what is left, and so on. The noise is drawn on the law's own device.
        """
        if probs.device not in self._races:
            seed = int(self._fresh.integers(2**63))
            self._races[probs.device] = torch.Generator(probs.device).manual_seed(seed)
        noise = torch.empty_like(probs, dtype=torch.float64).exponential_(generator=self._races[probs.device])
        return torch.where(probs > 0, noise / probs, torch.inf).topk(k, largest=False).indices


def _invert(probs: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, "rows draws"]) -> Int[Tensor, "rows draws"]:
    """The tokens at which the rows' cumulative laws exceed the uniforms' share of the whole."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # right=True: the first token whose cumulative mass exceeds the point, so a token of probability 0 never wins; the
    # product may round up to the whole, which no token exceeds.
    points = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, points, right=True)
