"""What a first GPU should answer, in one call of under five minutes.

    python -m experiments.gpu_first_light                  # all parts, in order of value a minute
    python -m experiments.gpu_first_light --parts exact,budgets --shapes smollm2,7b
    python -m experiments.gpu_first_light --dry-run        # the same code, small; on a CPU graphs are called

Nothing is downloaded: the embedded pair, as it is and inflated to the shapes of 1B and 7B models, and the public model
`smollm2` where it is on this machine already. After each part what is known so far is written to FILE.json, and as
tables to FILE.md; a part that fails says why, and the next one begins. `evaluation.latency`
times more trees on a GPU, and with `--compile` captured.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option

SHAPES = ("demo", "smollm2", "1b", "7b")
"""The embedded pair, the public model where it is on this machine, and the embedded pair inflated."""
ESTIMATES = {"exact": 40, "machine": 5, "budgets": 150, "canonical": 60}
"""Every part with its seconds, by what an H200 and an H100 took; layers are compiled in them. In order of value: a card
that is taken away in the middle has answered what matters most."""


@dataclass(frozen=True)
class Options:
    """What is tried, and where it is noted."""

    dry_run: bool = option(False, "with small sizes, also on a CPU: shows that all runs, its times mean nothing")
    parts: str = option(",".join(ESTIMATES), "comma list of parts")
    shapes: str = option("", f"comma list of targets; by default {','.join(SHAPES)}, those that are here")
    output: str = option("gpu_first_light", "writes this name with .json and .md")
    minutes: float = option(10.0, "no part is begun after this long")

    def __post_init__(self) -> None:
        for part in self.parts.split(","):
            if part not in ESTIMATES:
                raise ValueError(f"--parts: no part {part!r}; there are {', '.join(ESTIMATES)}")
        for shape in filter(None, self.shapes.split(",")):
            if shape not in SHAPES:
                raise ValueError(f"--shapes: no shape {shape!r}; there are {', '.join(SHAPES)}")


main = main_of("experiments.gpu_first_light", Options, __doc__, "experiments.gpu_first_light:attempt_all")
"""Returns 1 where a part failed."""

if __name__ == "__main__":
    sys.exit(main())

import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from evaluation.command_line import Value, table
from evaluation.run.baselines import InLoop, transformers_methods
from evaluation.timing import environment, interleave, step_figures
from experiments.inflate import inflate_pair
from opt_tree import Buckets, CausalLM, Decoder, OptTree, Pair, load_pair, make_canonical
from opt_tree.backends.canonical import NotCanonicalError
from opt_tree.backends.cuda_graphs import Captured
from opt_tree.errors import one_line
from opt_tree.models.named.places import cached
from opt_tree.system.files import write_text
from opt_tree.tools.on_device import on_device
from opt_tree.tools.presets import plain

Row = dict[str, Value]
QUESTIONS = ("Why is the sky blue?", "What does the word lantern mean?", "Name three uses of a brick.")
ENGINES = ("eager", "captured")


@dataclass(frozen=True)
class Place:
    """The machine, and how much of everything is tried on it."""

    dry: bool
    chosen: tuple[str, ...] = ()
    """The shapes asked for; all, where none are."""

    @property
    def device(self) -> torch.device:
        """A dry run takes a GPU, too, where there is one, or a pretended one (`tests/pretend`)."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def shapes(self) -> tuple[str, ...]:
        if self.dry:
            return ("256x13",)
        return self.chosen or tuple(shape for shape in SHAPES if shape != "smollm2" or cached("smollm2"))

    @property
    def new_tokens(self) -> int:
        return 12 if self.dry else 128

    def pair(self, shape: str = "demo", dtype: str = "float32") -> Pair:
        """Load the embedded pair, its target inflated to a shape; or the public model and what drafts for it."""
        torch.backends.cuda.matmul.allow_tf32 = False
        pair = load_pair("smollm2" if shape == "smollm2" else "demo", dtype=dtype, device=self.device.type)
        pair = pair if shape in ("demo", "smollm2") else inflate_pair(pair, shape)
        pair.target.watch(pair.drafter.features)
        return pair

    @contextmanager
    def captured(self, pair: Pair) -> Iterator[None]:
        """Inside, forwards of the pair are replayed as CUDA graphs."""
        buckets = Buckets((1, 8), (128,)) if self.dry else Buckets()
        models = [lm for lm in (pair.target, *pair.drafter.models) if isinstance(lm, CausalLM)]
        for lm in models:
            lm.backend, lm.buckets = Captured(lm.eager, buckets.rows), buckets
        try:
            yield
        finally:
            for lm in models:
                lm.backend, lm.buckets = lm.eager, None

    def backends(self, pair: Pair) -> Iterator[str]:
        """Yield the backends' names in turn, each while it computes the forwards of the pair."""
        yield "eager"
        with self.captured(pair):
            yield "captured"

    def seconds(self, call: Callable[[], object]) -> float:
        """The median time of a call, the device's work included."""
        found = []
        for _ in range(5 if self.dry else 22):
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            found.append(time.perf_counter() - begin)
        return statistics.median(found[2:])

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def machine(place: Place) -> list[Row]:
    """What a launch, a read-back, a copy and a product cost."""
    size = 256 if place.dry else 8192
    one, large = torch.zeros(256, device=place.device), torch.randn(size, size, device=place.device)
    half = large.to(torch.bfloat16)

    def launches() -> None:
        for _ in range(100):
            one.add_(1)

    row: Row = {"device": str(environment(place.device)["device"]), "torch": torch.__version__}
    row["launch us"] = 1e4 * place.seconds(launches)
    row["read-back us"] = 1e6 * place.seconds(one.cpu)
    row["copy GB/s"] = 2e-9 * large.nbytes / place.seconds(large.clone)
    row["bf16 product TFLOP/s"] = 2e-12 * size**3 / place.seconds(lambda: half @ half)
    return [row]


