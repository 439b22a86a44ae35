"""Random numbers for what must not change a run, whenever and however often it is done: to judge held-out text."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_draws(seed: int) -> Iterator[None]:
    """Inside, torch draws as it does after this seed; behind it, as if nothing had been drawn."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
