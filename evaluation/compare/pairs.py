"""The models of a comparison, loaded once: a target, and every drafter bare and fitted."""

import copy
import dataclasses
from collections.abc import Sequence

from evaluation.compare.combinations import Combination
from evaluation.compare.options import Options
from evaluation.run.models import load_several, resolved
from opt_tree import Pair


def reading(one: Combination) -> tuple[str, str]:
    """The drafter of a combination, and how it is read: bare where nothing is to be sharpened."""
    return one.drafter, "fitted" if one.sharpening == "fitted" else "bare"


def load_pairs(options: Options, combinations: Sequence[Combination]) -> dict[tuple[str, str], Pair]:
    """Load each drafter that is named, once; by its spec and how it is read.

    Raises ValueError where a fitted sharpening is asked for and none is stored.
    """
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
