"""Two ways of judging a tree node by node, top-down and bottom-up, and the exact expectation of either.

The methods are one file each: a *branching rule* (what is emitted at a node, given the children that were drawn there)
or a sequence of *attempts* (which row to accept, in which order and with which probability). They compute in float64 on
the host, one node at a time; the logits and the drafter's distributions stay on the device.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.children import TopK
from opt_tree.methods.children.draws import probs_of
from opt_tree.methods.verifiers.rules import Attempts, Branching, Probs, attempts_of, branching_of
from opt_tree.sampling import LazyLogits, Logits, Random
from opt_tree.tree import Tree, fetch, on_host
from opt_tree.verify import Verdict, Verifier

# Rows: a list of tree rows that carry the same tokens from the root, first one first. Siblings drawn independently may
# be equal; they are one node then, with all their children in a row, and those children are still i.i.d.


def below(tree: Tree, rows: Int[np.ndarray, " equal"]) -> Int[np.ndarray, " children"]:
    """The children of a node that is made of these equal rows."""
    return (tree.parents[:, None] == rows).any(1).nonzero()[0]


def target_probs_at(logits: Logits, row: int) -> Probs:
    """The target's distribution behind a row."""
    return fetch(probs_of(logits[row]))[0]


class Node(NamedTuple):
    """One node as a verifier sees it: over the tokens that the target may emit there or that the drafter may draw.

    With top-p these are a few of the vocabulary, and no other one has a part in what is emitted. All but `tokens`
    counts in places of that list.
    """

    tokens: Int[np.ndarray, " tokens"]
    """Which ones they are, in rising order."""
    target: Probs
    draft: Probs
    """What the children were drawn from; empty where there are none or nothing was drawn."""
    children: Int[np.ndarray, " children"]
    """The places of the children's tokens."""


def node_at(
    tree: Tree, logits: Logits, rows: Int[np.ndarray, " equal"], children: Int[np.ndarray, " children"]
) -> Node:
    """Return the node that is made of these equal rows, with these of its children. One read-back."""
    laws = [logits[int(rows[0])]]
    drawn = len(children) > 0 and tree.draft_log_probs is not None
    if drawn:
        laws.append(drafted_from(tree)[tree.draft_rows[tree.parents[children[0]]]])
    if not on_host(laws[0]):
        laws = list(map(torch.from_numpy, fetch(*(law.double() for law in laws))))
    tokens = _possible(laws, tree.tokens[children])
    target, *draft = (fetch(probs_of(_columns(law, tokens)))[0] for law in laws)
    return Node(tokens, target, draft[0] if drawn else np.zeros(0), tokens.searchsorted(tree.tokens[children]))


def _possible(laws: list[Float[Tensor, " _"]], drafted: Int[np.ndarray, " children"]) -> Int[np.ndarray, " tokens"]:
    """The tokens of any of these laws: all, where they are not few."""
    vocab, possible = len(laws[0]), [drafted]
    for law in laws:
        possible.append((law != -torch.inf).numpy().nonzero()[0])
        if not 0 < len(possible[-1]) <= vocab // 2:
            return np.arange(vocab)
    return np.unique(np.concatenate(possible))


def _columns(law: Float[Tensor, " any"], tokens: Int[np.ndarray, " tokens"]) -> Float[Tensor, " tokens"]:
    """A law on these tokens only, -inf for those that a drafter lacks."""
    if len(law) == len(tokens):
        return law
    known = torch.from_numpy(tokens[: tokens.searchsorted(len(law))])
    return torch.constant_pad_nd(law[known], (0, len(tokens) - len(known)), -torch.inf)


def drafted_from(tree: Tree) -> Float[Tensor, "expanded vocab"]:
    """The laws that the children were drawn from; ValueError where the tree does not hold them."""
    if tree.draft_log_probs is None:
        raise ValueError(
            "the tree does not hold the distributions that its children were drawn from; were they drawn at all?"
        )
    return tree.draft_log_probs


def residual(target: Probs, draft: Probs) -> Probs:
    """What the target's distribution has in excess of the drafter's, normalised; the target's own where it has nothing.

    The latter is reached by rounding only: a distribution with no excess anywhere is the same distribution, and rejects
    nothing.
    """
    excess = np.maximum(target - draft, 0)
    total = excess.sum()
    return excess / total if total > 0 else target


