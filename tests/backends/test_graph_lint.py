"""Which forwards a CUDA graph could hold: those that never read a tensor on the host. Found without a GPU.

A dispatch mode watches the model's call inside `CausalLM.run` in padded mode (the library's own building of the inputs
happens before it) for the operations that wait for a device: scalars read back, sizes that depend on values, tensors
made from literals. `.tolist()` on a CPU tensor does not pass through the dispatcher and is not seen.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, CONTEXT, build, prompt, random_tree, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from opt_tree.backends.body import Body
from opt_tree.backends.compiled import example
from opt_tree.models.causal_lm import Buckets, CausalLM

BUCKETS = Buckets(rows=(8,), keys=(64,))
_READS = ("_local_scalar_dense", "item", "nonzero", "lift_fresh", "unique", "masked_select", "repeat_interleave")
"""In inference mode an operation that is made of others, as `item` is, comes by its own name."""


class HostReads(TorchDispatchMode):
    """Counts the operations inside it that a graph capture would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if any(read in name for read in _READS):
            self.found[name] += 1
        # A boolean index has as many rows as it has True: the size is read back.
        if name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            self.found["boolean index"] += 1
        return func(*args, **(kwargs or {}))


def host_reads(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, context: int = 20) -> Counter[str]:
    """Score a tree behind a context, padded, and count the host reads inside the model's own call."""
    lm = CausalLM(model, BUCKETS)
    lm.append(prompt(context))
    reads, forward = HostReads(), model.forward

    def watched(**inputs: Any) -> Any:
        with reads:
            return forward(**inputs)

    monkeypatch.setattr(model, "forward", watched)
    lm.score(random_tree(6, seed=0, root=1))
    monkeypatch.undo()
    return reads.found


# Eager experts ask on the host which expert got any token.
READING = {"mixtral": {"nonzero", "is_nonzero", "item"}}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_body_reads_on_the_host(architecture):
    """The pure function that is compiled and captured: the cache's write is inside."""
    lm = CausalLM(tiny(architecture))
    inputs = example(lm.model, lm.cache.shapes, lm.mask_kinds)
    reads = HostReads()
    with torch.inference_mode(), reads:
        Body(lm.model, (-1,))(**inputs)
    assert set(reads.found) == READING.get(architecture, set())


def test_grouped_experts_read_nothing(monkeypatch):
    """What Mixtral runs by default; float64 has no grouped matrix product, float32 has."""
    config = ARCHITECTURES["mixtral"]()
    config._experts_implementation = "grouped_mm"
    assert not host_reads(build(config, dtype=torch.float32), monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_dtypes_in_use_read_nothing_either(dtype, monkeypatch):
    for architecture in ("llama", "gemma3", "phi3"):
        assert not host_reads(build(ARCHITECTURES[architecture](), dtype=dtype), monkeypatch), architecture


ROPES = {
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"original_max_position_embeddings": 64},
        False,
    ),
    "linear": ({"rope_type": "linear", "factor": 2.0}, {}, False),
    "yarn": ({"rope_type": "yarn", "factor": 2.0}, {"original_max_position_embeddings": CONTEXT // 2}, False),
    # The positive control: it asks on the host whether the longest position so far has been passed.
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, {}, True),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_kinds(kind, monkeypatch):
    rope, more, reads = ROPES[kind]
    config = ARCHITECTURES["llama"]()
    config.rope_parameters = {"rope_theta": 10000.0} | rope | more
    found = host_reads(build(config), monkeypatch)
    assert bool(found) == reads, dict(found)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_kind_of_read_is_seen(mode):
    x = torch.arange(4.0)
    reads = {
        "item": lambda: x.sum().item(),
        "float": lambda: float(x.sum()),
        "bool": lambda: bool(x.any()),
        "nonzero": lambda: x.nonzero(),
        "boolean index": lambda: x[x > 1],
        "a literal": lambda: torch.tensor([1.0, 2.0]),
        "masked_select": lambda: x.masked_select(x > 1),
    }
    with mode():
        for name, read in reads.items():
            with HostReads() as seen:
                read()
            assert seen.found.total() == 1, name
        with HostReads() as seen:
            x[torch.arange(2)] + x.masked_fill(x > 1, 0.0)[:2]
    assert not seen.found
