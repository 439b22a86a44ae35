"""How long the first tokens of each turn of a conversation take: the whole prompt taken in anew, or its cache kept.

    python -m experiments.turns --base-model-path smollm2 [--limit 3] [--max-new-tokens 256]

The first turns of the questions are put one after the other, as one conversation. Times are medians over `--rounds`, by
the wall clock and, for a busy machine, by the process's own. The texts must be the same, and are compared.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option
from evaluation.run.options import Asked


@dataclass(frozen=True)
class Options(Asked):
    """The pair, and the questions."""

    limit: int = option(3, "this many questions at most", least=1)
    max_new_tokens: int = option(256, "of a turn, at most", least=1)
    rounds: int = option(3, "how often the conversation is held, each way by turns", least=1)


main = main_of("experiments.turns", Options, __doc__, "experiments.turns:run")

if __name__ == "__main__":
    sys.exit(main())

import statistics
import time
from typing import Any

from evaluation.command_line import Value, machine_of, table
from evaluation.run.models import Material, gather
from evaluation.timing import environment
from opt_tree import Decoder, OptTree
from opt_tree.methods.drafters.around import described


@dataclass(frozen=True)
class First:
    """One turn: its tokens, and what it took until the first step was done."""

    prompt: list[int]
    tokens: list[int]
    seconds: float
    own: float
    """Of the process, in seconds."""


def talk(given: Material, decoder: Decoder, max_new_tokens: int, reuse: bool) -> list[First]:
    """Hold the conversation once, and return what each of its turns took.

    A turn's prompt is all that was asked and said before it, and its own question.
    """
    asked: list[str] = []
    said: list[str] = []
    found = []
    for question in given.chosen:
        asked.append(question.turns[0])
        prompt = given.prompter.encode(asked, said)
        begin, own_begin = time.perf_counter(), time.process_time()
        steps = decoder.steps(prompt, max_new_tokens, reuse=reuse, stop=None)
        tokens = list(next(steps).tokens)
        seconds, own = time.perf_counter() - begin, time.process_time() - own_begin
        for step in steps:  # the rest of the answer, which the next prompt holds
            tokens += step.tokens
        tokens = given.prompter.trim(tokens)
        said.append(given.prompter.text(tokens))
        found.append(First(prompt, tokens, seconds, own))
    return found


def measure(given: Material, options: Options) -> list[dict[str, Value]]:
    """Hold the conversation both ways by turns; a row a turn. Raises ValueError where the texts differ."""
    decoder = Decoder(given.pair.target, given.pair.drafter, OptTree(8, 0.45))
    talk(given, decoder, 8, False)  # first forwards of their kinds
    ways: dict[bool, list[list[First]]] = {False: [], True: []}
    for _ in range(options.rounds):
        for reuse, held in ways.items():
            given.pair.target.reset()  # the conversation before is another one
            held.append(talk(given, decoder, options.max_new_tokens, reuse))
    texts = [[turn.tokens for turn in held] for held in (*ways[False], *ways[True])]
    if any(text != texts[0] for text in texts):
        raise ValueError(f"the texts differ, which rounding does in {given.pair.target.dtype}: pass --dtype float32")
    rows = []
    for turn, known in enumerate(ways[False][0]):
        row: dict[str, Value] = {"turn": turn + 1, "prompt": len(known.prompt)}
        for name, reuse in (("anew", False), ("kept", True)):
            for clock, field in (("ms", "seconds"), ("CPU ms", "own")):
                row[f"{name}, {clock}"] = 1000 * statistics.median(getattr(held[turn], field) for held in ways[reuse])
        rows.append(row)
    return rows


def run(options: Options) -> dict[str, Any]:
    """Measure, print the table and return it."""
    given = gather(options)
    rows, place = measure(given, options), environment(given.pair.target.device)
    drafter = described(given.pair.drafter)
    print(f"{given.pair.target.name}; {drafter}; {machine_of(place)}")
    print(f"until the first step of a turn is done, {options.rounds} rounds, same texts", table(rows), sep="\n")
    return {"environment": place, "rows": rows}