def exact(place: Place) -> list[Row]:
    """Float32 texts: both backends, plain and by trees, against plain decoding on the CPU."""
    pair, here = place.pair(), load_pair("demo", dtype="float32", device="cpu")
    rows: list[Row] = []
    prompts = [pair.encode(question) for question in QUESTIONS]
    expected = [plain(here.target).generate(prompt, place.new_tokens, stop=None).tokens for prompt in prompts]
    for name in place.backends(pair):
        for method, decoder in (
            ("plain", plain(pair.target)),
            ("OPT-Tree", _trees(pair)),
            ("OPT-Tree on the device", on_device(_trees(pair))),
        ):
            found = [decoder.generate(prompt, place.new_tokens, stop=None).tokens for prompt in prompts]
            equal = sum(one == other for one, other in zip(found, expected, strict=True))
            rows.append({"engine": name, "method": method, "equal texts": f"{equal} of {len(prompts)}"})
            if equal < len(prompts):
                raise RuntimeError(f"{name}, {method}: {equal} of {len(prompts)} texts are those of the CPU")
    return rows


def canonical(place: Place) -> list[Row]:
    """Captured bfloat16, canonical and not: tokens a second, texts of trees that are plain decoding's."""
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
        with place.captured(pair):
            for method in methods.values():  # a shape is captured when it first comes
                method(prompts[0], place.new_tokens, 0)
            timings = interleave(methods, prompts, place.new_tokens)
        row: Row = {"shape": shape, "canonical": "yes" if on else "no"}
        row |= {f"{method} tokens/s": timings.rate(method) for method in methods}
        equal = sum(one == other for one, other in zip(*map(timings.texts, methods), strict=True))
        rows.append(row | {"equal texts": f"{equal} of {len(prompts)}"})
        if on and equal < len(prompts):
            raise RuntimeError(f"{shape}, canonical: {equal} of {len(prompts)} texts are plain decoding's")
    return rows


