"""OPT-Tree's evaluation on a pair of real models: trees of equal nodes and equal layers along stored greedy texts.

    python -m experiments.real_pair --target T.gguf --drafter D.gguf --data-dir bench --output runs/real_pair

Three stages, each of which goes on where it was stopped: the target's plain texts (`texts.jsonl`); the drafter's
temperature and acceptance rates, from texts that nothing is measured on (`fit.json`); the steps of every policy along
the other texts (`steps.jsonl`), which takes no target. Then the tables, as text and as `tables.json`. `--check` and
`--sampled` (`sampled.jsonl`) decode with both models.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from evaluation.command_line import check_bounds, main_of, option


@dataclass(frozen=True)
class Options:
    """The pair, the questions, and how long it may take."""

    target: str = option("demo", "a folder, a .gguf file or a name that `python -m opt_tree.models` lists")
    drafter: str = option("demo", "the draft model, named likewise")
    trimmed: str | None = option(None, "what the draft model is trimmed to, as `trimmed:` names it: a folder or a name")
    sets: str = option("humaneval,mbpp,gsm8k,mt_bench,humaneval_repeated", "comma list; see `questions.py`")
    data_dir: str | None = option(None, "where the sets are: NAME/question.jsonl")
    fetch: bool = option(False, "download the sets that are not there")
    count: int = option(10, "questions of each set, spread over it; the third of ten is for the fit alone", least=4)
    rounds: int | None = option(None, "ask only the first so many of a set; a later run with more goes on", least=3)
    max_new_tokens: int = option(128, "of a text, at most", least=2)
    only: str | None = option(None, "comma list of policies (`ways.py`), fitted ones with them, or of beginnings")
    bare: bool = option(False, "leave out the policies of a fitted temperature, which draft everything once more")
    check: int = option(0, "texts, the shortest, that are decoded with some trees: do steps agree?", least=0)
    sampled: int = option(0, "texts, the first, that are decoded at temperature 1 with some trees", least=0)
    weights: str | None = option(None, "int8 or int4: both models quantised, where the CPU multiplies no bfloat16")
    output: str = option("real_pair", "folder of the three files, and of the tables")
    width: int = option(8, "texts that are decoded at a time", least=1)
    minutes: float = option(600.0, "no further text is drafted along after so many", least=0)
    json: bool = option(False, "print the figures as one JSON line, too")

    def kept(self, name: str) -> Path:
        """Where "steps" or "sampled" texts are kept: those of a trimmed draft model apart."""
        return Path(self.output) / (f"{name}.jsonl" if self.trimmed is None else f"{name}.trimmed.jsonl")

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.weights is not None:
            from opt_tree.backends.quantised import check_weights

            check_weights(self.weights)


main = main_of("experiments.real_pair", Options, __doc__, "experiments.real_pair.measure:run", "stopped; it goes on")

if __name__ == "__main__":
    sys.exit(main())
