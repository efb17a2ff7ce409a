"""Gathering checks: recipes whose last rows cannot gather on few replicas, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rillflow.algorithms.config import SampledConfig, cuts_tail, is_ready_first
from rillflow.errors import ConfigError
from rillflow.rollout.config import SERVICE, gather_replicas
from rillflow.workers.config import SAMPLER

if TYPE_CHECKING:
    from rillflow.app.recipe import Recipe


def gathering_problems(recipe: Recipe) -> Iterator[ConfigError]:
    """Yield errors about the settings of gathered rows."""
    rollout, config = recipe.rollout, recipe.algorithm
    if not rollout.gather_rows:
        yield from _unread(recipe)
    elif isinstance(config, SampledConfig):
        for other, why in (*_orders(recipe, config), *_sizes(recipe, config)):
            yield ConfigError(
                f"rollout.gather_rows is {rollout.gather_rows}, and {other}",
                why=why,
                fix="change one of them, or set rollout.gather_rows = 0",
            )
    else:
        yield ConfigError(
            f"rollout.gather_rows is {rollout.gather_rows}, and {config.name} samples no rows",
            why="only sampled rows can be unfinished",
            fix="remove rollout.gather_rows",
        )


def _orders(recipe: Recipe, config: SampledConfig) -> Iterator[tuple[str, str]]:
    """Yield orders of a step and makers of rows that leave no tail to gather, each with the reason."""
    rollout = recipe.rollout
    if config.freshness:
        why = "a sampler that runs ahead does not wait for the last rows, so no rank is idle meanwhile"
        yield f"algorithm.freshness is {config.freshness}", why
    elif is_ready_first(config):
        why = "a step of the groups that are ready first does not wait for the last rows"
        yield 'algorithm.async_mode is "ready_first"', why
    if cuts_tail(config):
        why = "a step that leaves its longest rows for later has no tail to gather"
        yield "algorithm.oversample_prompts or oversample_samples is above 1", why
    if rollout.stream_chunks > 1:
        why = "the rows of a chunk go on when all of them have ended, wherever they run"
        yield f"rollout.stream_chunks is {rollout.stream_chunks}", why
    if rollout.writer is not None:
        yield f"{rollout.writer} writes the rows", "such a row cannot go on in another process"
    if rollout.engine == SERVICE:
        why = "its programs send whole rows, so a row that moves would lose its tokens"
        yield f'rollout.engine is "{SERVICE}"', why
    if recipe.chosen.answers(config) is None:
        why = "the rows of a step begin before its own code runs, all with the same settings"
        yield f"{config.name} does not sample its step in one call", why


def _sizes(recipe: Recipe, config: SampledConfig) -> Iterator[tuple[str, str]]:
    """Yield numbers of rows and replicas that do not fit, each with the reason."""
    rollout, placement = recipe.rollout, recipe.placement
    most, ranks = gather_replicas(rollout), placement.pools.get(placement.pool_of(SAMPLER), 1)
    replicas = ranks // max(1, placement.generate_tp)
    if rollout.gather_rows > config.rows_per_step:
        why = "no more rows than these can be unfinished; about a fifth of them is a good start"
        yield f"a step has {config.rows_per_step} rows", why
    if most >= replicas:
        counted = f"{replicas} replica{'s' * (replicas > 1)}, of which {most} would run the rows"
        how = f"rollout.gather_replicas = {rollout.gather_replicas}, rollout.max_rows = {rollout.max_rows}"
        why = "no replica would be given up, so no rank would score earlier"
        yield f"the sampler has {counted} ({how})", why


def _unread(recipe: Recipe) -> Iterator[ConfigError]:
    """Yield errors about settings of gathered rows, where none gather."""
    rollout = recipe.rollout
    for name, is_set in (
        (f"gather_replicas is {rollout.gather_replicas}", rollout.gather_replicas > 0),
        (f'gather_by is "{rollout.gather_by}"', rollout.gather_by != "cache"),
    ):
        if is_set:
            yield ConfigError(
                f"rollout.{name}, and rollout.gather_rows is 0",
                why="no rows are gathered, so nothing reads it",
                fix="set rollout.gather_rows, about a fifth of a step's rows; or remove it",
            )
