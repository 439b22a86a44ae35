"""From an eager model to a compiled one: finds or makes its package, checks it, and says why where that fails.

Owns the decision: a backend is taken only when it computes what the eager one does. Files are
`backends/package_cache.py`'s, code is `backends/compiled.py`'s.
"""

import warnings
from collections.abc import Iterator
from types import NoneType
from typing import Any

import numpy as np
import torch

from opt_tree.backend import Inputs, takes
from opt_tree.backends.body import Body
from opt_tree.backends.canonical import NotCanonicalError
from opt_tree.backends.compiled import Compiled, CompileError, example
from opt_tree.backends.cuda_graphs import Captured
from opt_tree.errors import require
from opt_tree.models.canonical import check
from opt_tree.models.causal_lm import Buckets, CausalLM, UnsupportedModelError, check_tree_mask
from opt_tree.models.chain_lm import AnyLM, ChainLM
from opt_tree.models.positions import rope_border
from opt_tree.target import Work
from opt_tree.tree import Tree

_NOISE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""How far another backend's logits may be off, as a part of the largest (eager attention's softmax is float32 in any
dtype)."""
_ROW, _WHOLE = 0.3, 0.05
"""The same in narrower dtypes: as a part of a row, and of all of them, by their norms. A wrong row is off by 1."""


def compile_forwards(lm: AnyLM, make: bool = True, buckets: Buckets | None = None) -> bool:
    """Compute a model's forwards by compiled code from now on; return whether that is so.

    Its context is forgotten. A package is made once, in minutes, and kept in the user's cache (see
    `backends/package_cache.py`); with make=False only one that is there is taken. On CUDA forwards are captured as
    graphs instead, one for each shape of `buckets`, when it first comes or in `warm_up`; None: of those that it has,
    else of `Buckets()`.
    Where a model cannot be compiled it stays eager, and a warning says why in one line. The weights are those of now:
    a text that begins after a change of the model is computed eagerly, with a warning, until it is compiled again.
    """
    require((CausalLM, ChainLM), lm=lm)
    require(bool, make=make)
    require((Buckets, NoneType), buckets=buckets)
    if not isinstance(lm, CausalLM):
        if make:
            warnings.warn(f"{lm.name} is not compiled: it keeps a cache of its own", stacklevel=2)
        return False
    if isinstance(lm.backend, Compiled):
        lm.eager.packed.pack(lm.backend.packed)  # as it was before
    eager, before = lm.eager, lm.buckets
    lm.backend = eager
    lm.reset()
    try:
        if (why := _why_not(lm)) is not None:
            raise CompileError(why)
        if lm.device.type == "cuda":
            lm.buckets = buckets or before or Buckets()
            lm.backend = Captured(eager, lm.buckets.rows)
        else:  # one kind of layer means one mask, as `CausalLM` makes it
            lm.backend = Compiled(eager, lm.mask_kinds, make, lm.drafted is not None)
        _check_backend(lm)
        if lm.canonical:
            check(lm)
    except (CompileError, NotCanonicalError, OSError) as why:  # a full disk, a cache that cannot be written
        lm.backend, lm.buckets = eager, before
        if make:
            warnings.warn(f"{lm.name} is not compiled: {why}", stacklevel=2)
    if isinstance(lm.backend, Compiled):
        eager.packed.pack(False)  # its package has them
    return lm.backend is not eager


def _why_not(lm: CausalLM) -> str | None:
    """Why a model's forwards are neither captured nor compiled; None: they can be tried."""
    if lm.ranks is not None:
        return "it is spread over processes, and a graph is one process's"
    if what := "layers with a running state" if lm.recurrent else rope_border(lm.model) and "LongRoPE":
        return f"it has {what}, and a graph holds nothing that changes with the context"
    if lm.device.type not in ("cpu", "cuda"):
        return f"packages are for CPUs and graphs for CUDA, and it is on {lm.device.type}"
    if lm.eager.packed.in_blocks:
        return "canonical, it computes many rows in blocks here, and a package all at once (exact=False compiles)"
    return None


def captured_shapes(lm: AnyLM, nodes: int, context: int) -> list[tuple[int, int]]:
    """Return the shapes, rows and keys, that trees of up to so many nodes take behind so many tokens of context.

    Those of a model whose forwards are captured as graphs; none for every other one.
    """
    if not isinstance(lm, CausalLM) or not isinstance(lm.backend, Captured) or lm.buckets is None:
        return []
    fixed = lm.eager.rows_at_once
    rows, keys = lm.buckets.pad(fixed or nodes + 1, min(context, lm.max_context - nodes - 1))
    sizes = [size for size in lm.buckets.keys if size < keys] + [keys]
    return [(few, many) for few in lm.buckets.rows if (fixed or 1) <= few <= rows for many in sizes if few < many]