def budgets(place: Place) -> list[Row]:
    """Captured forwards: what trees of other sizes bring over plain decoding, ours and that of transformers."""
    rows: list[Row] = []
    for shape in place.shapes:
        pair = place.pair(shape, "auto")
        prompts = [pair.encode(question) for question in QUESTIONS]
        methods: dict[str, Any] = {"plain": InLoop(plain(pair.target), stop=pair.stop)}
        sizes = (7,) if place.dry else (7, 15, 31, 63, 127)
        for nodes, threshold in itertools.product(sizes, (0.2, 0.05)):
            decoder = Decoder(pair.target, pair.drafter, OptTree(nodes, threshold))
            methods[f"{nodes}, {threshold}"] = InLoop(decoder, stop=pair.stop)
        for nodes in sizes:  # steps of the host beside steps that are one graph, or a graph a layer until a stop
            decoder = Decoder(pair.target, pair.drafter, OptTree(nodes, 0, 6))
            device = on_device(decoder)
            if device.why is None:
                methods[f"{nodes}, six layers"] = InLoop(decoder, stop=pair.stop)
                methods[f"{nodes}, six layers, one graph"] = InLoop(device, stop=pair.stop)
                stopping = on_device(Decoder(pair.target, pair.drafter, OptTree(nodes, 0.2)))
                methods[f"{nodes}, 0.2, a graph a layer"] = InLoop(stopping, stop=pair.stop)
        theirs = transformers_methods(pair, None)["transformers"]
        with place.captured(pair):
            for prompt, method in itertools.product(prompts, methods.values()):
                method(prompt, place.new_tokens, 0)
            timings = interleave(methods | {"transformers": theirs}, prompts, place.new_tokens)
        for name in (*methods, "transformers"):
            rate = timings.rate(name)
            row: Row = {"shape": shape, "nodes, threshold": name, "tokens/s": rate}
            row["x plain"] = rate / timings.rate("plain")
            rows.append(row if name == "transformers" else row | step_figures(timings.generations(name)))
    return rows


def _trees(pair: Pair) -> Decoder:
    return Decoder(pair.target, pair.drafter, OptTree(15, 0.2))


PARTS: dict[str, Callable[[Place], list[Row]]] = {
    "exact": exact,
    "machine": machine,
    "budgets": budgets,
    "canonical": canonical,
}


def attempt(part: str, place: Place) -> dict[str, Any]:
    """Run a part and print its table; where it fails, say so: the others are still worth their minutes."""
    try:
        rows = PARTS[part](place)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(f"{part} failed: {found['error']}\n", flush=True)
        return found
    print(f"{part}\n{table(rows)}\n", flush=True)
    return {"rows": rows}


def write(name: str, found: dict[str, dict[str, Any]], place: Place) -> None:
    """Write what is known so far, whole, in both forms."""
    figures = {"dry_run": place.dry, "environment": environment(place.device), "parts": found}
    lines = [f"{'A dry run: its times mean nothing. ' if place.dry else ''}{figures['environment']}", ""]
    for part, what in found.items():
        lines += [f"## {part}: {PARTS[part].__doc__}", "", "```", what.get("error") or table(what["rows"]), "```", ""]
    write_text(Path(f"{name}.json"), json.dumps(figures, indent=1) + "\n")
    write_text(Path(f"{name}.md"), "\n".join(lines))


def attempt_all(options: Options) -> int:
    """Attempt each part, and write after each; return 1 where one failed, else 0."""
    if not options.dry_run and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; --dry-run tries the code on a CPU")
    place = Place(options.dry_run, tuple(filter(None, options.shapes.split(","))))
    begin = time.perf_counter()
    chosen = options.parts.split(",")
    found: dict[str, dict[str, Any]] = {}
    if options.dry_run:
        torch.set_num_threads(1)
    else:
        print(f"about {sum(ESTIMATES[part] for part in chosen) / 60:.0f} minutes, by a guess", flush=True)
    for part in tqdm(chosen, desc="first light", unit="part", leave=False, disable=None):
        started = time.perf_counter()
        if started - begin > 60 * options.minutes:
            found[part] = {"error": f"not begun: {options.minutes:g} minutes were over"}
        else:
            found[part] = attempt(part, place)
        found[part]["seconds"] = round(time.perf_counter() - started, 1)
        write(options.output, found, place)
    print(f"written: {options.output}.json, {options.output}.md")
    return int(any("trace" in what for what in found.values()))
