"""How often `khisti` accepts one of two drawn children, by how many tokens its linear programme settles.

    python -m experiments.contested [--drafter eagle:demo] [--limit 6] [--top-k 10]

Questions are answered at temperature 1, and what target and drafter say at the nodes is kept. At each of them the
probability that one of two independent children is accepted is computed exactly: by `khisti` at several sizes of its
programme, by `multi_round`, and the bound that no rule can pass (arXiv:2410.18234, section 3). Intervals of the
difference are over questions (95 %, resampled).
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option
from evaluation.run.options import Asked


@dataclass(frozen=True)
class Options(Asked):
    """The pair, the questions, and how many nodes are looked at."""

    limit: int = option(6, "this many questions at most", least=1)
    laws: int = option(60, "nodes that are looked at, drawn from all that were met", least=1)
    max_new_tokens: int = option(40, "of an answer, at most", least=1)
    top_k: int = option(0, "target and drafter keep so many tokens, as in that paper's table 4; 0: all", least=0)


main = main_of("experiments.contested", Options, __doc__, "experiments.contested:run")

if __name__ == "__main__":
    sys.exit(main())

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from evaluation.answers.metrics import between, estimate
from evaluation.command_line import Value, table
from evaluation.run.models import Material, gather
from opt_tree import Decoder, Random, Sampling, Tree, Verdict
from opt_tree.methods.children.iid import IID
from opt_tree.methods.drafters.around import described
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.importance_weighted import Duel
from opt_tree.methods.verifiers.multi_round_rejection import in_rounds
from opt_tree.methods.verifiers.rules import Probs, computes
from opt_tree.methods.verifiers.walks import walk_down
from opt_tree.sampling import Logits
from opt_tree.verify import valid_for

CONTESTED = (5, 10, 20, 40)
"""Tokens that the linear programme settles. Beyond 200 it takes minutes a node."""


class Met(NamedTuple):
    """What target and drafter say at a node, and the question whose answer it is in."""

    target: Probs
    draft: Probs
    question: int


def met(given: Material, options: Options) -> list[Met]:
    """The nodes of sampled answers."""
    laws, number = list[Met](), 0

    def rule(target: Probs, draft: Probs, tokens: Int[np.ndarray, " children"]) -> Probs:
        laws.append(Met(target.copy(), draft.copy(), number))
        return in_rounds(target, draft, tokens)

    @valid_for(IID)
    @computes(branching=rule)
    def watched(tree: Tree, logits: Logits, random: Random) -> Verdict:
        return walk_down(tree, logits, random, rule)

    decoder = Decoder(given.pair.target, given.pair.drafter, Sampled.chains(2, 4), watched)
    sampling = Sampling(1.0, top_k=options.top_k)
    for number, prompt in enumerate(given.first_prompts()):
        decoder.generate(prompt, options.max_new_tokens, sampling, given.pair.stop, seed=number)
    return laws


def by_rounds(target: Probs, draft: Probs) -> float:
    """The probability that `multi_round` accepts one of two children.

    >>> round(by_rounds(np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.3, 0.1])), 2)
    0.76
    """
    first = np.minimum(target, draft).sum()
    left = np.maximum(target - draft, 0)
    return float(first + np.minimum(left, (1 - first) * draft).sum())


def by_duel(target: Probs, draft: Probs, contested: int) -> float:
    """The probability that `khisti` accepts one of two children.

    >>> round(by_duel(np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.3, 0.1]), 3), 2)
    0.84
    """
    return float(np.minimum(target, Duel(target, draft, draft, contested).winner).sum())


def bound(target: Probs, draft: Probs) -> float:
    """What no rule accepts more than, with two children: the least of p(S) + 1 - q(S)^2 over sets S of tokens.

    The sets that matter have the tokens of largest q / p.

    >>> round(bound(np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.3, 0.1])), 2)
    0.84
    """
    order = np.argsort(-draft / np.maximum(target, 1e-300), kind="stable")
    return float(min(1.0, (target[order].cumsum() + 1 - draft[order].cumsum() ** 2).min()))


def run(options: Options) -> dict[str, Any]:
    """Measure, print the table and return it."""
    given = gather(options)
    known = met(given, options)
    chosen = np.random.default_rng(0).permutation(len(known))[: options.laws]
    nodes = [known[place] for place in chosen]
    rounds = np.array([by_rounds(node.target, node.draft) for node in nodes])
    questions = [np.array([node.question == one for node in nodes]) for one in {node.question for node in nodes}]

    def row(name: str, accepted: Sequence[float] | np.ndarray) -> dict[str, Value]:
        more = np.asarray(accepted) - rounds
        of_questions = [(more[here].sum(), here.sum()) for here in questions]
        ahead, interval = estimate(of_questions, lambda sums: sums[..., 0] / sums[..., 1])
        shown = between(interval, 4)
        return {"rule": name, "accepted": float(np.mean(accepted)), "above multi_round": ahead, "95 % interval": shown}

    rows = [row("multi_round", rounds)]
    for size in CONTESTED:
        rows.append(row(f"khisti, {size} tokens", [by_duel(node.target, node.draft, size) for node in nodes]))
    rows.append(row("the bound", [bound(node.target, node.draft) for node in nodes]))
    print(f"{given.pair.target.name}; {described(given.pair.drafter)}; {len(nodes)} of {len(known)} nodes")
    print(table(rows, ".4f"))
    return {"nodes": len(nodes), "rows": rows}
