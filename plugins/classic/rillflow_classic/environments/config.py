"""Settings of the environments of a recipe. Imports nothing heavy."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rillflow.config.schema import Section

Provider = Literal["auto", "gymnasium", "envpool"]
Run = Literal["auto", "inline", "processes"]


class EnvironmentSettings(Section):
    """An environment, where its slots run, and what is done to observations and rewards.

    Example:
        EnvironmentSettings(id="CartPole-v1")
    """

    id: str = Field(
        "CartPole-v1",
        min_length=1,
        description="Id of Gymnasium, EnvPool, ale-py or MinAtar; MultiAgentCartPole-v0 or "
        "PointNavigation-v0; or a class: file.py:Class, relative to the recipe, or package.module:Class.",
    )
    provider: Provider = Field(
        "auto",
        description="Who has the id; auto: EnvPool where it has it, otherwise Gymnasium. A class is a "
        "gymnasium.Env, or several agents in PettingZoo's parallel form.",
    )
    run: Run = Field(
        "auto",
        description="inline: slots step one after the other; processes: in child processes, several slots "
        "each; auto: the faster one by the measured time of a step. EnvPool has threads of its own.",
    )
    processes: int = Field(0, ge=0, description="Child processes; 0: one per core, at most one per slot.")
    frame_stack: int = Field(
        0, ge=0, le=64, description="Last observations in each one; 0: 4 for Atari, otherwise 1."
    )
    normalise_observations: bool = Field(
        False, description="Subtract the running mean and divide by the running standard deviation."
    )
    normalise_rewards: bool = Field(
        False, description="Divide by the running standard deviation of the discounted returns."
    )
    clip_rewards: bool = Field(False, description="Clip rewards to -1 and 1.")
    time_limit: int | None = Field(
        None, ge=1, description="Steps after which an episode is truncated; None: the environment's own."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the environment, or of EnvPool such as num_threads."
    )
    step_timeout_s: float = Field(
        30.0, gt=0.0, description="Seconds that one step or reset may take in a child process."
    )
    restarts: int = Field(
        3, ge=0, description="How often child processes that died or hung are replaced; then the run stops."
    )
