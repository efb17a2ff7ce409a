"""OpenAI: validate the requests of its protocol.

JSON ─ checked ─> ChatRequest | CompletionRequest       refuses unknown parameters with the nearest name

A parameter that changes nothing is accepted: names and notes of the client (``user``, ``metadata``), and each
parameter of ``NEUTRAL`` with a value that asks for what is done anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from rillflow.errors import StreamError, nearest
from rillflow.rollout.config import Factor, Penalty, SamplingConfig, Temperature, TopK
from rillflow.serving.http_body import checked_request
from rillflow.tasks.example import TAKEN_ARGUMENTS
from rillflow_parts.endpoint.request_fields import Messages, Name, Notes, Text, Tools
from rillflow_parts.endpoint.tool_calls import ToolFormat

_OLD = "it belongs to an older version of the protocol"
_NO_GRAMMAR = "tokens are sampled without grammar constraints"
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), _NO_GRAMMAR),
    "logit_bias": (({},), "only the model's logits and the row's own tokens decide what is sampled"),
    "top_logprobs": ((0,), "only the log probabilities of sampled tokens are kept"),
    "best_of": ((1,), "every sampled answer is returned"),
    "suffix": (("",), _OLD),
    "functions": (([],), _OLD + "; use tools"),
    "function_call": (("none", "auto"), _OLD + "; use tool_choice"),
    "modalities": ((["text"],), "answers are text"),
    "ignore_eos": ((False,), "an end token ends an answer"),
    "min_tokens": ((0,), "an end token ends an answer"),
    "skip_special_tokens": ((True,), "return_token_ids returns every token"),
    "spaces_between_special_tokens": ((True, False), "special tokens are no part of the text"),
    "include_stop_str_in_output": ((False,), "the text ends before the stop"),
    "add_generation_prompt": ((True,), "the assistant answers"),
    "continue_final_message": ((False,), "the assistant begins a new message"),
    "add_special_tokens": ((False,), "the chat template writes all special tokens"),
    "use_beam_search": ((False,), "tokens are sampled one by one"),
    "length_penalty": ((1, 1.0), "tokens are sampled one by one"),
    "priority": ((0,), "requests take turns"),
    "truncate_prompt_tokens": ((), "a prompt beyond the context is refused"),
    "prompt_logprobs": ((0,), "/v1/completions returns them with echo and logprobs"),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        ((), _NO_GRAMMAR),
    ),
    **dict.fromkeys(
        ("audio", "prediction", "web_search_options"), ((), "the engine continues text and nothing else")
    ),
}
"""Parameters that are accepted with these values, and the reason why others are refused."""
DRAWING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Sampling parameters, by their names in ``SamplingConfig``."""

MOST_STOPS, LONGEST_STOP = 16, 1_000
"""Largest number of stop texts, and characters of one: every look at a row searches all of them."""
MOST_TOKENS = 2**31 - 1
"""Largest ``max_tokens``, more than any context; the context ends a row before."""
NewTokens = Annotated[int, Field(gt=0, le=MOST_TOKENS)]
"""A largest number of new tokens."""
Token = Annotated[int, Field(ge=-(2**70), le=2**70)]
"""A token of a prompt; the engine names one that the vocabulary lacks."""
Tokens = Annotated[list[Token], Field(max_length=2**20, fail_fast=True)]
"""A prompt as tokens."""
Texts = Annotated[list[Text], Field(max_length=2**20, fail_fast=True)]
"""Several prompts; the error of too many counts them."""
Lists = Annotated[list[Tokens], Field(max_length=2**16, fail_fast=True)]
"""Several prompts as tokens."""


class SamplingRequest(BaseModel):
    """Parameters of both kinds of request."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    model: Text = Field(default="", description="name of the model in /v1/models; optional")
    n: int = Field(default=1, ge=1, le=128, description="number of answers per prompt")
    temperature: Temperature | None = Field(
        default=None, le=100, description="sampling temperature; 0 is greedy"
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="mass of nucleus sampling")
    top_k: TopK | None = Field(default=None, description="number of likeliest tokens; 0 or -1 for all")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="least share of the top probability; 0 for none"
    )
    repetition_penalty: Factor | None = Field(default=None, description="factor for tokens of the row")
    presence_penalty: Penalty | None = Field(default=None, description="penalty for sampled tokens")
    frequency_penalty: Penalty | None = Field(default=None, description="penalty per earlier occurrence")
    max_tokens: NewTokens | None = Field(default=None, description="largest number of new tokens")
    stop: Text | Texts = Field(default=[], description="stop texts, not part of the answer")
    stream: bool = Field(default=False, description="streaming of answers as they are sampled")
    stream_options: dict[Name, bool] = Field(default={}, max_length=16, description="option include_usage")
    return_token_ids: bool = Field(default=False, description="token ids and their versions in the answer")
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**64, description="choice of the random numbers of new rows"
    )
    user: Name = Field(default="", description="name of the user; ignored")
    safety_identifier: Name = Field(default="", description="name of the user; ignored")
    store: bool = Field(default=False, description="nothing is stored; ignored")
    metadata: Notes = Field(default={}, description="notes of the client; ignored")
    service_tier: Name = Field(default="", description="there is one tier; ignored")
    prompt_cache_key: Name = Field(default="", description="ignored")
    prompt_cache_retention: Name = Field(default="", description="ignored")
    request_id: Name = Field(default="", description="ignored")
    kind: ClassVar[str]
    """Object type in an answer."""

    @field_validator("top_k", mode="before")
    @classmethod
    def _all(cls, top_k: object) -> object:
        return 0 if type(top_k) is int and top_k == -1 else top_k  # vLLM's way to say all

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

    def check(self) -> None:
        """Raise StreamError for parameters that contradict each other."""

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls are read out of the answers."""
        return False

    def ends(self, tools: ToolFormat) -> tuple[str, ...]:
        """Return the texts that end sampling: the stop texts; the end of a call if only one is wanted."""
        del tools
        return self.stops

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """Return the sampling settings of the request, with ``usual`` for missing parameters."""
        asked = self.model_dump(include={*DRAWING}) | {"max_tokens": self.limit}
        return usual.model_copy(update={name: value for name, value in asked.items() if value is not None})


