"""The ceiling of a tree, against all rules that are exact given it: a linear programme over what they may emit.

A rule says with which probability it ends at each row and which token it emits behind it. It is exact given the tree if
the target, going on behind that, makes every text as likely as the target itself: equations, one a text. The largest
expected number of tokens under them is what no exact rule exceeds and some rule has.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from enumeration import LAWS, VOCAB, Text, assert_same, drawn_trees, target_law, verdicts
from scipy.optimize import linprog
from table_models import Laws, TableDrafter, TableTarget, hashed_laws, log_rows

from opt_tree import Decoder, OptTree, Sampling, Static, Tree, greedy, match
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.traversal_verification import traversal
from opt_tree.methods.verifiers.walks import block_efficiency
from opt_tree.tools.ceiling import Ceilings, ceiling
from opt_tree.tools.enumeration import continued, paths_of

ROOT = (0,)


def trees(count: int) -> Iterator[Tree]:
    """Trees of up to five nodes and three layers, distinct siblings, by chance."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        parents, tokens, depths = [-1], [0], [0]
        while len(parents) < 2 + seed % 5:
            parent, token = int(rng.integers(len(parents))), int(rng.integers(VOCAB))
            taken = {(p, t) for p, t in zip(parents, tokens, strict=True)}
            if depths[parent] < 3 and (parent, token) not in taken:
                parents.append(parent)
                tokens.append(token)
                depths.append(depths[parent] + 1)
        yield Tree.of(tokens, parents)


def scored(tree: Tree, target: Laws) -> torch.Tensor:
    return log_rows(target, paths_of(tree, ROOT))


def chance(target: Laws, text: Text) -> float:
    """The probability of a text behind the root."""
    return float(np.prod([target((*ROOT, *text[:place]))[token] for place, token in enumerate(text)]))


def best_exact_rule(tree: Tree, target: Laws) -> tuple[float, np.ndarray]:
    """The most tokens that a rule exact given the tree emits, and how often such a rule ends at each row."""
    branches = [path[len(ROOT) :] for path in paths_of(tree, ROOT)]
    ways = [(row, (*branch, token)) for row, branch in enumerate(branches) for token in range(VOCAB)]
    texts = target_law(target, ROOT, int(tree.depths.max()) + 1)
    # Of each way and text: how likely the target goes on to the text behind what was emitted.
    shares = [
        [p / chance(target, way) if text[: len(way)] == way else 0.0 for _, way in ways] for text, p in texts.items()
    ]
    possible = [(0, None if chance(target, way) > 0 else 0) for _, way in ways]
    lengths = np.array([len(way) for _, way in ways], dtype=float)
    found = linprog(-lengths, A_eq=shares, b_eq=[*texts.values()], bounds=possible)
    assert found.status == 0, found.message
    return -found.fun, np.bincount([row for row, _ in ways], found.x, len(tree))


CASES = [(name, tree) for name in ("random", "zeros", "disjoint") for tree in trees(15)]


@pytest.mark.parametrize(("name", "tree"), CASES, ids=lambda value: getattr(value, "nodes", value))
def test_no_rule_that_is_exact_given_the_tree_exceeds_it_and_some_rule_has_it(name: str, tree: Tree) -> None:
    target = LAWS[name][0]
    logits = scored(tree, target)
    found = ceiling(tree, logits)
    most, ends = best_exact_rule(tree, target)
    assert found.tokens == pytest.approx(most, abs=1e-9)
    assert found.left.sum() == pytest.approx(1) and found.left @ (1 + tree.depths) == pytest.approx(most)
    assert ends == pytest.approx(found.left, abs=1e-9), "whoever has it ends where the target leaves the tree"
    assert sum(p * len(path) for (path, _), p in verdicts(match, tree, logits).items()) == pytest.approx(most)
    assert block_efficiency(tree, logits.exp(), match) == pytest.approx(most)


