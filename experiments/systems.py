"""Systems of five papers, each whole, beside OPT-Tree alone on the same prompts with as many nodes and layers.

    python -m experiments.systems --systems rasd --bench-name heldout --limit 24 --dtype float32

A system is a preset and the drafter that it is made for. OPT-Tree is given the system's mean number of nodes, rounded,
and its most layers, and drafts every one of them; beside RASD also the layers alone that its model drafts. Counts do
not depend on the machine's load. --rounds adds the clock: every method decodes each prompt in turn, so many times, and
the medians count; they tell something on an idle machine alone. Intervals are over prompts (95 %, resampled).
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

from evaluation.command_line import main_of, option
from evaluation.run.options import Asked

NAMES = ("rasd", "adaeagle", "eesd", "parallelspec", "delayed")


@dataclass(frozen=True)
class Options(Asked):
    """What is decoded."""

    drafter: str | None = option(None, "instead of the drafter that each system is made for")
    systems: str = option(",".join(NAMES), "which of them, a comma list")
    max_new_tokens: int = option(64, "new tokens a question, at most", least=1)
    length: str = option("demo", "folder of AdaEAGLE's predictor, or demo")
    trees: str | None = option(
        None, "folder of the selector of delayed trees; by default that system stands without it"
    )
    rounds: int = option(0, "say tokens a second, too: medians of so many rounds, in turn with plain decoding", least=0)

    embedded: ClassVar[str] = "eagle:demo"

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", self.drafter)
        super().__post_init__()
        if unknown := sorted(set(self.systems.split(",")) - set(NAMES)):
            raise ValueError(f"there is no system {unknown[0]}; there are {', '.join(NAMES)}")


main = main_of("experiments.systems", Options, __doc__, "experiments.systems:run")

if __name__ == "__main__":
    sys.exit(main())

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tqdm import tqdm

from evaluation.answers.metrics import between, estimate, times_as_fast
from evaluation.command_line import table
from evaluation.run.baselines import InLoop
from evaluation.run.models import Material, gather
from evaluation.timing import Timings, interleave
from opt_tree import Decoder, Generation, OptTree, Sampling, Static
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.traversal_verification import traversal
from opt_tree.tools.pair import Pair
from opt_tree.tools.presets import make_preset, plain

Make = Callable[[Pair], Decoder]
LENGTHS = range(1, 7)
PLAIN = "plain decoding"


@dataclass(frozen=True)
class System:
    """What a paper describes, and what stands beside it besides OPT-Tree."""

    drafter: str
    presets: tuple[str, ...]
    beside: Mapping[str, Make]
    temperature: float = 0.0
    drafted: int | None = None
    """Layers that the model drafts, where a tree has more."""


def chains(pair: Pair, length: int) -> Decoder:
    return Decoder(pair.target, pair.drafter, Static.chain(length))


CHAINS: dict[str, Make] = {f"chain of {length}": functools.partial(chains, length=length) for length in LENGTHS}


def drawn(name: str, policy: Any, verifier: Any) -> dict[str, Make]:
    return {name: lambda pair: Decoder(pair.target, pair.drafter, policy, verifier)}


def systems_of(options: Options) -> dict[str, System]:
    """The systems by name, with the trained parts that were named."""
    selected = () if options.trees is None else (f"delayed_selected:{options.trees}",)
    eagle2: dict[str, Make] = {"EAGLE-2": lambda pair: Decoder(pair.target, pair.drafter.bare, Eagle2())}
    return {
        "rasd": System("rasd:eagle:demo+store:demo", ("rasd",), eagle2, drafted=Eagle2().max_depth),
        "adaeagle": System("eagle:demo", (f"adaeagle:{options.length}", f"adaeagle_ddd:{options.length}"), CHAINS),
        "eesd": System("exit:demo", ("eesd", "eesd_beta"), CHAINS),
        "parallelspec": System("parallelspec:demo", ("parallelspec_eagle", "parallelspec_medusa"), {}),
        "delayed": System(
            "lm:demo",
            (*selected, "delayed"),
            drawn("4 branches of 2, SpecInfer's rule", Sampled.chains(4, 2), multi_round)
            | drawn("3 branches of 5, SpecInfer's rule", Sampled.chains(3, 5), multi_round)
            | drawn("3 branches of 5, traversal", Sampled.chains(3, 5), traversal)
            | drawn("trunk of 2, 3 branches of 4, traversal", Sampled.delayed(), traversal)
            | drawn("chain of 2, SpecInfer's rule", Sampled.chain(2), multi_round)
            | drawn("chain of 4, SpecInfer's rule", Sampled.chain(4), multi_round),
            1.0,
        ),
    }


def model_of(pair: Pair) -> Any:
    """The drafter of OPT-Tree alone: the model, without what is retrieved beside it."""
    return getattr(pair.drafter, "drafter", pair.drafter)


def run(options: Options) -> dict[str, Any]:
    """Print a table for each system; return its lines."""
    found: dict[str, Any] = {}
    for name in options.systems.split(","):
        system = systems_of(options)[name]
        spec = options.own or system.drafter  # type: ignore[attr-defined]
        given = gather(replace(options, drafter=spec))
        rows = measure(given, system, options)
        found[name] = rows
        print(f"{name}: {spec}, {len(given.chosen)} texts of {given.questions.name}, temperature {system.temperature}")
        print(table(rows))
    return found


@dataclass(frozen=True)
class Texts:
    """What is decoded."""

    pair: Pair
    prompts: Sequence[list[int]]
    length: int
    """New tokens, at most."""
    temperature: float

    def answers(self, decoder: Decoder) -> list[Generation]:
        """Decode all prompts, each with a seed of its own; a drafter begins anew."""
        if decoder.drafter is not None:
            decoder.drafter.clear()
        sampling = Sampling(self.temperature)
        return [
            decoder.generate(prompt, self.length, sampling, self.pair.stop, seed=seed)
            for seed, prompt in enumerate(tqdm(self.prompts, leave=False, disable=None))
        ]

    def clock(self, decoders: Mapping[str, Decoder], rounds: int) -> Timings:
        """The time that every method takes, in turn, so many times, with one seed."""
        sampling = Sampling(self.temperature)
        methods = {name: InLoop(one, sampling, self.pair.stop, forget=True) for name, one in decoders.items()}
        return interleave(methods, self.prompts, self.length, rounds)


def measure(given: Material, system: System, options: Options) -> list[dict[str, Any]]:
    """Decode with every method; OPT-Tree behind each preset, by its sizes."""
    pair = given.pair
    texts = Texts(pair, given.first_prompts(), options.max_new_tokens, system.temperature)
    decoders = {PLAIN: plain(pair.target)}
    answers = {PLAIN: texts.answers(decoders[PLAIN])}

    def add(name: str, decoder: Decoder) -> Sequence[Generation]:
        if name not in answers:
            decoders[name], answers[name] = decoder, texts.answers(decoder)
        return answers[name]

    for spec in tqdm(system.presets, desc="systems", leave=False, disable=None):
        found = add(spec.partition(":")[0], make_preset(spec, pair.target, pair.drafter))
        nodes = round(np.mean([step.tree.nodes for answer in found for step in answer.steps]))
        deepest = max(int(step.tree.depths.max()) for answer in found for step in answer.steps)
        for layers in sorted({deepest, system.drafted or deepest}):
            alone = Decoder(pair.target, model_of(pair), OptTree(nodes, 0.0, layers))
            add(f"OPT-Tree, {nodes} nodes, {layers} layers", alone)
    for name, make in tqdm(system.beside.items(), desc="beside", leave=False, disable=None):
        add(name, make(pair))
    rows = [line(name, found, answers[PLAIN]) for name, found in answers.items() if name != PLAIN]
    if options.rounds:
        timings = texts.clock(decoders, options.rounds)
        for row in rows:
            times, interval = times_as_fast(timings.spent(row["method"]), timings.spent(PLAIN))
            row |= {"tokens/s": timings.rate(row["method"]), "x plain": times}
            row["x plain, 95 %"] = between(interval)
    return rows


def line(name: str, answers: Sequence[Generation], baseline: Sequence[Generation]) -> dict[str, Any]:
    """The figures of a method: means over steps."""
    counts = [(len(answer.tokens), len(answer.steps)) for answer in answers]
    rate, interval = estimate(counts, lambda sums: sums[..., 0] / sums[..., 1])
    steps = [step for answer in answers for step in answer.steps]
    equal = sum(answer.tokens == other.tokens for answer, other in zip(answers, baseline, strict=True))
    return {
        "method": name,
        "tokens/step": rate,
        "95 %": between(interval),
        "nodes/step": float(np.mean([step.tree.nodes for step in steps])),
        "draft forwards/step": float(np.mean([step.draft_forwards for step in steps])),
        "= plain": f"{equal}/{len(answers)}",
    }
