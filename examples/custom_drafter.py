"""A drafter of one's own, without a model: it counts which token followed which in the context.

    python -m examples.custom_drafter
    python -m evaluation.compare --drafter examples/custom_drafter.py:Bigrams --policies opt:0.1 --budgets 8

It names the few tokens that it has seen behind a node, with a mass below 1. What is missing is the chance of something
never seen there. A node about which it knows nothing gets a row of -inf, and no children. A drafter that runs a model
returns a forward instead of an answer, and reads what came of it: see `opt_tree/draft_model.py`.
"""

import math
from collections import Counter, defaultdict

import torch

import opt_tree
from opt_tree.children import LogProbs
from opt_tree.drafter import Drafter
from opt_tree.generation import Outcome
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Output


class Bigrams(Drafter):
    """Proposes what followed the same token earlier in this context, the most frequent ones first."""

    names_few = True  # no whole distributions: policies that draw their children refuse it

    def __init__(self, most: int = 4) -> None:
        self.most = most
        """Tokens named behind a node."""
        self._followers: dict[int, Counter[int]] = {}
        self._read = 0  # tokens of the context that are counted

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        super().begin(prompt, kept, prefill, sampling)
        self._followers, self._read = defaultdict(Counter), 0

    def root(self, context: list[int]) -> LogProbs:
        """Count what the last step added, then answer for the last token."""
        for place in range(max(self._read, 1), len(context)):
            self._followers[context[place - 1]][context[place]] += 1
        self._read = len(context)
        return self._answer(context[-1:])

    def expand(self, frontier: Frontier) -> LogProbs:
        return self._answer(frontier.tokens.tolist())

    def accept(self, outcome: Outcome) -> None:
        """Nothing to learn here: the next `root` sees the whole context."""

    def _answer(self, tokens: list[int]) -> LogProbs:
        log_probs = torch.full((len(tokens), self.most), -torch.inf)
        named = torch.zeros(len(tokens), self.most, dtype=torch.long)
        for row, token in enumerate(tokens):
            seen = self._followers.get(token, Counter())
            for column, (follower, count) in enumerate(seen.most_common(self.most)):
                # One more than was seen: the rest is the chance of a token that never followed.
                log_probs[row, column] = math.log(count / (seen.total() + 1))
                named[row, column] = follower
        return LogProbs(log_probs, named)


def main() -> "opt_tree.Generation":
    pair = opt_tree.load_pair("demo", dtype="float32")
    decoder = opt_tree.Decoder(pair.target, Bigrams(), opt_tree.OptTree(nodes=8, threshold=0.1))
    prompt = pair.encode("Give me an overview of the economy of Iceland.")
    answer = decoder.generate(prompt, max_new_tokens=96)
    print(opt_tree.transcript(answer, pair.tokenizer, color=False))
    print(f"{answer.mean_acceptance_length:.2f} tokens a step without any draft model")
    return answer


if __name__ == "__main__":
    main()