@torch.inference_mode()
def warm_up(lm: CausalLM, shapes: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Capture these shapes and yield each when it is there. Room for the longest is reserved first, so that none moves.

    The context is forgotten.
    """
    work = lm.work
    lm.reset()
    lm.cache.reserve(max((keys for _, keys in shapes), default=0))
    try:
        for rows, keys in shapes:
            lm.cache.length = keys - rows
            features = torch.zeros(rows, lm.hidden, dtype=lm.dtype, device=lm.device)
            given = features if takes(lm.model, "features") else None
            nothing = np.zeros(rows, dtype=np.int64)
            lm.extend(nothing, nothing, np.eye(rows, dtype=bool), given)
            lm.cache.pending = 0
            yield rows, keys
    finally:
        lm.reset()
        lm.work = work


@torch.inference_mode()
def _check_backend(lm: CausalLM) -> None:
    """Probe the backend and compare it with the eager one; raise CompileError where it computes something else."""
    backend = lm.backend
    if not takes(lm.model, "features"):
        try:
            check_tree_mask(lm)
        except UnsupportedModelError as error:
            raise CompileError(str(error)) from error
    try:
        found = _answers(lm)
        lm.backend = lm.eager
        expected = _answers(lm)
    finally:
        lm.backend = backend
        lm.reset()
        lm.work = Work()
    _check_close(lm, found, expected, "its compiled logits")
    if isinstance(backend, Compiled):
        _check_lanes(lm, backend)


def _check_close(lm: CausalLM, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise CompileError for more than rounding. In a narrow dtype single logits are far off by it."""
    off, size = (found - expected).abs().max(), expected.abs().max()
    limit = None if lm.quantised else _NOISE.get(lm.dtype)
    if limit is not None:
        close = off <= limit * size
    else:
        rows, whole = (found - expected).norm(dim=-1) <= _ROW * expected.norm(dim=-1), (found - expected).norm()
        close = rows.all() and whole <= _WHOLE * expected.norm()
    if not close:
        raise CompileError(f"{what} are off by {off:.2g}, where the largest is {size:.2g}")


def _check_lanes(lm: CausalLM, backend: Compiled) -> None:
    """Compare a forward of three lanes, of another length each, with the body as it is: what is said and written.

    The lanes' contexts are the model's own rows: on made-up ones a deep model in a narrow dtype says anything.
    """
    body, numbers = Body(lm.model, backend.traced), torch.Generator().manual_seed(0)
    traced = example(lm.model, lm.cache.shapes, backend.kinds, lanes=3)
    ints, mask, views = traced["ints"], traced["mask"], traced["kv"]

    def filled(ints: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        ints[0] = torch.randint(lm.vocab, ints[0].shape, generator=numbers)
        own = None
        if "features" in traced:
            own = torch.randn(*ints.shape[1:], lm.hidden, generator=numbers).to(lm.dtype)
        return ints, {kind: seen for kind in mask} if isinstance(mask, dict) else seen, own

    rows, begin = ints.shape[2], int(ints[1].min())
    before = torch.arange(begin).expand(3, 3, begin).clone()
    causal = torch.ones(begin + rows, begin + rows, dtype=torch.bool).tril().expand(3, 1, -1, -1).clone()
    context, seen, given = filled(before, causal[:, :, :begin, :begin])
    body(context, seen, views, given)
    again = [view.clone() for view in views]
    for lane in range(3):  # a lane that is shorter sees less
        causal[lane, :, begin:, begin - 9 * lane : begin] = False
    ints, seen, given = filled(ints, causal[:, :, begin:].contiguous())
    found = backend.call(Inputs(ints, seen, features=given), views)
    expected = body(ints, seen, again, given)
    _check_close(lm, found.logits.double(), expected[0].double(), "its compiled logits of several lanes")
    last = backend.call(Inputs(ints, seen, features=given, last_only=True), views).logits[:, -1:]
    _check_close(lm, last.double(), expected[0][:, -1:].double(), "its compiled logits of the last row")
    for view, one in zip(views, again, strict=True):
        _check_close(lm, view.double(), one.double(), "the rows that its compiled forward of several lanes writes")


def _answers(lm: CausalLM) -> torch.Tensor:
    """Logits of a context that outgrows the cache's first capacity, of a tree behind it, and after a kept path."""
    tokens = [(7 * i + 3) % lm.vocab for i in range(min(300, lm.max_context - 8))]
    tree = Tree.of(tokens[:5], [-1, 0, 0, 1, 2])
    states = None
    if takes(lm.model, "features"):
        states = torch.randn(300, lm.hidden, generator=torch.Generator().manual_seed(0)).to(lm.device, lm.dtype)

    def given(begin: int, end: int) -> torch.Tensor | None:
        return None if states is None else states[begin:end]

    lm.reset()
    middle = len(tokens) * 2 // 3
    logits = [
        lm.append(tokens[begin:end], True, given(begin, end)).logits.clone()
        for begin, end in ((0, middle), (middle, len(tokens)))
    ]
    logits.append(lm.extend(tree.tokens, lm.length + tree.depths, tree.ancestors, given(0, 5)).logits.clone())
    lm.commit([0, 2, 4])
    logits.append(lm.append(tokens[:1], features=given(0, 1)).logits.clone())
    return torch.cat(logits).double()
