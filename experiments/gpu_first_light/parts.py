"""What is asked of a first GPU, part by part: each is a function from the place to rows of a table."""

import itertools
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from evaluation.command_line import Value
from evaluation.latency.forwards import Probe
from evaluation.run.baselines import InLoop, assistant_of, transformers_methods
from evaluation.run.inflate import inflate_pair
from evaluation.timing import Method, Timed, environment, interleave, step_figures
from experiments.gpu_first_light.options import SHAPES
from opt_tree import Buckets, CausalLM, Decoder, Generation, OptTree, Pair, load_pair, make_canonical
from opt_tree.core.errors import one_line
from opt_tree.decoding.presets import plain
from opt_tree.engines import Captured
from opt_tree.engines.canonical import NotCanonicalError
from opt_tree.models.named.places import cached

Row = dict[str, Value]

QUESTIONS = ("Why is the sky blue?", "What does the word lantern mean?", "Name three uses of a brick.")
ENGINES = ("eager", "captured")
OTHERS = ("transformers", "transformers, assisted", "transformers, prompt lookup")
DRY_SHAPES = ("256x13",)


@dataclass
class Place:
    """The machine, how much of everything is tried on it, and the pair that is loaded."""

    dry: bool
    chosen: tuple[str, ...] = ()
    """The shapes asked for; all, where none are."""
    _engines: dict[str, list[tuple[CausalLM, Captured]]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """A dry run takes a GPU, too, where there is one, or a pretended one (`tests/pretend`)."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def shapes(self) -> tuple[str, ...]:
        if self.dry or self.chosen:
            return DRY_SHAPES if self.dry else self.chosen
        return SHAPES if cached("smollm2") else tuple(shape for shape in SHAPES if shape != "smollm2")

    @property
    def buckets(self) -> Buckets:
        return Buckets((1, 8), (128,)) if self.dry else Buckets()

    @property
    def new_tokens(self) -> int:
        return 12 if self.dry else 128

    @property
    def context(self) -> int:
        """Tokens behind which forwards are timed: with 64 rows they fill the first bucket of keys."""
        return 64 if self.dry else 448

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second that a copy reads: what reading the weights of a forward cannot be faster than."""
        large = torch.zeros(256 if self.dry else 8192, 8192, device=self.device)
        return 2 * large.nbytes / self.seconds(large.clone, 3 if self.dry else 20)

    def pair(self, shape: str = "demo", dtype: str = "float32") -> Pair:
        """Load the embedded pair, its target inflated to a shape; or the public model and what drafts for it."""
        torch.backends.cuda.matmul.allow_tf32 = False
        pair = load_pair("smollm2" if shape == "smollm2" else "demo", dtype=dtype, device=self.device.type)
        pair = pair if shape in ("demo", "smollm2") else inflate_pair(pair, shape)
        pair.target.watch(pair.drafter.features)
        self._engines = {shape: [(lm, Captured(lm.eager, self.buckets.rows)) for lm in models_of(pair)]}
        return pair

    @contextmanager
    def engine(self, name: str) -> Iterator[None]:
        """Compute forwards of the pair loaded last by one engine or the other."""
        (models,) = self._engines.values()
        for lm, captured in models:
            lm.engine, lm.buckets = (captured, self.buckets) if name == "captured" else (lm.eager, None)
        try:
            yield
        finally:
            for lm, _ in models:
                lm.engine, lm.buckets = lm.eager, None

    def seconds(self, call: Callable[[], object], times: int) -> float:
        """The median time of a call, the device's work included."""
        found = []
        for _ in range(times + 2):
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            found.append(time.perf_counter() - begin)
        return statistics.median(found[2:])

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def models_of(pair: Pair) -> list[CausalLM]:
    return [lm for lm in (pair.target, *pair.drafter.models) if isinstance(lm, CausalLM)]


def machine(place: Place) -> list[Row]:
    """What a launch, a read-back, a copy and a product cost."""
    size = 256 if place.dry else 8192
    one, large = torch.zeros(256, device=place.device), torch.randn(size, size, device=place.device)
    half = large.to(torch.bfloat16)

    def launches() -> None:
        for _ in range(100):
            one.add_(1)

    times = 3 if place.dry else 20
    row: Row = {"device": str(environment(place.device)["device"]), "torch": torch.__version__}
    row["launch us"] = 1e4 * place.seconds(launches, times)
    row["read-back us"] = 1e6 * place.seconds(one.cpu, times)
    row["copy GB/s"] = 1e-9 * place.bandwidth
    row["bf16 product TFLOP/s"] = 2e-12 * size**3 / place.seconds(lambda: half @ half, times)
    return [row]


def tests(place: Place) -> list[Row]:
    """The tests that need a GPU."""
    if place.dry:
        return [{"tests": "left out of a dry run"}]
    files = ("tests/decoding/test_gpu.py", "tests/engines/test_canonical_cuda.py", "tests/evaluation/test_inflate.py")
    call = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", *files]
    done = subprocess.run(call, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:])
    return [{"tests": done.stdout.strip().splitlines()[-1]}]


