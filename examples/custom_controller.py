"""A controller of one's own: a fixed schedule of tree policies.

    python -m examples.custom_controller
    python -m evaluation.eval_opt_classic --controller examples/custom_controller.py:stages --limit 2 --nodes 16

A controller is a policy that chooses another one for each step. It lists all of them beforehand, so that the decoder
can check each against its verifier. It sees the past only: the context and the steps that are done.
"""

from collections.abc import Sequence

import opt_tree
from opt_tree.children import LogProbs
from opt_tree.generation import Outcome, Step
from opt_tree.methods.controllers.registry import ControllerRequest
from opt_tree.methods.policies.static import Static
from opt_tree.policy import TreePolicy
from opt_tree.target import Output


class Stages(TreePolicy):
    """Uses each policy for a given number of steps, and the last one for the rest of the answer."""

    def __init__(self, stages: Sequence[tuple[int, TreePolicy]], last: TreePolicy) -> None:
        self.policies = (*(policy for _, policy in stages), last)
        self._plan = [policy for steps, policy in stages for _ in range(steps)]
        self._done = 0

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        """A new prompt begins."""
        self._done = 0

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        """Return the policy of the next step, one of `policies`."""
        return self._plan[self._done] if self._done < len(self._plan) else self.policies[-1]

    def observe(self, step: Step, outcome: Outcome) -> None:
        """A step is done. A learning controller would look at what it cost and at what was accepted."""
        self._done += 1


def stages(path: str, wanted: ControllerRequest) -> Stages:
    """Make it of what a command knows: two steps without a tree, then the one asked for. It reads no `path`."""
    return Stages([(2, Static.empty())], last=wanted.tree)


def main() -> "opt_tree.Generation":
    pair = opt_tree.load_pair("demo", dtype="float32")
    small, large = opt_tree.OptTree(nodes=4, threshold=0.3), opt_tree.OptTree(nodes=16, threshold=0.1)
    stages = Stages([(2, opt_tree.Static.empty()), (4, small)], last=large)
    decoder = opt_tree.Decoder(pair.target, pair.drafter, stages)
    answer = decoder.generate(pair.encode("What does the word lantern mean?"), max_new_tokens=48)
    for number, step in enumerate(answer.steps, start=1):
        print(f"step {number:2}: {step.tree.nodes:2} nodes drafted, {step.accepted} accepted")
    return answer


if __name__ == "__main__":
    main()
