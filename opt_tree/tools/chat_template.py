"""From messages to the text of a prompt, by a tokenizer's chat template; what a template leaves out is not lost."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from opt_tree.errors import one_line

Message = Mapping[str, Any]


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], opens: bool = True, **options: Any) -> str:
    """Return the prompt that the chat template makes of messages.

    Some templates take content in parts only (`[{"type": "text", "text": ...}]`) and drop a plain string: whether the
    last message is in the prompt is seen by another one in its place. Raises ValueError where the template refuses the
    messages, or leaves the last one out either way.

    Args:
        opens: Whether the prompt opens the answer.
        options: What the template is told beside the messages.
    """
    told = options | {"add_generation_prompt": opens, "tokenize": False}
    refusal: Exception | None = None
    for form in (dict, _in_parts):
        given = [form(message) for message in messages]
        try:
            text = str(tokenizer.apply_chat_template(given, **told))
            if not isinstance(messages[-1].get("content"), str):
                return text
            other = form({**messages[-1], "content": messages[-1]["content"] + "x"})
            if text != tokenizer.apply_chat_template([*given[:-1], other], **told):
                return text
        except Exception as error:  # the template's own, and jinja's
            refusal = refusal or error
    if refusal is not None:
        raise ValueError(f"the chat template refuses these messages: {one_line(refusal)}") from refusal
    raise ValueError(
        f"the chat template of {tokenizer.name_or_path or 'this tokenizer'} leaves the last message out of the prompt"
    )


def _in_parts(message: Message) -> dict[str, Any]:
    """The same message with its text as a part, as templates of models that see images take it."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}