def exact(place: Place) -> list[Row]:
    """Float32 texts: both engines, plain and by trees, against plain decoding on the CPU."""
    pair, here = place.pair(), load_pair("demo", dtype="float32", device="cpu")
    rows: list[Row] = []
    prompts = [pair.encode(question) for question in QUESTIONS]
    expected = [plain(here.target).generate(prompt, place.new_tokens).tokens for prompt in prompts]
    for name in ENGINES:
        with place.engine(name):
            for method, decoder in (("plain", plain(pair.target)), ("OPT-Tree", _trees(pair))):
                found = [decoder.generate(prompt, place.new_tokens).tokens for prompt in prompts]
                equal = sum(one == other for one, other in zip(found, expected, strict=True))
                rows.append({"engine": name, "method": method, "equal texts": f"{equal} of {len(prompts)}"})
                if equal < len(prompts):
                    raise RuntimeError(f"{name}, {method}: {equal} of {len(prompts)} texts are those of the CPU")
    return rows


def canonical(place: Place) -> list[Row]:
    """Bfloat16 with canonical arithmetic and without: tokens a second, texts of trees that are plain decoding's."""
    rows: list[Row] = []
    for shape, on in itertools.product(dict.fromkeys((place.shapes[0], place.shapes[-1])), (False, True)):
        pair = place.pair(shape, "bfloat16")
        try:
            make_canonical(pair.target, on)
        except NotCanonicalError as why:  # a dry run without Triton
            rows.append({"shape": shape, "canonical": one_line(why)})
            continue
        prompts = [pair.encode(question) for question in QUESTIONS]
        methods = {"plain": InLoop(plain(pair.target)), "OPT-Tree": InLoop(_trees(pair))}
        for name in ENGINES:
            with place.engine(name):
                for method in methods.values():  # a shape is captured when it first comes
                    method(prompts[0], place.new_tokens, 0)
                timings = interleave(methods, prompts, place.new_tokens)
            row: Row = {"shape": shape, "canonical": "yes" if on else "no", "engine": name}
            row |= {f"{method} tokens/s": timings.rate(method) for method in methods}
            equal = sum(one == other for one, other in zip(*map(timings.texts, methods), strict=True))
            rows.append(row | {"equal texts": f"{equal} of {len(prompts)}"})
            if on and equal < len(prompts):
                raise RuntimeError(f"{shape}, canonical, {name}: {equal} of {len(prompts)} texts are plain decoding's")
    return rows


def buckets(place: Place) -> list[Row]:
    """A forward of each bucket, eager and captured, against reading its weights; the first call makes the capture."""
    rows: list[Row] = []
    for shape in place.shapes:
        pair = place.pair(shape, "auto")
        for role, lm in zip(("target", "drafter"), models_of(pair), strict=False):
            probe = Probe(role, lm, role == "drafter" and bool(pair.drafter.features))
            for count in place.buckets.rows:
                row: Row = {"shape": shape, "model": role, "rows": count}
                for name in ENGINES:
                    with place.engine(name):
                        probe.fill(place.context)
                        row[f"{name}, first ms"] = 1000 * probe.time(count)
                        times = [probe.time(count) for _ in range(3 if place.dry else 20)]
                        row[f"{name} ms"] = 1000 * statistics.median(times)
                row["weights ms"] = 1000 * _weights(lm) / place.bandwidth
                rows.append(row)
    return rows


def steps(place: Place) -> list[Row]:
    """Where a step's time goes, and how often it waits for the device."""
    rows: list[Row] = []
    for shape in dict.fromkeys((place.shapes[0], place.shapes[-1])):
        pair = place.pair(shape, "auto")
        for name in ENGINES:
            with place.engine(name):
                prompt = pair.encode(QUESTIONS[0])
                _trees(pair).generate(prompt, place.new_tokens)
                generation = _trees(pair).generate(prompt, place.new_tokens)
                waits = _waits(_trees(pair), prompt) if place.device.type == "cuda" else None
            rows.append({"shape": shape, "engine": name, "waits/step": waits} | step_figures([generation]))
    return rows


