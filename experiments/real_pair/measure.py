"""The three stages: texts, fit, steps. Owns what is on disk; each line is written once and never again."""

import copy
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from evaluation.command_line import Value, counted, table
from experiments.real_pair import sampled
from experiments.real_pair.__main__ import Options
from experiments.real_pair.check import decoded
from experiments.real_pair.plots import draw_all
from experiments.real_pair.questions import Asked, asked, in_rounds
from experiments.real_pair.tables import Along, all_tables
from experiments.real_pair.taken import Way, taken_of
from experiments.real_pair.ways import NAMED_ONLY, all_ways
from opt_tree import CausalLM, CausalLMDrafter, Decoder, Static, TreePolicy, side_by_side
from opt_tree.backends.batch import scheduler
from opt_tree.backends.batch.shared_forwards import lane_memos
from opt_tree.methods.drafters.draft_vocabulary import needed_vocabulary
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.models.canonical import make_canonical
from opt_tree.models.checkpoints import load_causal_lm, load_tokenizer
from opt_tree.models.named import resolve
from opt_tree.system.files import write_text
from opt_tree.target import Asking
from opt_tree.tools.along import asking_along
from opt_tree.tools.pair import encode, stop_tokens
from opt_tree.tools.stop_strings import Stop
from opt_tree.tools.stored_text import StoredText
from opt_tree.training.fitting.calibrate import Likelihood

_RANKS = 20


def load(name: str, role: str, weights: str | None) -> tuple[CausalLM, Any]:
    """Return a model in canonical arithmetic, in bfloat16 where this CPU multiplies it, and its tokenizer."""
    folder = resolve(name, role)
    # Quantised, both compute in bfloat16 on any CPU: what is stored is gone on with on another one.
    lm = load_causal_lm(folder, "auto" if weights is None else "bfloat16", "cpu", weights=weights)
    if not isinstance(lm, CausalLM):
        raise ValueError(f"{name} is scored path by path; its trees are not drafted here")
    make_canonical(lm)
    return lm, load_tokenizer(folder)


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that are whole; none of a file that is not there."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def decode_texts(options: Options, questions: list[Asked], path: Path) -> None:
    """Let the target answer plainly what it has not answered yet; `width` texts at a time, which changes none."""
    have = {(line["set"], line["id"]) for line in lines(path)}
    todo = [one for one in questions if (one.set, one.id) not in have]
    if not todo:
        return
    lm, tokenizer = load(options.target, "target", options.weights)
    ends = sorted(stop_tokens(lm.model, tokenizer))

    def job(one: Asked) -> Any:
        given = tokenizer(one.given, add_special_tokens=False).input_ids if one.given else []
        prompt = [*encode(tokenizer, one.message), *given]

        def answer(decoder: Decoder) -> Asking[dict[str, Any]]:
            made = yield from decoder.answer(prompt, options.max_new_tokens, stop=Stop(ends))
            tokens = made.tokens
            asked = {"set": one.set, "id": one.id, "limit": options.max_new_tokens, "ends": ends}
            return {**asked, "prompt": prompt, "tokens": tokens, "text": tokenizer.decode(tokens)}

        return answer

    decoder = Decoder(lm, None, Static.empty())
    made = side_by_side(decoder, (job(one) for one in todo), options.width)
    for _, line in tqdm(made, "texts", len(todo), unit="text", disable=None):
        append(path, line)


def stored(line: dict[str, Any]) -> StoredText:
    """A line of `texts.jsonl` as the text that it is."""
    return StoredText(line["prompt"], line["tokens"], line["limit"], frozenset(line["ends"]))


