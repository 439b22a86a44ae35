"""RASD: a tree of retrieved continuations, pruned by the draft model and merged with its tree (arXiv:2503.03434).

Owns its two rules, pruning and fusion, as the abstract and reports have them, and the policy that verifies both whole.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from opt_tree.children import LogProbs, TopK
from opt_tree.drafter import Asked, Drafter
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.around import described, settings_of
from opt_tree.methods.drafters.combined.grafted import Joined, numbered
from opt_tree.methods.drafters.registry import DrafterOptions, register, two_specs
from opt_tree.methods.drafters.tables.lookup import Lookup, Tails, few, load_with_table
from opt_tree.methods.drafters.tables.store import StoreDrafter
from opt_tree.models.chain_lm import AnyLM
from opt_tree.policy import MOST_NODES, TreePolicy, check_sizes
from opt_tree.pool import CandidatePool, Frontier
from opt_tree.tree import fetch, send

_COLUMNS = 64
"""The model's best tokens that are named below a node: as many as REST drafts in a whole tree."""


class ExpandedRows:
    """Which nodes of a step the model expanded, and their numbers in its own draft.

    Draft rows count all nodes that were expanded; here b was retrieved, and so is what follows it:

        draft row   0 root   1 a   2 b   3 below a   4 below b        model's row   0   1   -1   2   -1
    """

    def __init__(self, root: bool = True) -> None:
        """`root`: whether the model answered behind the root."""
        self._of = [0 if root else -1]
        self._count = 0

    def take(self, frontier: Frontier, own: Bool[np.ndarray, " frontier"]) -> Frontier:
        """Number the model's nodes of a frontier, `own`, and describe them as the model would have met them."""
        before = np.array(self._of)
        for mine in own.tolist():
            self._count += mine
            self._of.append(self._count if mine else -1)
        # Column k - 1 of `visible` is draft row k. Whatever an own node may see is an own node: its ancestors.
        columns = (np.array(self._of[1:]) > 0).nonzero()[0]
        return Frontier(
            frontier.tokens[own],
            before[frontier.parents[own]],
            frontier.depths[own],
            frontier.visible[own][:, columns],
        )

    def share_of(self, outcome: Outcome) -> Outcome:
        """Return the same outcome as far as it is the model's: rows that it never ran are no rows of its cache."""
        rows = outcome.tree.draft_rows
        return numbered(outcome, np.where(rows < 0, -1, np.array(self._of)[rows]))


class Rasd(Joined):
    """A model's tree merged with the tree of the continuations that `retrieval` finds, best with `longest` matches.

    What the model proposes below a node are its `top` best tokens. Of what was retrieved behind the context only
    branches remain whose first token the model proposes (pruning). A branch then shares the model's nodes as long as
    their tokens agree (longest prefix), and what is left of it hangs below, at no forward (fusion):

        model:  the -> cat -> sat      retrieved:  cat sat on a mat       the model proposes behind "the": cat, dog, ...
                                                   ox was here
        fused:  the -> cat -> sat -> on -> a -> mat     (the second branch is pruned)

    A node of both trees is the model's: it has the model's probability, and the model is asked what follows. Only what
    hangs below has the probabilities of the retrieval.

    The paper verifies both trees whole, as `BothTrees` does. Another policy picks from the merged tree, so that a
    budget means what it always does. The paper's full text was not at hand: what `top` is there is not known here.
    """

    def __init__(self, drafter: Drafter, retrieval: Lookup, top: int = 10, depth: int = MOST_NODES) -> None:
        """`depth`: the layers that the model answers for; below them the branches go on alone, at no forward."""
        if top < 1:
            raise ValueError(f"pruning keeps at least the model's best token, got top {top}")
        if depth < 1:
            raise ValueError(f"the model answers for at least one layer, got depth {depth}")
        super().__init__(drafter, retrieval)
        self.retrieval, self.top, self.depth = retrieval, top, depth
        self._begin()

    def _begin(self) -> None:
        self._tails, self._rows = Tails(self.retrieval.order), ExpandedRows(self.led)
        self._retrieved: list[dict[int, float]] = []  # by draft row: the branches that go on there
        self._proposed: list[set[int]] = []  # by draft row: what the model proposes there

    def says_of(self, row: int, token: int) -> tuple[bool, float]:
        """Of a child of a draft row: whether the model proposes it, and its share of the branches; 0: on none."""
        return token in self._proposed[row], self._retrieved[row].get(token, 0.0)

    def root(self, context: list[int]) -> Asked:
        self.lead(context)
        self._begin()
        (found,) = _probs(self.retrieval.look_up(self._tails.root(context)))
        if not self.led:  # no model prunes
            return self._fuse([{}], [found])

        def fused(answer: LogProbs) -> LogProbs:
            (model,) = _probs(answer)
            best = set(list(model)[: self.top])
            return self._fuse([model], [{token: share for token, share in found.items() if token in best}])

        return self.after(self.drafter.root(context), fused)

    def expand(self, frontier: Frontier) -> Asked:
        """Ask the model below the nodes that it proposed, the retrieval below those on its branches; some are both."""
        tails = self._tails.expand(frontier)
        nodes = list(zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True))
        known = [self.says_of(*node) for node in nodes]
        # A frontier is one layer. What only the retrieval names is a graft, of which the model never hears.
        own = np.array([proposed or not share for proposed, share in known]) & (frontier.depths < self.depth)
        on_branch = [share > 0 for _, share in known]
        branches = [tail for tail, on in zip(tails, on_branch, strict=True) if on]
        found = _spread(_probs(self.retrieval.look_up(branches)) if branches else [], on_branch)
        inner = self._rows.take(frontier, own)  # numbers the rows, so also where none is the model's
        if not own.any():
            return self._fuse(_spread([], own.tolist()), found)
        return self.after(
            self.drafter.expand(inner), lambda answer: self._fuse(_spread(_probs(answer), own.tolist()), found)
        )

    def accept(self, outcome: Outcome) -> None:
        self.drafter.accept(self._rows.share_of(outcome))
        self.retrieval.accept(outcome)

    def describe(self) -> str:
        return f"{described(self.drafter)} merged with branches of {self.retrieval.describe()}"

    @property
    def settings(self) -> dict[str, Any]:
        own = {"top": self.top, "retrieval": self.retrieval.describe()}
        return settings_of(self.drafter) | own | self.retrieval.settings

    def _fuse(self, model: list[dict[int, float]], retrieved: list[dict[int, float]]) -> LogProbs:
        """Return both answers of each draft row merged, and note the branches there and the grafts among them."""
        for answer, found in zip(model, retrieved, strict=True):
            proposed = set(list(answer)[: self.top])
            answer.update({token: share for token, share in found.items() if token not in proposed})
            self._proposed.append(proposed)
            self._retrieved.append(found)
        return few(model)


