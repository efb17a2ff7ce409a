"""Draws: the rows of each prompt, with lengths that depend on (seed, prompt, sample) alone."""

from __future__ import annotations

from dataclasses import dataclass

from rillflow_planner.workload import BLOCK, PROMPTS, Workload, drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row to sample."""

    prompt: int
    """Number of its prompt, counted from the first of the run."""
    sample: int
    """Index among the rows of its prompt."""
    prompt_tokens: int
    """Number of prompt tokens."""
    response_tokens: int
    """Number of response tokens at its end."""


def rows_of(workload: Workload, prompt: int, *, seed: int, samples: int) -> list[Row]:
    """Return the rows of a prompt, for the given number of samples."""
    block, place = divmod(prompt, size := BLOCK * workload.prompts)
    (prompts,) = drawn(workload.prompt, block, seed=seed, stream=PROMPTS, size=size, count=1, kept=1)
    responses = drawn(workload.response, block, seed=seed, size=size, count=samples, kept=workload.samples)
    return [
        Row(prompt=prompt, sample=sample, prompt_tokens=prompts[place], response_tokens=response[place])
        for sample, response in enumerate(responses)
    ]
