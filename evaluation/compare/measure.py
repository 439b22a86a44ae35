"""One combination, measured: the questions, the rates that trees are made of, the clock.

Owns in which order things are decoded. Knows nothing of files of combinations, tables and plots.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from evaluation.answers.comparison import PLAIN, figures
from evaluation.answers.file import AnswerFile, Record
from evaluation.compare.combinations import Combination, footprint, verifier_of
from evaluation.compare.expectation import Expectation
from evaluation.compare.options import Options
from evaluation.compare.rates import measure as count_acceptance
from evaluation.questions.prompts import Prompter
from evaluation.questions.sets import Question, load_set, select
from evaluation.run.baselines import InLoop, transformers_methods
from evaluation.run.conversation import Conversation, alone, side_by_side
from evaluation.run.models import load_assistant, load_several, resolved
from evaluation.timing import Method, in_turn, schedule
from opt_tree import Decoder, Generation, OptTree, Pair, Sampling, Step, TreePolicy, Verifier
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.policies.registry import name_of, takes
from opt_tree.target import Asking
from opt_tree.tools.presets import controller, plain

RATES_TOKENS = 64
"""New tokens a question that acceptance rates are counted on."""
LEAST_TRIALS = 20
"""Ranks and depths that were tried less often have no acceptance rate."""


def peers_key(temperature: float) -> str:
    """The name of the line of plain decoding and of transformers' own decoding, which take turns."""
    return f"{PLAIN} and transformers, T {temperature:g}"


