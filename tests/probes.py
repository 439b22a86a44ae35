"""What a model is asked when it is wrapped takes longer than most tests of it: here it is asked once a kind."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def one_for_each_kind_of_model() -> Iterator[None]:
    """Probe the tree mask of a kind of model at its first wrapping only: it shows the same for all of the kind.

    What is refused is asked again. Models that differ in their weights or their code alone are of one kind.
    """
    from opt_tree.models import causal_lm, compiling

    probe, seen = causal_lm.check_tree_mask, set[Any]()
    assert compiling.check_tree_mask is probe, "a backend is probed whenever it is made"

    def first(lm: causal_lm.CausalLM) -> None:
        kind = type(lm.model), lm.dtype, lm.device, str(lm.model.config)
        if kind not in seen:
            probe(lm)
        seen.add(kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "check_tree_mask", first)
        yield
