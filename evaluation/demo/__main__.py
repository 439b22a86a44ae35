"""The code of both demos: an answer streamed in colour, then one table of what it cost against what.

    python -m evaluation.demo --drafter SPEC

Decoding is the library's, measuring is `timing`'s.
"""

import sys

from evaluation.demo.options import main

if __name__ == "__main__":
    sys.exit(main())

import dataclasses
import os
import time
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evaluation.command_line import machine_of, print_json
from evaluation.demo.comparison import ASSISTED, GREEDY, OURS, PLAIN, different_texts, notes, rows_of, table
from evaluation.demo.options import BESIDE, Options
from evaluation.run.baselines import InLoop, transformers_methods
from evaluation.run.models import load, load_assistant
from evaluation.timing import Method, Timings, environment, interleave
from opt_tree import Beside, CausalLM, Decoder, Generation, OptTree, Pair, Sampling, explore, generate_beside
from opt_tree.backends import package_cache as packages
from opt_tree.errors import counted
from opt_tree.methods.controllers.auto import Auto
from opt_tree.methods.drafters.around import described
from opt_tree.methods.policies.registry import make_policy
from opt_tree.models.known import KNOWN
from opt_tree.request import check_prompt
from opt_tree.system.command_line import no_bars_in_logs
from opt_tree.system.files import write_text
from opt_tree.tools.ceiling import Ceiling, Ceilings
from opt_tree.tools.display.transcripts import IncrementalText, paint, wants_color
from opt_tree.tools.presets import controller, opt, plain
from opt_tree.tools.step_costs import auto

PROMPTS = (
    "Explain the `tar` command on Linux with examples.",
    "Give me an overview of the economy of Iceland.",
    'What does the word "lantern" mean? Please give an example.',
    "Is it true that penguins can fly? Why or why not?",
    "Write a short story about a fox who wanted to learn how to swim.",
    "A box holds 12 pencils. Anna buys 3 boxes and gives away 5 pencils. How many pencils does she have left?",
)
CODE = (
    "Write a Python function that returns the longest palindromic substring of a string, with a docstring and tests.",
    "Write a Python class `Stack` with `push`, `pop` and `peek`. `pop` of an empty stack raises an IndexError.",
    "Write an SQL query that lists each customer's three largest orders.",
    "Write a bash script that renames all .jpeg files of a folder to .jpg.",
)
"""For a model that writes code."""
TIME_LIMIT = 35.0  # seconds after which the comparison begins no further prompt: a demo is to take less than a minute
ANSWER_LIMIT = 10.0  # seconds that an answer of the comparison may take, at the pace of the one that was shown


def run(options: Options) -> None:
    """Load, stream one answer, compare, print the table, write the page."""
    no_bars_in_logs(wanted=options.base_model_path != "demo")  # the embedded models load in a blink
    device = torch.device(options.check_device())
    began = time.perf_counter()
    pair = load(options, str(device), options.bare)
    loading = time.perf_counter() - began
    assistant = load_assistant(options, options.assistant, pair)
    if not (options.compile or options.eager or options.unpacked):
        pair.compile(make=False)
    known = KNOWN.get(options.base_model_path)
    texts = [options.prompt] if options.prompt else CODE if known and known.code else PROMPTS
    prompts = [check_prompt(pair.encode(text), pair.target) for text in texts]

    place = environment(device)
    memory = psutil.Process().memory_info().rss / 1e9
    facts = describe(options, pair, place)
    facts["loaded"] = f"in {loading:.0f} s; this process has {memory:.1f} GB of memory"
    decoder, policy = make_decoder(options, pair)
    print(facts["models"], f"forwards: {facts['forwards']}", facts["machine"], sep="\n")
    print(f"loaded {facts['loaded']}")
    print(f"{policy}, {describe_sampling(options.sampling)}", f"\n> {texts[0]}\n", sep="\n")
    first, ceilings = stream(decoder, pair, prompts[0], options)
    ways = methods(decoder, pair, options, assistant)
    timings = compare(ways, prompts, first.generation if isinstance(first, Beside) else first, options)
    differences = different_texts(timings, pair, prompts, options.sampling, options.seed)
    rows = rows_of(timings, options.sampling)
    print(table(rows))
    print(*notes(timings, pair, differences, options.sampling), sep="\n")
    if options.html:
        rates = "; ".join(f"{row['method']} {row['tokens/s']:.0f}" for row in rows)
        compared = {f"{len(prompts)} prompts" if len(prompts) > 1 else "compared": f"{rates} tokens per second"}
        page = explore(first, pair.tokenizer, compared | {"policy": str(policy)} | facts, ceilings)
        write_text(Path(options.html), page)
        print(f"wrote {options.html}")
    if options.base_model_path == "demo":
        print(f"These models are toys. A public one, fetched once: {Path(sys.argv[0]).name} --base-model-path smollm2")
    costs = dataclasses.asdict(policy.costs if isinstance(policy, Auto) else policy)
    settings = {"options": dataclasses.asdict(options), "policy": costs}
    tokens = {name: sum(map(len, timings.texts(name))) for name in timings.runs}
    found = {"tokens": tokens, "rows": rows, "divergences": [dataclasses.asdict(one) for one in differences]}
    print_json(options.json, settings | facts | found | {"environment": place})


