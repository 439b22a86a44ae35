"""How fast trees decode on this machine, and where a step's time goes.

    python -m evaluation.latency --nodes 8,16,24,60,auto --thresholds 0.45 --bench-name heldout --limit 10
    python -m evaluation.latency --nodes 6,15 --lanes 1,2,4,8

Decodes the questions' first turns with trees of several budgets, in turn with plain decoding and transformers' own;
`same text` counts those that are plain decoding's. On a GPU --compile captures graphs.
With --lanes so many questions are decoded side by side, and transformers' way is the padded batch.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option, whole_numbers
from evaluation.run.options import MOST_LANES, Asked


@dataclass(frozen=True)
class Options(Asked):
    """What is decoded, how."""

    nodes: str = option("8,16,60,auto", "comma list of budgets, auto among them or not")
    lanes: str | None = option(None, "comma list: so many questions side by side")
    thresholds: str = option("0.2", "comma list, each tried at each budget")
    max_new_tokens: int = option(96, "new tokens a question, at most", least=1)
    on_device: bool = option(False, "each tree also by steps that the host reads once (docs/device_step.md)")
    assistant: str | None = option(
        None, "causal LM that assists transformers; by default the draft model, or the embedded one"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lanes and min(whole_numbers(self.lanes, MOST_LANES)) < 1:
            raise ValueError(f"--lanes must be at least 1 each, got {self.lanes}")
        if self.lanes and self.on_device:
            raise ValueError("--lanes decodes side by side, which takes the host's steps: leave out --on-device")


main = main_of("evaluation.latency", Options, __doc__, "evaluation.latency:run")

if __name__ == "__main__":
    sys.exit(main())

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from evaluation.answers.metrics import times_as_fast, with_interval
from evaluation.command_line import counted, machine_of, numbers, table
from evaluation.run.baselines import InLoop, transformers_batch, transformers_methods
from evaluation.run.models import gather, load_assistant, made_of
from evaluation.run.options import AUTO
from evaluation.timing import BASELINES, Method, Row, Timings, contested, environment, interleave, overview
from opt_tree import Decoder, Generation, OptTree, Pair, Step, TreePolicy, generate_batch
from opt_tree.policy import MOST_NODES
from opt_tree.tools.on_device import on_device
from opt_tree.tools.presets import plain
from opt_tree.tools.step_costs import auto

Trees = Mapping[str, TreePolicy]


def run(options: Options) -> dict[str, Any]:
    """Decode the questions' first turns with every tree and by every baseline; print and return the tables."""
    material = gather(options)
    pair, prompts = material.pair, material.first_prompts()
    trees, auto_rows = trees_of(options, pair), []
    if options.lanes:
        rows = in_lanes(pair, trees, prompts, options.max_new_tokens, whole_numbers(options.lanes))
    else:
        others = transformers_methods(pair, load_assistant(options, options.assistant, pair))
        methods = methods_of(pair, trees, options.on_device)
        methods |= {name: others[name] for name in BASELINES if name in others}
        if options.compile and pair.target.device.type == "cuda":  # a graph is captured when its shape first comes
            for prompt, method in itertools.product(prompts, methods.values()):
                method(prompt, options.max_new_tokens, 0)
        timings = interleave(methods, prompts, options.max_new_tokens)
        rows, auto_rows = overview(timings), auto_over_others(timings)
    place = environment(pair.target.device)
    target = made_of(pair) or f"target {pair.target.name}, {pair.target.size}"
    print(f"{target}; drafter {options.drafter}; {machine_of(place)}")
    questions = f"{counted(len(prompts), 'question')} of {material.questions.name}"
    print(f"{questions}, greedy, {options.max_new_tokens} new tokens at most, in turn")
    print(table(rows))
    if busy := contested():
        print(busy)
    if auto_rows:
        print(table(auto_rows))
    return {"environment": place, "rows": rows, "auto": auto_rows}


def trees_of(options: Options, pair: Pair) -> Trees:
    """Every tree that --nodes and --thresholds ask for, by its name."""
    budgets = options.nodes.split(",") if options.nodes else []
    fixed = [budget for budget in budgets if budget != AUTO]
    sizes = whole_numbers(",".join(fixed), MOST_NODES) if fixed else ()
    pairs = [(n, t) for n in sizes for t in numbers(options.thresholds)]
    trees: dict[str, TreePolicy] = {f"OPT-Tree {n}/{t:g}": OptTree(n, t) for n, t in pairs}
    return trees | ({AUTO: auto(pair.target, pair.drafter)} if AUTO in budgets else {})


def methods_of(pair: Pair, trees: Trees, twice: bool = False) -> dict[str, Method]:
    """The loop with every tree, also on the device if `twice`, and with none; no drafter learns from prompts."""
    decoders = {name: Decoder(pair.target, pair.drafter, tree) for name, tree in trees.items()}
    if twice:
        fixed = {name: on_device(decoder) for name, decoder in decoders.items() if name != AUTO}
        if why := next((one.why for one in fixed.values() if one.why), None):
            raise ValueError(f"--on-device: {why}")
        decoders |= {f"{name}, on the device": decoder for name, decoder in fixed.items()}
    decoders["plain"] = plain(pair.target)
    return {name: InLoop(decoder, stop=pair.stop, forget=True) for name, decoder in decoders.items()}


