"""A transformers model that cannot hold a tree: its paths are scored instead, each as a row of a batch.

For models with a running state (hybrid and recurrent ones) and for those whose positions or masks follow the order of
rows: a chain is plain text to them. Owns the model's own cache, which is put back where a part of a path is dropped.
Knows nothing of policies, verification and the decoding loop.
"""

import time
import warnings
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from opt_tree.backend import takes
from opt_tree.cache import inference
from opt_tree.errors import UnsupportedModelError
from opt_tree.models.cache_snapshot import State, restore, state_of
from opt_tree.models.capabilities import (
    TREE_ATTENTION,
    cache_name,
    check_model,
    check_steps,
    check_unchanged,
    logits_per_row,
    past_fault,
    plain_logits,
    sees_later,
    unwrapped,
)
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.left_out import TellsLeftOut
from opt_tree.models.positions import context_limit
from opt_tree.models.tensor_parallel import ranks_of
from opt_tree.target import Forward, Output, Work
from opt_tree.tree import Tree

_PREFILL_ROWS = 512
_REPLAYED = 16
"""Rows of accepted tokens that a forward computes once more rather than that one forward more is run."""


@dataclass(frozen=True, eq=False)
class PathsForward(Forward):
    """Further tokens of paths that a drafter has begun, a batch row each: no positions, and nobody sees another."""

    rows: Int[np.ndarray, " paths"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The paths, by their rows in the last layer."""


class ChainLM(TellsLeftOut):
    """One transformers causal LM that is asked about the paths of a tree, one beside the other. Final, as `CausalLM`.

    A path is text, so any model that goes on from its own cache is exact: no mask is passed. A chain costs what it
    costs elsewhere; a tree costs the rows of all its paths. Where a path is kept in part, the cache is put back to
    before the tree, and the tokens kept go before the next one: no forward more, a few rows more.
    Probed when it is wrapped: chains, cut short and gone on from, must give the logits of plain forwards.
    """

    canonical, not_canonical = False, ""
    """As of `CausalLM`."""

    @property
    def alone(self) -> str:
        """Why it serves one sequence at a time."""
        return f"{self.name} is scored path by path, from one cache of its own"

    def __init__(self, model: Any, probe: bool = True) -> None:
        check_model(model)
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder; a decoder-only model is needed")
        check_steps(model)
        if ranks_of(model) is not None:
            raise UnsupportedModelError(f"{type(model).__name__} is spread over processes, which follow trees alone")
        self.model = model.eval()
        self.name = model.config.name_or_path or type(model).__name__
        self.vocab, (self.max_context, self.context_note) = logits_per_row(model), context_limit(model)
        weight = cast(Tensor, model.get_input_embeddings().weight)
        self.device, self.dtype, self.hidden = weight.device, weight.dtype, weight.shape[1]
        bare = unwrapped(model)  # whose signature names what it takes
        past = cache_name(bare)
        if past is None:
            raise UnsupportedModelError(f"{type(model).__name__} takes no transformers cache")
        self._past, self._keep, self._numbered = past, takes(bare, "logits_to_keep"), takes(bare, "position_ids")
        self._forget()
        if probe:
            check_chains(self)

    def _forget(self) -> None:
        self.length = 0
        """Tokens of the context."""
        self.cache = self._new_cache()
        self._rows, self._layers = 1, 0
        """Rows of its batch; calls of `layer` behind the context."""
        self._behind: list[int] = []
        """The newest tokens of the context, which the cache does not hold yet."""
        self._before: State | None = None
        """What to put back into the cache, where rows were scored that nobody kept yet."""
        self._scored: tuple[Tree, list[Int[np.ndarray, " path"]]] | None = None
        """The tree that was scored and not yet judged, and its rows from the root to each leaf: the batch."""

    def _new_cache(self) -> Cache:
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    @torch.no_grad()
    def cache_of(self, tokens: list[int]) -> Cache:
        """Return a cache that holds these tokens, from a prefill: the model's own may be past them.

        Not under `inference_mode`: whoever gets it goes on from it elsewhere.
        """
        kept, self.cache = self.cache, self._new_cache()
        try:
            self._prefill(tokens, 1, 0)
            return self.cache
        finally:
            self.cache = kept

    def reset(self) -> None:
        """Forget the context. Raises UnsupportedModelError where the model is no longer what was wrapped."""
        check_unchanged(self.model, self.dtype, self.device)
        super().reset()
        self._forget()

    def layer(self, rows: Int[np.ndarray, " paths"], tokens: Int[np.ndarray, " paths"]) -> "PathsForward":
        """Go on from rows of the last `layer`, or behind the context (row 0) the first time, by one token each.

        For a drafter, layer by layer. The next `text` drops these rows.
        """
        positions = np.full(len(tokens), self.length)  # which a batch of paths counts for itself
        return PathsForward(self, tokens, positions, np.zeros((len(tokens), 0), dtype=bool), rows=rows)

    @inference
    def run(self, forward: Forward) -> Output:
        """See `Target.run`."""
        if isinstance(forward, PathsForward):
            return self._extend(forward.rows, forward.tokens)
        if forward.tree is not None:
            return self._score(forward.tree)
        assert forward.goes_on, "any other row needs a mask"
        return self._append(forward.tokens.tolist(), forward.last_only)

    def _append(self, tokens: list[int], last_only: bool) -> Output:
        self._put_back()
        self._catch_up()
        logits = self._prefill(tokens, 1 if last_only else _PREFILL_ROWS, self.length)
        self.length += len(tokens)
        return Output(logits[-1] if last_only else torch.cat(logits))

    def _prefill(self, tokens: list[int], last: int, start: int) -> list[Tensor]:
        chunks = [tokens[first : first + _PREFILL_ROWS] for first in range(0, len(tokens), _PREFILL_ROWS)]
        return [
            self._run(np.array([chunk]), min(last, len(chunk)), start + number * _PREFILL_ROWS)[0]
            for number, chunk in enumerate(chunks)
        ]

    def _score(self, tree: Tree) -> Output:
        self._put_back()
        leaves = np.setdiff1d(np.arange(len(tree)), tree.parents)  # the root, where it is alone
        paths = [tree.path_to(leaf) for leaf in leaves.tolist()]
        if len(self._behind) * len(paths) > _REPLAYED:
            self._catch_up()
        behind, width = len(self._behind), int(tree.depths.max()) + 1
        ids, first = np.zeros((len(paths), behind + width), dtype=np.int64), np.zeros(len(tree), dtype=np.int64)
        ids[:, :behind] = self._behind
        for number, path in reversed(list(enumerate(paths))):
            ids[number, behind : behind + len(path)] = tree.tokens[path]
            first[path] = number
        self._scored = tree, paths
        if tree.nodes:  # a root alone is always kept
            self._before = state_of(self.cache)
            self._become([0] * len(paths))
        logits = self._run(ids, width, self.length - behind)
        where = torch.from_numpy(np.array([first, tree.depths])).to(self.device)
        return Output(logits[where[0], where[1]])

    def extend(self, rows: Int[np.ndarray, " paths"], tokens: Int[np.ndarray, " paths"]) -> Output:
        """Run a `layer` by itself."""
        return self.run(self.layer(rows, tokens))

    def _extend(self, rows: Int[np.ndarray, " paths"], tokens: Int[np.ndarray, " paths"]) -> Output:
        if self._before is None:
            self._before, self._layers = state_of(self.cache), 0
        self._become(rows.tolist())
        self._layers += 1
        return Output(self._run(tokens[:, None], 1, self.length + self._layers - 1)[:, 0])

    @inference
    def commit(self, path: list[int]) -> None:
        """See `Target.commit`. A path that was scored to its end stays; of any other the tokens are kept behind."""
        if self._scored is None:
            raise ValueError("no scored tree to keep a path of")
        tree, paths = self._scored
        ended = [list(leaf) == path for leaf in paths]
        if any(ended) and len(path) > tree.depths.max():
            self._become([ended.index(True)])
            self._behind, self._before, self._scored = [], None, None
        else:
            self._put_back()
            self._behind += tree.tokens[path].tolist()
        self.length += len(path)

    def _become(self, rows: list[int]) -> None:
        """Make these rows of the cache's batch the batch."""
        if rows != [0] or self._rows > 1:
            self.cache.reorder_cache(torch.tensor(rows, device=self.device))  # type: ignore[arg-type]
            self._rows = len(rows)

    def _put_back(self) -> None:
        """Drop what was scored and not kept."""
        if self._before is not None:
            restore(self.cache, self._before)
            self._rows = 1
        elif self._scored is not None:
            raise RuntimeError("a root was scored and not committed; reset the target")
        self._before, self._scored = None, None

    def _catch_up(self) -> None:
        """Bring the cache to the end of the context."""
        if self._behind:
            self._run(np.array([self._behind]), 1, self.length - len(self._behind))
            self._behind = []

    def _run(self, ids: Int[np.ndarray, "paths rows"], last: int, start: int) -> Tensor:
        """Run one forward behind the `start` tokens in the cache; return the last rows' logits, `[paths, last, vocab]`.

        Positions are counted as `generate` counts them, for a model that takes any.
        """
        options: dict[str, Any] = {self._past: self.cache, "use_cache": True}
        if self._numbered:
            options["position_ids"] = torch.arange(start, start + ids.shape[1], device=self.device).expand(ids.shape)
        if self._keep:
            options["logits_to_keep"] = last
        begin = time.perf_counter()
        logits = self.model(input_ids=torch.from_numpy(ids).to(self.device), **options).logits
        self.work += Work(1, ids.size, time.perf_counter() - begin)
        return logits[:, -last:]


_PROBES = ((4, 7, 3), (19, 7, 3), (33, 5, 1), (70, 11, 2))
"""Texts that a model is probed with: tokens of context, and the step and the first of its token ids."""
_BEHIND = 10
"""Tokens behind the context of a probe."""


@torch.inference_mode()
def check_chains(lm: ChainLM) -> None:
    """Score chains and two paths, keep them in part and whole, and compare with plain forwards; refuse what differs.

    The yardstick is how far the logits move when the context is lost. A state that is lost in part may move little, so
    where rounding is small, hardly more than that is let pass. Contexts of several lengths: what a short one hides (a
    window, a pool of keys, a chunk of a scan) a longer one shows.
    """
    name, room = type(lm.model).__name__, max(4, lm.max_context - _BEHIND - 1)
    pad = getattr(lm.model.config.get_text_config(), "pad_token_id", None)  # which some models count no position for
    for length, step, first in dict.fromkeys((min(length, room), *ids) for length, *ids in _PROBES):
        ids = [(step * place + first) % (lm.vocab - 1) for place in range(length + _BEHIND)]
        ids = [token + (token == pad) for token in ids]
        try:
            later = sees_later(lm.model, ids)
            expected = _plain(lm, ids)[length:]
            yardstick = float((_plain(lm, ids[length:]) - expected).abs().max())
            several, one = _errors(lm, ids, length, expected)
        except Exception as why:
            told = past_fault(lm.model, why)
            raise UnsupportedModelError(f"{name} does not go on from its own cache: {told}") from why
        finally:
            lm.reset()
            lm.work = Work()
        if later is not None:
            raise UnsupportedModelError(f"{name} cannot be decoded with: {later}")
        fine = lm.dtype in (torch.float32, torch.float64)
        allowed = 1e-3 * yardstick + 1e-5 * float(expected.abs().max()) if fine else 0.3 * yardstick
        for error, how in ((several, "several tokens at once"), (one, "one token at a time")):
            if not error <= allowed:
                raise UnsupportedModelError(
                    f"{name} does not go on from its own cache by {how}: its logits are {error:.2g} off those of "
                    f"plain forwards (a context lost: {yardstick:.2g})"
                )


def _plain(lm: ChainLM, tokens: list[int]) -> Tensor:
    """Logits `[tokens, vocab]` of a forward without a cache."""
    row = torch.arange(len(tokens), device=lm.device)[None]
    positions = {"position_ids": row} if takes(unwrapped(lm.model), "position_ids") else {}
    return plain_logits(lm.model, tokens, **positions)


def _errors(lm: ChainLM, ids: list[int], length: int, expected: Tensor) -> tuple[float, float]:
    """How far the rows of chains and of two paths behind `length` tokens are off; and those of one token at a time."""
    after = ids[length:]

    def of_chain(rows: int, kept: int) -> float:
        """Score the next tokens as a chain, and keep some of them."""
        start = lm.length - length
        logits = lm.score(Tree.of(after[start : start + rows], range(-1, rows - 1))).logits.double()
        lm.commit(list(range(kept)))
        return float((logits - expected[start : start + rows]).abs().max())

    def of_fork() -> float:
        """Score two paths from the third token on, and keep neither: one goes on as the text does, one otherwise."""
        fork = Tree.of([after[2], after[3], ids[0]], [-1, 0, 0])
        other = _plain(lm, [*ids[: length + 3], ids[0]])[-1]
        both = torch.stack([expected[2], expected[3], other])
        return float((lm.score(fork).logits.double() - both).abs().max())

    lm.append(ids[:length])
    several = [of_chain(4, kept=2), of_fork(), of_chain(3, kept=1), of_chain(3, kept=3)]
    one = [of_chain(1, kept=1) for _ in range(_BEHIND - 6)]
    return max(several), max(one)


AnyLM = CausalLM | ChainLM
"""A wrapped transformers model, one way or the other."""


def wrap(model: Any) -> AnyLM:
    """Wrap a model as what it can be: `CausalLM` where it can hold a tree, else `ChainLM`, which a warning says.

    An attention that takes no tree mask (flash, flex) is switched to one that does, which a warning says, too.
    Raises UnsupportedModelError with both reasons where it can be neither.
    """
    check_model(model)
    if (attention := model.config.get_text_config()._attn_implementation) not in TREE_ATTENTION:
        other = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        model.set_attn_implementation(other)
        warnings.warn(
            f"{type(model).__name__}: attention {attention!r} takes no tree mask; now {other!r}", stacklevel=2
        )
    try:
        return CausalLM(model)
    except UnsupportedModelError as error:
        try:
            lm = ChainLM(model)
        except UnsupportedModelError as other:
            why = str(error) if str(other) == str(error) else f"{error}; nor path by path: {other}"
            raise UnsupportedModelError(why) from other
        told = f"{error}. It scores a tree path by path; chains cost least (--policies chain)"
        warnings.warn(told, stacklevel=2)
        return lm
