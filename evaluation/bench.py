"""One cell of a comparison, measured: the models, the questions, the rates that trees are made of, the clock.

Owns what is loaded and in which order things are decoded. Knows nothing of files of cells, tables and plots.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evaluation import acceptance, standings
from evaluation.answers import AnswerFile, Record
from evaluation.cells import VERIFIERS, Cell
from evaluation.conversation import Answer, Conversation
from evaluation.loading import resolved
from evaluation.prompts import Prompter
from evaluation.questions import Question, load_set, select
from opt_tree import (
    Decoder,
    Generation,
    OptTree,
    Pair,
    Random,
    Sampling,
    Sharpened,
    Step,
    Tree,
    Verdict,
    Verifier,
    load_eagle,
    load_pair,
)
from opt_tree.checkpoints import DEMO, read_calibration
from opt_tree.children import Children
from opt_tree.policies import AcceptanceRates
from opt_tree.presets import plain
from opt_tree.probabilities import probs_of
from opt_tree.sampling import Logits, whole
from opt_tree.verifiers import block_efficiency, check

if TYPE_CHECKING:
    from evaluation.compare import Options

PLAIN_EVERY = 2
"""Every so many questions of a cell are decoded plainly as well, before and after the cell's own answer by turns."""
RATES_TOKENS, LEAST_TRIALS = 64, 20
"""New tokens a question that acceptance rates are counted on; ranks and depths tried less often have none."""


class Expectation:
    """A verifier that also computes, on every n-th tree it judges, how many tokens each valid verifier would emit.

    The same trees for all, and no noise of accepting and rejecting (arXiv:2602.16994). Its own time is in `seconds`.
    """

    def __init__(self, verifier: Verifier, children: Children, every: int) -> None:
        self.__dict__.update(vars(verifier))
        self.__name__ = verifier.__name__
        self.verifier, self.every, self.calls, self.seconds = verifier, every, 0, 0.0
        self.judges = {name: judge for name, judge in VERIFIERS.items() if name != "greedy" and _exact(judge, children)}
        self.values: dict[str, list[float]] = {name: [] for name in self.judges}

    def __call__(self, tree: Tree, logits: Logits, random: Random) -> Verdict:
        if self.calls % self.every == 0:
            begin = time.perf_counter()
            probs = probs_of(whole(logits))
            for name, judge in self.judges.items():
                self.values[name].append(round(block_efficiency(tree, probs, judge), 4))
            self.seconds += time.perf_counter() - begin
        self.calls += 1
        return self.verifier(tree, logits, random)

    def take(self) -> dict[str, list[float]]:
        """Hand out what was computed since the last time."""
        values, self.values = self.values, {name: [] for name in self.judges}
        return values


def _exact(verifier: Verifier, children: Children) -> bool:
    try:
        check(verifier, children)
    except TypeError:
        return False
    return True