@dataclass(frozen=True)
class BothTrees(TreePolicy):
    """The model's tree by EAGLE-2's rule and the tree of retrieved branches, fused and verified whole.

    In each of the drafter's `depth` layers the model is asked below its `width` best nodes, and its `nodes` best are
    verified. Of the branches the `retrieved` most frequent nodes are, down to `longest` tokens: the sizes are EAGLE-2's
    and REST's, since RASD's own could not be had. Nodes of both trees count once, so that a tree of 60 and one of 64
    have 60 to 124 nodes together. At a node of both trees the model is asked, too, in a forward that is run anyway.

        drafter = Rasd(pair.drafter, NGramDrafter((0.0, 0.0, 0.0)), depth=6)
        decoder = Decoder(pair.target, drafter, BothTrees(drafter))
        decoder.generate(pair.encode("Why is the sky blue?")).mean_acceptance_length
    """

    drafter: Rasd
    nodes: int = 60
    retrieved: int = 64
    width: int = 10
    longest: int = 10

    def __post_init__(self) -> None:
        check_sizes(nodes=self.nodes, width=self.width, longest=self.longest)
        check_sizes(0, retrieved=self.retrieved)

    @property
    def children(self) -> TopK:
        return TopK(per_node=2 * _COLUMNS)  # all that either names

    @property
    def max_depth(self) -> int:
        return max(self.drafter.depth, self.longest)

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        own, frequent = self._both(pool)
        layer = pool.newest
        beam = layer[np.argsort(-own[layer], kind="stable")[: self.width if pool.depth < self.drafter.depth else 0]]
        branches = layer[frequent[layer]] if pool.depth < self.longest else layer[:0]
        return np.union1d(beam[own[beam] > -np.inf], branches)

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        own, frequent = self._both(pool)
        best = np.argsort(-own, kind="stable")[: self.nodes + 1]
        return np.union1d(best[own[best] > -np.inf], frequent.nonzero()[0])

    def _both(self, pool: CandidatePool) -> tuple[Float[np.ndarray, " pool"], Bool[np.ndarray, " pool"]]:
        """Of every candidate the model's path log-probability, -inf where it is not the model's; and which are among
        the most frequent of the retrieval's. The root is in both."""
        own, shares = np.zeros(pool.size), np.ones(pool.size)
        rows = zip(pool.parents.tolist(), pool.draft_rows[pool.parents].tolist(), pool.tokens.tolist(), strict=True)
        for row, (parent, asked, token) in enumerate(rows):
            if row:
                proposed, share = self.drafter.says_of(asked, token)
                own[row] = pool.path_log_probs[row] if proposed and own[parent] > -np.inf else -np.inf
                shares[row] = shares[parent] * share
        order = np.argsort(-shares, kind="stable")[: self.retrieved + 1]
        frequent = np.zeros(pool.size, dtype=bool)
        frequent[order[shares[order] > 0]] = True
        return own, frequent


def _spread(answers: list[dict[int, float]], asked: list[bool]) -> list[dict[int, float]]:
    """Return one answer a node, in the nodes' order: empty for those that were not asked about."""
    following = iter(answers)
    return [next(following) if one else {} for one in asked]


def _probs(answer: LogProbs) -> list[dict[int, float]]:
    """Return an answer as {token: probability} a row, the likeliest first."""
    few = answer.tokens is not None and answer.tokens.ndim == 2
    if few:
        log_probs, order = answer.values.sort(dim=1, descending=True, stable=True)
    else:
        log_probs, order = answer.values.topk(min(_COLUMNS, answer.values.shape[1]))
    tokens = order
    if answer.tokens is not None:
        named = send(answer.tokens, order.device)
        tokens = named.gather(1, order) if few else named[order]
    names, probs = fetch(tokens, log_probs.exp())
    return [
        {token: prob for token, prob in zip(*row, strict=True) if prob > 0}
        for row in zip(names.tolist(), probs.tolist(), strict=True)
    ]


@register(
    "rasd",
    about="a model's tree merged with a tree of retrieved branches (RASD): rasd:eagle:demo+store:demo",
    paper="2503.03434",
    others=lambda path: two_specs("rasd", path),
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    model, table = load_with_table("rasd", path, target, options)
    if isinstance(table, StoreDrafter):  # as REST looks up, one of the paper's two retrievals: the longest match alone
        table = StoreDrafter(table.store, longest=True)
    return Rasd(model, table)