def auto_over_others(timings: Timings) -> list[Row]:
    """How many times as fast `auto` is as the best fixed tree, chosen afterwards, and as plain decoding; by two clocks.

    With 95 % intervals over prompts, both methods' runs on a prompt drawn together. Nothing where there is no grid.
    """
    grid = [name for name in timings.runs if name not in (AUTO, *BASELINES)]
    if AUTO not in timings.runs or not grid:
        return []
    clocks = {"seconds": "by the clock", "cpu_seconds": "in CPU time"}
    best = {clock: max(grid, key=functools.partial(timings.rate, clock=clock)) for clock in clocks}
    over_best: Row = {"auto over": "the best of the grid"}
    over_best |= {text: f"{_over(timings, best[clock], clock)}, {best[clock]}" for clock, text in clocks.items()}
    over_plain: Row = {"auto over": "plain"}
    return [over_best, over_plain | {text: _over(timings, "plain", clock) for clock, text in clocks.items()}]


def _over(timings: Timings, other: str, clock: str) -> str:
    """How many times as fast `auto` is, and its interval."""
    return with_interval(*times_as_fast(timings.spent(AUTO, clock), timings.spent(other, clock)))


# Side by side.

Way = Callable[[Sequence[list[int]], int, int], Sequence[Generation] | Sequence[list[int]]]
"""From prompts, how many go side by side and a limit of new tokens to each one's answer, or its new tokens."""


class Found(NamedTuple):
    """What one way gave with one number of lanes; no steps of what has none."""

    texts: list[list[int]]
    steps: list[Step]
    seconds: float
    cpu_seconds: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def rate(self) -> float:
        """New tokens a CPU second."""
        return self.tokens / self.cpu_seconds


def in_lanes(
    pair: Pair, trees: Trees, prompts: Sequence[list[int]], max_new_tokens: int, lanes: Sequence[int]
) -> list[Row]:
    """Decode all prompts in every way with every number of lanes; a line each.

    `tokens/CPU s` counts the time of all threads of this process, which a busy machine distorts less than the clock's.
    """

    def in_batches(group: Sequence[list[int]], width: int, limit: int) -> list[list[int]]:
        groups = (group[start : start + width] for start in range(0, len(group), width))
        return [tokens for own in groups for tokens in transformers_batch(pair, own, limit)]

    ways: dict[tuple[str, int], Way] = {("plain", count): _in_loop(plain(pair.target), pair) for count in lanes}
    for name, count in itertools.product(trees, lanes):
        tree = auto(pair.target, pair.drafter, lanes=count) if name == AUTO else trees[name]
        ways[name, count] = _in_loop(Decoder(pair.target, pair.drafter, tree), pair)
    ways |= {("transformers", count): in_batches for count in lanes}
    for (_, count), way in ways.items():
        way(prompts[: max(count, 2)], count, 4)
    found = {}
    for (name, count), way in tqdm(ways.items(), desc="batches", leave=False, disable=None):
        found[name, count] = _measured(way, prompts, count, max_new_tokens)
    return [_lanes_row(name, count, found) for name, count in ways]


def _in_loop(decoder: Decoder, pair: Pair) -> Way:
    def answer(group: Sequence[list[int]], width: int, limit: int) -> Sequence[Generation]:
        if decoder.drafter is not None:
            decoder.drafter.clear()  # another way may have shown it these texts
        return generate_batch(decoder, group, limit, stop=pair.stop, width=width)

    return answer


def _measured(way: Way, prompts: Sequence[list[int]], lanes: int, limit: int) -> Found:
    begin, cpu = time.perf_counter(), time.process_time()
    answers = way(prompts, lanes, limit)
    took = time.perf_counter() - begin, time.process_time() - cpu
    texts = [one.tokens if isinstance(one, Generation) else one for one in answers]
    return Found(texts, [step for one in answers if isinstance(one, Generation) for step in one.steps], *took)


def _lanes_row(name: str, lanes: int, found: Mapping[tuple[str, int], Found]) -> Row:
    own, least = found[name, lanes], min(count for _, count in found)
    same = sum(a == b for a, b in zip(own.texts, found["plain", least].texts, strict=True))
    return {
        "method": name,
        "lanes": lanes,
        "s": own.seconds,
        "tokens/s": own.tokens / own.seconds,
        "tokens/CPU s": own.rate,
        f"x lanes {least}": own.rate / found[name, least].rate,
        "x plain": own.rate / found["plain", lanes].rate,
        "x transformers": own.rate / found["transformers", lanes].rate,
        "tokens/step": own.tokens / len(own.steps) if own.steps else None,
        "nodes/step": sum(step.tree.nodes for step in own.steps) / len(own.steps) if own.steps else None,
        "same text": f"{same}/{len(own.texts)}",
    }
