"""A delayed tree, chosen before each step by a small network: the paper's neural selector (arXiv:2602.16994, App. E).

Owns the controller. The network is `selector.py`'s.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from opt_tree.children import LogProbs, log_probs_of
from opt_tree.generation import Outcome, Step
from opt_tree.methods.children.draws import over_vocabulary
from opt_tree.methods.controllers.selector import RootFacts, Selector
from opt_tree.methods.drafters.seen import Seen
from opt_tree.policy import TreePolicy
from opt_tree.target import Output
from opt_tree.tree import fetch

LAST = -1
_MOST = 20.0
"""Divergences are cut there: a drafter may lack tokens that the target has."""


class SelectedTree(TreePolicy):
    """Chooses the tree of each step by a selector, from what the models said before: the action of largest logit.

    Nothing has been drawn when it chooses, and the verifier is exact for each of the trees, so the output is. It was
    trained for one verifier, `selector.choice.judge`: the decoder is given that.

        drafter = Seen(pair.drafter)
        selector = Selector.load("trees", pair.target, drafter.models[0])
        decoder = Decoder(pair.target, drafter, SelectedTree(selector, drafter), selector.choice.judge)
        decoder.generate(pair.encode("Why is the sky blue?"), sampling=Sampling(1.0)).mean_acceptance_length
    """

    features = (LAST,)
    reads_root = True

    def __init__(self, selector: Selector, seen: Seen) -> None:
        self.selector, self.seen = selector, seen
        self.policies = tuple(action.policy for action in selector.choice.actions)
        self._target: tuple[Tensor, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "SelectedTree":
        """A lane's own: what it sees is its lane's drafter, the weights are shared."""
        return SelectedTree(self.selector, memo.get(id(self.seen), self.seen))

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        self._target = None if prefill is None else _kept(prefill.features[LAST][-1:], prefill.logits[-1:])

    def observe(self, step: Step, outcome: Outcome) -> None:
        last = outcome.path[-1]
        self._target = _kept(outcome.features[LAST][-1:], outcome.logits[last : last + 1])

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        known = None if root is None else self.known(context, root)
        if known is None:
            return self.policies[0]
        (logits,) = fetch(self.selector(known))
        return self.policies[int(logits[0].argmax())]

    def known(self, context: list[int], root: LogProbs) -> RootFacts | None:
        """What the network reads; None where the token before the root is not known.

        Scalars: entropies of target and drafter behind that token and of the drafter behind the root; divergences of
        the first two both ways, and their L1 distance; the logarithm of the context's length; temperature and top-p
        (1); seconds of a draft forward and of the target's there.
        """
        before = self.seen.before
        if self._target is None or before is None or not self.seen.rows:
            return None
        state, logits = self._target
        choice, tokens = self.selector.choice, root.unpicked.tokens
        costs, vocab = choice.costs.at(len(context)), logits.shape[1]
        columns = vocab if tokens is None else len(tokens)
        earlier = LogProbs(before.logits[:, :columns], tokens)
        p, q, at_root = (_law(one, vocab, choice.temperature) for one in (LogProbs(logits), earlier, root))
        told = [entropy(p), entropy(q), entropy(at_root), divergence(p, q), divergence(q, p)]
        told += [float((p.exp() - q.exp()).abs().sum()), math.log(len(context)), choice.temperature, 1.0]
        told += [costs.draft(1, 0), costs.score(1)]
        states = (state, before.state, self.seen.rows[0].state)
        device = self.selector.mean.device
        return RootFacts(tuple(one.to(device) for one in states), torch.tensor([told], device=device))


def _kept(state: Float[Tensor, "1 hidden"], logits: Float[Tensor, "1 vocab"]) -> tuple[Tensor, Tensor]:
    return state.float().clone(), logits.float().clone()


def _law(answer: LogProbs, vocab: int, temperature: float) -> Float[Tensor, " vocab"]:
    """The log-probabilities of all tokens, at a temperature, on the host."""
    wide = over_vocabulary(answer)[0].float().cpu()
    return log_probs_of(F.pad(wide, (0, vocab - len(wide)), value=-torch.inf)[None] / temperature)[0]


def entropy(law: Float[Tensor, " vocab"]) -> float:
    return -float((law.exp() * law).nan_to_num().sum())


def divergence(law: Float[Tensor, " vocab"], other: Float[Tensor, " vocab"]) -> float:
    """KL(law || other), at most `_MOST`."""
    return min(float((law.exp() * (law - other)).nan_to_num(0.0).sum()), _MOST)