def in_turn(target: Probs, children: Int[np.ndarray, " children"], proposals: Iterable[Probs]) -> Probs:
    """Accept child x with probability min(1, p(x) / r(x)), r what it was proposed from; then go on with norm(p - r)+.

    Rejection sampling emits p whatever r is, provided that x came from it: each round emits exactly its p, whether or
    not there is another child. At the end the token is drawn from what is left.
    """
    emitted, left = np.zeros_like(target), 1.0
    for token, proposal in zip(children, proposals, strict=False):
        accepted = min(1.0, target[token] / proposal[token])
        emitted[token] += left * accepted
        left *= 1 - accepted
        target = residual(target, proposal)
    return emitted + left * target


def walk_down(tree: Tree, logits: Logits, random: Random, branching: Branching) -> Verdict:
    """Emit a token from the branching rule at the root, and go on at the child that carries it, while there is one.

    The top-down walk of the methods that solve one optimal transport problem a node (arXiv:2602.16994).
    """
    if tree.nodes:
        drafted_from(tree)  # raises where the children were not drawn
    rows = np.zeros(1, dtype=np.int64)  # the root; further down all equal siblings, which are one node
    while True:
        children = below(tree, rows)
        tokens, emitted = _emitted(tree, logits, rows, children, branching)
        token = int(tokens[random.choose(emitted)])
        matched = children[tree.tokens[children] == token]
        if not len(matched):
            return Verdict(tree.path_to(int(rows[0])).tolist(), token)
        rows = matched


def walk_up(tree: Tree, logits: Logits, random: Random, attempts: Attempts) -> Verdict:
    """Accept the first attempt whose coin says so. Nearly all rows are looked at: from a device they come together."""
    if not isinstance(logits, LazyLogits) and not on_host(logits):
        drafted = [] if tree.draft_log_probs is None else [tree.draft_log_probs]
        logits, *drafted = map(torch.from_numpy, fetch(logits, *drafted))
        tree = replace(tree, draft_log_probs=drafted[0] if drafted else None)
    for attempt in attempts(tree, logits):
        if random.accept(attempt.probability):
            token = random.choose(attempt.token_probs)
            token = token if attempt.tokens is None else int(attempt.tokens[token])
            return Verdict(tree.path_to(attempt.row).tolist(), token)
    raise ValueError("no token can be drawn: the logits are not numbers (NaN), or no token is allowed")


def block_efficiency(tree: Tree, target_probs: Float[Tensor, "rows vocab"], verifier: Verifier) -> float:
    """Return the expected number of tokens that a verifier emits on this tree, the target's own token included.

    Exact, by summing over the verifier's randomness (arXiv:2602.16994, eq. 3): averaged over steps it
    estimates the mean acceptance length without the noise of accepting and rejecting. Takes one evaluation of the
    verifier's rule at every node. `target_probs`: the target's distribution behind every row of the tree.
    """
    logits = target_probs.log()
    if (attempts := attempts_of(verifier)) is not None:
        left, expected = 1.0, 0.0
        for attempt in attempts(tree, logits):
            expected += left * attempt.probability * (1 + tree.depths[attempt.row])
            left *= 1 - attempt.probability
        return float(expected)
    return float(sum(reached(tree, target_probs, verifier)))


def reached(tree: Tree, target_probs: Float[Tensor, "rows vocab"], verifier: Verifier) -> list[float]:
    """Return how likely a top-down verifier is to come to each depth of this tree, the root's first.

    As exact as `block_efficiency`, which is the sum. A tree cut behind a depth has the same numbers as far as it goes.
    """
    logits = target_probs.log()
    if (branching := branching_of(verifier)) is None:
        raise ValueError(f"verifier {verifier.__name__} has no branching rule to compute its block efficiency from")
    if tree.nodes and verifier.valid_for and TopK not in verifier.valid_for:
        drafted_from(tree)
    depths = tree.depths.tolist()
    found, open_nodes = [0.0] * (max(depths) + 1), [(np.zeros(1, dtype=np.int64), 1.0)]
    while open_nodes:
        rows, probability = open_nodes.pop()
        found[depths[rows[0]]] += probability
        children = below(tree, rows)
        if len(children):
            tokens, emitted = _emitted(tree, logits, rows, children, branching)
            for token in np.unique(tree.tokens[children]):
                equal = children[tree.tokens[children] == token]
                open_nodes.append((equal, probability * float(emitted[tokens.searchsorted(token)])))
    return found


def _emitted(
    tree: Tree,
    logits: Logits,
    rows: Int[np.ndarray, " equal"],
    children: Int[np.ndarray, " children"],
    branching: Branching,
) -> tuple[Int[np.ndarray, " tokens"], Probs]:
    """Tokens and the distribution of which of them is emitted at a node; without children it is the target's."""
    node = node_at(tree, logits, rows, children)
    if not len(children):
        return node.tokens, node.target
    return node.tokens, branching(node.target, node.draft, node.children)
