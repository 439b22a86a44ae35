"""The models of a comparison, loaded once: a target, and every drafter bare and fitted; their acceptance rates, too.

Owns what two outputs must share to be one. The rates lie beside the output, in OUTPUT.rates, and are counted once.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from evaluation.answers.file import AnswerFile
from evaluation.compare.combinations import Combination
from evaluation.compare.options import Options
from evaluation.compare.rates import Counts
from evaluation.run.models import load_several, resolved
from opt_tree import Pair
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates

LEAST_TRIALS = 20
"""Ranks and depths that were tried less often have no acceptance rate."""


class Pairs:
    """The models and what is known of them; `settings` are what made an output, `sharpening` what fitted drafters have.

    Raises ValueError where a fitted sharpening is asked for and none is stored.
    """

    def __init__(self, options: Options, combinations: Sequence[Combination]) -> None:
        self.pairs = load_pairs(options, combinations)
        self.pair = next(iter(self.pairs.values()))
        self.rates_file = AnswerFile(f"{options.output}.rates")
        known = resolved(self.pair)
        self.settings: dict[str, Any] = {
            "base_model_path": options.base_model_path,
            "target_dtype": known["target_dtype"],
            "canonical": known.get("canonical"),
            "through": options.through,
        }
        self.sharpening = {
            spec: resolved(pair)["sharpening"] for (spec, read), pair in self.pairs.items() if read == "fitted"
        }

    def pair_of(self, one: Combination) -> Pair:
        """The target, and the drafter of a combination as it is read."""
        return self.pairs[reading(one)]

    def rates_by(self, key: str, count: Callable[[], Counts]) -> AcceptanceRates:
        """Acceptance rates of this name, counted where they are not there yet."""
        found = {record["question_id"]: record["rates"] for record in self.rates_file.read()}
        if key not in found:
            counts = count()
            found[key] = counts.rates(LEAST_TRIALS).to_dict()
            self.rates_file.append({"question_id": key, "rates": found[key], "tried": counts.tried.tolist()})
        return AcceptanceRates(tuple(found[key]["by_rank"]), tuple(map(tuple, found[key]["by_depth"])))


def reading(one: Combination) -> tuple[str, str]:
    """The drafter of a combination, and how it is read: bare where nothing is to be sharpened."""
    return one.drafter, "fitted" if one.sharpening == "fitted" else "bare"


def load_pairs(options: Options, combinations: Sequence[Combination]) -> dict[tuple[str, str], Pair]:
    """Load each drafter that is named, once; by its spec and how it is read."""
    pairs: dict[tuple[str, str], Pair] = {}
    drafters = list(dict.fromkeys(one.drafter for one in combinations))
    for spec, pair in load_several(options, drafters, options.check_device()).items():
        if (spec, "fitted") in map(reading, combinations):
            if resolved(pair)["sharpening"] is None:
                raise ValueError(
                    f"no calibration is stored beside {spec}: --sharpening bare, or opt_tree.training.fitting.calibrate"
                )
            pairs[spec, "fitted"] = pair
        # Above temperature 0 a drafter is bare; so it is here, whatever the temperature.
        pairs[spec, "bare"] = dataclasses.replace(pair, drafter=copy.copy(pair.drafter).calibrated(1.0))
    return pairs
