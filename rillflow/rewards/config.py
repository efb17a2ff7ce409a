"""Settings of the reward."""

from __future__ import annotations

from pydantic import Field

from rillflow.config.section import Section


class CostConfig(Section):
    """What is to stay below a limit: a function as a reward's, or a model."""

    function: str | None = Field(None, description="file.py:name of a cost, relative to the recipe.")
    model: str | None = Field(
        None, description="A model that says the cost instead, named as reward.model is."
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
    timeout_s: float = Field(10.0, gt=0, description="Longest time for one call.")
    memory_bytes: int = Field(2 * 1024**3, gt=0, description="Address space of one child.")
    workers: int = Field(1, gt=0, description="Children that score side by side.")
    sandbox: bool = Field(
        False,
        description="Whether the function, code that a model wrote say, is shut in: no network, no files "
        "but its folder's and Python's, read only, none of the environment's variables. Linux alone.",
    )
    max_failures: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of rows of one step with a time-out or error above which the run stops.",
    )
