"""Settings of the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rillflow.config.schema import Section
from rillflow.rewards.judge_prompt import FrameConfig


class CostConfig(Section):
    """Cost that must stay below a limit: a function like a reward's, or a model."""

    function: str | None = Field(None, description="file.py:name of a cost, relative to the recipe.")
    model: str | None = Field(None, description="A cost model instead, named as in reward.model.")


class HttpConfig(Section):
    """Requests to a reward or a judge over HTTP."""

    concurrency: int = Field(
        32, gt=0, le=512, description="Largest number of requests at the same time, from each worker."
    )
    retries: int = Field(
        3, ge=0, description="Repetitions of a request that found no server, or was answered 429 or 5xx."
    )
    rows_per_request: int = Field(
        32, gt=0, description="Largest number of rows in one request to reward.url."
    )


class JudgeConfig(Section):
    """Language model that compares or rates answers."""

    model: str | None = Field(
        None,
        description="The judge: a causal language model's directory, or a pairwise run that trained one, "
        "relative to the recipe.",
    )
    url: str | None = Field(
        None,
        description="A judge behind an OpenAI-compatible endpoint instead, such as http://localhost:8000/v1.",
    )
    model_name: str | None = Field(None, description="The model that requests to reward.judge.url name.")
    key_variable: str | None = Field(
        None, description="Environment variable with the key for reward.judge.url; it is not recorded."
    )
    max_tokens: int = Field(
        16, gt=0, description="Longest reply of the judge at reward.judge.url; its last label counts."
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
        "trained, or a rating from 1 to 5 for a judge at a url.",
    )


class RewardConfig(Section):
    """A function of named columns, run in killable children; or a model."""

    function: str | None = Field(
        None,
        description="file.py:name of the reward function, relative to the recipe, or math-verify or "
        "code-tests; left out, the task's own function.",
    )
    functions: dict[str, float] | None = Field(
        None, description="Several functions, named like function or url, with their weights in a sum."
    )
    url: str | None = Field(
        None, description="A server that scores rows instead, such as http://localhost:9000/score."
    )
    key_variable: str | None = Field(
        None, description="Environment variable with the key for reward.url; it is not recorded."
    )
    http: HttpConfig = HttpConfig()
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
        "variables, no files but its own and Python's. auto: unless its source is known to "
        "run no text and to start no process.",
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

    @property
    def named(self) -> Mapping[str, float]:
        """Weights of the functions and URLs that the recipe names."""
        one = self.function or self.url
        return {one: 1.0} if one is not None else self.functions or {}
