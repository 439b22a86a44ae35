"""One combination, measured: the models, the questions, the rates that trees are made of, the clock.

Owns what is loaded and in which order things are decoded. Knows nothing of files of combinations, tables and plots.
"""

import copy
import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation.answers.comparison import PLAIN, figures
from evaluation.answers.file import AnswerFile, Record
from evaluation.compare.combinations import Combination, verifier_of
from evaluation.compare.options import Options
from evaluation.compare.rates import measure as count_acceptance
from evaluation.questions.prompts import Prompter
from evaluation.questions.sets import Question, load_set, select
from evaluation.run.baselines import InLoop, transformers_methods
from evaluation.run.conversation import Conversation, alone, side_by_side
from evaluation.run.models import load_assistant, load_several, resolved
from evaluation.timing import Method, in_turn, schedule
from opt_tree import (
    Decoder,
    Generation,
    OptTree,
    Pair,
    Random,
    Sampling,
    Step,
    Tree,
    TreePolicy,
    Verdict,
    Verifier,
)
from opt_tree.answers import probs_of
from opt_tree.children import Children
from opt_tree.errors import counted
from opt_tree.grow import Asking
from opt_tree.methods.drafters.registry import folders_of
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.methods.verifiers.walks import block_efficiency
from opt_tree.models.checkpoints import read_minutes
from opt_tree.sampling import Logits, whole
from opt_tree.tools.presets import controller, plain
from opt_tree.verify import check

RATES_TOKENS, LEAST_TRIALS = 64, 20
"""New tokens a question that acceptance rates are counted on; ranks and depths tried less often have none."""


def peers_key(temperature: float) -> str:
    """The name of the line of plain decoding and of transformers' own decoding, which take turns."""
    return f"{PLAIN} and transformers, T {temperature:g}"


