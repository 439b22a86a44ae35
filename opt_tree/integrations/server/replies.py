"""What a client is answered: the objects of OpenAI's protocol, whole or in pieces.

Owns their shape. `usage` has two fields more: `steps`, and `tokens_per_step`.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from opt_tree.generation import Generation
from opt_tree.integrations.server.answer_text import AnswerText, decoded
from opt_tree.integrations.server.engine import Job, NewText, Read
from opt_tree.integrations.server.requests import Refused
from opt_tree.integrations.server.service import Service

Json = dict[str, Any]


def problem(refused: Refused) -> Json:
    """An error as clients read it."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.field, "code": refused.code}}


@dataclass
class ReplyChoice:
    """One answer that grows."""

    service: Service
    job: Job
    index: int
    chat: bool
    generation: Generation | None = None
    """Once it is over."""
    log_probs: list[Json] = field(default_factory=list)
    """Of each token that was told of."""

    def __post_init__(self) -> None:
        self._text = AnswerText(self.service.tokenizer, tuple(self.job.stop.strings), self.job.stop.tokens or ())
        self._offset = 0
        self._echo = ""
        """The prompt, where it is a part of the answer."""

    def take(self, told: NewText | Generation) -> Json | None:
        """Take in what the engine tells; return what of it goes into a stream, None where nothing does."""
        if isinstance(told, Generation):
            self.generation = told
            rest = self._text.end(told.finish_reason == "stop_string")
            return self._piece(rest, [], self.finish)
        likeliest = told.top_log_probs or [{}] * len(told.log_probs)
        if isinstance(told, Read):
            self._echo = new = decoded(self.service.tokenizer, told.tokens)
            tokens = told.tokens[1:]
            places = [self._token(told.tokens[0], None) | {"top_logprobs": None}] * (self.job.likeliest is not None)
        else:
            new, tokens, places = self._text.add(told.tokens), told.tokens, []
        places += [self._place(*one) for one in zip(tokens, told.log_probs, likeliest, strict=False)]
        piece = self._piece(new, places, None) if new or places else None
        self.log_probs += places
        self._offset += sum(len(place["token"]) for place in places)
        return piece

    @property
    def finish(self) -> str | None:
        if self.generation is None:
            return None
        return "stop" if self.generation.finish_reason.startswith("stop") else "length"

    def whole(self) -> Json:
        """The answer when it is over."""
        content = {"role": "assistant", "content": self._text.text, "refusal": None}
        told: Json = {"message": content} if self.chat else {"text": self._echo + self._text.text}
        return {
            "index": self.index,
            **told,
            "logprobs": self._logprobs(self.log_probs, 0),
            "finish_reason": self.finish,
        }

    def _piece(self, text: str, places: list[Json], finish: str | None) -> Json:
        told: Json = {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
        return {"index": self.index, **told, "logprobs": self._logprobs(places, self._offset), "finish_reason": finish}

    def _place(self, token: int, log_prob: float, likeliest: Mapping[int, float]) -> Json:
        top = [self._token(*one) for one in likeliest.items()]
        return self._token(token, log_prob) | {"top_logprobs": top}

    def _token(self, token: int, log_prob: float | None) -> Json:
        text = str(self.service.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        # A token may be a part of a character: its bytes are not told then.
        return {"token": text, "logprob": log_prob, "bytes": None if "\ufffd" in text else [*text.encode()]}

    def _logprobs(self, places: Sequence[Json], offset: int) -> Json | None:
        """Log-probabilities as the kind of request has them, behind so many letters; None where nobody asked."""
        if self.job.likeliest is None or not places:
            return None
        if self.chat:
            return {"content": [*places], "refusal": None}
        tokens = [place["token"] for place in places]
        return {
            "tokens": tokens,
            "token_logprobs": [place["logprob"] for place in places],
            "top_logprobs": [
                None if (top := place["top_logprobs"]) is None else {one["token"]: one["logprob"] for one in top}
                for place in places
            ],
            "text_offset": [*accumulate(map(len, tokens), initial=offset)][:-1],
        }


class Reply:
    """The answer to one request: a choice for each of its prompts."""

    def __init__(self, service: Service, jobs: Sequence[Job], chat: bool) -> None:
        self.choices = [ReplyChoice(service, job, index, chat) for index, job in enumerate(jobs)]
        self._chat = chat
        self._head: Json = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
            "seed": jobs[0].seed,
        }

    def whole(self) -> Json:
        """All of it, when it is over."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [choice.whole() for choice in self.choices]
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        """A piece of it, in a stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [*choices], "usage": usage}

    def opening(self) -> Json | None:
        """What a stream begins with: whose words follow."""
        said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self.chunk([{"index": choice.index, **said} for choice in self.choices]) if self._chat else None

    def usage(self) -> Json:
        """Tokens, steps, and tokens a step, of all choices together."""
        made = [choice.generation for choice in self.choices if choice.generation is not None]
        prompt, new = (sum(map(len, some)) for some in ([one.prompt for one in made], [one.tokens for one in made]))
        steps = sum(len(one.steps) for one in made)
        tokens = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**tokens, "steps": steps, "tokens_per_step": round(new / max(steps, 1), 4)}
