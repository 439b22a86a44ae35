"""What `evaluation.compare` can be asked for: the command line, and the grid of cells that it spells."""

from dataclasses import dataclass
from typing import Any

from evaluation.compare.combinations import PRESETS, VERIFIERS, Cell, grid
from evaluation.run.options import option


@dataclass(frozen=True)
class Options:
    """What is compared, on what."""

    preset: str | None = option(None, "a ready list of cells instead of a grid", choices=tuple(PRESETS))
    quick: bool = option(False, "with --preset: fewer cells and questions")
    policies: str | None = option(None, "comma list of trees, parameters behind colons: opt:0.2,eagle2,kary:3,...")
    verifiers: str = option("match", "comma list: " + ", ".join(VERIFIERS))
    temperatures: str = option("0", "comma list; at 0 the judge is greedy")
    budgets: str = option("60", "comma list of nodes, at most that many each step")
    drafters: str = option("draft", "comma list of draft, eagle")
    laws: str = option("sharpened", "comma list of bare, sharpened: the drafter's law at temperature 0")
    lossy: bool = option(False, "allow verifiers that do not keep the target's law")
    base_model_path: str = option("demo", "target: a folder, a Hub id or 'demo', the embedded one")
    draft_model_path: str = option("demo", "independent draft model, likewise")
    ea_model_path: str = option("demo", "EAGLE head, likewise")
    bench_name: str = option("demo", "question set, as for evaluation.eval_opt_classic")
    question_file: str | None = option(None, "any JSONL with `turns` or `question`, instead of --bench-name")
    data_dir: str | None = option(None, "where question sets lie")
    conv_template: str | None = option(None, "FastChat's conversation of this name instead of the chat template")
    limit: int | None = option(None, "questions, from the first (default: 8, quick: 3)")
    max_new_tokens: int | None = option(None, "new tokens a question, at most (default: 64, quick: 32)")
    rates_questions: int | None = option(
        None, "questions from the set's end, not compared, to measure acceptance rates on (default: 8, quick: 3)"
    )
    expect_every: int = option(4, "compute the exact block efficiency on every so many steps; 0: never")
    dtype: str = option("auto", "of the target: auto, float32, bfloat16, float16")
    device: str | None = option(None, "by default cuda where there is one, else cpu")
    threads: int = option(1, "CPU threads")
    seed: int = option(0, "of sampling")
    output: str = option("compare.jsonl", "one JSON line a cell; its header and the measured rates lie beside it")
    overwrite: bool = option(False, "delete the output instead of going on with it")
    plots: str | None = option(None, "draw what the output has data for into this folder")

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("max_new_tokens", 1), ("rates_questions", 1), ("expect_every", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")

    @property
    def cells(self) -> list[Cell]:
        """What is asked for, valid or not."""
        if self.preset is not None:
            return PRESETS[self.preset](self.quick)
        if self.policies is None:
            return []
        temperatures, budgets = _numbers(self.temperatures, float), _numbers(self.budgets, int)
        policies, judges = self.policies.split(","), self.verifiers.split(",")
        return grid(policies, judges, temperatures, budgets, self.drafters.split(","), self.laws.split(","))


def _numbers(text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"not a comma list of numbers: {text!r}") from error
