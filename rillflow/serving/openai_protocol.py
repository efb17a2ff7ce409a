"""OpenAI: validate requests of its protocol, and format sampled rows as its answers.

JSON ─ checked ─> ChatRequest | CompletionRequest       refuses unknown parameters with the nearest name
Rollout ─ Choice.next ─> JSON                           text before the stop; ids, versions, log probabilities
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from rillflow.errors import StreamError, nearest
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.rollout import Finish, Rollout
from rillflow.rollout.config import Factor, Penalty, SamplingConfig, Temperature, TopK
from rillflow.serving.http_body import checked_request

NOT_OFFERED = {
    "seed": "the engine's seed and the row's id determine a row's random numbers",
    "tool_choice": "the answer is the model's raw text; the client parses tool calls from it",
    "response_format": "tokens are sampled without grammar constraints",
    "top_logprobs": "only the log probabilities of sampled tokens are kept",
    "logit_bias": "only the model's logits and the row's own tokens decide what is sampled",
    **dict.fromkeys(
        ("best_of", "echo", "suffix", "functions"), "it belongs to an older version of the protocol"
    ),
}
"""Refused parameters of the protocol, with reasons."""
DRAWING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Sampling parameters, by their names in ``SamplingConfig``."""

MOST_STOPS, LONGEST_STOP = 16, 1_000
"""Largest number of stop texts, and characters of one: every look at a row searches all of them."""


