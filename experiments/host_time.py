"""What a step costs the host beside its forwards: the host's steps, those that stay on the device, and captured ones.

    python -m experiments.host_time [--nodes 8,60,127]

Forwards return at once, whatever they are asked: what is left of a step is the host's. `operations` are those of torch
that launch a kernel on a device; `reads` bring a number to the host. Both are counts, alike on every machine. Time is
the process's on this CPU, which also computes what a device would, over a small vocabulary; the median over rounds.
A captured step is copies of what it begins with and one replay, which does nothing here and says what it said before.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import check_bounds, main_of, option


@dataclass(frozen=True)
class Options:
    """The trees, and how long is measured."""

    nodes: str = option("8,60,127", "comma list of budgets")
    layers: int = option(6, "layers of a tree", least=3)
    vocab: int = option(64, "tokens of the vocabulary", least=2)
    steps: int = option(20, "of each text", least=1)
    rounds: int = option(5, "texts of each kind, in turn", least=1)
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        check_bounds(self)


main = main_of("experiments.host_time", Options, __doc__, "experiments.host_time:run")

if __name__ == "__main__":
    sys.exit(main())

import statistics
import time
from itertools import islice
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from evaluation.command_line import Value, machine_of, table, whole_numbers
from evaluation.timing import environment
from opt_tree import CausalLM, CausalLMDrafter, Decoder, OptTree
from opt_tree.backend import Inputs
from opt_tree.backends.device_decoder import DeviceDecoder
from opt_tree.backends.device_step import DeviceStep
from opt_tree.backends.tensor_step import Given, Layers, Left, Shape, whole
from opt_tree.target import Output
from opt_tree.tools.on_device import on_device

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select")
_PROMPT = list(range(2, 12))
_ROWS = 512


class Counter(TorchDispatchMode):
    """Counts operations that are no views, and those that read."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        self.reads += name in READS
        self.operations += not func.is_view and name not in ("detach", "alias", "lift_fresh", "empty")
        return func(*args, **(kwargs or {}))


def answers_at_once(lm: CausalLM, seed: int) -> CausalLM:
    """Have a model answer any forward with the same random rows, which are there already."""
    logits = 3 * torch.randn(1, _ROWS, lm.vocab, generator=torch.Generator().manual_seed(seed))

    def forward(inputs: Inputs, cache: Any) -> Output:
        return Output(logits[:, : inputs.numbers.shape[2]])

    lm.backend.forward = forward  # type: ignore[method-assign]
    return lm


class Replayed(DeviceStep):
    """What a captured step is for the host: copies to where a graph reads, and what the graph left."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.known: dict[Shape, tuple[Given, Left]] = {}

    def pays(self, shape: Shape) -> bool:
        return shape in self.known

    def launch(self, shape: Shape, given: Given) -> Layers:
        if shape not in self.known:
            self.known[shape] = given, whole(super().launch(shape, given))
        buffers, left = self.known[shape]
        for buffer, part in zip(buffers, given, strict=True):
            if buffer is not None and part is not None:
                buffer.copy_(part)
        yield from ()  # at threshold 0 no flag is looked at
        return left


def replayed(decoder: DeviceDecoder) -> DeviceDecoder:
    """Have a decoder's steps replayed."""
    step = decoder._tensor_step()
    decoder._step = Replayed(step.target, step.drafter, step.growth, step.layers)
    return decoder


def decoders_of(nodes: int, options: Options) -> dict[str, Decoder]:
    """A decoder of each kind over models of no size."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=options.vocab, **sizes))
    target, small = (answers_at_once(CausalLM(model, probe=False), seed) for seed in (1, 2))
    host = Decoder(target, CausalLMDrafter(small), OptTree(nodes, 0.0, options.layers))
    return {"host": host, "device": on_device(host), "captured": replayed(on_device(host))}


def measured(decoder: Decoder, options: Options) -> tuple[float, int, int]:
    """Milliseconds of the process, operations and reads, each a step, over the first steps of a text."""
    steps = decoder.steps(_PROMPT, stop=None)
    next(steps)
    begin = time.process_time()
    list(islice(steps, options.steps))
    spent = time.process_time() - begin
    with Counter() as counter:
        taken = len(list(islice(steps, options.steps)))
    return 1000 * spent / options.steps, counter.operations // taken, counter.reads // taken


def run(options: Options) -> dict[str, Any]:
    """Measure both kinds in turn; print and return a row for each budget and kind."""
    rows: list[dict[str, Value]] = []
    for nodes in whole_numbers(options.nodes):
        decoders = decoders_of(nodes, options)
        found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in decoders}
        for _ in range(options.rounds):
            for name, decoder in decoders.items():
                found[name].append(measured(decoder, options))
        for name, some in found.items():
            spent, (_, operations, reads) = statistics.median(one[0] for one in some), some[-1]
            rows.append({"nodes": nodes, "steps": name, "ms a step": spent, "operations": operations, "reads": reads})
    place = environment(torch.device("cpu"))
    print(machine_of(place), table(rows), sep="\n")
    return {"environment": place, "rows": rows}
