"""Settings of generation: how a token is drawn, and how the engine works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rillflow.config.section import Section

LEAST_TEMPERATURE = 1e-3
"""Below it float32 logits overflow when they are divided; 0 takes the likeliest token instead."""
MOST_PENALTY = 1e4
"""The largest penalty, either way, and the largest factor of one: beyond, float32 logits may overflow."""
MOST_TOP_K = 2**31 - 1
"""The largest top-k, beyond every vocabulary."""


def _divides(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise PydanticCustomError(
            "temperature", f"it must be 0, which is greedy, or at least {LEAST_TEMPERATURE}"
        )
    return value


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_divides)]
"""0, or a temperature that float32 logits can be divided by."""
Penalty = Annotated[float, Field(ge=-MOST_PENALTY, le=MOST_PENALTY, allow_inf_nan=False)]
"""What is taken off a logit."""
Factor = Annotated[float, Field(ge=1 / MOST_PENALTY, le=MOST_PENALTY, allow_inf_nan=False)]
"""What a logit is divided or multiplied by."""
TopK = Annotated[int, Field(ge=0, le=MOST_TOP_K)]
"""A number of likeliest tokens."""
StopText = Annotated[str, Field(min_length=1)]
"""A text that ends a row; the empty one would end every row before its first token."""


class SamplingConfig(Section):
    """How a token is drawn.

    Log probabilities are those of the whole vocabulary, after temperature, before all else: what the policy
    says, by which it is trained.
    """

    temperature: Temperature = Field(1.0, description="0 takes the likeliest token.")
    top_k: TopK = Field(0, description="Draw from the k likeliest tokens; 0 from all.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Draw from the least set of tokens with this probability."
    )
    min_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Leave out tokens less likely than so many times the likeliest, before top-k and top-p.",
    )
    repetition_penalty: Factor | None = Field(
        None,
        description="Divide by it the positive logits of tokens that the row has, its prompt included, and "
        "multiply the negative ones.",
    )
    presence_penalty: Penalty | None = Field(
        None, description="Taken off the logits of tokens that the row has sampled."
    )
    frequency_penalty: Penalty | None = Field(
        None, description="Taken off the logit of a token once for each time that the row has sampled it."
    )
    max_tokens: int = Field(256, gt=0, description="New tokens of one row at most.")
    stop: tuple[StopText, ...] = Field(
        (), description="Texts that end a row, besides the model's own tokens."
    )

    @property
    def is_cut(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p is not None

    @property
    def is_penalised(self) -> bool:
        """Whether a token's chance depends on those before it by more than the model."""
        return any((self.repetition_penalty, self.presence_penalty, self.frequency_penalty))


def answering(args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """How prompts are to be answered, by name, as a call of ``generate`` says it after the prompts."""
    return {**dict(zip(("samples", "sampling"), args, strict=False)), **options}


NATIVE = "native"
"""The embedded engine."""
VLLM = "vllm"
"""vLLM in the rank's own process, or in a server beside it."""


class AgentConfig(Section):
    """A function that writes rows by talking to the policy, in killable children."""

    function: str = Field(description="file.py:name, relative to the recipe; called for every row.")
    timeout_s: float = Field(
        60.0, gt=0, description="Longest time that it works without waiting for an answer of the policy."
    )
    workers: int = Field(16, gt=0, description="Children of a sampler's rank, each with one row at a time.")
    memory_bytes: int = Field(2 * 1024**3, gt=0, description="Address space of one child.")
    sandbox: Literal["auto"] | bool = Field(
        "auto",
        description="Run the agent in a sandbox that reaches nothing but the policy, as reward.sandbox says.",
    )
    files: tuple[str, ...] | None = Field(
        None, description="What the sandbox shows too, as reward.files says."
    )


class RolloutConfig(SamplingConfig):
    """Sampling, and the engine's size."""

    engine: str = Field(
        NATIVE, description="What samples: native, vllm, or package.module:Class, an engine of your own."
    )
    server: str | None = Field(
        None,
        min_length=1,
        description="The python of an environment with vLLM, which runs there, a server beside each rank; "
        "left out, in this one.",
    )
    agent: AgentConfig | None = Field(None, description="What writes rows; left out, a prompt is answered.")
    max_rows: int = Field(256, gt=0, description="Rows that run at once.")
    cache_gib: float | None = Field(
        None,
        gt=0,
        description="GiB (2^30 bytes) that keys and values take on a rank at most; rows that find no room "
        "in them wait. Nothing: as much as the rows need.",
    )
    parts: int = Field(
        1,
        gt=0,
        description="Parts of a step's prompts; the rows of one go on to other ranks once they have ended.",
    )
    keep_cache: bool = Field(
        False,
        description="A row that goes on with new weights keeps keys and values of the old ones, which is "
        "faster and inexact; else it is read again.",
    )
    verify_every: int = Field(
        1,
        gt=0,
        description="Of so many publishes one is compared by digest before it is used, and the first.",
    )
    replay_routing: bool | None = Field(
        None,
        description="Record which experts of a mixture each token takes, and train with these; left out, no.",
    )
    deterministic: bool = Field(
        False, description="Fixed shapes: a row's bits are the same whatever runs beside it. Slower."
    )