@pytest.mark.parametrize("tree", trees(10), ids=lambda tree: tree.nodes)
def test_drawing_where_the_target_leaves_is_exact_and_has_the_ceiling(tree: Tree) -> None:
    """TEV of the paper: one draw of the row, one of a token that is no child's."""
    target = LAWS["random"][0]
    law: dict[Text, float] = {}
    left = ceiling(tree, scored(tree, target)).left.tolist()
    for row, (share, path) in enumerate(zip(left, paths_of(tree, ROOT), strict=True)):
        behind = target(path).copy()
        behind[tree.tokens[tree.parents == row]] = 0
        for token in behind.nonzero()[0].tolist():
            law[(*path[1:], token)] = share * behind[token] / behind.sum()
    length = int(tree.depths.max()) + 1
    assert_same(continued(law, lambda text: target((*ROOT, *text)), length), target_law(target, ROOT, length))


def test_of_equal_siblings_the_first_stands_for_all() -> None:
    """Node 1 and 2 carry the same token: with their children they are one node."""
    target = LAWS["random"][0]
    twice = Tree.of([0, 1, 1, 0, 2, 2], [-1, 0, 0, 1, 2, 1])
    once = Tree.of([0, 1, 0, 2], [-1, 0, 1, 1])
    two, one = ceiling(twice, scored(twice, target)), ceiling(once, scored(once, target))
    assert two.tokens == pytest.approx(one.tokens) and two.reached[2] == two.left[2] == 0
    assert two.left[[0, 1, 3]] == pytest.approx(one.left[:3]) and two.left.sum() == pytest.approx(1)


def test_rules_that_are_exact_over_the_drawing_are_not_bounded_by_it() -> None:
    """One child drawn from q is accepted with sum min(p, q); given the child, no rule accepts more than sum p q."""
    target, draft = hashed_laws(21, VOCAB), hashed_laws(22, VOCAB)
    drawn = drawn_trees(Sampled((1,)), draft, ROOT, Sampling(1.0))
    means = {
        rule.__name__: sum(p * block_efficiency(tree, scored(tree, target).exp(), rule) for tree, p in drawn)
        for rule in (multi_round, traversal, match)
    }
    p, q = target(ROOT), draft(ROOT)
    assert means["multi_round"] == pytest.approx(1 + np.minimum(p, q).sum())
    assert means["traversal"] == pytest.approx(means["multi_round"])
    bound = sum(share * ceiling(tree, scored(tree, target)).tokens for tree, share in drawn)
    assert bound == pytest.approx(1 + p @ q)
    assert bound == pytest.approx(means["match"])
    assert means["traversal"] > bound + 0.05


@pytest.mark.parametrize("policy", [OptTree(4, 0.0, 3), Static.empty()], ids=str)
def test_at_temperature_0_it_is_what_a_step_emits(policy: OptTree | Static) -> None:
    target, draft = LAWS["random"]
    watch = Ceilings(policy, Sampling())
    decoder = Decoder(TableTarget(target, VOCAB), TableDrafter(draft), watch, greedy)
    for prompt in ([0], [1, 2]):  # anew for each text
        answer = decoder.generate(prompt, 12, stop=None)
        assert [one.tokens for one in watch.found] == [len(step.tokens) for step in answer.steps]
        assert [int(one.left.argmax()) for one in watch.found] == [step.path[-1] for step in answer.steps]
    assert {type(step.policy) for step in answer.steps} == {type(policy)}


def test_a_watched_text_is_the_same_and_its_ceilings_are_those_of_its_processed_trees() -> None:
    target, draft = LAWS["random"]
    sampling = Sampling(0.7, top_k=2)
    watch = Ceilings(OptTree(4, 0.0, 3), sampling)
    answers = [
        Decoder(TableTarget(target, VOCAB), TableDrafter(draft), policy).generate([0], 20, sampling, None, seed=3)
        for policy in (watch, OptTree(4, 0.0, 3))
    ]
    assert answers[0].tokens == answers[1].tokens
    assert len(watch.found) == len(answers[0].steps)
    context = [0]
    for step, one in zip(answers[0].steps, watch.found, strict=True):
        rows = log_rows(target, paths_of(step.tree, tuple(context)))
        assert one.tokens == pytest.approx(ceiling(step.tree, sampling.process(rows, step.tree, context)).tokens)
        assert 1 <= one.tokens <= 1 + step.tree.depths.max()
        context += step.tokens


def test_what_watches_wants_a_policy_and_a_sampling() -> None:
    with pytest.raises(TypeError, match="policy"):
        Ceilings(match, Sampling())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampling"):
        Ceilings(OptTree(4), 1.0)  # type: ignore[arg-type]