def decoding(place: Place) -> list[Row]:
    """Tokens a second of OPT-Tree and of plain decoding with either engine, and of transformers, in turn."""
    rows: list[Row] = []
    for shape in place.shapes:
        pair = place.pair(shape, "auto")
        methods: dict[str, Method] = {}
        for name in ENGINES:
            for method, decoder in (("plain", plain(pair.target)), ("OPT-Tree", _trees(pair))):
                methods[f"{method}, {name}"] = _with(place, name, InLoop(decoder, stop=pair.stop, forget=True))
        methods |= transformers_methods(pair, assistant_of(pair.drafter))
        prompts = [pair.encode(question) for question in QUESTIONS[: 1 if place.dry else None]]
        for prompt in prompts:  # a shape is captured when it first comes
            for method in ("plain, captured", "OPT-Tree, captured"):
                methods[method](prompt, place.new_tokens, 0)
        timings = interleave(methods, prompts, place.new_tokens)
        for name in methods:
            row: Row = {"shape": shape, "method": name, "tokens/s": timings.rate(name)}
            others = ("plain, eager", "plain, captured", *OTHERS)
            row |= {
                f"x {other}": timings.rate(name) / timings.rate(other) if other in methods else None for other in others
            }
            equal = [a == b for a, b in zip(timings.texts(name), timings.texts("plain, eager"), strict=True)]
            rows.append(row | {"equal texts": f"{sum(equal)} of {len(equal)}"})
    return rows


def budgets(place: Place) -> list[Row]:
    """Captured forwards: what trees of other sizes bring, over plain decoding."""
    rows: list[Row] = []
    for shape in place.shapes:
        pair = place.pair(shape, "auto")
        prompts = [pair.encode(question) for question in QUESTIONS]
        methods = {"plain": InLoop(plain(pair.target), stop=pair.stop)}
        sizes = (7,) if place.dry else (7, 15, 31, 63, 127)
        for nodes, threshold in itertools.product(sizes, (0.2, 0.05)):
            decoder = Decoder(pair.target, pair.drafter, OptTree(nodes, threshold))
            methods[f"{nodes}, {threshold}"] = InLoop(decoder, stop=pair.stop)
        with place.engine("captured"):
            for prompt, method in itertools.product(prompts, methods.values()):
                method(prompt, place.new_tokens, 0)
            timings = interleave(methods, prompts, place.new_tokens)
        for name in methods:
            rate, generations = timings.rate(name), timings.generations(name)
            row: Row = {
                "shape": shape,
                "nodes, threshold": name,
                "tokens/s": rate,
                "x plain": rate / timings.rate("plain"),
            }
            rows.append(row | step_figures(generations))
    return rows


def _weights(lm: CausalLM) -> int:
    """Bytes of weights that a forward reads: all but the table of embeddings, of which it looks up rows."""
    output: Any = lm.model.get_output_embeddings()
    table: Any = lm.model.get_input_embeddings()
    read = {id(weight): weight.nbytes for weight in (*lm.model.parameters(), output.weight)}
    if table.weight is not output.weight:
        read.pop(id(table.weight))
    return sum(read.values())


def _trees(pair: Pair) -> Decoder:
    return Decoder(pair.target, pair.drafter, OptTree(15, 0.2))


def _with(place: Place, name: str, method: Method) -> Method:
    """A method whose forwards are computed by one engine."""

    def decode(prompt: list[int], limit: int, seed: int) -> Generation | Timed:
        with place.engine(name):
            return method(prompt, limit, seed)

    return decode


def _waits(decoder: Decoder, prompt: list[int]) -> float:
    """How often a step waits for the device, on average over a few."""
    taken, waits = decoder.steps(prompt, 64), []
    next(taken)
    for _ in range(5):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                next(taken)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing CUDA operation" in str(warning.message) for warning in caught))
    return statistics.mean(waits)


PARTS: dict[str, Callable[[Place], list[Row]]] = {
    "exact": exact,
    "machine": machine,
    "buckets": buckets,
    "decoding": decoding,
    "budgets": budgets,
    "steps": steps,
    "canonical": canonical,
    "tests": tests,
}
"""In order of value: a card that is taken away in the middle has answered what matters most."""
