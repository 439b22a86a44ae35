"""How fast prompts are decoded side by side: plainly, with trees, and by transformers' padded batch; in turn."""

import time
from collections.abc import Callable, Mapping, Sequence

from tqdm import tqdm

from evaluation.latency.decoding import Row
from evaluation.run.baselines import transformers_batch
from evaluation.timing import schedule
from opt_tree import Decoder, Pair
from opt_tree.controllers import Controller
from opt_tree.policies import TreePolicy
from opt_tree.presets import plain

Way = Callable[[Sequence[list[int]], int, int], list[list[int]]]
"""From prompts, how many go side by side and a limit of new tokens to the new tokens of each."""


def measure(
    pair: Pair,
    trees: Mapping[str, TreePolicy | Controller],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    lanes: Sequence[int],
) -> list[Row]:
    """Decode all prompts in every way with every number of lanes; a line each.

    `tokens/CPU s` counts the time of all threads of this process, which a busy machine distorts less than the clock's.
    """
    ways: dict[str, Way] = {"plain": _in_loop(plain(pair.target), pair)}
    ways |= {name: _in_loop(Decoder(pair.target, pair.drafter, tree), pair) for name, tree in trees.items()}
    ways["transformers"] = lambda group, width, limit: [
        tokens
        for start in range(0, len(group), width)
        for tokens in transformers_batch(pair, group[start : start + width], limit)
    ]
    for way in ways.values():
        way(prompts[:2], 2, 4)
    cells = [(name, count) for name in ways for count in lanes]
    found = {}
    for (name, count), _ in schedule(cells, tqdm([0], desc="batches", leave=False, disable=None)):
        clocks = time.perf_counter(), time.process_time()
        texts = ways[name](prompts, count, max_new_tokens)
        found[name, count] = texts, time.perf_counter() - clocks[0], time.process_time() - clocks[1]
    return [_row(name, count, found) for name, count in cells]


def _in_loop(decoder: Decoder, pair: Pair) -> Way:
    def decode(group: Sequence[list[int]], width: int, limit: int) -> list[list[int]]:
        return [answer.tokens for answer in decoder.generate_batch(group, width, limit, stop=pair.stop)]

    return decode


def _row(name: str, lanes: int, found: Mapping[tuple[str, int], tuple[list[list[int]], float, float]]) -> Row:
    def rate(cell: tuple[str, int], clock: int) -> float:
        return sum(map(len, found[cell][0])) / found[cell][clock]

    least = min(count for _, count in found)
    same = sum(a == b for a, b in zip(found[name, lanes][0], found["plain", least][0], strict=True))
    own = rate((name, lanes), 2)
    return {
        "method": name,
        "lanes": lanes,
        "tokens/s": rate((name, lanes), 1),
        "tokens/CPU s": own,
        f"x lanes {least}": own / rate((name, least), 2),
        "x plain": own / rate(("plain", lanes), 2),
        "x transformers": own / rate(("transformers", lanes), 2),
        "same text": f"{same}/{len(found[name, lanes][0])}",
    }
