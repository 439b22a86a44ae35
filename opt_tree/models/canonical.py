"""A canonical target: a token's logits are a function of the tokens before it alone, bit for bit, also in bfloat16.

Owns the switch and its check: whatever is computed beside a row (a tree of any shape, the rest of a prompt, other
lanes) and wherever its keys lie, its logits are those of one prefill. What does not pass is refused by name.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from opt_tree.backend import Inputs
from opt_tree.backends.body import BodyCache
from opt_tree.backends.canonical import DTYPES, NotCanonicalError, layers_seen, load_kernel, same_bits
from opt_tree.backends.compiled import Compiled
from opt_tree.backends.cuda_graphs import Captured
from opt_tree.errors import counted, require
from opt_tree.models.checked_once import check_once
from opt_tree.models.positions import rope_border
from opt_tree.tree import Tree

if TYPE_CHECKING:
    from opt_tree.models.causal_lm import CausalLM

_LENGTH, _LAST = 130, 8
"""Tokens of the prefill that all is compared with; of these the last are scored as one row and as a tree, too."""


def make_canonical(lm: Any, on: bool = True) -> None:
    """Compute a target's forwards canonically from now on, or as before. Its context is forgotten.

    In bfloat16 and float32. On a CPU the attention kernel is built once (five seconds) and kept where packages are; on
    CUDA it is Triton's, and every forward has 64 rows.
    Raises NotCanonicalError, and leaves the target as it was, where it does not pass `check`.
    """
    require(bool, on=on)
    if on == getattr(lm, "canonical", False):
        return
    if not hasattr(lm, "eager"):
        raise _no(lm, "it is scored path by path, from a cache of its own")
    if not on:
        _switch(lm, False)
        return lm.reset()
    if lm.device.type not in ("cpu", "cuda") or lm.dtype not in DTYPES:
        what = f"{str(lm.dtype).removeprefix('torch.')} on {lm.device.type}"
        raise NotCanonicalError(f"{lm.name} is not canonical in {what}: only in bfloat16 and float32 on a CPU or CUDA")
    if lm.ranks is not None:
        raise _no(lm, "it is spread over processes")
    if rope_border(lm.model) is not None:
        raise _no(lm, "its position factors change with the context (LongRoPE)")
    if lm.max_context < 4 * _LAST:
        raise _no(lm, f"{lm.max_context} tokens of context are too few")
    load_kernel(lm.device.type)
    _switch(lm, True)
    try:
        check_once(lm, check)
    except BaseException:
        _switch(lm, False)
        raise
    lm.not_canonical = ""


def _switch(lm: "CausalLM", on: bool) -> None:
    lm.eager.packed.make_canonical(on)
    if isinstance(lm.backend, Captured):
        lm.backend.forget()  # graphs hold the other one


def make_exact(lm: Any) -> None:
    """Make a target canonical where it can be, if it is in bfloat16 or quantised, on a CPU: what `load_pair` does.

    Where it cannot be, `lm.not_canonical` says why, and so does a warning.
    """
    coarse = lm.dtype == torch.bfloat16 or getattr(lm, "quantised", False)
    if lm.device.type != "cpu" or not coarse:
        return
    try:
        make_canonical(lm)
    except NotCanonicalError as why:
        lm.not_canonical = str(why)
        warnings.warn(f"{why}. A tree may change its text where two tokens are nearly equal", stacklevel=3)


class _Trial(NamedTuple):
    """A forward that has to give the bits of the prefill."""

    what: str
    run: Callable[[], Tensor]
    rows: list[int]
    """Of its logits, those that are compared, and with which tokens' of the prefill."""
    tokens: list[int]


def _no(lm: "CausalLM", why: str) -> NotCanonicalError:
    return NotCanonicalError(f"{lm.name} is not canonical: {why}")


@torch.inference_mode()
def check(lm: "CausalLM") -> None:
    """Compare one row, a prefill in uneven chunks, a tree and two lanes with one prefill. Forgets the context.

    Each form of linear layer is tried among up to 130 rows, too (`PackedWeights.uneven`).
    Raises NotCanonicalError with the first layer whose numbers differ in a bit.
    """
    work, fixed = lm.work, lm.eager.rows_at_once
    ids = [(7 * i + 3) % lm.vocab for i in range(min(fixed or _LENGTH, lm.max_context - _LAST))]
    try:
        before = layers_seen()
        expected = _prefill(lm, ids).clone()
        layers, seen = len(lm.cache.shapes), layers_seen() - before
        if lm.backend is lm.eager and seen < layers:
            attention = lm.model.config.get_text_config()._attn_implementation
            own = f"the others compute their own (it was loaded with {attention!r})"
            raise _no(lm, f"{seen} of its {layers} layers ask transformers' interface for 'sdpa' attention, {own}")
        if not fixed:
            _check_gelu(lm, ids)
        for number, trial in enumerate(_trials(lm, ids)):
            if not same_bits(trial.run()[trial.rows], expected[trial.tokens]):
                culprit = _culprit(lm, ids, number)
                first = "" if culprit is None else f", and {culprit} is the first layer to differ"
                raise _no(lm, f"{trial.what} has other logits than one prefill{first}")
        if lm.backend is lm.eager and (uneven := lm.eager.packed.uneven()) is not None:
            raise _no(lm, uneven)
        if fixed:
            return  # and sequences run one after the other
        one, two = (_lanes(lm, ids[: 3 * _LAST], lanes) for lanes in (1, 2))
        if not same_bits(two, one):
            raise _no(lm, "the second of two lanes has other logits than one alone")
    finally:
        lm.reset()
        lm.work = work


