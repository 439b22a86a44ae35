"""The only wrapper of a transformers model: forwards over a context, over a tree, over a drafter's frontier.

Owns shapes: it turns tokens, positions and visibility into the model's inputs, pads them to buckets where asked to, and
refuses models that cannot decode a tree exactly. Knows nothing of policies, verification and the decoding loop.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from opt_tree.core.children import Picking, TopK
from opt_tree.core.errors import UnsupportedModelError, one_line, require
from opt_tree.core.target import Forward, Output, Target, TreeForward, Work, own_turn, shared
from opt_tree.core.tree import Tree, send
from opt_tree.engines import Eager, Engine, Inputs
from opt_tree.engines.base import Mask
from opt_tree.engines.body import takes
from opt_tree.engines.canonical import ROWS, NotCanonicalError
from opt_tree.engines.delta_layers import delta_nets
from opt_tree.engines.delta_net import DeltaCache
from opt_tree.engines.kv_cache import KVCache, LayerShape, inference
from opt_tree.engines.masks import chunked, tree_mask, windowed
from opt_tree.engines.snapshot import Snapshot
from opt_tree.models.canonical import check
from opt_tree.models.capabilities import (
    cause,
    check_model,
    check_unchanged,
    end_tokens,
    key_limit,
    layer_windows,
    logits_per_row,
    size_of,
)
from opt_tree.models.meter import Meter
from opt_tree.models.positions import context_limit, rope_border
from opt_tree.models.quantised_layers import weights_of
from opt_tree.models.tensor_parallel import LedCache, ranks_of, tell

if TYPE_CHECKING:
    from opt_tree.models.split_target import Split

_PREFILL_ROWS = 512


@dataclass(frozen=True)
class Buckets:
    """Shapes a forward is padded to: the rows to the next of `rows`, the keys to the next of `keys` (then doubling).

    Few distinct shapes are what CUDA graphs and compiled kernels need. Padding is exact: pad rows see only themselves
    and no row sees them.
    """

    rows: tuple[int, ...] = (1, 8, 16, 32, 64, 128)
    keys: tuple[int, ...] = (512, 1024, 2048, 4096)

    def __post_init__(self) -> None:
        require(Sequence, rows=self.rows, keys=self.keys)
        for size in (*self.rows, *self.keys):
            require(Integral, size=size)
            if size < 1:
                raise ValueError(f"a bucket holds at least 1, got {size}")

    def pad(self, rows: int, start: int) -> tuple[int, int]:
        """Return the padded rows and keys of a forward whose first row goes to slot `start`.

        A forward larger than every row bucket (a prefill) keeps its rows.
        """
        rows = next((size for size in self.rows if size >= rows), rows)
        keys = start + rows
        size = next((size for size in self.keys if size >= keys), None)
        if size is None:
            size = self.keys[-1]
            while size < keys:
                size *= 2
        return rows, size


@dataclass(frozen=True, eq=False)
class Placed(Forward):
    """Rows that other layers have run before."""

    places: Int[np.ndarray, " rows"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Their columns among the pending rows."""


class Pending(NamedTuple):
    """What a forward added to the pending rows."""

    before: int
    """How many of them there were."""
    tokens: Int[np.ndarray, " rows"]
    positions: Int[np.ndarray, " rows"]


