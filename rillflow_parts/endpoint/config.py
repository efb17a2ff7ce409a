"""Settings of an agent."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.config.schema import Section


class AgentConfig(Section):
    """An agent that produces the rows; left out, the policy completes each prompt once."""

    function: str = Field(
        description="file.py:name of the agent, relative to the recipe; called once per row."
    )
    timeout_s: float = Field(
        60.0, gt=0, description="Longest time in seconds between two requests of the agent to the policy."
    )
    workers: int = Field(
        16, gt=0, description="Agent processes per sampler rank; each runs one row at a time."
    )
    memory_bytes: int = Field(
        2 * 1024**3, gt=0, description="Address space limit of one child process, in bytes."
    )
    sandbox: Literal["auto"] | bool = Field(
        "auto",
        description="Run the agent in a sandbox that can reach only the policy; values as in reward.sandbox.",
    )
    files: tuple[str, ...] = Field(
        (), description="Further files and folders that the sandbox shows; see reward.files."
    )
