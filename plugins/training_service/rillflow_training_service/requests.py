"""Requests: the JSON bodies of the Tinker API; fields that the service does not use are ignored."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from rillflow_training_service.tenant import AdamParams


class Request(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


R = TypeVar("R", bound=Request)


class CreateSession(Request):
    """Begin a session."""

    user_metadata: dict[str, Any] | None = None


class OfSession(Request):
    """A request about a session."""

    session_id: str


class LoraConfig(Request):
    """The adapter of a new model."""

    rank: int
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(Request):
    """The kind of optimiser."""

    type: str = "adamw"


class CreateModel(OfSession):
    """Create a trained model."""

    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class OfModel(Request):
    """A request about a model."""

    model_id: str


class InOrder(OfModel):
    """A request with its place among the model's requests."""

    seq_id: int = Field(ge=1)


class Adam(Request):
    """Settings of an optimiser step. The client sends null for a number that is not finite."""

    learning_rate: float | None = AdamParams.learning_rate
    beta1: float | None = AdamParams.beta1
    beta2: float | None = AdamParams.beta2
    eps: float | None = AdamParams.eps
    weight_decay: float | None = AdamParams.weight_decay
    grad_clip_norm: float | None = AdamParams.grad_clip_norm

    @property
    def params(self) -> AdamParams:
        """The settings, with NaN for null; ``check`` of AdamParams refuses it."""
        return AdamParams(**{name: math.nan if value is None else value for name, value in self})


class OptimStep(InOrder):
    """Apply the gradient."""

    adam_params: Adam | None = None


class SaveWeights(InOrder):
    """Write a checkpoint, or keep weights for sampling if there is no path."""

    path: str | None = None
    ttl_seconds: int | None = Field(None, gt=0)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(Request):
    """Load a checkpoint into a model, or create a model from it."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool = False


class CreateSamplingSession(OfSession):
    """Sample from a checkpoint, or from the base."""

    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class OfSampler(Request):
    """A request about a sampling session."""

    sampling_session_id: str


class TextChunk(Request):
    """Tokens of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = Field(default_factory=list)


class Prompt(Request):
    """A prompt."""

    chunks: list[TextChunk]


class SampleBody(Request):
    """Sample from a prompt."""

    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: int = Field(1, ge=1)
    prompt: Prompt
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


class OfFuture(Request):
    """A request about a future."""

    request_id: str


class OfPath(Request):
    """A request about a checkpoint."""

    tinker_path: str


class Expiry(Request):
    """Change when a checkpoint may be deleted."""

    ttl_seconds: int | None = Field(None, gt=0)


class FinishSession(Request):
    """End a session."""

    detail: str | None = None
