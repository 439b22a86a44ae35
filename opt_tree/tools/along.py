"""Many policies along a stored text: the steps that decoding with each takes, and no target forward a tree.

A text that a target wrote greedily, or with a seed judged by `match`, is the same whatever the trees. So the text says
what is accepted of any tree of the most probable children, and the number of steps is exact (EDR, arXiv:2610.10411,
for trees). Each policy has a loop of its own, the library's, in front of a target that says the text again
(`stored_text.py`). The loops share one drafter (`shared_drafter.py`).
"""

from collections.abc import Mapping
from functools import partial

import torch

from opt_tree.decoder import Decoder
from opt_tree.drafter import Drafter
from opt_tree.generation import Generation
from opt_tree.policy import TreePolicy
from opt_tree.target import Asking, Target, run_alone
from opt_tree.tools.shared_drafter import drafting_for
from opt_tree.tools.stored_text import Said, StoredText, Until


def along(
    drafter: Drafter, text: StoredText, policies: Mapping[str, TreePolicy], target: Target | None = None
) -> dict[str, Generation]:
    """Return what decoding with each policy would be: the same trees and steps, with no target forward a tree.

        along(pair.drafter, text, {"opt": OptTree(24, 0.2), "chain": Static.chain(5)})["opt"].accept_lengths

    Their times are shared, and say nothing. A policy that chooses among others learns from text to text.

    Arguments:
        drafter: shared by all; calibrated or not, as it is.
        target: who wrote the text; needed where the drafter reads its hidden states or logits.

    Raises ValueError for a policy that draws its children, or reads the target's hidden states, and for a drafter that
    reads the target where there is none.
    """
    with torch.inference_mode():
        return run_alone(asking_along(drafter, text, policies, target))


def asking_along(
    drafter: Drafter, text: StoredText, policies: Mapping[str, TreePolicy], target: Target | None = None
) -> Asking[dict[str, Generation]]:
    """The same, as a generator of the forwards that it needs."""
    for name, policy in policies.items():
        check_along(name, policy)
    if target is not None and drafter.features:
        target.watch(tuple(sorted(drafter.features)))

    def decoding(policy: TreePolicy, asker: Drafter) -> Asking[Generation]:
        decoder = Decoder(Said(text, target), asker, policy)
        decoder.lanes = len(policies) + 1  # its times are not its own
        return decoder.answer(text.prompt, text.limit, stop=Until(text))

    return drafting_for(drafter, text, {name: partial(decoding, one) for name, one in policies.items()}, target)


def check_along(name: str, policy: TreePolicy) -> None:
    """Raise ValueError for a policy whose trees do not follow from the text before them."""
    if policy.features:
        raise ValueError(f"{name} reads the target's hidden states, which are not stored beside a text")
    if any(known.children.sampled for known in policy.policies if known.max_depth):
        raise ValueError(f"{name} draws its children: it has many trees at a step, not one")
