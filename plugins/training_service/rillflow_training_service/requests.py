"""Requests: the JSON bodies of the Tinker API; fields that the service does not use are ignored.

Every field has a bound; ``rillflow_parts.endpoint.request_fields`` says why.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from rillflow.models.peft_settings import MOST_RANK
from rillflow.rollout.config import MOST_TOP_K, Temperature
from rillflow_parts.endpoint.request_fields import WHOLE, Free, Name, Notes, Text
from rillflow_training_service.tenant import AdamParams

MOST_SAMPLES = 1024
"""Largest ``num_samples`` of a request."""
MOST_STOPS, LONGEST_STOP, MOST_STOP_TOKENS = 16, 1_000, 1_024
"""Most stop texts, characters of one, and stop tokens: every pass looks for all of them."""
MOST_TTL_S = 10**9
"""Largest time to live of a checkpoint, 31 years; later dates have no calendar."""
LARGEST_SETTING = 1e6
"""Largest setting of an optimiser step, larger than any that trains."""
Number = Annotated[int, Field(ge=0, le=WHOLE)]
"""A number that a client counts, such as a sequence number."""
Setting = Annotated[float, Field(ge=0, le=LARGEST_SETTING)]
"""A setting of an optimiser step."""
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay of a moment."""
Lifetime = Annotated[int, Field(gt=0, le=MOST_TTL_S)]
"""Seconds until a checkpoint may be deleted."""
Reserved = Annotated[int, Field(ge=0, le=2**31)]
"""A count that is not served unless it is 0."""
Facts = Annotated[dict[Name, Name], Field(max_length=256)]
"""Facts that a client adds to a checkpoint."""
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
"""A stop text."""
Token = Annotated[int, Field(ge=0, lt=2**31)]
"""A token; the model's vocabulary is checked later."""


class Request(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), strict=True, allow_inf_nan=False)


R = TypeVar("R", bound=Request)


class CreateSession(Request):
    """Begin a session."""

    user_metadata: Notes | None = None


class OfSession(Request):
    """A request about a session."""

    session_id: Name


class LoraConfig(Request):
    """The adapter of a new model."""

    rank: Annotated[int, Field(ge=1, le=MOST_RANK)]
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(Request):
    """The kind of optimiser."""

    type: Name = "adamw"


class CreateModel(OfSession):
    """Create a trained model."""

    model_seq_id: Number
    base_model: Name
    user_metadata: Notes | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class OfModel(Request):
    """A request about a model."""

    model_id: Name


class Sequenced(OfModel):
    """A request with its place among the model's requests."""

    seq_id: Annotated[int, Field(ge=1, le=WHOLE)]


class Adam(Request):
    """Settings of an optimiser step. The client sends null for a number that is not finite."""

    learning_rate: Setting | None = AdamParams.learning_rate
    beta1: Decay | None = AdamParams.beta1
    beta2: Decay | None = AdamParams.beta2
    eps: Setting | None = AdamParams.eps
    weight_decay: Setting | None = AdamParams.weight_decay
    grad_clip_norm: Annotated[float, Field(ge=0, le=1e30)] | None = AdamParams.grad_clip_norm

    @property
    def params(self) -> AdamParams:
        """The settings, with NaN for null; ``check`` of AdamParams refuses it."""
        return AdamParams(**{name: math.nan if value is None else value for name, value in self})


class OptimStep(Sequenced):
    """Apply the gradient."""

    adam_params: Adam | None = None


class SaveWeights(Sequenced):
    """Write a checkpoint, or keep weights for sampling if there is no path."""

    path: Name | None = None
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: Facts | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(Request):
    """Load a checkpoint into a model, or create a model from it."""

    model_id: Name | None = None
    seq_id: Number | None = None
    session_id: Name | None = None
    model_seq_id: Number | None = None
    base_model: Name | None = None
    user_metadata: Notes | None = None
    path: Name
    optimizer: bool = False


class CreateSamplingSession(OfSession):
    """Sample from a checkpoint, or from the base."""

    sampling_session_seq_id: Number
    base_model: Name | None = None
    model_path: Name | None = None


class OfSampler(Request):
    """A request about a sampling session."""

    sampling_session_id: Name


class TextChunk(Request):
    """Tokens of a prompt."""

    type: Name = "encoded_text"
    tokens: list[Token] = Field(default_factory=list, max_length=2**20, fail_fast=True)


class Prompt(Request):
    """A prompt."""

    chunks: list[TextChunk] = Field(max_length=2**12, fail_fast=True)


class SamplingParams(Request):
    """How rows are sampled; checked when the request is begun, so that its error is the future's result."""

    temperature: Annotated[Temperature, Field(le=100)] | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST_TOP_K)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: (
        StopText
        | Annotated[list[StopText], Field(max_length=MOST_STOPS, fail_fast=True)]
        | Annotated[list[Token], Field(max_length=MOST_STOP_TOKENS, fail_fast=True)]
        | None
    ) = None


class SampleBody(Request):
    """Sample from a prompt."""

    sampling_session_id: Name | None = None
    seq_id: Number | None = None
    num_samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    prompt: Prompt
    sampling_params: Notes = Field(default_factory=dict)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1, lt=2**31)
    topk_prompt_logprobs: Reserved = 0
    topk_sample_logprobs: Reserved = 0
    target_prompt_logprobs: Free = None
    prompt_alt_tokens_k: Reserved = 0


class OfFuture(Request):
    """A request about a future."""

    request_id: Name


class OfPath(Request):
    """A request about a checkpoint."""

    tinker_path: Name


class Expiry(Request):
    """Change when a checkpoint may be deleted."""

    ttl_seconds: Lifetime | None = None


class FinishSession(Request):
    """End a session."""

    detail: Text | None = None
