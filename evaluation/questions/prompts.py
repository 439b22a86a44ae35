"""From a conversation to token ids and from an answer's ids to text.

Owns the choice of the template, which is explicit: the tokenizer's own, or one of FastChat's by name.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from opt_tree import Stop
from opt_tree.tools.chat_template import render


class Prompter:
    """Renders conversations for one tokenizer.

    Without `template` the tokenizer's chat template is used, reasoning models' thinking switched off; with it,
    FastChat's conversation of that name (`vicuna_v1.1`, `llama-2`, ...), whose stop strings and tokens join `stop`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Stop, template: str | None = None) -> None:
        self.tokenizer, self.template = tokenizer, template
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template: name one of FastChat's with "
                "--conv-template (vicuna_v1.1, llama-2, ...)"
            )
        strings: tuple[str, ...] = ()
        tokens = stop.tokens
        if template is not None:
            conversation = get_template(template)
            found = conversation.stop_str
            strings = tuple([found] if isinstance(found, str) else found or [])
            if conversation.stop_token_ids:
                tokens = frozenset(tokens or ()) | set(conversation.stop_token_ids)
        self.stop = Stop(tokens, strings, tokenizer)
        self.encode(["?"], [])  # a template that refuses it refuses every question

    def encode(self, questions: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Token ids of a conversation whose last question is to be answered: one answer fewer than questions."""
        said = [text for turn in zip(questions, [*answers, None], strict=True) for text in turn]
        if self.template is not None:
            conversation = get_template(self.template)
            for place, own in enumerate(said):
                conversation.append_message(conversation.roles[place % 2], own)
            return self.tokenizer(conversation.get_prompt()).input_ids
        messages = [{"role": ("user", "assistant")[place % 2], "content": own} for place, own in enumerate(said[:-1])]
        text = render(self.tokenizer, messages, enable_thinking=False)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def trim(self, tokens: list[int]) -> list[int]:
        """Cut after the first token at which `stop` fires: the same end for every method."""
        ends = (end for end in range(1, len(tokens) + 1) if self.stop(tokens[:end]))
        return tokens[: next(ends, len(tokens))]

    def text(self, tokens: list[int]) -> str:
        """The answer as text: without special tokens, stop strings and surrounding blanks."""
        if tokens and tokens[-1] in self.stop.tokens:
            tokens = tokens[:-1]
        text = self.tokenizer.decode(
            tokens, skip_special_tokens=True, spaces_between_special_tokens=False, clean_up_tokenization_spaces=False
        )
        cuts = [cut for string in self.stop.strings if (cut := text.find(string)) >= 0]
        return text[: min(cuts, default=len(text))].strip()


def get_template(name: str) -> Any:
    """A fresh FastChat conversation. FastChat is imported here only: nothing else needs it."""
    try:
        from fastchat.conversation import conv_templates, get_conv_template
    except ImportError as error:
        raise ValueError("--conv-template needs FastChat's conversations: pip install fschat") from error
    if name not in conv_templates:
        raise ValueError(f"no FastChat conversation is called {name!r}; there are: {', '.join(sorted(conv_templates))}")
    return get_conv_template(name)
