"""Settings of generation: token sampling and the rollout engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from rillflow.config.schema import Section
from rillflow.config.user_paths import expanded

LEAST_TEMPERATURE = 1e-3
"""Smallest temperature above 0; below it, divided float32 logits overflow. 0 takes the likeliest token."""
MOST_PENALTY = 1e4
"""Largest absolute penalty and largest penalty factor: larger ones could overflow float32 logits."""
MOST_TOP_K = 2**31 - 1
"""Largest top-k, larger than any vocabulary."""


def _divides(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise PydanticCustomError(
            "temperature", f"it must be 0, which is greedy, or at least {LEAST_TEMPERATURE}"
        )
    return value


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_divides)]
"""A sampling temperature: 0, or large enough to divide float32 logits by."""
Penalty = Annotated[float, Field(ge=-MOST_PENALTY, le=MOST_PENALTY, allow_inf_nan=False)]
"""A number subtracted from a logit."""
Factor = Annotated[float, Field(ge=1 / MOST_PENALTY, le=MOST_PENALTY, allow_inf_nan=False)]
"""A number that logits are divided or multiplied by."""
TopK = Annotated[int, Field(ge=0, le=MOST_TOP_K)]
"""A top-k value."""
StopText = Annotated[str, Field(min_length=1)]
"""A stop text. It is not empty, because an empty one would end every row before its first token."""


class SamplingConfig(Section):
    """Settings of token sampling.

    Recorded log probabilities are over the whole vocabulary, after temperature and before every other
    setting: the distribution that the policy is trained on.
    """

    temperature: Temperature = Field(1.0, description="Sampling temperature; 0 is greedy.")
    top_k: TopK = Field(0, description="Sample from the k most likely tokens; 0 from all.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the smallest set of tokens whose probabilities sum to this."
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Drop tokens whose probability is below this share of the most likely one, before "
        "top_k and top_p; 0 drops none.",
    )
    repetition_penalty: Factor = Field(
        1.0,
        description="Penalty on tokens already in the row, prompt included: divides their positive logits "
        "and multiplies negative ones; 1 for none.",
    )
    presence_penalty: Penalty = Field(
        0.0, description="Subtracted from the logits of tokens that the row has already sampled."
    )
    frequency_penalty: Penalty = Field(
        0.0, description="Subtracted from a token's logit once for each time that the row has sampled it."
    )
    max_tokens: int = Field(256, gt=0, description="Longest completion, in tokens.")
    stop: tuple[StopText, ...] = Field(
        (), description="Stop strings that end a row, in addition to the model's end tokens."
    )

    @property
    def is_cut(self) -> bool:
        """Whether top-k, top-p or min-p leaves out unlikely tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_penalised(self) -> bool:
        """Whether a penalty changes logits by the tokens that the row already has."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def answering(args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that follow the prompts in a call of ``generate``, by name."""
    return {**dict(zip(("samples", "sampling"), args, strict=False)), **options}


NATIVE = "native"
"""Name of the embedded engine."""
VLLM = "vllm"
"""Name of the vLLM engine: in the rank's own process, or in a server process next to it."""


class RolloutConfig(SamplingConfig):
    """Settings of sampling and of the rollout engine."""

    renamed: ClassVar[Mapping[str, str]] = {
        "parts": "schedule.stream_chunks",
        "verify_every": "weight_check_interval",
        **{
            name: f"schedule.{name}"
            for name in ("stream_chunks", "gather_rows", "gather_replicas", "gather_by", "keep_cache")
        },
    }
    _keep_cache: bool = PrivateAttr(False)
    _returns_cache: bool = PrivateAttr(False)

    engine: str = Field(
        NATIVE,
        description="Rollout engine: native, vllm, service, or package.module:Class of your own; left out or "
        '"auto", vllm with rollout.server, else native.',
    )
    server: str | None = Field(
        None,
        min_length=1,
        description="Python interpreter of another environment that has vLLM; each rank starts a vLLM "
        "server with it. Left out, vLLM runs in this environment.",
    )
    tool_format: Literal["auto", "hermes", "qwen", "llama", "template"] = Field(
        "auto",
        description="Format in which the model writes tool calls; auto finds it in the chat template, "
        "template is the tokeniser's response_template.",
    )
    max_rows: int = Field(256, gt=0, description="Rows that are sampled at the same time.")
    cache_gib: float | None = Field(
        None,
        gt=0,
        description="Largest KV cache per rank in GiB; rows without room wait. Left out, as much as the "
        "rows need.",
    )
    weight_check_interval: int = Field(
        1,
        gt=0,
        description="Check weight digests on the first publish and on every Nth after it.",
    )
    replay_routing: bool = Field(
        False,
        description="Record the experts that each token is routed to while sampling, and train with the "
        "same routing.",
    )
    deterministic: bool = Field(
        False, description="Compute with fixed shapes, so that a row has the same bits in any batch. Slower."
    )

    @property
    def keep_cache(self) -> bool:
        """Whether a row that continues with new weights keeps its KV cache, as the run's schedule says."""
        return self._keep_cache

    def with_kept_cache(self, keep: bool = True) -> Self:
        """Return these settings for rows that keep, or do not keep, their KV cache."""
        config = self.model_copy()
        config._keep_cache = keep
        return config

    @property
    def returns_cache(self) -> bool:
        """Whether a row that ended at a stop token keeps its KV cache, because it may continue later."""
        return self._returns_cache

    def with_returned_cache(self) -> Self:
        """Return these settings for rows that may continue after they have ended."""
        config = self.model_copy()
        config._returns_cache = True
        return config


def server_python(server: str, base: Path) -> Path:
    """Return the Python that ``rollout.server`` names, relative to the recipe's folder; keep its links."""
    return (base / expanded(server)).absolute()
