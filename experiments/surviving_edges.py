"""Three readings of a drafter's probabilities: as they are, by a temperature, by a map fitted on surviving edges.

    python -m experiments.surviving_edges --drafter dspark:demo --bench-name mt_bench --dtype float32 --limit 40

TreeSpark (arXiv:2609.22098, by its code) takes an edge of probability q for one that survives with probability
sigma(a * logit(q) + b). Its logistic regression knows the edges all of whose ancestors were accepted. Here a, b and the
temperature are fitted on the greedy answers to the questions of --fit-set, and the trees of each reading are drafted
along the answers to the others: how E(A) keeps to A, and what a step emits. TreeSpark's own rule (a threshold on what
survives) is not here: the trees are OPT-Tree's.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option
from evaluation.run.options import Asked


@dataclass(frozen=True)
class Options(Asked):
    """The pair, the questions that are measured, and those that are fitted on."""

    fit_set: str = option("heldout", "question set that is fitted on; nothing is measured on it")
    fit_limit: int = option(30, "of its questions", least=1)
    nodes: str = option("12,60", "of the trees that are measured, a comma list")
    fit_nodes: int = option(60, "of the trees whose edges are fitted on", least=1)
    max_new_tokens: int = option(96, "of an answer, at most", least=2)


main = main_of("experiments.surviving_edges", Options, __doc__, "experiments.surviving_edges:run")

if __name__ == "__main__":
    sys.exit(main())

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy import optimize, stats
from tqdm import tqdm

from evaluation.answers.metrics import between, estimate
from evaluation.command_line import table
from evaluation.run.models import Material, gather
from opt_tree import OptTree
from opt_tree.children import LogProbs
from opt_tree.drafter import Asked as AskedDrafter
from opt_tree.drafter import Drafter
from opt_tree.generation import Generation
from opt_tree.methods.drafters.around import DrafterAround, described
from opt_tree.pool import Frontier
from opt_tree.tools.along import along
from opt_tree.tools.stored_text import StoredText, written
from opt_tree.training.fitting.calibrate import Likelihood, LikelihoodRecorder


@dataclass(frozen=True)
class Survival:
    """The logistic map of an edge's log-probability to the logarithm of how likely it survives."""

    slope: float
    shift: float

    def __call__(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Of the same shape. A certain edge stays certain and an impossible one impossible."""
        logits = log_probs - torch.log1p(-log_probs.exp())
        return torch.nn.functional.logsigmoid(self.slope * logits + self.shift)

    @classmethod
    def fit(cls, log_probs: Float[np.ndarray, " edges"], survived: Float[np.ndarray, " edges"]) -> "Survival":
        """Maximum likelihood; a slope above 0, so that the order of siblings stays.

        >>> q = np.repeat([0.2, 0.6], 10)
        >>> fitted = Survival.fit(np.log(q), np.r_[[1] * 4, [0] * 6, [1] * 8, [0] * 2])
        >>> fitted(torch.log(torch.tensor([0.2, 0.6]))).exp().numpy().round(3).tolist()
        [0.4, 0.8]
        """
        logits = log_probs - np.log(-np.expm1(np.minimum(log_probs, -1e-7)))

        def loss(given: Float[np.ndarray, "2"]) -> float:
            scores = given[0] * logits + given[1]
            return float(np.logaddexp(0, scores).sum() - (survived * scores).sum())

        found = optimize.minimize(loss, [1.0, 0.0], bounds=[(1e-3, None), (None, None)])
        return cls(*map(float, found.x))


class Reread(DrafterAround):
    """A drafter whose probabilities are read in another way, which the bare one beside it is not told."""

    def __init__(self, drafter: Drafter, reading: Callable[[LogProbs], LogProbs]) -> None:
        super().__init__(drafter)
        self.reading = reading

    def root(self, context: list[int]) -> AskedDrafter:
        return self.after(self.drafter.root(context), self.reading)

    def expand(self, frontier: Frontier) -> AskedDrafter:
        return self.after(self.drafter.expand(frontier), self.reading)


def edges(made: Generation) -> tuple[list[float], list[bool]]:
    """The log-probabilities of the edges below accepted nodes, and whether the text took them; without the last step.

    The text may have ended inside the last tree.
    """
    log_probs, survived = list[float](), list[bool]()
    for step in made.steps[:-1]:
        tree, path = step.tree, set(step.path)
        for row in range(1, len(tree)):
            if (parent := int(tree.parents[row])) in path:
                log_probs.append(float(tree.path_log_probs[row] - tree.path_log_probs[parent]))
                survived.append(row in path)
    return log_probs, survived


def answers(given: Material, options: Options) -> list[StoredText]:
    """What the target writes plainly."""
    asked = tqdm(given.first_prompts(), "plain decoding", unit="text", disable=None)
    return [written(given.pair.target, prompt, options.max_new_tokens, given.pair.stop) for prompt in asked]


def readings(given: Material, options: Options) -> dict[str, Drafter]:
    """The three drafters, from the answers to the questions that are fitted on."""
    target, drafter = given.pair.target, given.pair.drafter
    likelihood, log_probs, survived = Likelihood(), list[float](), list[bool]()
    for text in tqdm(answers(given, options), "fitting", unit="text", disable=None):
        made = along(LikelihoodRecorder(drafter, likelihood), text, {"": OptTree(options.fit_nodes, 0)}, target)[""]
        found = edges(made)
        log_probs += found[0]
        survived += found[1]
    survival = Survival.fit(np.array(log_probs), np.array(survived, float))
    temperature = likelihood.temperature()
    print(f"temperature {temperature:.3f}; {survival}, of {len(survived)} edges")
    sharpened = Reread(drafter, lambda answer: LogProbs.of(answer.values, answer.tokens, 1 / temperature))
    # These rows are no distributions.
    mapped = Reread(drafter, lambda answer: LogProbs(survival(answer.values), answer.tokens))
    return {
        "bare": drafter,
        f"temperature {temperature:.2f}": sharpened,
        f"map of slope {survival.slope:.2f}, shift {survival.shift:.2f}": mapped,
    }


def row(name: str, nodes: int, made: list[Generation]) -> dict[str, Any]:
    """What the trees of a reading promised and gave, and its interval over texts."""
    steps = [step for one in made for step in one.steps[:-1]]
    expected = np.array([step.expected_accepted for step in steps])
    accepted = np.array([step.accepted for step in steps], float)
    sums = np.array(
        [
            [len(one.tokens), len(one.steps), *np.sum([(s.accepted, s.expected_accepted) for s in one.steps[:-1]], 0)]
            for one in made
            if len(one.steps) > 1
        ]
    )
    tokens, tokens_interval = estimate(sums, lambda sums: sums[..., 0] / sums[..., 1])
    kept, kept_interval = estimate(sums, lambda sums: sums[..., 2] / sums[..., 3])
    return {
        "nodes": nodes,
        "reading": name,
        "tokens a step": tokens,
        "its 95 % interval": between(tokens_interval),
        "E(A)": float(expected.mean()),
        "A": float(accepted.mean()),
        "A / E(A)": kept,
        "95 % interval": between(kept_interval),
        "slope of A on E(A)": float(np.polyfit(expected, accepted, 1)[0]),
        "rank correlation": float(stats.spearmanr(expected, accepted).statistic),
        "mean distance": float(np.abs(expected - accepted).mean()),
    }


def run(options: Options) -> dict[str, Any]:
    """Fit, measure, print the table and return it."""
    fit_on = dataclasses.replace(options, bench_name=options.fit_set, question_file=None, limit=options.fit_limit)
    drafters = readings(gather(fit_on, bare=True), options)
    given = gather(options, bare=True)
    texts = answers(given, options)
    rows = []
    for nodes in map(int, options.nodes.split(",")):
        for name, drafter in drafters.items():
            named = tqdm(texts, f"{name}, {nodes} nodes", unit="text", disable=None)
            made = [along(drafter, text, {"": OptTree(nodes, 0)}, given.pair.target)[""] for text in named]
            rows.append(row(name, nodes, made))
    print(f"{given.pair.target.name}; {described(given.pair.drafter)}; {len(texts)} texts of {given.questions.name}")
    print(table(rows))
    return {"texts": len(texts), "rows": rows}