class Bench:
    """The models, loaded once, and the questions; measures one cell after the other."""

    def __init__(self, options: "Options", cells: Sequence[Cell]) -> None:
        self.options = options
        questions = load_set(options.bench_name, options.question_file, options.data_dir)
        first_turns = [dataclasses.replace(question, turns=question.turns[:1]) for question in questions.questions]
        few = 3 if options.quick else 8
        self.questions = select(tuple(first_turns), None, None, options.limit or few)
        self.others = first_turns[len(self.questions) :][-(options.rates_questions or few) :]
        self.pairs = load_pairs(options, cells)
        self.pair = next(iter(self.pairs.values()))
        self.prompter = Prompter(self.pair.tokenizer, self.pair.stop, options.conv_template)
        self.max_new_tokens = options.max_new_tokens or (32 if options.quick else 64)
        self.rates_file = AnswerFile(f"{options.output}.rates")
        self.settings = {
            **{key: getattr(options, key) for key in ("base_model_path", "conv_template", "seed", "expect_every")},
            **{"draft_model_path": options.draft_model_path, "ea_model_path": options.ea_model_path},
            **{"questions": questions.name, "sha256": questions.sha256, "ids": [q.id for q in self.questions]},
            "rates_ids": [question.id for question in self.others],
            "max_new_tokens": self.max_new_tokens,
            "target_dtype": resolved(self.pair)["target_dtype"],
            "device_type": self.pair.target.device.type,
        }
        self.sharpening = {
            drafter: pair.drafter.temperature
            for (drafter, _), pair in self.pairs.items()
            if isinstance(pair.drafter, Sharpened)
        }

    def measure(self, cell: Cell) -> Record:
        """Answer the questions as the cell says, every second one plainly, too; return the cell's line."""
        pair, sampling = self.pairs[cell.drafter, cell.draws_from], Sampling(cell.temperature)
        policy = cell.build(self.rates(cell)) if cell.needs_rates else cell.build()
        verifier = VERIFIERS[cell.verifier if cell.temperature else "match"]
        watch = None
        if self.options.expect_every and cell.temperature:
            verifier = watch = Expectation(verifier, policy.children, self.options.expect_every)
        decoder = Decoder(pair.target, pair.drafter, policy, verifier, lossy=self.options.lossy)
        steps: list[Step] = []
        ours = self.method(decoder, sampling, watch, steps)
        base = self.method(plain(pair.target), sampling)
        answers: list[Record] = []
        baseline: list[Record] = []
        efficiency: list[dict[str, list[float]]] = []
        for index, question in enumerate(self.questions):
            both, swapped = index % PLAIN_EVERY == 0, index // PLAIN_EVERY % 2 == 1
            for method, kept in ((ours, answers), (base, baseline)) if swapped else ((base, baseline), (ours, answers)):
                if both or kept is answers:
                    kept.append(self.answer(question, method))
            if watch is not None:
                efficiency.append(watch.take())
        return {
            "question_id": cell.key,
            "cell": dataclasses.asdict(cell),
            "figures": standings.figures(answers, baseline, efficiency),
            "first_tree": {
                "parents": steps[0].tree.parents.tolist(),
                "tokens": [pair.tokenizer.decode([token]) for token in steps[0].tree.tokens],
                "log_probs": steps[0].tree.path_log_probs.round(4).tolist(),
                "path": steps[0].path,
            },
            "efficiency": efficiency,
            "answers": [_slim(answer) for answer in answers],
            "plain": [_slim(answer) for answer in baseline],
        }

    def method(
        self,
        decoder: Decoder,
        sampling: Sampling,
        watch: Expectation | None = None,
        kept: list[Step] | None = None,
    ) -> Answer:
        """One way to answer. What `watch` spends is not the decoder's; `kept` gets the steps of the first answer."""

        def generate(prompt: list[int], limit: int, seed: int) -> Generation:
            before = watch.seconds if watch is not None else 0.0
            generation = decoder.generate(prompt, limit, sampling, self.prompter.stop, seed=seed)
            if kept is not None and not kept:
                kept.extend(generation.steps)
            spent = watch.seconds - before if watch is not None else 0.0
            return dataclasses.replace(generation, seconds=generation.seconds - spent)

        return generate

    def answer(self, question: Question, method: Answer) -> Record:
        """One line as in an answer file."""
        conversation = Conversation(self.prompter, self.max_new_tokens, seed=self.options.seed)
        return {"question_id": question.id, "choices": conversation.answer(question, method)}

    def rates(self, cell: Cell) -> AcceptanceRates:
        """Acceptance rates of the cell's drafter, siblings and temperature, on the other questions; measured once."""
        key = f"{cell.drafter}, T {cell.temperature:g}, {cell.children}"
        found = {record["question_id"]: record["rates"] for record in self.rates_file.read()}
        if key not in found:
            if not self.others:
                raise ValueError(
                    f"{cell.policy} needs acceptance rates, and all {len(self.questions)} questions are compared: "
                    "lower --limit, or name a larger set"
                )
            counting = argparse.Namespace(
                width=12,
                depth=4,
                conv_template=self.options.conv_template,
                max_new_tokens=RATES_TOKENS,
                seed=self.options.seed,
            )
            pair, sampling = self.pairs[cell.drafter, cell.draws_from], Sampling(cell.temperature)
            counts = acceptance.measure(pair, cell.children, sampling, self.others, counting)
            if counts.tried[:, 0].sum() < LEAST_TRIALS:
                raise ValueError(
                    f"{len(self.others)} questions are too few to measure acceptance rates for {cell.policy} on: only "
                    f"{counts.tried[:, 0].sum()} trials of the first rank ({key}); raise --rates-questions"
                )
            found[key] = counts.rates(LEAST_TRIALS).to_dict()
            self.rates_file.append({"question_id": key, "rates": found[key], "tried": counts.tried.tolist()})
        return AcceptanceRates(tuple(found[key]["by_rank"]), tuple(map(tuple, found[key]["by_depth"])))

    def warm_up(self) -> None:
        """Pay for cold memory before anything is timed."""
        for pair in self.pairs.values():
            Decoder(pair.target, pair.drafter, OptTree()).generate(pair.encode("Count to ten."), 16)


def load_pairs(options: "Options", cells: Sequence[Cell]) -> dict[tuple[str, str], Pair]:
    """Load the target once, and each drafter that the cells name once; by drafter and law.

    Raises ValueError where a sharpened law is asked for and none is stored.
    """
    pairs: dict[tuple[str, str], Pair] = {}
    target: Pair | None = None
    for drafter in sorted({cell.drafter for cell in cells}):
        path = options.draft_model_path if drafter == "draft" else options.ea_model_path
        if target is None:
            named = {"drafter" if drafter == "draft" else "eagle": path}
            pair = load_pair(options.base_model_path, **named, dtype=options.dtype, device=options.device, bare=True)
        else:  # the draft model came first: this is the head
            folder = str(DEMO / "eagle") if path == "demo" else path
            pair = dataclasses.replace(target, drafter=load_eagle(folder, target.target))
        target = target or pair
        pairs[drafter, "bare"] = pair
        if any(cell.drafter == drafter and cell.draws_from == "sharpened" for cell in cells):
            name = "draft" if drafter == "draft" else "eagle"
            temperature = read_calibration(str(DEMO / name) if path == "demo" else path)
            if temperature is None:
                raise ValueError(f"no calibration is stored beside {path}: --laws bare, or opt_tree.training.calibrate")
            pairs[drafter, "sharpened"] = dataclasses.replace(pair, drafter=Sharpened(pair.drafter, temperature))
    return pairs


def _slim(answer: Record) -> Record:
    """Without what no figure needs."""
    dropped = ("prompt_ids", "token_ids", "idxs")
    choices = [{key: value for key, value in choice.items() if key not in dropped} for choice in answer["choices"]]
    return {**answer, "choices": choices}
