"""Shape checks on the annotated calls of the library, by jaxtyping and beartype.

A check costs more than most of the calls that it is made on. Its outcome depends on types, dtypes and on which sizes
are equal. So a function is checked again only where one of these is new, in what it takes or in what it returns.
"""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, Self

import greenlet
import jaxtyping
import numpy as np
import torch
from beartype import BeartypeConf, BeartypeHintOverrides, beartype
from torch import Tensor

# An int may stand for a float, as for type checkers; beartype cannot resolve Self on a method decorated by itself.
_CONF = BeartypeConf(is_pep484_tower=True, hint_overrides=BeartypeHintOverrides({Self: Any}))
_jaxtyped = jaxtyping.jaxtyped


def checked(annotated: Any) -> Any:
    """Check the annotations of a function or class."""
    return beartype(conf=_CONF)(annotated)


class _Calls:
    """The calls whose shapes are being checked. jaxtyping keeps them by thread; sequences side by side take turns in
    one, each in a greenlet, and would find each other's.
    """

    @property
    def memo_stack(self) -> list[Any]:
        return vars(greenlet.getcurrent()).setdefault("memo_stack", [])


def install() -> None:
    """Check every call into opt_tree, which must not have been imported yet."""
    jaxtyping._storage._shape_storage = _Calls()
    jaxtyping.jaxtyped = jaxtyping._decorator.jaxtyped = remembering
    jaxtyping.install_import_hook("opt_tree", f"{__name__}.checked")


def remembering(annotated: Any = None, *, typechecker: Any) -> Any:
    """Stand in for `jaxtyping.jaxtyped`: a function remembers what it has been found to take and to return."""
    if annotated is None:
        return functools.partial(remembering, typechecker=typechecker)
    if not isinstance(annotated, types.FunctionType):
        return _jaxtyped(annotated, typechecker=typechecker)  # which asks here again for the functions inside
    if annotated.__globals__ is globals():
        return annotated  # inherited
    # Sizes that are computed, or given by a value, and types that a value decides on.
    always = any(mark in str(hint) for hint in annotated.__annotations__.values() for mark in ("{", "+", "Literal"))
    # A function defined in another one is made anew at every call of that one; its code is not.
    memory = _MEMORIES.setdefault(id(annotated.__code__), _Memory(annotated, typechecker))

    @functools.wraps(annotated)
    def call(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return annotated(*args, **kwargs)
        if torch.compiler.is_compiling():  # sizes are symbols: looking at one would fix it
            return memory.check(annotated)(*args, **kwargs)
        sizes: dict[int, int] = {}
        taken = (*[_looks(one, sizes) for one in args], *kwargs, *[_looks(one, sizes) for one in kwargs.values()])
        if always or (returned := memory.known.get(taken)) is None:
            result = memory.check(annotated)(*args, **kwargs)
            memory.known[taken] = {_looks(result, sizes)}
            return result
        result = annotated(*args, **kwargs)
        if (looks := _looks(result, sizes)) not in returned:
            memory.check(lambda *_, **__: result)(*args, **kwargs)
            returned.add(looks)
        return result

    return call


class _Memory:
    """What a function was found to take and, then, to return; and how that is found."""

    def __init__(self, annotated: types.FunctionType, typechecker: Any) -> None:
        self.annotated, self.typechecker = annotated, typechecker
        self.known: dict[Any, set[Any]] = {}
        self._next = threading.local()

    def check(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the same annotations, checked, that calls `answer`; good for one call."""
        self._next.answer = answer
        return self._checked

    @functools.cached_property
    def _checked(self) -> Callable[..., Any]:
        def given(*args: Any, **kwargs: Any) -> Any:
            return self._next.answer(*args, **kwargs)

        # Annotations can be names of the module that they stand in.
        code, names, inside = given.__code__, self.annotated.__globals__, given.__closure__
        stub = functools.update_wrapper(types.FunctionType(code, names, closure=inside), self.annotated)
        return _jaxtyped(stub, typechecker=self.typechecker)


_MEMORIES: dict[int, _Memory] = {}
"""By the identity of a code, which the memory keeps alive: equal codes can have other annotations."""


def _looks(value: Any, sizes: dict[int, int]) -> Any:
    """What a check depends on: types, and which sizes are equal. Only small sizes are written down in annotations.

    Of a list no more than its beginning: beartype, too, looks at one item of it.
    """
    if isinstance(value, Tensor | np.ndarray):
        shape = [size if size < 8 else sizes.setdefault(size, -1 - len(sizes)) for size in value.shape]
        return type(value), value.dtype, *shape
    if isinstance(value, tuple | list):
        length = None if isinstance(value, list) else len(value)
        return type(value), length, *[_looks(one, sizes) for one in value[:4]]
    return value if isinstance(value, type | bool) else type(value)
