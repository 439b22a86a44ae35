"""What a client may ask: the fields of OpenAI's requests that are served, with those of trees.

Owns which values there are, and how each mistake is told. A field that is not served may be given as what it is by
default; all else is refused by its name.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator


class Refused(Exception):
    """A request that is not served: an HTTP status, one clear line, and which field it is about."""

    def __init__(self, status: int, why: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(why)
        self.status, self.field, self.code = status, field, code


def only(*values: Any) -> AfterValidator:
    """Of a field of which these values alone are served, the first being the default of whoever does not give it."""

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(f"not served here, except as {values[0]!r}")
        return value

    return AfterValidator(check)


Text = Annotated[str, StringConstraints(min_length=1)]
Tokens = Annotated[list[int], Field(min_length=1)]


class Strict(BaseModel):
    """A part of a request, all of which must be understood."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TreeOptions(Strict):
    """The draft tree of a request; what is left out is the server's."""

    policy: str | None = None
    """A policy's name, or with numbers behind colons: "opt", "eagle2", "kary:3"."""
    nodes: int | None = Field(default=None, ge=0)
    """0: plain decoding."""
    threshold: float | None = Field(default=None, ge=0)


class StreamOptions(Strict):
    include_usage: bool = False


class BaseRequest(Strict):
    """What both kinds of request have in common."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Whose request it is; nothing depends on it."""
    drafter: str | None = None
    tree: TreeOptions | None = None
    n: Annotated[Any, only(1, None)] = 1
    presence_penalty: Annotated[Any, only(0, None)] = 0
    frequency_penalty: Annotated[Any, only(0, None)] = 0
    logit_bias: Annotated[Any, only(None, {})] = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def most(self) -> int | None:
        """How many new tokens are asked for at most."""
        return self.max_tokens

    @property
    @abstractmethod
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are told at each place; None: no log-probabilities."""

    @model_validator(mode="after")
    def _streams(self) -> "BaseRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One message; its text may come in parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    refusal: Annotated[Any, only(None)] = None
    name: Annotated[Any, only(None)] = None

    @property
    def plain(self) -> dict[str, str]:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": self.role, "content": "".join(parts)}


class Chat(BaseRequest):
    """A request of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Annotated[Any, only(None, [])] = None
    tool_choice: Annotated[Any, only(None, "none", "auto")] = None
    response_format: Annotated[Any, only(None, {"type": "text"})] = None

    @property
    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _agrees(self) -> "Chat":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        if self.max_tokens not in (None, self.most):
            raise ValueError("max_tokens and max_completion_tokens differ: they are one")
        return self


class Completion(BaseRequest):
    """A request of /v1/completions."""

    prompt: Text | Tokens | Annotated[list[Text] | list[Tokens], Field(min_length=1)]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    best_of: Annotated[Any, only(1, None)] = 1
    suffix: Annotated[Any, only(None)] = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]  # type: ignore[return-value, list-item]


def first_mistake(errors: Sequence[Mapping[str, Any]]) -> Refused:
    """What pydantic found wrong with a request, as one line about one field."""
    first = errors[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    field = ".".join(where) or None
    why = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        why = "no such field is served here"
    given = f", got {first['input']!r:.80}" if first["type"] not in ("missing", "json_invalid") and where else ""
    return Refused(400, f"{field}: {why}{given}" if field else why, field)