class CausalLM(Target):
    """One transformers causal LM with one KV cache; batch size 1. Final: wrap it, do not subclass it.

    Committed rows are the context; `extend` scores rows behind them that stay pending until `commit` keeps some.
    A model is probed once, when it is wrapped: a forward over a small tree must give the logits of plain causal
    forwards, otherwise `UnsupportedModelError` says why.
    """

    not_canonical = ""
    """Why it is not `canonical` where it was to be, if it could."""
    tokenizer_ends: frozenset[int] = frozenset()
    """End tokens that the tokenizer of its `Pair` names."""

    def __init__(self, model: Any, buckets: Buckets | None = None, probe: bool = True) -> None:
        check_model(model)
        self.buckets, self.work = buckets, Work()
        self.name = model.config.name_or_path or type(model).__name__
        self.vocab, (self.max_context, self.context_note) = logits_per_row(model), context_limit(model)
        self.columns = 0
        """Of a drafter's model: how many tokens its laws are over. Its graphs make them then, so set it beforehand."""
        self.hidden: int = model.get_input_embeddings().weight.shape[1]
        self._windows = layer_windows(model)
        self._numbered = bool({"sliding_attention", "chunked_attention"} & self._windows.keys())
        """Whether a mask needs the positions of the keys."""
        self._key_limit = key_limit(model)
        self._pending: list[Pending] = []
        """What was added to the context last and is not committed, in order."""
        self._given: Cache | None = None
        self.ahead: Split | None = None
        """Who scores the next tree, having run rows of it through the lower layers of this cache; None: nobody has."""
        self.places: Int[np.ndarray, " rows"] | None = None
        """Which pending row each row of the scored tree is, where `ahead` scored it."""
        self._scale: tuple[float, Tensor] | None = None
        self.model: PreTrainedModel = model.eval()  # or what looks like one: an EAGLE head with an output layer
        embeddings = cast(Tensor, model.get_input_embeddings().weight)
        self.device, self.dtype = embeddings.device, embeddings.dtype
        self._on_host = self.device.type == "cpu"
        self.ranks = ranks_of(model)
        self.cache = _new_cache(self)
        self._tokens: list[int] = []
        """The context, a token a row; -1 where it was given as rows."""
        self.eager: Eager = Eager(model, self.cache)
        self.eager.packed.pack(self.ranks is None)
        self.engine: Engine = self.eager
        """Computes every forward; see `opt_tree.engines`."""
        self.renew()
        if self.device.type == "cpu":
            _keep_freed_memory()
        if probe:
            check_tree_mask(self)

    def renew(self) -> None:
        """Take the model as it is now for the one that was wrapped, as whoever replaces a layer of it on purpose."""
        self.eager.packed.forget()
        self._snapshot, self._logits = Snapshot(self.model), logits_per_row(self.model)

    def pack(self, wanted: bool = True) -> None:
        """Have eager forwards on a CPU take packed copies of the weights, as they do by themselves; or not.

        A tree's rows are scored in about half the time, in as much memory again. A weight that was changed is packed
        anew: at once, or before the next text where it was changed through `.data` (see `Snapshot`).
        A canonical target is checked again, which forgets its context: NotCanonicalError says what is not then.
        """
        require(bool, wanted=wanted)
        before = self.eager.packed.wanted
        self.eager.packed.pack(wanted)
        if self.canonical and wanted != before:
            try:
                check(self)
            except NotCanonicalError:
                self.eager.packed.pack(before)
                raise

    @property
    def canonical(self) -> bool:
        """Whether a token's logits are a function of the tokens before it alone; see `opt_tree.models.canonical`."""
        return self.eager.packed.canonical

    @property
    def quantised(self) -> bool:
        """Whether some weights have eight or four bits. Rows are then rounded coarsely, in float32, too."""
        return weights_of(self.model) is not None

    @property
    def fixed_rows(self) -> int | None:
        """How many rows every forward of a canonical target has on CUDA; None: as many as are asked for."""
        return ROWS if self.canonical and self.device.type == "cuda" else None

    @property
    def work(self) -> Work:
        """What it has done so far. Seconds are the host's, on CUDA the device's, whose last forward is waited for."""
        return self.meter.work

    @work.setter
    def work(self, work: Work) -> None:
        self.meter = Meter(work)

    def _moment(self) -> Any:
        """Now: by the host's clock, on CUDA when the device has come so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def in_lane(self, cache: KVCache, engine: Engine) -> "CausalLM":
        """The same model for another sequence, with rows and a context of its own, run by another engine."""
        twin = copy.copy(self)
        twin.cache, twin.engine, twin.work = cache, engine, Work()
        twin._pending, twin._given, twin._tokens = [], None, []
        own_turn(twin)
        return twin

    @property
    def length(self) -> int:  # type: ignore[override]
        """Committed rows."""
        return self.cache.length

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state of the whole context (gated delta nets), which cannot be taken back."""
        return isinstance(self.cache, DeltaCache)

    @property
    def mask_kinds(self) -> tuple[str, ...]:
        """The kinds of attention layers, where there are several: every forward then brings a mask for each."""
        return tuple(sorted(self._windows)) if len(self._windows) > 1 else ()

    @property
    def ends(self) -> frozenset[int]:  # type: ignore[override]
        """The end tokens that the model's generation config names now, and those of the pair's tokenizer."""
        return end_tokens(getattr(self.model, "generation_config", None)) | self.tokenizer_ends

    @property
    def size(self) -> str:
        """Parameters and dtype, for a reader."""
        return size_of(self.model, self.dtype)

    def reset(self) -> None:
        """Forget the context. Raises UnsupportedModelError where the model is no longer what was wrapped."""
        self.begin()
        super().reset()
        self.cache.reset()
        self._tokens = []
        self.ahead = self.places = None

    def keep(self, prompt: list[int], most: int) -> int:
        """See `Target.keep`."""
        length = min(shared(self._tokens, prompt), most, self.length)
        stays = length == self.length or not self.recurrent
        if length < 1 or self._given is not None or self.ranks is not None or not stays:
            return super().keep(prompt, most)
        if not self.begin():  # the rows are another model's
            return super().keep(prompt, most)
        self.generation += 1
        self.cut(length)
        return length

    def begin(self) -> bool:
        """Look at the model before a text; return whether it is what it was before the last one.

        If not, nothing is computed as it was: neither by packed weights nor by compiled forwards. Raises
        UnsupportedModelError where it is no longer the kind of model that was wrapped.
        """
        check_unchanged(self.model, self.dtype, self.device)
        change = self._snapshot.change()
        if change is None:
            return True
        check_model(self.model)
        if (logits := logits_per_row(self.model)) != self._logits:
            raise UnsupportedModelError(
                f"{self.name} had {self._logits} logits a row when it was wrapped and has {logits} now: wrap it again"
            )
        self.renew()
        self.engine.changed(change.what)
        if change.rebuilt and self.canonical:
            check(self)
        return False

    def begins_with(self, past: Cache, tokens: list[int]) -> bool:
        """Whether a transformers cache holds the first rows of this context, which are those of these tokens."""
        length = past.get_seq_length()
        return shared(self._tokens, tokens) >= length and self.cache.begins_with(past)

    def cut(self, length: int) -> None:
        """Forget every row from `length` on."""
        self.cache.truncate(length)
        del self._tokens[length:]
        self.ahead = self.places = None

    def watch(self, layers: tuple[int, ...]) -> None:
        """See `Target.watch`. Raises ValueError for a layer that the model does not have."""
        self.engine.watch(layers)

    def text(
        self,
        tokens: Sequence[int],
        features: Float[Tensor, "tokens hidden"] | None = None,
        all_logits: bool = False,
        picking: Picking | None = None,
    ) -> Forward:
        """See `Target.text`. `features` are inputs of a head that drafts in the target's feature space.

        With a `picking` there are laws beside the logits; see `Forward.picking`.
        """
        if self._given is not None and self.length == 0:
            self.cache.adopt(self._given)
            self._tokens = [-1] * self.length
            tokens = tokens[self.length :]
            if not len(tokens):
                nothing = np.zeros(0, dtype=np.int64)
                return Forward(self, nothing, nothing, np.zeros((0, 0), dtype=bool))
        forward = super().text(tokens, features, all_logits)
        return forward if picking is None else replace(forward, picking=picking)

    def append(
        self,
        tokens: list[int],
        all_logits: bool = False,
        features: Float[Tensor, "tokens hidden"] | None = None,
        picking: Picking | None = None,
    ) -> Output:
        """Run a `text` by itself."""
        return self.run(self.text(tokens, features, all_logits, picking))

    @contextmanager
    def given(self, rows: Cache) -> Iterator[None]:
        """Inside, every context begins with these rows of its first tokens, which transformers computed.

        The first `text` then has logits and features of the other tokens only.
        """
        if rope_border(self.model) is not None:
            raise ValueError(
                f"{self.name} may have rotated these rows by other factors (LongRoPE): pass the text alone"
            )
        self._given = rows
        try:
            yield
        finally:
            self._given = None

    def extend(
        self,
        tokens: Int[np.ndarray, " rows"],
        positions: Int[np.ndarray, " rows"],
        visible: Bool[np.ndarray, "rows columns"],
        features: Float[Tensor, "rows hidden"] | None = None,
        picking: Picking | None = None,
    ) -> Output:
        """Add pending rows and return their logits; see `Forward`."""
        return self.run(Forward(self, tokens, positions, visible, features, picking=picking))

    def commit(self, path: list[int]) -> None:
        """Keep these pending rows (of a tree: a path, root first) as the next rows of the context; drop the others."""
        if self.places is not None:
            path, self.places = self.places[path].tolist(), None
        self.cache.commit(path)
        if path:
            tokens: list[int] = []
            for before, more, _ in self._pending:
                tokens[before:] = more.tolist()
            self._tokens += [tokens[row] for row in path]

    @inference
    def run(self, forward: Forward, engine: Engine | None = None) -> Output:
        """Compute what was asked for, in parts where it is longer than what is run at once.

        A text, or a tree, comes behind the context: pending rows are dropped. `engine`: another than the model's own,
        which computes some of its layers.
        """
        if isinstance(forward, TreeForward):
            ahead, self.ahead, self.places = self.ahead, None, None
            if ahead is not None:
                assert forward.tree is not None
                return ahead.score(forward.tree)
        if forward.goes_on or isinstance(forward, TreeForward):
            self.cache.truncate(self.length)
        rows = len(forward.tokens)
        if not rows:
            return Output(torch.zeros(0, self.vocab, dtype=self.dtype, device=self.device))
        most = self.fixed_rows or rows
        if forward.goes_on:
            most = min(most, _PREFILL_ROWS)
        if rows <= most:
            return self._run_part(forward, engine or self.engine)
        # An Output lives until the next forward, which the next part is.
        parts = [
            _cloned(self._run_part(forward.part(first, min(first + most, rows)), engine or self.engine))
            for first in range(0, rows, most)
        ]
        states = {layer: torch.cat([one.features[layer] for one in parts]) for layer in parts[0].features}
        if forward.last_only:
            return parts[-1]._replace(features=states)
        return Output(torch.cat([one.logits for one in parts]), states)

    def _run_part(self, forward: Forward, engine: Engine) -> Output:
        """The one place where rows become a forward: padding, mask, slots, the engine, the slice of real rows."""
        if self.ranks is not None:
            tell(self, forward)
        visible, picking = forward.visible, forward.picking
        (rows, columns), length = visible.shape, self.length
        start = length + columns - rows
        padded = max(rows, self.fixed_rows or 0, engine.least_rows)
        keys = start + padded
        if self.buckets is not None:
            padded, keys = self.buckets.pad(padded, start)
        if keys > self._key_limit:
            raise UnsupportedModelError(
                f"{self.name} is not causal beyond {self._key_limit} keys (its keep_window_size), and a forward over "
                f"{length} tokens and a tree has {keys}"
            )
        ints, masks, features = self._lay_out(forward, padded, keys)
        placed = isinstance(forward, Placed)
        slots = ints[2] if placed or self.buckets is not None or padded > rows else None
        self.cache.open(0 if placed else rows, keys, slots)
        if isinstance(self.cache, DeltaCache):
            self.cache.see(visible, self.device)
        epilogue = () if picking is None else self._epilogue(picking, engine.picks, rows, padded)
        begin = self._moment()
        output = engine.run(Inputs(ints, masks, slots, features, forward.last_only, *epilogue))
        self.meter.add(rows, begin, self._moment())
        if forward.goes_on:
            self.commit(list(range(rows)))
        return _real_rows(output, rows, padded, forward.last_only)

    def _lay_out(
        self, forward: Forward, padded: int, keys: int
    ) -> tuple[Int[Tensor, "3 padded"], Mask | dict[str, Mask], Float[Tensor, "padded hidden"] | None]:
        """Return the tensors of a forward, and note its rows as pending ones."""
        (rows, columns), features = forward.visible.shape, forward.features
        numbers = self._numbers(forward, self.length + columns - rows, padded)
        if not isinstance(forward, Placed):
            self._note(Pending(columns - rows, numbers[0], numbers[1]))
        ints = send(numbers, self.device)
        if features is not None and padded > rows:
            features = torch.constant_pad_nd(features, (0, 0, 0, padded - rows))
        return ints, self._masks(ints, forward.visible, keys), features

    def _note(self, rows: Pending) -> None:
        """These rows are pending from now on, behind the first `before` of those that are."""
        if rows.before:
            self._pending.append(rows)
        else:
            self._pending = [rows]

    def _numbers(self, forward: Forward, start: int, padded: int) -> Int[np.ndarray, "3 padded"]:
        """Tokens, positions and slots. A pad row is token 0 at position 0, in a slot of its own behind all columns."""
        rows, slots = len(forward.tokens), np.arange(start, start + padded)
        if isinstance(forward, Placed):
            slots[:rows] = self.length + forward.places
        if padded == rows:
            return np.array([forward.tokens, forward.positions, slots])
        numbers = np.zeros((3, padded), dtype=np.int64)
        numbers[0, :rows], numbers[1, :rows] = forward.tokens, forward.positions
        numbers[2] = slots
        return numbers

    def _epilogue(self, picking: Picking, picks: bool, rows: int, padded: int) -> tuple[Any, ...]:
        """What a forward brings for its laws: scale, columns, and the children and paths that an engine picks by."""
        scale, children, above = picking
        scaled = self._scale_tensor(scale)
        if not picks or above is None or not isinstance(children, TopK):
            return scaled, self.columns
        paths = np.full(padded, -np.inf)
        paths[rows - len(above) : rows] = above
        return scaled, self.columns, children, send(paths, self.device, scaled.dtype)

    def _scale_tensor(self, scale: float) -> Float[Tensor, ""]:
        """A scale where the model is, in the dtype of its laws: made once, as it seldom changes."""
        if self._scale is None or self._scale[0] != scale:
            dtype = torch.promote_types(self.dtype, torch.float32)
            self._scale = scale, torch.tensor(scale, dtype=dtype, device=self.device)
        return self._scale[1]

    def _masks(
        self, ints: Int[Tensor, "3 padded"], visible: Bool[np.ndarray, "rows columns"], keys: int
    ) -> Tensor | dict[str, Tensor]:
        """One mask where all layers are of one kind; a dict of masks where they differ."""
        full = tree_mask(visible, self.length, ints.shape[1], keys, self.device)
        if not self._numbered:
            return dict.fromkeys(self._windows, full) if len(self._windows) > 1 else full
        numbers = np.arange(keys)
        pending: list[int] = []
        for before, _, more in self._pending:
            pending[before:] = more.tolist()
        numbers[self.length : self.length + len(pending)] = pending
        positions, key_positions, masks = ints[1], send(numbers, self.device), {}
        for kind, size in self._windows.items():
            hide = {"sliding_attention": windowed, "chunked_attention": chunked}.get(kind)
            masks[kind] = full if hide is None else hide(full, positions, key_positions, size)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _real_rows(output: Output, rows: int, padded: int, last_only: bool) -> Output:
    """Cut the padding off, and with `last_only` all logits but the last row's, which an engine may have done."""
    first = rows - 1 if last_only and output.logits.shape[0] > 1 else 0
    if padded == rows and not first:
        return output
    return output.some(slice(first, rows), {layer: states[:rows] for layer, states in output.features.items()})


