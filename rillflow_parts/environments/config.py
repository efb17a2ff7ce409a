"""Settings of an environment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rillflow.config.schema import Section


class EnvironmentConfig(Section):
    """An environment that the policy acts in; left out, the policy completes each prompt."""

    source: str = Field(
        min_length=1,
        description="file.py:Class with reset and step, relative to the recipe; verifiers:NAME of an "
        "environment that the package verifiers finds; or openenv:URL of an OpenEnv server.",
    )
    arguments: dict[str, Any] = Field(
        {}, description="Arguments of the class, or of the environment that verifiers loads."
    )
    max_turns: int = Field(16, gt=0, description="Turns after which a row ends.")
    timeout_s: float = Field(60.0, gt=0, description="Longest time in seconds of one reset or step.")
    workers: int = Field(
        4, gt=0, description="Environment processes per sampler rank; each holds up to 128 rows at a time."
    )
    memory_bytes: int = Field(
        4 * 1024**3, gt=0, description="Address space limit of one environment process, in bytes."
    )
    sandbox: Literal["auto"] | bool = Field(
        "auto", description="Run the environment in a sandbox; values as in reward.sandbox."
    )