class Expectation:
    """A verifier that also computes, on every n-th tree it judges, how many tokens each valid verifier would emit.

    The same trees for all, and no noise of accepting and rejecting (arXiv:2602.16994). Its own time is in `seconds`.
    """

    def __init__(self, own: str, children: Children, every: int) -> None:
        """`own` is the name of the verifier that judges."""
        verifier = verifier_of(own)
        self.__dict__.update(vars(verifier))
        self.__name__ = verifier.__name__
        self.verifier, self.every, self.calls, self.seconds = verifier, every, 0, 0.0
        judges = {name: method.make for name, method in VERIFIERS.items()} | {own: verifier}
        self.judges = {
            name: judge for name, judge in judges.items() if not judge.greedy_only and _exact(judge, children)
        }
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
    """The models, loaded once, and the questions; measures one combination after the other."""

    def __init__(self, options: Options, combinations: Sequence[Combination]) -> None:
        self.options = options
        questions = load_set(options.bench_name, options.question_file, options.data_dir, options.fetch)
        there = questions.questions[options.question_begin : options.question_end]
        first_turns = tuple(dataclasses.replace(question, turns=question.turns[:1]) for question in there)
        self.size = options.size
        self.questions = select(first_turns, None, None, options.limit or self.size.questions)
        self.others = first_turns[len(self.questions) :][-options.rates_questions :]
        self.warming = self._warming()
        self.pairs = load_pairs(options, combinations)
        self.pair = next(iter(self.pairs.values()))
        prompter = Prompter(self.pair.tokenizer, self.pair.stop, options.conv_template)
        self.max_new_tokens = options.max_new_tokens or self.size.tokens
        self.conversation = Conversation(prompter, self.max_new_tokens, seed=options.seed)
        self.counting = dataclasses.replace(self.conversation, max_new_tokens=RATES_TOKENS)
        self.rates_file = AnswerFile(f"{options.output}.rates")
        self.settings: dict[str, Any] = {
            **{key: getattr(options, key) for key in ("base_model_path", "conv_template", "seed", "expect_every")},
            **{"questions": questions.name, "sha256": questions.sha256, "ids": [q.id for q in self.questions]},
            "rates_ids": [question.id for question in self.others],
            "max_new_tokens": self.max_new_tokens,
            "target_dtype": resolved(self.pair)["target_dtype"],
            "canonical": resolved(self.pair).get("canonical"),
            "device_type": self.pair.target.device.type,
            "through": options.through,
            "batch_size": options.batch_size,
            "warm_set": options.warm_set,
        }
        fitted = {name: pair for (name, read), pair in self.pairs.items() if read == "fitted"}
        self.sharpening = {
            name: resolved(fitted[name])["sharpening"] if name in fitted else None for name, _ in self.pairs
        }

    def refusal(self, one: Combination) -> str | None:
        """Why the library does not run this combination with this drafter; None if it does, or does not know yet."""
        if one.controls:
            return None
        pair = self._pair(one)
        try:
            Decoder(pair.target, pair.drafter, one.build(), verifier_of(one.verifier), lossy=self.options.lossy)
        except TypeError as error:
            return str(error)
        return None

    def measure(self, one: Combination) -> Record:
        """Answer the questions as the combination says, every second one plainly, too; return its line."""
        pair, sampling = self._pair(one), Sampling(one.temperature)
        policy, verifier = self._policy(one, pair), verifier_of(one.verifier if one.temperature else "match")
        stop = self.conversation.prompter.stop

        def judged_by(verifier: Verifier) -> InLoop:
            try:
                decoder = Decoder(pair.target, pair.drafter, policy, verifier, lossy=self.options.lossy)
            except TypeError as error:
                raise ValueError(f"{one.key}: {error}") from error
            return InLoop(decoder, sampling, stop)

        self._warm(judged_by(verifier))
        watch = None
        if self.options.expect_every and one.temperature:
            children = policy.policies[-1].children
            verifier = watch = Expectation(one.verifier, children, self.options.expect_every)
        steps: list[Step] = []
        ours, base = judged_by(verifier), InLoop(plain(pair.target), sampling, stop)
        efficiency: list[dict[str, list[float]]] = []
        if self.options.batch_size > 1:
            answers = self._together(ours, self.questions, steps)
            baseline = self._together(base, self.questions[:: self.size.plain_every])
        else:
            answers, baseline = self._in_turn(_watched(ours, watch, steps), base, watch, efficiency)
        counts = (count for answer in answers for count in answer["choices"][0]["tree_nodes"])
        if (most := max(counts, default=0)) > one.budget:
            raise ValueError(f"{one.policy} sent {most} nodes to the target, the budget is {one.budget}")
        return {
            "question_id": one.key,
            "code": one.code or None,
            "cell": dataclasses.asdict(one),
            "figures": figures(answers, baseline, efficiency) | footprint(one.drafter),
            "first_tree": drawn(steps[0]),
            "efficiency": efficiency,
            "answers": [slim(answer) for answer in answers],
            "plain": [slim(answer) for answer in baseline],
        }

    def measure_peers(self, temperature: float) -> Record:
        """Answer the questions by plain decoding and as transformers does, in turn; return the line of all of them."""
        assistant = load_assistant(self.options, None, self.pair)
        base = InLoop(plain(self.pair.target), Sampling(temperature), self.conversation.prompter.stop)
        methods = {PLAIN: base, **transformers_methods(self.pair, assistant, Sampling(temperature))}
        answers: dict[str, list[Record]] = {name: [] for name in methods}
        for name, question in schedule(list(methods), self.questions):
            answers[name].append(slim(self._answer(question, methods[name])))
        return {"question_id": peers_key(temperature), "temperature": temperature, "peers": answers}

    def _warming(self) -> list[Question]:
        """The questions that drafters learn from before each line; ValueError where one of them is compared."""
        if (name := self.options.warm_set) is None:
            return []
        file = name if Path(name).is_file() else None
        known = load_set(name, file, self.options.data_dir, self.options.fetch).questions
        found = [dataclasses.replace(question, turns=question.turns[:1]) for question in known]
        compared = {question.turns for question in self.questions}
        if both := sum(question.turns in compared for question in found):
            raise ValueError(f"{both} questions of --warm-set {name} are compared themselves: name another set")
        return found

    def _warm(self, ours: InLoop) -> None:
        """Let a drafter that learns forget the line before, which had the same questions, and learn from others."""
        drafter = ours.decoder.drafter
        assert drafter is not None
        drafter.clear()
        if drafter.learns:
            for question in tqdm(self.warming, desc="warming", unit="question", leave=False, disable=None):
                self._answer(question, ours)

    def _pair(self, one: Combination) -> Pair:
        """Bare where nothing is to be sharpened."""
        return self.pairs[one.drafter, "fitted" if one.sharpening == "fitted" else "bare"]

    def _in_turn(
        self, ours: Method, base: Method, watch: Expectation | None, efficiency: list[dict[str, list[float]]]
    ) -> tuple[list[Record], list[Record]]:
        """The combination's answers and plain decoding's, one by one and by turns."""
        answers: list[Record] = []
        baseline: list[Record] = []
        for index, question in enumerate(self.questions):
            every = self.size.plain_every
            both = [(base, baseline), (ours, answers)] if index % every == 0 else [(ours, answers)]
            for method, kept in in_turn(both, index // every):
                kept.append(self._answer(question, method))
            if watch is not None:
                efficiency.append(watch.take())
        return answers, baseline

    def _policy(self, one: Combination, pair: Pair) -> TreePolicy:
        """What chooses the trees; a controller is new for each line."""
        if one.controls:
            return controller(one.policy, pair.target, pair.drafter, OptTree(one.budget), self.options.seed)
        return one.build(self.rates(one)) if one.needs_rates else one.build()

    def _together(self, method: InLoop, questions: Sequence[Question], kept: list[Step] | None = None) -> list[Record]:
        """Answers to these questions, decoded side by side; `kept` gets the steps of the first one."""

        def task(place: int, own: InLoop) -> Asking[Record]:
            if place == 0 and kept is not None:
                own = dataclasses.replace(own, heard=lambda made: None if kept else kept.extend(made.steps))
            choices = yield from self.conversation.answer(questions[place], own)
            return {"question_id": questions[place].id, "choices": choices}

        tasks = [functools.partial(task, place) for place in range(len(questions))]
        found = dict(side_by_side(method, tasks, self.options.batch_size))
        return [found[place] for place in range(len(questions))]

    def _answer(self, question: Question, method: Method) -> Record:
        return {"question_id": question.id, "choices": alone(method, self.conversation.answer(question, method))}

    def rates(self, one: Combination) -> AcceptanceRates:
        """Acceptance rates of the drafter, siblings and temperature, on the other questions; measured once."""
        key = f"{one.drafter}, T {one.temperature:g}, {one.children}"
        found = {record["question_id"]: record["rates"] for record in self.rates_file.read()}
        if key not in found:
            if not self.others:
                raise ValueError(
                    f"{one.policy} needs acceptance rates, and all {len(self.questions)} questions are compared: "
                    "lower --limit, or name a larger set"
                )
            sampling, pair = Sampling(one.temperature), self._pair(one)
            pair.drafter.clear()
            counts = count_acceptance(pair, one.children, sampling, self.others, self.counting)
            if (trials := counts.tried[:, 0].sum()) < LEAST_TRIALS:
                raise ValueError(
                    f"too few questions to measure acceptance rates for {one.policy} on: {len(self.others)} have only "
                    f"{counted(trials, 'trial')} of the first rank ({key}); raise --rates-questions"
                )
            found[key] = counts.rates(LEAST_TRIALS).to_dict()
            self.rates_file.append({"question_id": key, "rates": found[key], "tried": counts.tried.tolist()})
        return AcceptanceRates(tuple(found[key]["by_rank"]), tuple(map(tuple, found[key]["by_depth"])))

    def warm_up(self, left: Sequence[Combination]) -> None:
        """Pay for cold memory before anything is timed."""
        for pair in self.pairs.values():
            Decoder(pair.target, pair.drafter, OptTree()).generate(pair.encode("Count to ten."), 16, stop=None)


def _watched(method: Method, watch: Expectation | None, kept: list[Step]) -> Method:
    """The same method: what `watch` spends is not the decoder's, and `kept` gets the steps of the first answer."""

    def generate(prompt: list[int], limit: int, seed: int) -> Generation:
        before = watch.seconds if watch is not None else 0.0
        generation = method(prompt, limit, seed)
        assert isinstance(generation, Generation)
        if not kept:
            kept.extend(generation.steps)
        spent = watch.seconds - before if watch is not None else 0.0
        return dataclasses.replace(generation, seconds=generation.seconds - spent)

    return generate


def load_pairs(options: Options, combinations: Sequence[Combination]) -> dict[tuple[str, str], Pair]:
    """Load each drafter that is named, once; by its spec and how it is read.

    Raises ValueError where a fitted sharpening is asked for and none is stored.
    """
    pairs: dict[tuple[str, str], Pair] = {}
    drafters = list(dict.fromkeys(one.drafter for one in combinations))
    for spec, pair in load_several(options, drafters, options.check_device()).items():
        if any(one.drafter == spec and one.sharpening == "fitted" for one in combinations):
            if resolved(pair)["sharpening"] is None:
                raise ValueError(
                    f"no calibration is stored beside {spec}: --sharpening bare, or opt_tree.training.fitting.calibrate"
                )
            pairs[spec, "fitted"] = pair
        # Above temperature 0 a drafter is bare; so it is here, whatever the temperature.
        pairs[spec, "bare"] = dataclasses.replace(pair, drafter=copy.copy(pair.drafter).calibrated(1.0))
    return pairs


def drawn(step: Step) -> dict[str, Any]:
    """A tree as the plots read it."""
    return {
        "parents": step.tree.parents.tolist(),
        "log_probs": step.tree.path_log_probs.round(4).tolist(),
        "path": step.path,
    }


def slim(answer: Record) -> Record:
    """Without what no figure needs."""
    dropped = ("prompt_ids", "token_ids", "idxs")
    choices = [{key: value for key, value in choice.items() if key not in dropped} for choice in answer["choices"]]
    return {**answer, "choices": choices}


WEIGHTS = (".safetensors", ".bin", ".pt")


def footprint(spec: str) -> dict[str, Any]:
    """Bytes on disk and minutes of training, over all parts; None where a part that has weights does not say.

    A table that learns as it goes weighs nothing and was trained for no time.
    """
    folders = [Path(folder) for folder in folders_of(spec)]
    minutes = [read_minutes(str(folder)) for folder in folders]
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir() if file.suffix in WEIGHTS]
    known = all(folder.is_dir() for folder in folders)
    return {
        "weights_bytes": sum(file.stat().st_size for file in files) if known else None,
        "training_minutes": None if None in minutes else sum(minute or 0.0 for minute in minutes),
    }
