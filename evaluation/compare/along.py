"""Combinations counted along stored answers, without decoding: the steps that each takes through the target's texts.

The texts of a target decoded greedily, or with a seed judged by `match`, do not depend on the trees: how many steps a
tree of the most probable children takes is exact (`opt_tree.tools.along`). All combinations of one drafter share its
forwards. Nothing is timed. Acceptance rates are counted along answers that are not compared.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from tqdm import tqdm

from evaluation.answers.file import Record
from evaluation.answers.reading import AnswerSet
from evaluation.answers.record import add_turn
from evaluation.compare.combinations import Combination
from evaluation.compare.lines import line_of
from evaluation.compare.options import Options
from evaluation.compare.pairs import Pairs, reading
from evaluation.compare.rates import DEPTH, WIDTH, Counts, measuring_tree
from evaluation.questions.prompts import Prompter
from opt_tree import Generation, Static, TreePolicy
from opt_tree.methods.policies.acceptance_rates import HALVING, AcceptanceRates
from opt_tree.tools.along import along
from opt_tree.tools.stored_text import StoredText

PLAIN = "plain"
Turn = tuple[Record, int, StoredText]
"""A choice of an answer, a turn's place in it, and the turn's text."""


def stored_answers(options: Options) -> AnswerSet:
    """Read the answers. ValueError where they lack token ids, or another target or temperature made them."""
    assert options.along is not None
    fields = ("turns", "prompt_ids", "token_ids", "finish_reason")
    found = AnswerSet.read(options.along).require(fields, "its tokens are what is walked along")
    if not found.settings:
        raise ValueError(f"{found.path} has no header, which says what made it")
    if (made := found.settings.get("base_model_path")) != options.base_model_path:
        raise ValueError(f"{found.path} has answers of {made}, not of {options.base_model_path}")
    temperature = float(found.settings["temperature"])
    if any(one.temperature != temperature for one in options.combinations):
        raise ValueError(f"{found.path} was decoded at temperature {temperature:g}: --temperatures {temperature:g}")
    return found


class Along(Pairs):
    """The models and the stored answers; measures all combinations of a drafter in one walk."""

    def __init__(self, options: Options, combinations: Sequence[Combination]) -> None:
        stored = stored_answers(options)
        count = options.limit or len(stored.answers)
        self.answers, self.others = stored.answers[:count], stored.answers[count:][-options.rates_questions :]
        super().__init__(options, combinations)
        for (spec, _), pair in self.pairs.items():
            if pair.drafter.reads_logits:
                raise ValueError(f"{spec} learns from every tree that it draws: only decoding counts its steps")
        self._limit = int(stored.settings["max_new_token"])
        template = stored.settings.get("conv_template")
        self._ends = frozenset(Prompter(self.pair.tokenizer, self.pair.stop, template).stop.tokens)
        self.settings |= {
            "along": hashlib.sha256(stored.path.read_bytes()).hexdigest(),
            "ids": [answer["question_id"] for answer in self.answers],
            "rates_ids": [answer["question_id"] for answer in self.others],
            "max_new_tokens": self._limit,
        }
        self._left: list[Combination] = []
        self._found: dict[str, Record] = {}

    def refusal(self, one: Combination) -> str | None:
        """Why this combination cannot be counted along a text; None where it can."""
        sampled = not one.controls and one.build().children.sampled
        if one.controls or sampled or one.verifier not in ("greedy", "match"):
            return "--along counts trees of the most probable children, judged by greedy or match"
        return None

    def warm_up(self, left: Sequence[Combination]) -> None:
        """Note what is to be measured."""
        self._left = list(left)

    def measure(self, one: Combination) -> Record:
        """Return the line of a combination; those of the same drafter are found with it."""
        if one.key not in self._found:
            self._walk([other for other in self._left if reading(other) == reading(one)])
        return self._found.pop(one.key)

    def _walk(self, cells: Sequence[Combination]) -> None:
        policies = {one.key: one.build(self._rates(one) if one.needs_rates else HALVING) for one in cells}
        made: dict[str, list[Record]] = {key: [] for key in (*policies, PLAIN)}
        first: dict[str, Generation] = {}
        for answer in tqdm(self.answers, desc="along answers", unit="answer", leave=False, disable=None):
            records = {key: {"question_id": answer["question_id"], "choices": list[Record]()} for key in made}
            for (choice, turn, text), walked in self._along(answer, cells[0], {**policies, PLAIN: Static.empty()}):
                first = first or walked
                for key, generation in walked.items():
                    choices = records[key]["choices"]
                    if turn == 0:
                        choices.append({"index": choice.get("index", 0), "turns": []})
                    add_turn(choices[-1], text.prompt, generation, choice["turns"][turn], choice["finish_reason"][turn])
            for key, record in records.items():
                made[key].append(record)
        for one in cells:
            self._found[one.key] = line_of(one, made[one.key], made[PLAIN], first[one.key].steps[0], {})

    def _along(
        self, answer: Record, one: Combination, policies: Mapping[str, TreePolicy]
    ) -> Iterator[tuple[Turn, dict[str, Generation]]]:
        """Each turn of an answer, and what every policy does along it, by the drafter of a combination."""
        pair = self.pair_of(one)
        for choice in answer["choices"]:
            for turn, (prompt, tokens) in enumerate(zip(choice["prompt_ids"], choice["token_ids"], strict=True)):
                text = StoredText(prompt, tokens, self._limit, self._ends)
                yield (choice, turn, text), along(pair.drafter, text, policies, pair.target)

    def _rates(self, one: Combination) -> AcceptanceRates:
        """Acceptance rates by rank and depth, along the answers that are not compared."""

        def count() -> Counts:
            if not self.others:
                raise ValueError(f"{one.policy} needs acceptance rates, and all answers are compared: lower --limit")
            tree, counts = measuring_tree(WIDTH, DEPTH), Counts.none(DEPTH, WIDTH)
            for answer in self.others:
                for _, walked in self._along(answer, one, {"": tree}):
                    counts.add(walked[""])
            return counts

        return self.rates_by(f"{' '.join(reading(one))}, along answers", count)