def make_decoder(options: Options, pair: Pair) -> tuple[Decoder, OptTree | Auto]:
    """The decoder, and what decides its trees: what they cost here, or the options' own."""
    if options.controller is not None:
        chosen = controller(options.controller, pair.target, pair.drafter, options.policy(), options.seed)
        return Decoder(pair.target, pair.drafter, chosen), options.policy()
    if options.asks_costs(pair.target.device.type):
        if options.nodes is None:
            print("nodes and layers by what they cost here, measured once; --nodes N --threshold T choose otherwise")
        policy = auto(pair.target, pair.drafter, max_depth=options.max_depth or OptTree.max_depth)
        return Decoder(pair.target, pair.drafter, policy), policy
    fixed = options.policy()
    return opt(pair.target, pair.drafter, fixed), fixed


def stream(
    decoder: Decoder, pair: Pair, prompt: list[int], options: Options
) -> tuple[Generation | Beside, list[Ceiling]]:
    """Decode one prompt and show it as it comes; for a page, with other policies' trees and its own trees' ceilings."""
    streamer = ColorStreamer(pair.tokenizer, sys.stdout, wants_color(sys.stdout))
    given: Any = {"sampling": options.sampling, "stop": pair.stop, "streamer": streamer, "seed": options.seed}
    if not options.html:
        return decoder.generate(prompt, options.max_new_tokens, **given), []
    watch = Ceilings(decoder.policy, options.sampling)
    watched = Decoder(pair.target, pair.drafter, watch, decoder.verifier)
    others = {name: make_policy(name, options.policy().nodes) for name in BESIDE}
    return generate_beside(watched, others, prompt, options.max_new_tokens, **given), watch.found


def compare(ways: dict[str, Method], prompts: list[list[int]], shown: Generation, options: Options) -> Timings:
    """Time the methods. Answers are shorter, and that is said, where they would take longer than `ANSWER_LIMIT`."""
    length = max(int(ANSWER_LIMIT * len(shown.tokens) / shown.seconds), 16)
    if length < (wanted := options.max_new_tokens):
        print(f"compared below: answers of {length} tokens at most, since {wanted} would take long here\n")
    return interleave(ways, prompts, min(length, wanted), options.rounds, TIME_LIMIT, options.seed)


def methods(decoder: Decoder, pair: Pair, options: Options, assistant: PreTrainedModel | None) -> dict[str, Method]:
    """The ways to decode that are compared."""
    sampling = options.sampling
    own = transformers_methods(pair, assistant, sampling)
    found: dict[str, Method] = {
        PLAIN: InLoop(plain(pair.target), sampling, pair.stop),
        GREEDY: own[GREEDY],
        OURS: InLoop(decoder, sampling, pair.stop, forget=True),
    }
    return found | ({ASSISTED: own[ASSISTED]} if ASSISTED in own else {})


def describe(options: Options, pair: Pair, place: dict[str, Any]) -> dict[str, str]:
    """Say what decodes and what drafts (names, sizes, dtypes, the fitted sharpening), by which forwards, and where.

    Without the machine, its load and the versions, figures mean nothing.
    """
    through = f" through {options.through}" if options.through else ""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    versions = f"torch {place['torch']}, transformers {place['transformers']}, Python {place['python']}"
    return {
        "models": f"target {options.base_model_path}{through}: {pair.target.size}; {described(pair.drafter)}",
        "forwards": describe_forwards(options, pair),
        "machine": f"{pair.target.device.type}: {machine_of(place)}{load}; {versions}",
    }


def describe_forwards(options: Options, pair: Pair) -> str:
    """Say which models' forwards are compiled, and how the others' would be."""
    compiled = [isinstance(lm, CausalLM) and lm.backend.name != "eager" for lm in (pair.target, *pair.drafter.models)]
    if all(compiled) and pair.target.device.type == "cuda":
        return "captured as CUDA graphs"
    if all(compiled):
        return f"compiled for this CPU ({packages.cache_folder()})"
    found = f"{sum(compiled)} of {counted(len(compiled), 'model')} compiled, else eager" if any(compiled) else "eager"
    settled = options.compile or options.eager or options.unpacked or pair.target.device.type != "cpu"
    return found if settled else f"{found}; faster with --compile"


def describe_sampling(sampling: Sampling) -> str:
    """Say in words how the target's distribution is made."""
    if sampling.greedy:
        return "greedy"
    return f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k or 'off'}"


class ColorStreamer:
    """A transformers streamer for the library's loop: accepted draft tokens in colour or in brackets, as they come.

    The loop hands over one step at a time, and its last token is the target's own. (Only a stop token inside an
    accepted path ends a step otherwise, and it is not shown.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO, color: bool) -> None:
        self._text, self._out, self._color = IncrementalText(tokenizer), out, color
        self._begun = False

    def put(self, value: Tensor) -> None:
        """Show one step's tokens; the first call brings the prompt, which is not shown."""
        if not self._begun:
            self._begun = True
            return
        *drafted, own = [self._text.add(token) for token in value.tolist()]
        self._out.write(paint("".join(drafted), True, self._color) + own)
        self._out.flush()

    def end(self) -> None:
        """Show what was held back, and what the marks mean."""
        legend = paint("drafted and accepted", True, self._color) + " the target's own"
        self._out.write(f"{self._text.rest()}\n\n({legend})\n\n")
        self._out.flush()
