"""Shape checks on the annotated calls of the library, by jaxtyping and beartype: `CHECK_SHAPES=1 python -m pytest ...`.

A check costs more than most of the calls that it is made on. So an ordinary run has none; `tests/test_shapes.py` runs
a few files again with them.
"""

from typing import Any, Self

import jaxtyping
from beartype import BeartypeConf, BeartypeHintOverrides, beartype

# An int may stand for a float, as for type checkers; beartype cannot resolve Self on a method decorated by itself.
_CONF = BeartypeConf(is_pep484_tower=True, hint_overrides=BeartypeHintOverrides({Self: Any}))


def checked(annotated: Any) -> Any:
    """Check the annotations of a function or class."""
    return beartype(conf=_CONF)(annotated)


def install() -> None:
    """Check every call into opt_tree, which must not have been imported yet."""
    jaxtyping.install_import_hook("opt_tree", f"{__name__}.checked")
