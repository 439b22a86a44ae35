"""The kinds of text that engines are compared on: chat, what the model repeats from its prompt, functions' bodies.

Repeated text is summaries and corrections of passages, and code that is written out again. Passages are Spec-Bench's
for retrieval, code is HumanEval's: nothing here was trained or tuned on them.
"""

from evaluation.questions.sets import load_set
from experiments.real_pair.questions import Asked, asked

KINDS = ("chat", "repeated", "body")
_ASKED = (
    "Summarize this text in the words that it uses:\n\n{passage}",
    "Correct the spelling and write the whole text again:\n\n{passage}",
    "Write this Python function again, whole, with one comment more:\n\n```python\n{code}\n```",
    "Write this text again, with 'many' instead of 'some':\n\n{passage}",
)
_WORDS = 120
"""Of a passage, at most."""


def repeated(number: int, data_dir: str | None, fetch: bool) -> list[str]:
    """Prompts whose answers repeat them; each task in turn. Raises ValueError and OSError without the question sets."""
    passages, codes = (load_set(name, None, data_dir, fetch).questions for name in ("spec_bench", "humaneval"))
    passages = tuple(one for one in passages if one.category == "rag")
    prompts = []
    for place in range(number):
        words = passages[place * len(passages) // number].turns[0].split()[:_WORDS]
        code = codes[place * len(codes) // number].turns[0].split("\n", 1)[-1].strip()
        prompts.append(_ASKED[place % len(_ASKED)].format(passage=" ".join(words), code=code))
    return prompts


def bodies(number: int, data_dir: str | None, fetch: bool) -> list[Asked]:
    """Functions of HumanEval whose heads are given, so that their bodies alone are decoded; none is one for a fit."""
    known = [one for one in asked("humaneval", max(4, number + number // 3 + 1), data_dir, fetch) if not one.fit]
    return known[:number]
