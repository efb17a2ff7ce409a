"""Arithmetic: count the prompts, rows, optimiser steps and tokens of a recipe, and show each calculation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.algorithms.config import SampledConfig

if TYPE_CHECKING:
    from rillflow.app.sections import Recipe


def step_rows(recipe: Recipe) -> str:
    """Return the rows of one step as text. Example: ``64 prompts x 8 samples = 512 rows``."""
    config = recipe.algorithm
    if isinstance(config, SampledConfig):
        prompts, samples = config.prompts_per_step, config.samples_per_prompt
        return f"{prompts:,} prompts x {samples:,} samples = {config.rows_per_step:,} rows"
    return _many(config.rows_per_step, recipe.chosen.data.unit)


def batch_lines(recipe: Recipe) -> list[str]:
    """Return the arithmetic of the whole run, one fact per line."""
    config = recipe.algorithm
    lines = []
    if recipe.warm_start is not None:
        steps, rows = recipe.warm_start.steps, recipe.warm_start.prompts_per_step
        lines.append(f"warm start: {_many(steps, 'step')} x {rows:,} rows = {_many(steps * rows, 'row')}")
    lines.append(f"a step: {step_rows(recipe)}, trained in {_minibatches(recipe)}")
    passes = f"{_many(config.epochs, 'epoch')} x {_many(config.minibatches, 'minibatch', 'es')}"
    lines.append(
        f"the run: {_many(config.steps, 'step')} x {passes} = {_many(config.updates, 'optimiser step')} "
        f"on {_many(config.steps * config.rows_per_step, recipe.chosen.data.unit)}"
    )
    if isinstance(config, SampledConfig):
        begun, longest = recipe.schedule.begun(config), recipe.rollout.max_tokens
        if begun > (config.prompts_per_step, config.samples_per_prompt):
            lines.append(
                f"started: {begun[0]:,} prompts x {begun[1]:,} samples a step; later steps train the longest"
            )
        rows = config.steps * config.rows_per_step
        lines.append(
            f"sampled: {rows:,} rows x {_many(longest, 'token')} = {rows * longest:,} tokens at most"
        )
    return lines


def _minibatches(recipe: Recipe) -> str:
    """Return how one pass over a step's rows is split. Example: ``3 minibatches of 171 or 170 rows``."""
    config = recipe.algorithm
    small, larger = divmod(config.rows_per_step, config.minibatches)
    word = recipe.chosen.data.unit
    rows = f"{small + 1:,} or {small:,} {word}s" if larger else _many(small, word)
    return f"{_many(config.minibatches, 'minibatch', 'es')} of {rows}"


def _many(count: int, word: str, plural: str = "s") -> str:
    return f"{count:,} {word if count == 1 else word + plural}"
