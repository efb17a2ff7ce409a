"""Consistency: find settings that are valid one by one but contradict each other, and show the arithmetic.

    Resolved ─ contradictions ─┬─ model, phases, batch, rates, sampling   here
                               ├─ what scores ──────────────────────────> reward_needs.py
                               ├─ pools and grids ──────────────────────> placement_needs.py
                               └─ the order of a step ──────────────────> schedule_needs.py

It reads the settings alone, for a start and for a resume; ``check`` looks at files and data.
"""

from __future__ import annotations

from collections.abc import Iterator

from rillflow.algorithms.config import AnchoredConfig, OnlineConfig, SampledConfig
from rillflow.app.batch_arithmetic import step_rows
from rillflow.app.contradictions import Contradiction
from rillflow.app.placement_needs import device_needs, mesh_needs, pool_needs
from rillflow.app.plugins import installed
from rillflow.app.resolved import Resolved
from rillflow.app.reward_needs import reward_needs
from rillflow.app.schedule_needs import schedule_needs
from rillflow.config.problems import together
from rillflow.models.config import misfits


def require_consistent(resolved: Resolved, title: str = "the recipe") -> Resolved:
    """Return the recipe, or refuse it.

    Raises:
        ConfigError: settings contradict each other; it lists every contradiction under the title.
    """
    problems = [each.error for each in contradictions(resolved)]
    if problems:
        raise together(problems, title)
    return resolved