class ChatRequest(SamplingRequest):
    """A conversation that the assistant continues."""

    messages: Messages = Field(description="conversation: messages with role and content")
    tools: Tools | None = Field(default=None, description="tools for the chat template")
    tool_choice: Name | Notes = Field(
        default="auto", description="auto; or none, which leaves calls in the text"
    )
    parallel_tool_calls: bool = Field(
        default=True, description="several calls in an answer; false ends the answer after the first"
    )
    max_completion_tokens: NewTokens | None = Field(default=None, description="newer name of max_tokens")
    logprobs: bool = Field(default=False, description="log probabilities of the sampled tokens")
    reasoning_effort: Name | None = Field(default=None, description="variable of the chat template")
    verbosity: Name | None = Field(default=None, description="variable of the chat template")
    chat_template_kwargs: Notes = Field(
        default={}, description="variables of the chat template, such as enable_thinking"
    )
    kind = "chat.completion"

    @field_validator("tools")
    @classmethod
    def _are_functions(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for tool in tools or []:
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict):
                raise PydanticCustomError("tools", "a tool is {'type': 'function', 'function': {...}}")
            if not isinstance(function.get("name"), str) or not function["name"]:
                raise PydanticCustomError("tools", "the function of a tool has a name")
        return tools or None

    @field_validator("tool_choice")
    @classmethod
    def _is_free(cls, choice: str | dict[str, Any]) -> str | dict[str, Any]:
        if choice not in ("auto", "none"):
            told = "it must be 'auto' or 'none': tokens are sampled without grammar constraints, so no call "
            raise PydanticCustomError("tool_choice", told + "can be guaranteed; ask for it in a message")
        return choice

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(TAKEN_ARGUMENTS & variables.keys()):
            raise PydanticCustomError("variables", f"{name} is set by the server; use a template's variable")
        return variables

    @property
    def limit(self) -> int | None:
        """See SamplingRequest."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def reads_calls(self) -> bool:
        """See SamplingRequest."""
        return bool(self.tools) and self.tool_choice == "auto"

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        named = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {name: value for name, value in named.items() if value} | self.chat_template_kwargs

    def ends(self, tools: ToolFormat) -> tuple[str, ...]:
        """See SamplingRequest."""
        return self.stops + tools.ends * (self.reads_calls and not self.parallel_tool_calls)


class CompletionRequest(SamplingRequest):
    """Prompts to continue, as text or as tokens."""

    prompt: Text | Tokens | Texts | Lists = Field(description="one prompt or several")
    logprobs: int | None = Field(default=None, ge=0, le=1, description="log probabilities; 1 to return them")
    echo: bool = Field(default=False, description="the prompt before the answer, with its log probabilities")
    max_tokens: int | None = Field(
        default=None, ge=0, le=MOST_TOKENS, description="largest number of new tokens"
    )
    kind = "text_completion"

    def check(self) -> None:
        """See SamplingRequest."""
        if self.max_tokens == 0 and not self.echo:
            raise StreamError("max_tokens is 0", why="nothing is returned", fix="omit it, or set echo")
        if self.reads_prompt and self.stream:
            why = "log probabilities of the prompt are read after the answer"
            raise StreamError("stream is True", why=why, fix="omit stream, echo or logprobs")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """All prompts."""
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item,return-value]

    @property
    def limit(self) -> int | None:
        """See SamplingRequest; without new tokens one is sampled, and left out of the answer."""
        return 1 if self.max_tokens == 0 else self.max_tokens

    @property
    def reads_prompt(self) -> bool:
        """Whether the log probabilities of the prompt are wanted."""
        return self.echo and self.logprobs is not None


A = TypeVar("A", bound=SamplingRequest)


def checked(kind: type[A], says: Mapping[str, Any]) -> A:
    """Validate a request; null counts as missing.

    Raises:
        StreamError: a parameter is unknown, is not offered, or has an invalid value.
    """
    said = {name: value for name, value in says.items() if value is not None}
    for name in said.keys() - kind.model_fields.keys():
        if name in NEUTRAL:
            values, why = NEUTRAL[name]
            if any(type(said[name]) is type(value) and said[name] == value for value in values):
                continue
            raise StreamError(f"{name} is not supported", why=why, fix="omit it")
        what = f"there is no parameter {name[:80]!r}"
        raise StreamError(what, why="it would have no effect", fix=nearest(name, kind.model_fields))
    found = checked_request(kind, {name: value for name, value in said.items() if name not in NEUTRAL})
    found.check()
    return found
