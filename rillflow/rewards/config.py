"""Settings of the reward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.config.section import Section
from rillflow.rewards.frame import FrameConfig


class CostConfig(Section):
    """What is to stay below a limit: a function as a reward's, or a model."""

    function: str | None = Field(None, description="file.py:name of a cost, relative to the recipe.")
    model: str | None = Field(
        None, description="A model that says the cost instead, named as reward.model is."
    )


class JudgeConfig(Section):
    """A language model that compares answers, or rates them."""

    model: str = Field(
        description="A causal language model's directory, or a run of pairwise that trained one, relative to "
        "the recipe."
    )
    compare: Literal["group", "tournament"] = Field(
        "group",
        description="An answer against every other of its prompt, or the winner so far against the next.",
    )
    abstain: float = Field(
        0.0, ge=0, lt=0.5, description="A comparison nearer than this to probability 1/2 says nothing."
    )
    frame: FrameConfig | None = Field(
        None, description="How it is asked; left out, as its directory says, where pairwise trained it."
    )


class RewardConfig(Section):
    """A function of named columns, run in killable children; or a model."""

    function: str | None = Field(
        None, description="file.py:name, relative to the recipe; without it the task's own function scores."
    )
    model: str | None = Field(
        None,
        description="A directory with a scalar head, or the run that trained it, relative to the recipe; it "
        "scores what is trained on, and the function judges.",
    )
    judge: JudgeConfig | None = Field(
        None, description="A judge that scores what is trained on, instead of a function or a model."
    )
    weights: dict[str, float] | None = Field(
        None, description="What function, model and judge count, those that are named; left out, one scores."
    )
    timeout_s: float = Field(10.0, gt=0, description="Longest time for one call.")
    memory_bytes: int = Field(2 * 1024**3, gt=0, description="Address space of one child.")
    workers: int = Field(1, gt=0, description="Children that score side by side.")
    sandbox: Literal["auto"] | bool = Field(
        "auto",
        description="Run every row of the function in a sandbox: no network, no files but its own and "
        "Python's, no variables of the environment. auto: where its source runs text or starts processes.",
    )
    files: tuple[str, ...] | None = Field(
        None, description="Files and folders that the sandbox shows too, read only, relative to the recipe."
    )
    max_failures: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of rows of one step with a time-out or error above which the run stops.",
    )
