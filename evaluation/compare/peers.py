"""What a drafter competes with: plain decoding, and `transformers`' own decoding of the same questions.

One line a temperature: all of them take turns, question by question.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from evaluation.answers.file import Record
from evaluation.answers.match import exact_match, paired
from evaluation.answers.metrics import rates, tokens_per_second
from evaluation.run.baselines import transformers_assisted, transformers_greedy, transformers_lookup
from evaluation.run.conversation import Answer
from opt_tree import Pair, Sampling

PLAIN = "plain decoding"


def peers_key(temperature: float) -> str:
    """The name of the line."""
    return f"plain decoding and transformers, T {temperature:g}"


def own_methods(pair: Pair, assistant: Any, temperature: float) -> dict[str, Answer]:
    """Return what transformers can do with this target; assisted only where there is an assistant."""
    known = {"transformers": transformers_greedy, "transformers, prompt lookup": transformers_lookup}
    if assistant is not None:
        known["transformers, assisted"] = partial(transformers_assisted, assistant=assistant)
    sampling = Sampling(temperature)

    def method(decode: Any) -> Answer:
        return lambda prompt, limit, seed: decode(pair, prompt, limit, sampling, seed)

    return {name: method(decode) for name, decode in known.items()}


class Yardstick:
    """Plain decoding of one temperature, from all lines that have some: what each question took, and what it said."""

    def __init__(self, records: Sequence[Record], temperature: float) -> None:
        self.answers: dict[Any, list[Record]] = {}
        for record in records:
            if record.get("cell", record)["temperature"] == temperature:
                for answer in record.get("plain", record.get("peers", {}).get(PLAIN, [])):
                    self.answers.setdefault(answer["question_id"], []).append(answer)

    def times(self, answers: Sequence[Record]) -> float | None:
        """Tokens a second of some answers over those of plain decoding, on the questions of both."""
        common = [answer for answer in answers if answer["question_id"] in self.answers]
        if not common:
            return None
        plain = [rates(self.answers[answer["question_id"]]).mean(0) for answer in common]
        ours, theirs = rates(common).sum(0), sum(plain)
        return float(ours[0] / ours[1] * theirs[1] / theirs[0])

    def equal(self, answers: Sequence[Record]) -> tuple[int, int]:
        """How many of some answers are plain decoding's, of how many that can be compared."""
        found = exact_match(*paired(answers, [known[0] for known in self.answers.values()]))
        return found["equal"], found["compared"]


def peers_of(records: Sequence[Record]) -> dict[float, Mapping[str, Sequence[Record]]]:
    """The answers of plain decoding and of transformers, by temperature and name."""
    return {record["temperature"]: record["peers"] for record in records if "peers" in record}


def speeds(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Tokens a second of each of them, for a machine."""
    return [
        {"name": name, "temperature": temperature, "tokens_per_second": tokens_per_second(answers)}
        for temperature, found in peers_of(records).items()
        for name, answers in found.items()
    ]
