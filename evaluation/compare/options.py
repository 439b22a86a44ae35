"""What `evaluation.compare` can be asked for: the command line, and the combinations that it spells."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evaluation.command_line import numbers, option, whole_numbers
from evaluation.run.options import MOST_LANES, PUBLISHED, Asked, known

if TYPE_CHECKING:
    from evaluation.compare.combinations import Combination
    from evaluation.compare.studies import Size

GRID: dict[str, str | None] = {"verifiers": "match", "temperatures": "0", "budgets": "60", "sharpening": None}
"""What a grid is made of, besides policies and drafters, where nothing else is said; sharpening: what is stored."""


@dataclass(frozen=True)
class Options(Asked):
    """What is compared, on what."""

    preset: str | None = option(None, "a ready list of combinations instead of a grid", choices=("paper", "drafters"))
    policies: str | None = option(
        None,
        known(
            "policies",
            "comma list of trees, parameters behind colons, as opt:0.2,kary:3; a controller or FILE.py:NAME goes, "
            "too; of ",
        ),
    )
    verifiers: str | None = option(None, known("verifiers", "comma list (default: match), FILE.py:NAME or of "))
    temperatures: str | None = option(None, "comma list (default: 0); at 0 the judge is greedy")
    budgets: str | None = option(None, "comma list of nodes (default: 60), at most that many each step")
    drafter: str = option(None, "comma list of drafters, as for eval_opt_classic")
    sharpening: str | None = option(
        None, "comma list of bare, fitted (default: fitted if it is): how the drafter is read at temperature 0"
    )
    lossy: bool = option(False, "allow verifiers that do not keep the target's distribution")
    max_new_tokens: int | None = option(
        None, "new tokens a question, at most (default: 64; of --preset drafters: 32)", least=1
    )
    peers: bool = option(
        False, "time transformers on the same questions, too: plain, assisted, prompt lookup; --preset drafters does"
    )
    rates_questions: int = option(
        8, "questions from the set's end, not compared, to measure acceptance rates on", least=1
    )
    warm_set: str | None = option(
        None, "a set or file of other questions, which a drafter that learns answers before each line (default: none)"
    )
    expect_every: int = option(4, "compute the exact block efficiency on every so many steps; 0: never", least=0)
    batch_size: int = option(
        1,
        "questions that are decoded side by side; rows are the same but for their times, which are left out",
        least=1,
        most=MOST_LANES,
    )
    seed: int = option(0, "of sampling")
    output: str = option("compare.jsonl", "one JSON line a combination; its header and the rates lie beside it")
    overwrite: bool = option(False, "delete the output instead of going on with it")
    plots: str | None = option(None, "draw what the output has data for into this folder")

    def __post_init__(self) -> None:
        given = [name for name in (*GRID, "policies", "drafter", *PUBLISHED) if getattr(self, name) is not None]
        if self.preset is not None and given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"--preset {self.preset} is a ready list of combinations: leave out {flags}")
        super().__post_init__()
        if self.batch_size > 1 and (self.peers or self.size.peers):
            raise ValueError("--batch-size: --peers compares times; leave one of them out")
        if self.batch_size > 1 and self.expect_every and any(one.temperature for one in self.combinations):
            raise ValueError("--batch-size: block efficiency is computed one by one; --expect-every 0 leaves it out")

    @property
    def drafters(self) -> list[str]:
        """A comma list."""
        return self.drafter.split(",")

    @property
    def size(self) -> "Size":
        """How much is decoded where nothing else says it."""
        from evaluation.compare.studies import SIZES, Size

        return SIZES.get(self.preset or "", Size())

    @property
    def combinations(self) -> "list[Combination]":
        """What is asked for, valid or not."""
        from evaluation.compare.combinations import Grid, is_calibrated
        from evaluation.compare.studies import study
        from opt_tree.policy import MOST_NODES

        if self.preset is not None:
            return study(self.preset)
        if self.policies is None:
            return []
        grid = {name: getattr(self, name) or value or "" for name, value in GRID.items()}
        lists: dict[str, Any] = {
            "policies": self.policies.split(","),
            "judges": grid["verifiers"].split(","),
            "temperatures": numbers(grid["temperatures"]),
            "budgets": whole_numbers(grid["budgets"], MOST_NODES),
        }
        found = []
        for drafter in self.drafters:
            reading = grid["sharpening"] or ("fitted" if is_calibrated(drafter) else "bare")
            found += Grid(**lists, drafters=(drafter,), sharpening=reading.split(",")).combinations()
        return found