def _cloned(output: Output) -> Output:
    features = {layer: states.clone() for layer, states in output.features.items()}
    return output._replace(logits=output.logits.clone(), features=features)


def _keep_freed_memory() -> None:
    """Let the C library reuse the memory of a forward in the next one instead of giving it back to the system.

    glibc gives back what is larger than the largest block ever freed; a step of 60 nodes then pays for 600 page faults,
    or for none, as the heap happens to lie. Freeing one large block, never touched, settles it for the process.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def _new_cache(lm: CausalLM) -> KVCache:
    shapes, nets = _layer_shapes(lm), delta_nets(lm.model)
    if not nets:
        return (LedCache if lm.ranks else KVCache)(shapes)
    if lm.ranks or lm.buckets is not None:
        what = "is spread over processes" if lm.ranks else "pads its forwards to buckets"
        raise UnsupportedModelError(f"{lm.name} {what}, and has gated delta nets, which score a tree as it is")
    return DeltaCache(shapes, {layer: int(cast(Any, net).conv_kernel_size) for layer, net in nets.items()})


@torch.inference_mode()
def _layer_shapes(lm: CausalLM) -> list[LayerShape]:
    """Ask the model itself what each layer stores for a token: one through transformers' own cache."""
    cache = DynamicCache(config=lm.model.config.get_text_config()) if delta_nets(lm.model) else DynamicCache()
    inputs: dict[str, object] = {
        "input_ids": torch.zeros(1, 1, dtype=torch.long, device=lm.device),
        "position_ids": torch.zeros(1, 1, dtype=torch.long, device=lm.device),
        "past_key_values": cache,
        "use_cache": True,
    }
    if takes(lm.model, "features"):
        inputs["features"] = torch.zeros(1, 1, lm.hidden, dtype=lm.dtype, device=lm.device)
    try:
        lm.model(**inputs)
        none = torch.empty(1, 0, 1, 0, dtype=lm.dtype, device=lm.device)  # of a layer that keeps a state instead
        layers: list[Any] = [
            (getattr(layer, "keys", none), getattr(layer, "values", none)) for layer in cast(Any, cache.layers)
        ]
        return [LayerShape(k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device) for k, v in layers]
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} does not run with a key/value cache: {one_line(error)}"
        ) from error


