"""Ready lists of combinations, `--preset NAME`, and how much each decodes. Owns nothing but these lists."""

import itertools
from dataclasses import dataclass

from evaluation.compare.combinations import Combination, Grid

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


def verification() -> list[Grid]:
    """The verification study's: i.i.d. rollouts by K and L, all verifiers at equal budget, temperatures, delay.

    One judge suffices for the rollouts and the temperatures: on a cell's trees the expectation of all is computed.
    """
    judges: tuple[str, ...] = ("multi_round", "k_seq", "khisti", "naive", "match", "traversal")
    temperatures: tuple[float, ...] = (0.2, 0.6, 1, 1.2)
    ks, lengths, drafters, budget = (1, 2, 3, 4), (1, 2, 4, 6, 8), (DRAFT, HEAD), (24,)
    chains, rollouts = ("multi_round",), ("chains:3", "delayed:3:2")
    best = {"dyspec": "without_replacement", "rheo:0.2": "rheo", "opt:0.2": "match", "chain": "block"}
    grids = [Grid((f"chains:{k}",), chains, (1,), (k * length,)) for k, length in itertools.product(ks, lengths)]
    grids += [Grid(rollouts, judges, (1,), budget, drafters), Grid(rollouts, chains, temperatures, budget)]
    for policy, judge in best.items():
        grids.append(Grid((policy,), (judge,), temperatures, budget))
        grids.append(Grid((policy,), (judge,), (1,), budget, drafters))
    grids.append(Grid(("sequoia",), ("without_replacement", "traversal"), (1,), budget, drafters))
    pair = ("multi_round", "traversal")
    grids.append(Grid(("delayed:3:1", "delayed:3:4"), pair, (1,), budget, drafters))
    grids.append(Grid(("kary:2", "kary:3"), pair, (1,), budget))
    grids.append(Grid(("chain", "dyspec"), ("naive", "traversal"), (1,), budget))
    return grids


def rules() -> list[Grid]:
    """OPT-Tree's rule against the published code's, thresholds, and the fitted sharpening; small trees beside them."""
    both = (DRAFT, HEAD)
    return [
        Grid(("published:0.5", "opt:0.5", "opt:0.2"), drafters=both),
        Grid(("opt:0.5", "opt:0.2"), drafters=both, sharpening=("fitted",)),
        Grid(("binary",), budgets=(30,), drafters=both),
        Grid(("chain",), budgets=(4,), drafters=both),
    ]


RASD, GRAFT = f"rasd:{HEAD}+store:demo", f"{HEAD}+store:demo"
DRAFTERS: dict[str, tuple[str, ...]] = {
    DRAFT: ("opt:0.2", "binary"),
    HEAD: ("opt:0.2", "eagle2"),
    "eagle3:demo": ("opt:0.2", "eagle2"),
    "ngram": ("opt:0", "chain"),
    "store:demo": ("opt:0",),
    "recycling": ("opt:0", "recycling_tree"),
    f"graft:1:{GRAFT}": ("opt:0.05",),
    f"graft:2:{GRAFT}": ("opt:0.05",),
    RASD: ("opt:0.2", "eagle2"),
    **dict.fromkeys(SMALL := ("exit:demo", "parallelspec:demo", "dspark:demo"), ("opt:0.05", "chain")),
}
"""What drafts, and under which trees: OPT-Tree, whose threshold is about what a layer costs, then its paper's."""
FITTED = (DRAFT, HEAD, "eagle3:demo", f"graft:1:{GRAFT}", f"graft:2:{GRAFT}", RASD, *SMALL)
"""Those that bring a fitted sharpening."""


def drafters() -> list[Grid]:
    """What drafts: models, tables, and a model above a table, each under OPT-Tree and under its paper's tree.

    Tables that learn from prompt to prompt (recycling) are as warm as the combinations before have made them.
    """
    sizes = {0: (8, 12, 24, 60), 1: (8, 60)}
    grids = []
    for (temperature, budgets), (drafter, trees) in itertools.product(sizes.items(), DRAFTERS.items()):
        read = ("fitted",) if drafter in FITTED else ("bare",)
        grids.append(Grid(trees, temperatures=(temperature,), budgets=budgets, drafters=(drafter,), sharpening=read))
    return grids


STUDIES = {"paper": paper, "verification": verification, "rules": rules, "drafters": drafters}


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