class Bench:
    """The models and the questions; measures one combination after the other.

    `settings` are what two outputs must share to be one, `sharpening` is what fitted drafters have. Acceptance rates
    lie beside the output, in OUTPUT.rates, and are counted once.
    """

    def __init__(self, options: Options, combinations: Sequence[Combination]) -> None:
        self.options, self.size = options, options.size
        questions = load_set(options.bench_name, options.question_file, options.data_dir, options.fetch)
        there = questions.questions[options.question_begin : options.question_end]
        first_turns = tuple(dataclasses.replace(question, turns=question.turns[:1]) for question in there)
        self.questions = select(first_turns, None, None, options.limit or self.size.questions)
        self.others = first_turns[len(self.questions) :][-options.rates_questions :]
        self.warming = self._warming()
        self.pairs = _load(options, combinations)
        self.pair = next(iter(self.pairs.values()))
        self.rates_file = AnswerFile(f"{options.output}.rates")
        prompter = Prompter(self.pair.tokenizer, self.pair.stop, options.conv_template)
        self.max_new_tokens = options.max_new_tokens or self.size.tokens
        self.conversation = Conversation(prompter, self.max_new_tokens, seed=options.seed)
        self.counting = dataclasses.replace(self.conversation, max_new_tokens=RATES_TOKENS)
        asked = ("conv_template", "seed", "expect_every", "batch_size", "warm_set")
        known = resolved(self.pair)
        self.settings = {
            **{key: getattr(options, key) for key in ("base_model_path", "through", *asked)},
            **{key: known.get(key) for key in ("target_dtype", "canonical")},
            **{"questions": questions.name, "sha256": questions.sha256, "ids": [q.id for q in self.questions]},
            "rates_ids": [question.id for question in self.others],
            "max_new_tokens": self.max_new_tokens,
            "device_type": self.pair.target.device.type,
        }
        self.sharpening = {
            spec: resolved(pair)["sharpening"] for (spec, read), pair in self.pairs.items() if read == "fitted"
        }

    def pair_of(self, one: Combination) -> Pair:
        """The target, and the drafter of a combination as it is read: bare where nothing is to be sharpened."""
        return self.pairs[one.drafter, "fitted" if one.sharpening == "fitted" else "bare"]

    def refusal(self, one: Combination) -> str | None:
        """Why the library does not run this combination with this drafter; None if it does, or does not know yet."""
        if one.controls:
            return None
        pair = self.pair_of(one)
        try:
            Decoder(pair.target, pair.drafter, one.build(), verifier_of(one.verifier), lossy=self.options.lossy)
        except TypeError as error:
            return str(error)
        return None

    def measure(self, one: Combination) -> Record:
        """Answer the questions as the combination says, every second one plainly, too; return its line."""
        pair, sampling = self.pair_of(one), Sampling(one.temperature)
        policy, verifier = self._policy(one, pair), verifier_of(one.verifier if one.temperature else "match")
        stop = self.conversation.prompter.stop

        def judged_by(verifier: Verifier, heard: Callable[[Generation], Generation] = InLoop.heard) -> InLoop:
            try:
                decoder = Decoder(pair.target, pair.drafter, policy, verifier, lossy=self.options.lossy)
            except TypeError as error:
                raise ValueError(f"{one.key}: {error}") from error
            return InLoop(decoder, sampling, stop, heard=heard)

        self._warm(judged_by(verifier))
        watch = None
        if self.options.expect_every and one.temperature:
            children = policy.policies[-1].children
            verifier = watch = Expectation(one.verifier, children, self.options.expect_every)
        first: list[Step] = []

        def heard(made: Generation) -> Generation:
            """Keep the first step; what was watched took time that is not the decoder's."""
            first.extend([] if first else made.steps[:1])
            return made if watch is None else dataclasses.replace(made, seconds=made.seconds - watch.spent())

        ours, base = judged_by(verifier, heard), InLoop(plain(pair.target), sampling, stop)
        if self.options.batch_size > 1:
            answers = self._together(ours, self.questions)
            baseline = self._together(base, self.questions[:: self.size.plain_every])
        else:
            answers, baseline = self._in_turn(ours, base)
        counts = (count for answer in answers for count in answer["choices"][0]["tree_nodes"])
        if (most := max(counts, default=0)) > one.budget:
            raise ValueError(f"{one.policy} sent {most} nodes to the target, the budget is {one.budget}")
        efficiency = watch.values if watch is not None else {}
        return _about(one, first[0]) | {
            "figures": figures(answers, baseline, efficiency) | footprint(one.drafter),
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

    def _in_turn(self, ours: Method, base: Method) -> tuple[list[Record], list[Record]]:
        """The combination's answers and plain decoding's, one by one and by turns."""
        answers, baseline = list[Record](), list[Record]()
        for index, question in enumerate(self.questions):
            every = self.size.plain_every
            both = [(base, baseline), (ours, answers)] if index % every == 0 else [(ours, answers)]
            for method, kept in in_turn(both, index // every):
                kept.append(self._answer(question, method))
        return answers, baseline

    def _policy(self, one: Combination, pair: Pair) -> TreePolicy:
        """What chooses the trees; a controller is new for each line."""
        if one.controls:
            return controller(one.policy, pair.target, pair.drafter, OptTree(one.budget), self.options.seed)
        return one.build(self.rates(one)) if takes(name_of(one.policy), "rates") else one.build()

    def _together(self, method: InLoop, questions: Sequence[Question]) -> list[Record]:
        """Answers to these questions, decoded side by side; the first one alone is heard."""

        def task(place: int, own: InLoop) -> Asking[Record]:
            heard = own if place == 0 else dataclasses.replace(own, heard=InLoop.heard)
            choices = yield from self.conversation.answer(questions[place], heard)
            return {"question_id": questions[place].id, "choices": choices}

        tasks = [functools.partial(task, place) for place in range(len(questions))]
        return [made for _, made in sorted(side_by_side(method, tasks, self.options.batch_size))]

    def _answer(self, question: Question, method: Method) -> Record:
        return {"question_id": question.id, "choices": alone(method, self.conversation.answer(question, method))}

    def rates(self, one: Combination) -> AcceptanceRates:
        """Acceptance rates of the drafter, siblings and temperature, on the other questions; counted once."""
        key = f"{one.drafter}, T {one.temperature:g}, {one.children}"
        found = {record["question_id"]: record["rates"] for record in self.rates_file.read()}
        if key not in found:
            if not self.others:
                raise ValueError(
                    f"{one.policy} needs acceptance rates, and all {len(self.questions)} questions are compared: "
                    "lower --limit, or name a larger set"
                )
            pair = self.pair_of(one)
            pair.drafter.clear()
            counts = count_acceptance(pair, one.children, Sampling(one.temperature), self.others, self.counting)
            found[key] = counts.rates(LEAST_TRIALS).to_dict()
            self.rates_file.append({"question_id": key, "rates": found[key], "tried": counts.tried.tolist()})
        return AcceptanceRates(tuple(found[key]["by_rank"]), tuple(map(tuple, found[key]["by_depth"])))

    def warm_up(self) -> None:
        """Pay for cold memory before anything is timed."""
        for pair in self.pairs.values():
            Decoder(pair.target, pair.drafter, OptTree()).generate(pair.encode("Count to ten."), 16, stop=None)


def _about(one: Combination, first: Step) -> Record:
    """What a combination is, and its tree in the first step of the first answer."""
    tree, log_probs = first.tree, first.tree.path_log_probs.round(4).tolist()
    shape = {"parents": tree.parents.tolist(), "log_probs": log_probs, "path": first.path}
    return {"question_id": one.key, "code": one.code, "cell": dataclasses.asdict(one), "first_tree": shape}


def slim(answer: Record) -> Record:
    """Without what no figure needs."""
    dropped = ("prompt_ids", "token_ids", "idxs")
    choices = [{key: value for key, value in choice.items() if key not in dropped} for choice in answer["choices"]]
    return {**answer, "choices": choices}


def _load(options: Options, combinations: Sequence[Combination]) -> dict[tuple[str, str], Pair]:
    """Load a target and each drafter that is named, once; by the drafter's spec and how it is read, bare or fitted.

    Raises ValueError where a fitted sharpening is asked for and none is stored.
    """
    pairs: dict[tuple[str, str], Pair] = {}
    fitted = {one.drafter for one in combinations if one.sharpening == "fitted"}
    drafters = list(dict.fromkeys(one.drafter for one in combinations))
    for spec, pair in load_several(options, drafters, options.check_device()).items():
        if spec in fitted:
            if resolved(pair)["sharpening"] is None:
                raise ValueError(
                    f"no calibration is stored beside {spec}: --sharpening bare, or opt_tree.training.fitting.calibrate"
                )
            pairs[spec, "fitted"] = pair
        # Above temperature 0 a drafter is bare; so it is here, whatever the temperature.
        pairs[spec, "bare"] = dataclasses.replace(pair, drafter=copy.copy(pair.drafter).calibrated(1.0))
    return pairs
