"""Ready lists of combinations, `--preset NAME`, and how much each decodes. Owns nothing but these lists."""

import itertools
from dataclasses import dataclass

from evaluation.compare.combinations import Combination, Grid, is_calibrated

DRAFT, HEAD = "lm:demo", "eagle:demo"


def paper() -> list[Grid]:
    """The OPT-Tree paper's: its trees at equal budgets, the scaling figure, the threshold and temperature sweeps."""
    trees = ("opt:0.2", "eagle2", "sequoia", "eagle1", "binary")
    both = (DRAFT, HEAD)
    sweep = [f"opt:{threshold}" for threshold in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)]
    return [
        Grid(trees, budgets=(25, 30, 50, 60, 130), drafters=both, sharpening=("bare", "fitted")),
        Grid(("opt:0.2", "sequoia"), budgets=(10, 25, 60, 130, 250, 500), sharpening=("fitted",)),
        Grid(sweep, budgets=(50,), drafters=both, sharpening=("fitted",)),
        Grid(("opt:0.2",), ("match",), (0, 0.2, 0.4, 0.6, 0.8, 1), (50,), both, ("fitted",)),
    ]


DRAFTERS: dict[str, tuple[str, ...]] = {
    DRAFT: ("opt:0.2", "binary"),
    HEAD: ("opt:0.2", "eagle2"),
    "eagle3:demo": ("opt:0.2", "eagle2"),
    "ngram": ("opt:0", "chain"),
    "store:demo": ("opt:0",),
    "recycling": ("opt:0", "recycling_tree"),
    f"graft:1:{HEAD}+store:demo": ("opt:0.05",),
    f"graft:2:{HEAD}+store:demo": ("opt:0.05",),
    f"rasd:{HEAD}+store:demo": ("opt:0.2", "eagle2"),
    **dict.fromkeys(("exit:demo", "parallelspec:demo", "dspark:demo"), ("opt:0.05", "chain")),
}
"""What drafts, and under which trees: OPT-Tree, whose threshold is about what a layer costs, then its paper's."""


def drafters() -> list[Grid]:
    """What drafts: models, tables, and a model above a table, each under OPT-Tree and under its paper's tree.

    Tables that learn from prompt to prompt (recycling) are as warm as the combinations before have made them.
    """
    sizes = {0: (8, 12, 24, 60), 1: (8, 60)}
    grids = []
    for (temperature, budgets), (drafter, trees) in itertools.product(sizes.items(), DRAFTERS.items()):
        read = ("fitted",) if is_calibrated(drafter) else ("bare",)
        grids.append(Grid(trees, temperatures=(temperature,), budgets=budgets, drafters=(drafter,), sharpening=read))
    return grids


STUDIES = {"paper": paper, "drafters": drafters}


@dataclass(frozen=True)
class Size:
    """How much is decoded, where the command line does not say it."""

    questions: int = 8
    tokens: int = 64
    """New tokens a question, at most."""
    plain_every: int = 2
    """Of so many questions one is decoded plainly, too: before the combination's own answer or after it, by turns."""
    peers: bool = False
    """Whether `transformers` decodes the questions, too."""


SIZES = {"drafters": Size(24, 32, plain_every=8, peers=True)}
"""Of the studies that are not of the usual size: that of drafters has some hundred combinations."""


def study(name: str) -> list[Combination]:
    """The combinations of a study, each once."""
    return list(dict.fromkeys(one for grid in STUDIES[name]() for one in grid.combinations()))