@torch.inference_mode()
def fit_to(drafter: CausalLMDrafter, texts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the temperature under which the target's choices are likeliest, and how often each rank was its choice.

    At every place of the texts, the text before it given: a rank's rate is that of a child whose parent was accepted.
    """
    likelihood, ranks = Likelihood(), torch.zeros(_RANKS + 1, dtype=torch.long)
    for text in texts:
        drafter.lm.reset()
        drafter.lm.append(text["prompt"][:-1])
        scores = drafter.lm.append([text["prompt"][-1], *text["tokens"][:-1]], all_logits=True).logits.float()
        for row, choice in zip(scores.log_softmax(-1), text["tokens"], strict=True):
            likelihood.add(row, choice)
            ranks[min(int((row > row[choice]).sum()), _RANKS)] += 1
    rates = (ranks[:_RANKS] / ranks.sum()).tolist()
    return {"temperature": likelihood.temperature(), "rates": rates, "places": int(ranks.sum()), "texts": len(texts)}


def draft_along(
    drafter: CausalLMDrafter, texts: list[dict[str, Any]], ways: dict[str, Way], path: Path, options: Options
) -> None:
    """Write down the steps of every policy along each text that are not there yet, until the time is over.

    Policies share what is drafted with one temperature. The forwards of `options.width` texts are packed into one. A
    line is written when the last step of its policies is there.
    """
    have: dict[tuple[str, str], set[str]] = {}
    for line in lines(path):
        have.setdefault((line["set"], line["id"]), set()).update(line["steps"])
    todo = []
    for text, temperature in itertools.product(texts, dict.fromkeys(way.temperature for way in ways.values())):
        missing = ways.keys() - have.get((text["set"], text["id"]), set())
        own = {name: way.policy for name, way in ways.items() if name in missing and way.temperature == temperature}
        if own:
            todo.append((text, temperature, own))
    end = time.monotonic() + 60 * options.minutes
    twins = [copy.deepcopy(drafter, memo) for memo in lane_memos((drafter.lm,), options.width)]

    def job(
        line: dict[str, Any], temperature: float, policies: dict[str, TreePolicy]
    ) -> Callable[[int], Asking[dict[str, Any]]]:
        def walking(lane: int) -> Asking[dict[str, Any]]:
            text = stored(line)
            made = yield from asking_along(twins[lane].calibrated(temperature), text, policies)
            rows = {name: [one.row() for one in taken_of(text, found)] for name, found in made.items()}
            return {"set": line["set"], "id": line["id"], "tokens": len(text.tokens), "steps": rows}

        return walking

    in_time = itertools.takewhile(lambda _: time.monotonic() <= end, (job(*one) for one in todo))
    made = scheduler.side_by_side(in_time, options.width)
    for _, line in tqdm(made, "drafting", len(todo), unit="walk", disable=None):
        append(path, line)


def wanted(ways: dict[str, Way], parts: list[str]) -> dict[str, Way]:
    """The policies that are named, bare and fitted; of a part that is no name, all whose names begin so."""
    begins = tuple(part for part in parts if part not in ways)
    begun = {name for name in ways if name.startswith(begins) and name not in NAMED_ONLY}
    return {name: way for name, way in ways.items() if name.removesuffix(", fitted") in parts or name in begun}


def measure(options: Options, folder: Path) -> dict[str, Any] | None:
    """Do what of the stages is not done; return how real decoding agrees, where that was asked for."""
    sets = [asked(name, options.count, options.data_dir, options.fetch) for name in options.sets.split(",")]
    questions = list(in_rounds([questions[: options.rounds] for questions in sets]))
    decode_texts(options, questions, folder / "texts.jsonl")
    known = {(line["set"], line["id"]): line for line in lines(folder / "texts.jsonl")}
    for_fit, others = ([known[one.set, one.id] for one in questions if one.fit is fit] for fit in (True, False))
    lm, _ = load(options.drafter, "draft", options.weights)
    drafter = CausalLMDrafter(lm)
    if not (folder / "fit.json").exists():
        write_text(folder / "fit.json", json.dumps(fit_to(drafter, for_fit), indent=1))
    if options.trimmed is not None:
        drafter = TrimmedDrafter(lm, needed_vocabulary(resolve(options.trimmed, "trimmed"), lm.vocab))
    found = json.loads((folder / "fit.json").read_text())
    ways = all_ways(AcceptanceRates(tuple(found["rates"])), found["temperature"])
    if options.bare:
        ways = {name: way for name, way in ways.items() if way.temperature == 1}
    if options.only is None:
        ways = {name: way for name, way in ways.items() if name not in NAMED_ONLY}
    else:
        ways = wanted(ways, [part.strip() for part in options.only.split(",")])
        if not ways:
            raise ValueError(f"--only {options.only}: no policy's name begins so")
    print(f"{counted(len(others), 'text')}, {len(ways)} policies; {len(for_fit)} for the fit")
    draft_along(drafter, others, ways, options.kept("steps"), options)
    have = {(line["set"], line["id"]) for line in lines(options.kept("sampled"))}
    drawn = [one for one in others[: options.sampled] if (one["set"], one["id"]) not in have]
    if not options.check and not drawn:
        return None
    models = load(options.target, "target", options.weights)[0], drafter
    for line in sampled.decoded(
        models, [(one["set"], one["id"], stored(one)) for one in drawn], options.max_new_tokens
    ):
        append(options.kept("sampled"), line)
    if not options.check:
        return None
    along = {(one.set, one.id): one for one in Along.all_of(lines(options.kept("steps")))}
    there = [(stored(one), along[one["set"], one["id"]]) for one in others if (one["set"], one["id"]) in along]
    shortest = sorted(there, key=lambda one: len(one[0].tokens))[: options.check]
    return decoded(models, shortest, ways)


def run(options: Options) -> dict[str, Any]:
    """Measure what is missing; print the tables, write them and the pictures, and return them."""
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    checked = measure(options, folder)
    texts = Along.all_of(lines(options.kept("steps")))
    if not texts:
        raise ValueError(f"nothing was drafted in {options.minutes:g} minutes: {options.kept('steps')} is empty")
    found = all_tables(texts)
    if drawn := list(lines(options.kept("sampled"))):
        found.append(sampled.sampled_table(drawn))
    for one in found:
        print(f"\n{one['title']}")
        print(table([dict(zip(one["columns"], map(_cell, row), strict=True)) for row in one["rows"]]))
    write_text(folder / "tables.json", json.dumps(found, indent=1) + "\n")
    if checked is not None:
        print("\nreal decoding: " + ", ".join(f"{name} {value}" for name, value in checked.items()))
    pictures = [str(path) for path in draw_all(texts, folder)]
    return {"texts": len(texts), "tables": found, "checked": checked, "pictures": pictures}


def _cell(value: Any) -> Value:
    return " to ".join(f"{end:.2f}" for end in value) if isinstance(value, list) else value