@torch.inference_mode()
def check_tree_mask(lm: CausalLM) -> None:
    """Compare a small tree with plain causal forwards, commit a branch, go on from it; refuse what differs.

    The yardstick is how far the logits move when siblings do see each other, at the same positions: a model that
    ignores the mask is off by exactly that, rounding by a small part of it.
    """
    name = type(lm.model).__name__
    window = max(lm._windows.values(), default=0)
    length = min(window + 3 if 0 < window <= 128 else 4, lm.max_context - 8)
    ids = [(7 * i + 3) % lm.vocab for i in range(length + 6)]
    context, (r, a, b, c, d, e) = ids[:length], ids[length:]

    def plain(tokens: list[int]) -> Tensor:
        return lm.model(input_ids=torch.tensor([tokens], device=lm.device), use_cache=False).logits[0].double()

    try:
        left, right = plain([*context, r, a, c])[-3:], plain([*context, r, b, d, e])[-4:]
        lm.append(context)
        tree = Tree.of([r, a, b, c, d], [-1, 0, 0, 1, 2])
        mixed = lm.extend(tree.tokens, lm.length + tree.depths, np.tri(5, dtype=bool)).logits.double().clone()
        rows = lm.score(tree).logits.double()
        expected = torch.stack([left[0], left[1], right[1], left[2], right[2]])
        yardstick = (expected - mixed).abs().max()
        error = (rows - expected).abs().max()
        lm.commit([0, 2, 4])
        after = lm.extend(np.array([e]), np.array([lm.length]), np.ones((1, 1), dtype=bool)).logits.double()
        error = max(error, (after[0] - right[3]).abs().max())
    except Exception as why:
        told = cause(lm.model, ids, lm.device) or one_line(why)
        raise UnsupportedModelError(f"{name} cannot score a tree: {told}") from why
    finally:
        lm.reset()
        lm.work = Work()
    share = 0.02 if lm.dtype in (torch.float32, torch.float64) and not lm.quantised else 0.3
    if not error <= share * yardstick:
        if known := cause(lm.model, ids, lm.device):
            raise UnsupportedModelError(f"{name} cannot score a tree: {known}")
        raise UnsupportedModelError(
            f"{name} does not honour a tree mask with {lm.model.config.get_text_config()._attn_implementation!r} "
            f"attention: its logits over a small tree differ from plain forwards by {error:.2g} (a mask ignored: "
            f"{yardstick:.2g})"
        )
