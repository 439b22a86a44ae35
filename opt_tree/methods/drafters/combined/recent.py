"""A draft model that reads the end of a long prompt: between the prompt's first tokens and its last ones it reads none.

Owns what is left out. A prompt is read before the first token is written, and to a draft model that runs beside a
quantised target this costs much of what its drafts gain. The first tokens stay, since attention rests on them
(StreamingLLM, arXiv:2309.17453); positions are those of the text that is read.
"""

from typing import Any, Self

from opt_tree.drafter import Asked, Drafter
from opt_tree.methods.drafters.around import DrafterAround
from opt_tree.methods.drafters.registry import DrafterOptions, load_drafter, register
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, refused
from opt_tree.sampling import Temperature
from opt_tree.target import Output, shared

FIRST = 4
"""Tokens at the beginning of a prompt that are always read."""


class Recent(DrafterAround):
    """A drafter that is shown at most `tokens` tokens of a prompt, the first four and the last, and all that follows.

    Whatever it drafts is judged as ever, so that texts stay the target's. A text that goes on is read on, unless more
    than `tokens` tokens of it are new: then they are left out like those of a new prompt.

    Raises TypeError for a drafter that reads what the target says of the prompt, and for one that runs no model, to
    which a prompt costs nothing; ValueError for fewer than five tokens.
    """

    def __init__(self, drafter: Drafter, tokens: int) -> None:
        if drafter.features or drafter.reads_logits:
            raise TypeError(f"{drafter.describe()} reads what the target says of the prompt: it is shown all of it")
        if not drafter.models:
            raise TypeError(f"{drafter.describe()} runs no model: a long prompt costs it nothing")
        if tokens <= FIRST:
            raise ValueError(f"a prompt's first {FIRST} tokens are read, and some behind: {tokens} are too few")
        super().__init__(drafter)
        self.most = tokens
        self._text: list[int] = []
        """The context as the drafter is shown it."""
        self._skipped = 0
        """Tokens of the context that it is not shown."""

    def keeps(self, prompt: list[int]) -> int:
        return len(prompt) if self.drafter.keeps(prompt) == len(prompt) else 0

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        text, new = self._shown(prompt), not kept or len(prompt) < self._skipped + self.most
        if new or len(text) - shared(self._text, text) > self.most:
            self._skipped = max(0, len(prompt) - self.most)
            text = self._shown(prompt)
        self._text, self.max_context = text, self.drafter.max_context + self._skipped
        super().begin(text, min(kept, len(text)), prefill, sampling)

    def _shown(self, context: list[int]) -> list[int]:
        return context[:FIRST] + context[FIRST + self._skipped :]

    def room(self, length: int) -> int:
        return self.drafter.room(length - self._skipped)

    def root(self, context: list[int]) -> Asked:
        self._text += context[len(self._text) + self._skipped :]
        return super().root(self._text)

    def calibrated(self, temperature: float) -> Self:
        self.drafter.calibrated(temperature)
        return self

    def describe(self) -> str:
        return f"{super().describe()}, reading {self.most} tokens of a prompt"

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"prompt_tokens": self.most}


@register(
    "recent",
    about="a draft model that reads a prompt's last tokens only: recent:64:lm:qwen2.5-coder-0.5b",
    paper="2309.17453",
    others=lambda path: [path.partition(":")[2]],
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    tokens, _, spec = path.partition(":")
    if not tokens.isdigit() or not spec:
        raise CheckpointError(f"recent:TOKENS:SPEC says how many tokens of a prompt a model reads; got recent:{path}")
    with refused(f"recent:{path}"):
        return Recent(load_drafter(spec, target, options), int(tokens))
