"""An independent drafter: any causal LM that shares the target's tokenizer."""

from opt_tree.core.errors import require
from opt_tree.core.pool import Frontier
from opt_tree.core.sampling import Sampling
from opt_tree.core.step import Outcome
from opt_tree.core.target import Forward, Output
from opt_tree.drafters.of_model import OfModel
from opt_tree.models.causal_lm import CausalLM


class CausalLMDrafter(OfModel):
    """Drafts with a small causal LM. Accepted rows of its cache are kept: same tokens, positions and ancestors.

    `vocab` is the target's number of logits. Vocabularies padded to different sizes are reconciled: columns that the
    target lacks are cut before the softmax, tokens that the drafter lacks are never proposed (and read as token 0
    should the target ever emit one). Whether the tokenizers agree is for whoever loads the pair to check.
    """

    any_order = True

    def __init__(self, lm: CausalLM, vocab: int | None = None) -> None:
        require(CausalLM, lm=lm)
        whole = vocab or lm.vocab
        self.take_model(lm, min(whole, lm.vocab), whole)
        self.max_context = lm.max_context

    def keeps(self, prompt: list[int]) -> int:
        return len(prompt)

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Sampling) -> None:
        super().begin(prompt, kept, prefill, sampling)
        if kept:
            self.lm.keep(self.known(prompt), len(prompt) - 1)
        else:
            self.lm.reset()

    def root(self, context: list[int]) -> Forward:
        """Catch up with the context; between steps that is the target's own token and at most one accepted one."""
        return self.lm.text(self.known(context[self.lm.length :]))

    def expand(self, frontier: Frontier) -> Forward:
        # Depth 1 follows the root, which is the last committed row here.
        return Forward(self.lm, frontier.tokens, frontier.depths + (self.lm.length - 1), frontier.visible)

    def accept(self, outcome: Outcome) -> None:
        numbers = outcome.tree.draft_rows.tolist()
        self.lm.commit([numbers[row] - 1 for row in outcome.path[1:] if numbers[row] > 0])

    def describe(self) -> str:
        return f"draft model {self.name or self.lm.name}: {self._size()}"