def _check_gelu(lm: "CausalLM", ids: list[int]) -> None:
    """Refuse torch's GELU of other widths than multiples of 64: the rest of a row is computed by other instructions,
    with other results in bfloat16 for few numbers, which the trials need not meet.
    """
    names = [name for name, module in lm.model.named_modules() if "gelu" in type(module).__name__.lower()]
    for name, rows in _record(lm, lambda: _prefill(lm, ids), [0]) if names else ():
        if name in names and rows.shape[-1] % 64:
            why = "columns, and torch computes GELU the same in all rows for multiples of 64 only"
            raise _no(lm, f"{name} has {rows.shape[-1]} {why}")


def _prefill(lm: "CausalLM", ids: list[int]) -> Tensor:
    lm.reset()
    return _appended(lm, ids)


def _appended(lm: "CausalLM", ids: list[int]) -> Tensor:
    return lm.append(ids, all_logits=True).logits


def _trials(lm: "CausalLM", ids: list[int]) -> Iterator[_Trial]:
    """Each is to be run before the next one is asked for, which prepares the context."""
    lm.reset()
    start = len(ids) - _LAST
    for begin, end in itertools.pairwise((0, 1, 3, start // 3, start)):
        chunk = ids[begin:end]
        tokens = list(range(begin, end))
        run = functools.partial(_appended, lm, chunk)
        yield _Trial(f"a prefill of {counted(len(chunk), 'row')}", run, [*range(len(chunk))], tokens)
    lm.cut(start - _LAST)
    yield _Trial("the last row of a prefill", lambda: lm.append(ids[start - _LAST : start]).logits, [-1], [start - 1])
    root = np.array(ids[start : start + 1]), np.array([start]), np.ones((1, 1), dtype=bool)
    yield _Trial("one row", lambda: lm.extend(*root).logits, [0], [start])
    # Each node of the path has a sibling before it: the path's rows and slots lie apart.
    tokens, parents, path = ids[start : start + 1], [-1], [0]
    for token in ids[start + 1 :]:
        parents += [path[-1], path[-1]]
        tokens += [(token + 1) % lm.vocab, token]
        path.append(len(tokens) - 1)
    tree = Tree.of(tokens, parents)
    yield _Trial("a tree", lambda: lm.score(tree).logits, path, list(range(start, len(ids))))


def _lanes(lm: "CausalLM", ids: list[int], lanes: int) -> Tensor:
    """Logits of a prefill in the last of some lanes; the others hold the text backwards."""
    places = torch.arange(len(ids))
    text = [ids[::-1]] * (lanes - 1) + [ids]
    ints = torch.stack([torch.tensor(text), *[places.expand(lanes, -1)] * 2])
    mask: Any = torch.ones(lanes, 1, len(ids), len(ids), dtype=torch.bool).tril()
    if lm.mask_kinds:
        mask = dict.fromkeys(lm.mask_kinds, mask)
    kv = [
        torch.zeros(lanes, shape.heads, len(ids), dim, dtype=shape.dtype)
        for shape in lm.cache.shapes
        for dim in (shape.key_dim, shape.value_dim)
    ]
    if isinstance(lm.backend, Compiled):
        return lm.backend.call(Inputs(ints, mask), kv).logits[-1]
    return lm.eager.forward(Inputs(ints, mask), BodyCache(kv, ints[2], len(ids))).logits[-1]


def _culprit(lm: "CausalLM", ids: list[int], number: int) -> str | None:
    """The first layer of a trial whose numbers are not those of the prefill; None: no layer can be watched."""
    expected = dict(_record(lm, lambda: _prefill(lm, ids), list(range(len(ids)))))
    for place, trial in enumerate(_trials(lm, ids)):
        if place < number:
            trial.run()
            continue
        for name, rows in _record(lm, trial.run, trial.rows):
            if name in expected and not same_bits(rows, expected[name][trial.tokens]):
                return name
        break
    return None


def _record(lm: "CausalLM", run: Callable[[], Tensor], rows: list[int]) -> list[tuple[str, Tensor]]:
    """What the modules of a model take in and give back in a forward, in order, as far as it has a row for each row.

    What a module takes in is what its parent's own code computed, so that it goes by the parent's name.
    """
    found: list[tuple[str, Tensor]] = []
    count: list[int] = []

    def keep(name: str, what: Any) -> None:
        if isinstance(what, tuple):
            what = next((one for one in what if isinstance(one, Tensor)), None)
        if isinstance(what, Tensor) and what.is_floating_point() and what.ndim > 1 and len(what) == 1:
            if what.shape[1] != count[0] and rows != [-1]:  # of the last row a module may be asked alone
                return
            found.append((name, what[0, rows].clone()))

    def counted(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        count[:] = [given["input_ids"].shape[1]]

    handles = [lm.model.register_forward_pre_hook(counted, with_kwargs=True)]
    for name, module in lm.model.named_modules():
        before, enters = f"{name.rpartition('.')[0]}, before {name}", module.register_forward_pre_hook
        handles += [
            enters(lambda _, args, given, name=before: keep(name, (*args, *given.values())), with_kwargs=True),
            module.register_forward_hook(lambda _, args, output, name=name: keep(name, output)),
        ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found
