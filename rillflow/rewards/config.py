"""Settings of the reward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.config.schema import Section
from rillflow.rewards.judge_prompt import FrameConfig


class CostConfig(Section):
    """Cost that must stay below a limit: a function like a reward's, or a model."""

    function: str | None = Field(None, description="file.py:name of a cost, relative to the recipe.")
    model: str | None = Field(None, description="A cost model instead, named as in reward.model.")


class JudgeConfig(Section):
    """Language model that compares answers, or rates them."""

    model: str = Field(
        description="The judge: a causal language model's directory, or a pairwise run that trained one, "
        "relative to the recipe."
    )
    compare: Literal["group", "tournament"] = Field(
        "group",
        description="Compare each answer with every other answer to its prompt, or the winner so far with "
        "the next answer.",
    )
    abstain: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="A comparison whose probability is within this of 1/2 gives no verdict.",
    )
    frame: FrameConfig | None = Field(
        None,
        description="The text that the judge reads; left out, the one stored with a judge that pairwise "
        "trained.",
    )


class RewardConfig(Section):
    """A function of named columns, run in killable children; or a model."""

    function: str | None = Field(
        None,
        description="file.py:name of the reward function, relative to the recipe; left out, the task's "
        "own function.",
    )
    model: str | None = Field(
        None,
        description="A reward model: its directory or the run that trained it, relative to the recipe. It "
        "scores training rows; the function scores held-out rows.",
    )
    judge: JudgeConfig | None = Field(
        None, description="A judge that scores training rows, instead of a function or a reward model."
    )
    weights: dict[str, float] | None = Field(
        None,
        description="Weights of function, model and judge when several of them score; left out, only one "
        "may score.",
    )
    timeout_s: float = Field(10.0, gt=0, description="Longest time of one call, in seconds.")
    memory_bytes: int = Field(
        2 * 1024**3, gt=0, description="Address space limit of one child process, in bytes."
    )
    workers: int = Field(1, gt=0, description="Child processes that score in parallel.")
    sandbox: Literal["auto"] | bool = Field(
        "auto",
        description="Run the function in a sandbox, one process per row: no network, no environment "
        "variables, no files but its own and Python's. auto: if its source runs text or "
        "starts processes.",
    )
    files: tuple[str, ...] = Field(
        (),
        description="Further files and folders that the sandbox shows, read-only, relative to the recipe.",
    )
    max_failures: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Largest share of a step's rows that may time out or fail; above it the run stops.",
    )
