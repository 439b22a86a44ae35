"""Prove that a rule of verification is lossless, or see the smallest tree on which it is not.

    python -m examples.prove

A rule here is any function of a tree, the target's probabilities behind each of its rows, the drafter's, and a source
of randomness. Nothing of it is sampled: `prove` visits every outcome of every draw.
"""

import numpy as np

import opt_tree
from opt_tree.children import TopK
from opt_tree.methods.children.iid import IID


def specinfer(tree, target_probs, draft_probs, random):
    """SpecInfer's rule (arXiv:2305.09781): a child with probability min(1, p / q); then p becomes norm(p - q)+."""
    path = [0]
    while True:
        target, draft = target_probs[path[-1]], draft_probs[path[-1]]
        for child in np.flatnonzero(tree.parents == path[-1]):
            token = tree.tokens[child]
            if random.accept(target[token] / draft[token]):
                path.append(child)
                break
            target = np.maximum(target - draft, 0)
            target = target / target.sum()
        else:
            return path, random.choose(target)


def equality(tree, target_probs, draft_probs, random):
    """Draw the target's token, and go on at the child that is equal to it: no probability of the drafter is asked."""
    path = [0]
    while True:
        token = random.choose(target_probs[path[-1]])
        same = [row for row in np.flatnonzero(tree.parents == path[-1]) if tree.tokens[row] == token]
        if not same:
            return path, token
        path.append(same[0])


def main() -> list[opt_tree.Proof]:
    proofs = [
        opt_tree.prove(specinfer, IID(2), depth=1),  # as published: independent draws
        opt_tree.prove(specinfer, TopK(2)),  # plausible, faster, and wrong
        opt_tree.prove(equality, TopK(1)),  # a greedy draft under a sampled target loses nothing
    ]
    for proof in proofs:
        print(proof, end="\n\n")
    return proofs


if __name__ == "__main__":
    main()