class SamplingRequest(BaseModel):
    """Parameters of both kinds of request."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    model: str = Field(default="", description="name of the model in /v1/models; optional")
    n: int = Field(default=1, ge=1, le=128, description="number of answers per prompt")
    temperature: Temperature | None = Field(
        default=None, le=100, description="sampling temperature; 0 is greedy"
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="mass of nucleus sampling")
    top_k: TopK | None = Field(default=None, description="number of likeliest tokens; 0 for all")
    min_p: float | None = Field(default=None, gt=0, le=1, description="least share of the top probability")
    repetition_penalty: Factor | None = Field(default=None, description="factor for tokens of the row")
    presence_penalty: Penalty | None = Field(default=None, description="penalty for sampled tokens")
    frequency_penalty: Penalty | None = Field(default=None, description="penalty per earlier occurrence")
    max_tokens: int | None = Field(default=None, gt=0, description="largest number of new tokens")
    stop: str | list[str] = Field(default=[], description="stop texts, not part of the answer")
    stream: bool = Field(default=False, description="streaming of answers as they are sampled")
    stream_options: dict[str, bool] = Field(default={}, description="option include_usage")
    return_token_ids: bool = Field(default=False, description="token ids and their versions in the answer")
    user: str = Field(default="", description="name of the user; ignored")
    kind: ClassVar[str]
    """Object type in an answer."""

    @field_validator("stop")
    @classmethod
    def _few_and_short(cls, stop: str | list[str]) -> str | list[str]:
        texts = [stop] if isinstance(stop, str) else stop
        if len(texts) > MOST_STOPS or max(map(len, texts), default=0) > LONGEST_STOP:
            told = f"it must be at most {MOST_STOPS} texts of at most {LONGEST_STOP:,} characters"
            raise PydanticCustomError("stop", told)
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts, which end an answer."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop))

    @property
    def limit(self) -> int | None:
        """Largest number of new tokens, if given."""
        return self.max_tokens

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """Return the sampling settings of the request, with ``usual`` for missing parameters."""
        asked = self.model_dump(include={*DRAWING}) | {"max_tokens": self.limit}
        return usual.model_copy(update={name: value for name, value in asked.items() if value is not None})


class ChatRequest(SamplingRequest):
    """A conversation that the assistant continues."""

    messages: list[dict[str, Any]] = Field(description="conversation: messages with role and content")
    tools: list[dict[str, Any]] | None = Field(default=None, description="tools for the chat template")
    max_completion_tokens: int | None = Field(default=None, gt=0, description="newer name of max_tokens")
    logprobs: bool = Field(default=False, description="log probabilities of the sampled tokens")
    kind = "chat.completion"

    @property
    def limit(self) -> int | None:
        """See SamplingRequest."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(SamplingRequest):
    """Prompts to continue, as text or as tokens."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(description="one prompt or several")
    logprobs: int | None = Field(default=None, ge=0, le=1, description="log probabilities; 1 to return them")
    kind = "text_completion"

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """All prompts."""
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item,return-value]


A = TypeVar("A", bound=SamplingRequest)


def checked(kind: type[A], says: Mapping[str, Any]) -> A:
    """Validate a request; null counts as missing.

    Raises:
        StreamError: a parameter is unknown, is not offered, or has an invalid value.
    """
    said = {name: value for name, value in says.items() if value is not None}
    for name in said.keys() - kind.model_fields.keys():
        if name in NOT_OFFERED:
            raise StreamError(f"{name} is not supported", why=NOT_OFFERED[name], fix="omit it")
        what = f"there is no parameter {name[:80]!r}"
        raise StreamError(what, why="it would have no effect", fix=nearest(name, kind.model_fields))
    return checked_request(kind, said)


class Choice:
    """One answer, sent whole or in pieces.

    Args:
        asked: the request.
        index: number of the answer.
        begin: the row before sampling.
        tokenizer: tokeniser of the model.
    """

    def __init__(self, asked: SamplingRequest, index: int, begin: Rollout, tokenizer: Tokenizer) -> None:
        self._asked, self._index, self._prompt, self._tokenizer = asked, index, begin.tokens, tokenizer
        self._held = max(map(len, asked.stops), default=1) - 1
        self.count, self._characters = 0, 0
        """Number of tokens sent so far."""

    def next(self, rollout: Rollout, *, is_over: bool) -> dict[str, Any]:
        """Return the new part of the answer as JSON: all of it in the first call."""
        first, begin = self.count, len(self._prompt) + self.count
        text = text_of(rollout.tokens[len(self._prompt) :], self._asked.stops, self._tokenizer)
        if not is_over:  # hold back a possible stop prefix, or half a character
            text = text.removesuffix("\ufffd")
            text = text[: max(self._characters, len(text) - self._held)]
        new, self._characters = text[self._characters :], len(text)
        self.count = len(rollout.tokens) - len(self._prompt)
        told: dict[str, Any] = {"index": self._index}
        if self._asked.kind == CompletionRequest.kind:
            told["text"] = new
        else:
            told["delta" if self._asked.stream else "message"] = {"role": "assistant", "content": new}
        finish = {Finish.STOP: "stop", Finish.LENGTH: "length"}
        told["finish_reason"] = finish[rollout.finish] if is_over else None
        told["logprobs"] = self._logprobs(rollout, begin)
        if self._asked.return_token_ids:
            told |= {} if first else {"prompt_token_ids": list(self._prompt)}
            told |= {"token_ids": list(rollout.tokens[begin:]), "versions": list(rollout.versions[begin:])}
        return told

    def _logprobs(self, rollout: Rollout, begin: int) -> dict[str, Any] | None:
        asked = self._asked
        pieces, values = self._tokenizer.pieces(rollout.tokens[begin:]), list(rollout.logprobs[begin:])
        if isinstance(asked, CompletionRequest) and asked.logprobs is not None:
            places = [sum(map(len, pieces[:place])) for place in range(len(pieces))]
            return {"tokens": pieces, "token_logprobs": values, "text_offset": places, "top_logprobs": None}
        if isinstance(asked, ChatRequest) and asked.logprobs:
            both = zip(pieces, values, strict=True)
            return {
                "content": [
                    {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
                    for piece, value in both
                ]
            }
        return None


def text_of(tokens: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer) -> str:
    """Return the text of an answer, before the first stop text."""
    text = tokenizer.decode(tokens)
    return text[: min((found for stop in stops if (found := text.find(stop)) >= 0), default=None)]


def envelope(asked: SamplingRequest, name: str, model: str, version: int, **more: Any) -> dict[str, Any]:
    """Return the answer object around choices; ``version`` is that of the newest weights."""
    kind = asked.kind + ".chunk" * (asked.stream and asked.kind == ChatRequest.kind)
    about = {"id": name, "object": kind, "created": int(time.time()), "model": model}
    return {**about, "system_fingerprint": f"version {version}", **more}
