"""A verifier of one's own: toss a coin between two exact rules.

    python -m examples.custom_verifier
    python -m evaluation.compare --verifiers examples/custom_verifier.py:coin --policies chains:3 --temperatures 0.5

A verifier is a function, tagged with the kinds of children that it is exact for. Most are made of a rule for one node:
from the target's probabilities, the drafter's, and the children that were drawn, to the probabilities of the token
emitted there. The rule is exact if its mean over the children is the target's distribution. `prove` computes that.
"""

import numpy as np
from jaxtyping import Int

import opt_tree
from opt_tree.methods.children.iid import IID
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import in_rounds
from opt_tree.methods.verifiers.naive_tree import first_child
from opt_tree.methods.verifiers.rules import Probs, computes
from opt_tree.methods.verifiers.walks import walk_down
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for


def either(target: Probs, draft: Probs, tokens: Int[np.ndarray, " children"]) -> Probs:
    """Judge the first child only, or all of them in turn, by the toss of a coin. A mean of exact rules is exact."""
    return (first_child(target, draft, tokens) + in_rounds(target, draft, tokens)) / 2


@valid_for(IID)
@computes(branching=either)
def coin(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Walk down from the root; at each node emit a token by `either`, and go on while a child carries it."""
    return walk_down(tree, logits, random, either)


def main() -> "opt_tree.Generation":
    print(opt_tree.prove(coin, IID(2), depth=1))
    # The two most probable children are always the same two. That is not what the rule is exact for.
    print(opt_tree.prove(coin, opt_tree.TopK(2), depth=1))

    pair = opt_tree.load_pair("demo", dtype="float32")
    decoder = opt_tree.Decoder(pair.target, pair.drafter, Sampled.chains(3, 4), coin)
    prompt, sampling = pair.encode("What does the word lantern mean?"), opt_tree.Sampling(temperature=0.5)
    answer = decoder.generate(prompt, max_new_tokens=48, sampling=sampling)
    print(f"{answer.mean_acceptance_length:.2f} tokens a step at temperature 0.5")
    return answer


if __name__ == "__main__":
    main()