def contradictions(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield every contradiction between the recipe's settings."""
    for needs in (_model, _phases, _context, _tail, _batch, _rates, _sampling, reward_needs):
        yield from needs(resolved)
    unplaced = [*pool_needs(resolved)]
    yield from unplaced
    for needs in _OF_PLACED if not unplaced else ():
        yield from needs(resolved)
    yield from device_needs(resolved)
    yield from plugin_needs(resolved)


def _model(resolved: Resolved) -> Iterator[Contradiction]:
    model = resolved.recipe.policy.model
    if model.path is not None and model.new is not None:
        yield Contradiction(
            f'policy.model has both path = "{model.path}" and new',
            why="a run starts from one model",
            fix="remove one, or pass --set policy.model.new=none (or policy.model.path=none)",
        )
    if model.path is None and model.new is None:
        yield Contradiction(
            "policy.model has neither path nor new",
            why="a run needs a model to start from",
            fix='write model.path = "a/directory", or model.new = { hidden = 128, layers = 4 }',
        )
    if model.new is not None:
        yield from map(Contradiction.of, misfits(model.new))
    if model.new is not None and model.adapter is not None:
        yield Contradiction(
            "policy.model has both an adapter and a new model",
            why="an adapter's directory names the directory of its base model, and a new model has none",
            fix="train the new model first, and name its checkpoint as policy.model.path",
        )


def _phases(resolved: Resolved) -> Iterator[Contradiction]:
    own, config = resolved.main.roles, resolved.recipe.algorithm
    if resolved.trained_role not in own:
        yield Contradiction(
            f"warm_start trains the {resolved.trained_role}, and {config.name} has none",
            why=f"the algorithm trains the {own[0].replace('_', ' ')}",
            fix="pass --set warm_start=none",
        )
    if isinstance(config, SampledConfig) and config.truncated == "bootstrap" and "critic" not in own:
        yield Contradiction(
            f'algorithm.truncated is "bootstrap", and {config.name} has no critic',
            why="a critic must estimate the return that a row cut off at the token limit would still get",
            fix='set algorithm.truncated = "keep" or "mask", or choose an algorithm with a critic',
        )


def _context(resolved: Resolved) -> Iterator[Contradiction]:
    new, limit = resolved.recipe.policy.model.new, resolved.recipe.rollout.max_tokens
    if resolved.generates and new is not None and limit >= new.context:
        yield Contradiction(
            f"rollout.max_tokens is {limit} and policy.model.new.context is {new.context}",
            why=f"the context holds prompt and answer; {new.context - limit} tokens remain for the prompt",
            fix="lower rollout.max_tokens or raise policy.model.new.context",
        )


def _tail(resolved: Resolved) -> Iterator[Contradiction]:
    config, limit = resolved.recipe.algorithm, resolved.recipe.rollout.max_tokens
    for name, tokens in config.tails.items():
        if tokens > limit:
            yield Contradiction(
                f"algorithm.{name} is {tokens} and rollout.max_tokens is {limit}",
                why="it counts tokens at the end of the longest answer, which has fewer",
                fix=f"set it to at most {limit}",
            )


def _batch(resolved: Resolved) -> Iterator[Contradiction]:
    config = resolved.recipe.algorithm
    if config.minibatches > config.rows_per_step:
        yield Contradiction(
            f"algorithm.minibatches is {config.minibatches}",
            why=f"a step has {step_rows(resolved.recipe)}, and every minibatch needs at least one row",
            fix=f"set it to at most {config.rows_per_step}; 1 to 8 is usual",
        )


def _rates(resolved: Resolved) -> Iterator[Contradiction]:
    train, total = resolved.recipe.policy, resolved.recipe.algorithm.updates
    if train.schedule == "constant":
        if train.final_lr:
            yield Contradiction(
                f"policy.final_lr is {train.final_lr:g} and policy.schedule is constant",
                why="a constant schedule has no final learning rate",
                fix='set policy.schedule = "cosine" or "linear", or remove policy.final_lr',
            )
    elif total <= train.warmup_steps:
        yield Contradiction(
            f"policy.warmup_steps is {train.warmup_steps}",
            why=f"the phase has {total} optimiser steps, so its {train.schedule} schedule never begins",
            fix=f"set policy.warmup_steps below {total}",
        )


def _sampling(resolved: Resolved) -> Iterator[Contradiction]:
    recipe, config = resolved.recipe, resolved.recipe.algorithm
    if isinstance(config, SampledConfig) and recipe.rollout.temperature == 0:
        yield Contradiction(
            "rollout.temperature is 0",
            why="all answers to a prompt would be identical, so none could score higher than another",
            fix="set it to 0.7 to 1.0; evaluate.temperature is a separate setting and may be 0",
        )
    samples, judged = recipe.evaluate.samples, recipe.evaluate.problems > 0
    if samples > 1 and judged and recipe.evaluate.temperature == 0 and resolved.writer is None:
        yield Contradiction(
            f"evaluate.samples is {samples}, and evaluate.temperature is 0",
            why="all answers to a prompt would be identical",
            fix="set evaluate.temperature = 1.0, or evaluate.samples = 1",
        )
    if (writer := resolved.writer) is None:
        return
    if len(resolved.writers) > 1:
        yield Contradiction(
            f"{' and '.join(resolved.writers)} are both set",
            why="one of them writes the rows",
            fix="remove one of them",
        )
    for setting, model in resolved.scorers.items():
        yield Contradiction(
            f"{setting} is {model!r}, and {writer} writes the rows",
            why="a row that failed has no answer, but a model would still score it",
            fix=f"set {setting.split('.')[0]}.function, which scores only the other rows",
        )
    if recipe.rollout.replay_routing:
        yield Contradiction(
            f"rollout.replay_routing is true, and {writer} writes the rows",
            why="such a row joins several answers and keeps their tokens, but not their routes",
            fix="remove one of them",
        )
    if recipe.placement.generate_tp > 1:
        yield Contradiction(
            f"placement.rollout_parallel.tp is {recipe.placement.generate_tp}, and {writer} writes the rows",
            why="ranks that share a copy must run the same steps, but an agent calls one of them, or an "
            "environment answers one of them, at any time",
            fix="set placement.rollout_parallel.tp = 1",
        )


def _moving(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield contradictions of a moving reference that cannot follow the policy."""
    recipe, config, roles = resolved.recipe, resolved.recipe.algorithm, ("policy", "reference")
    placement = recipe.placement
    if not (isinstance(config, AnchoredConfig) and "reference" in resolved.roles and config.moves_reference):
        return
    where = [f"{role}: pool {placement.pool_of(role)}, {placement.mesh_of(role)}" for role in roles]
    if len({(placement.pool_of(role), placement.mesh_of(role)) for role in roles}) > 1:
        yield Contradiction(
            f'algorithm.reference is "moving", and its placement is not the policy\'s ({"; ".join(where)})',
            why="every rank updates its shard of the reference from its own shard of the policy",
            fix='give both one pool and one grid, or set algorithm.reference = "previous" (needs no ranks)',
        )
    if recipe.policy.model.adapter is not None and config.reference_rate < 1:
        yield Contradiction(
            f"algorithm.reference_rate is {config.reference_rate:g}, and policy.model has an adapter",
            why="the mean of two adapters' factors is not the mean of their weight updates",
            fix="set algorithm.reference_rate = 1.0, which copies the policy's adapter",
        )


def _correction(resolved: Resolved) -> Iterator[Contradiction]:
    config = resolved.recipe.algorithm
    correction = config.loss.correction if isinstance(config, OnlineConfig) else "none"
    if isinstance(config, OnlineConfig) and correction != "none" and config.reads_sampler:
        yield Contradiction(
            f'algorithm.loss.correction is "{correction}", and algorithm.old_logprobs is "sampler"',
            why="a correction weighs tokens by trainer / sampler, and both are then the sampler's numbers",
            fix='set algorithm.old_logprobs = "trainer", or algorithm.loss.correction = "none"',
        )


_OF_PLACED = (
    mesh_needs,
    schedule_needs,
    _moving,
    _correction,
)
"""Generators that read where roles lie, so each role must have a pool."""


def plugin_needs(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield the contradictions that plugins find."""
    for plugin in installed().values():
        yield from map(Contradiction.of, plugin.needs(resolved) if plugin.needs is not None else ())
