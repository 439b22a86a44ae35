"""RASD: a tree of retrieved continuations, pruned by the draft model and merged with its tree (arXiv:2503.03434).

Owns its two rules, pruning and fusion, as the abstract and reports have them. Which nodes of the merged tree are
verified is the policy's.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool

from opt_tree.answers import LogProbs
from opt_tree.drafter import Asked, Drafter, described, settings_of
from opt_tree.methods.drafters.combined.grafted import Joined
from opt_tree.methods.drafters.registry import DrafterOptions, register, two_specs
from opt_tree.methods.drafters.tables.lookup import Lookup, Tails, few, load_with_table
from opt_tree.methods.drafters.tables.store import StoreDrafter
from opt_tree.models.chain_lm import AnyLM
from opt_tree.pool import Frontier
from opt_tree.step import Outcome
from opt_tree.tree import fetch, send

_COLUMNS = 64
"""The model's best tokens that are named below a node: as many as REST drafts in a whole tree."""


class Rows:
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
        return outcome.numbered(np.where(rows < 0, -1, np.array(self._of)[rows]))


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

    The paper verifies both trees whole. Here a policy picks the nodes from the merged tree, so a budget means the same
    as for any other drafter. The paper's full text was not at hand: how many tokens `top` is there is not known here.
    """

    def __init__(self, drafter: Drafter, retrieval: Lookup, top: int = 10) -> None:
        if top < 1:
            raise ValueError(f"pruning keeps at least the model's best token, got top {top}")
        super().__init__(drafter, retrieval)
        self.retrieval, self.top = retrieval, top
        self._begin()

    def _begin(self) -> None:
        self._tails, self._rows = Tails(self.retrieval.order), Rows(self.led)
        self._retrieved: list[dict[int, float]] = []  # by draft row: the branches that go on there
        self._grafts: list[set[int]] = []  # by draft row: children that are the retrieval's alone

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
        own = np.array([token not in self._grafts[parent] for parent, token in nodes])
        on_branch = [token in self._retrieved[parent] for parent, token in nodes]
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
        return settings_of(self.drafter) | {
            "top": self.top,
            "retrieval": self.retrieval.describe(),
            **self.retrieval.settings,
        }

    def _fuse(self, model: list[dict[int, float]], retrieved: list[dict[int, float]]) -> LogProbs:
        """Return both answers of each draft row merged, and note the branches there and the grafts among them."""
        for answer, found in zip(model, retrieved, strict=True):
            proposed = list(answer)[: self.top]
            grafts = {token: share for token, share in found.items() if token not in proposed}
            answer.update(grafts)
            self._grafts.append(set(grafts))
            self._retrieved.append(found)
        return few(model)


def _spread(answers: list[dict[int, float]], asked: list[bool]) -> list[dict[int, float]]:
    """Return one answer a node, in the nodes' order: empty for those that were not asked about."""
    following = iter(answers)
    return [next(following) if one else {} for one in asked]


def _probs(answer: LogProbs) -> list[dict[int, float]]:
    """Return an answer as {token: probability} a row, the likeliest first."""
    if answer.names_few:
        log_probs, order = answer.values.sort(dim=1, descending=True, stable=True)
    else:
        log_probs, order = answer.values.topk(min(_COLUMNS, answer.values.shape[1]))
    tokens = order
    if answer.tokens is not None:
        named = send(answer.tokens, order.device)
        tokens = named.gather(1, order) if answer.names_few else named[order]
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
