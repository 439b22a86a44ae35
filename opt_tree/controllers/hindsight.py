"""What another policy would have brought at a step that is over: a large tree tells of the smaller ones inside it."""

import numpy as np

from opt_tree.core.step import Step
from opt_tree.core.tree import Tree
from opt_tree.policies import OptTree, Static, TreePolicy


def tells_of(policy: TreePolicy, drawn: TreePolicy) -> bool:
    """Whether the steps of `drawn` tell what `policy` would have brought, for whatever text.

    Always of the empty tree. Otherwise where each tree of `policy` is a part of the one drawn and nothing is drawn by
    chance. Never of a longer chain: only steps that cut it short would tell, and it would look worse than it is.
    """
    if policy == drawn or (isinstance(policy, Static) and not policy.paths):
        return True
    if isinstance(policy, Static) and isinstance(drawn, Static):
        return not drawn.children.sampled and policy.siblings == drawn.siblings and {*policy.paths} <= {*drawn.paths}
    if type(policy) is type(drawn) is OptTree:
        deep = policy.max_depth <= drawn.max_depth
        return deep and policy.nodes <= drawn.nodes and policy.threshold >= drawn.threshold
    return False


def tokens_of(policy: TreePolicy, step: Step) -> int:
    """How many tokens the step would have brought under a policy that it tells of: the path as far as its tree goes.

    Of an OPT-Tree this is an estimate: candidates that the larger tree dropped are not known any more.
    """
    if policy == step.policy:
        return len(step.tokens)
    if isinstance(policy, Static):
        paths, kept = {*policy.paths}, 0
        ranks: tuple[int, ...] = ()
        for parent, row in zip(step.path, step.path[1:], strict=False):
            ranks += (int((step.tree.parents[:row] == parent).sum()),)
            kept += ranks in paths
        return 1 + kept
    assert isinstance(policy, OptTree)
    inside = _best(step.tree, policy)
    return 1 + sum(row in inside for row in step.path[1:])


def _best(tree: Tree, policy: OptTree) -> set[int]:
    """The rows of the smaller tree, by its own rule on this one's nodes."""
    logs, depths, best, expected = tree.path_log_probs[1:], tree.depths[1:], np.array([], dtype=np.int64), 0.0
    for depth in range(1, min(int(depths.max(initial=0)), policy.max_depth) + 1):
        rows = (depths <= depth).nonzero()[0]
        best = rows[(-logs[rows]).argsort(kind="stable")[: policy.nodes]]
        gained, expected = np.exp(logs[best]).sum() - expected, np.exp(logs[best]).sum()
        if gained <= policy.threshold:
            break
    return {*(best + 1).tolist()}
