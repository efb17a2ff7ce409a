"""Consistency: find settings that are valid one by one but contradict each other, and show the arithmetic.

It reads the recipe alone; ``check`` looks at files and data.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from rillflow.algorithms.config import AnchoredConfig, OnlineConfig, SampledConfig, cuts_tail, is_ready_first
from rillflow.app.batch_arithmetic import step_rows
from rillflow.app.fused_checks import unfusable
from rillflow.app.gathering_checks import gathering_problems
from rillflow.app.meshes import impossible, unfit
from rillflow.app.role_table import model_roles, roles_of
from rillflow.config.problems import shown
from rillflow.errors import ConfigError, nearest
from rillflow.models.config import misfits
from rillflow.placement.mesh import divisors

if TYPE_CHECKING:
    from rillflow.app.recipe import Recipe


def inconsistencies(recipe: Recipe) -> list[ConfigError]:
    """Return every contradiction between the recipe's settings."""
    return [
        *_model(recipe),
        *_phases(recipe),
        *_context(recipe),
        *_tail(recipe),
        *_batch(recipe),
        *_schedule(recipe),
        *_sampling(recipe),
        *_judge(recipe),
        *gathering_problems(recipe),
        *_placement(recipe),
    ]


def _placement(recipe: Recipe) -> Iterator[ConfigError]:
    unknown = [*_unknown(recipe)]
    yield from unknown
    if not unknown:
        yield from _meshes(recipe)
        yield from unfusable(recipe)
        yield from _ahead(recipe)
    ranks, device = sum(recipe.placement.pools.values()), recipe.run.device
    if ":" in device and not recipe.placement.is_inline:
        yield ConfigError(
            f"run.device is {device}, and the pools have {ranks} ranks on Ray",
            why="Ray assigns every rank its own device and hides the others",
            fix='set run.device = "cuda"; CUDA_VISIBLE_DEVICES selects the devices that Ray may assign',
        )


def _ahead(recipe: Recipe) -> Iterator[ConfigError]:
    """Yield errors about sampling ahead, uneven rollout chunks, and corrections without effect."""
    placement, config, parts = recipe.placement, recipe.algorithm, recipe.rollout.stream_chunks
    if parts > 1 and config.goes_by(parts) and config.prompts_per_step % parts:
        fewer = max(each for each in divisors(config.prompts_per_step) if each <= parts)
        yield ConfigError(
            f"rollout.stream_chunks is {parts}, and algorithm.prompts_per_step is {config.prompts_per_step}",
            why="each chunk is trained as it arrives, and unequal chunks would change the minibatches",
            fix=f"set rollout.stream_chunks = {fewer}, or algorithm.shuffle = true",
        )
    if not isinstance(config, SampledConfig):
        return
    if isinstance(config, AnchoredConfig) and "reference" in roles_of(recipe) and config.moves_reference:
        yield from _moving(recipe, config)
    correction = config.loss.correction if isinstance(config, OnlineConfig) else "none"
    if correction != "none" and config.reads_sampler:
        yield ConfigError(
            f'algorithm.loss.correction is "{correction}", and algorithm.old_logprobs is "sampler"',
            why="a correction weighs tokens by trainer / sampler, and both are then the sampler's numbers",
            fix='set algorithm.old_logprobs = "trainer", or algorithm.loss.correction = "none"',
        )
    yield from _unread(recipe, config)
    if is_ready_first(config):
        yield from _ready_first(recipe, config)
    if cuts_tail(config):
        yield from _cut(recipe, config)
    if (config.freshness or is_ready_first(config)) and not placement.samples_apart:
        said = f"freshness is {config.freshness}" if config.freshness else 'async_mode is "ready_first"'
        yield ConfigError(
            f"algorithm.{said}, and the sampler shares its ranks with the policy",
            why="shared ranks take turns: they cannot sample ahead while they train",
            fix="give the sampler its own pool: placement.pools = { main = 1, answers = 1 }, "
            'placement.roles = { sampler = "answers" }; or set algorithm.freshness = 0',
        )


def _moving(recipe: Recipe, config: AnchoredConfig) -> Iterator[ConfigError]:
    """Yield errors about a moving reference that cannot follow the policy."""
    placement, roles = recipe.placement, ("policy", "reference")
    where = [f"{role}: pool {placement.pool_of(role)}, {placement.mesh_of(role)}" for role in roles]
    if len({(placement.pool_of(role), placement.mesh_of(role)) for role in roles}) > 1:
        yield ConfigError(
            f'algorithm.reference is "moving", and its placement is not the policy\'s ({"; ".join(where)})',
            why="every rank updates its shard of the reference from its own shard of the policy",
            fix='give both one pool and one grid, or set algorithm.reference = "previous" (needs no ranks)',
        )
    if recipe.policy.model.adapter is not None and config.reference_rate < 1:
        yield ConfigError(
            f"algorithm.reference_rate is {config.reference_rate:g}, and policy.model has an adapter",
            why="the mean of two adapters' factors is not the mean of their weight updates",
            fix="set algorithm.reference_rate = 1.0, which copies the policy's adapter",
        )


def _ready_first(recipe: Recipe, config: SampledConfig) -> Iterator[ConfigError]:
    """Yield errors about ready-first steps, and about publishes that do not divide an update."""
    parts = recipe.rollout.stream_chunks
    if parts > 1 and config.freshness:
        yield ConfigError(
            f"rollout.stream_chunks is {parts}, algorithm.freshness is {config.freshness}, and "
            'algorithm.async_mode is "ready_first"',
            why="with freshness above 0 the rows of a step are ready when it begins, so there is no chunk to "
            "wait for",
            fix="set rollout.stream_chunks = 1, or algorithm.freshness = 0",
        )
    if recipe.chosen.answers(config) is None:
        yield ConfigError(
            f'algorithm.async_mode is "ready_first", and {config.name} does not sample its step in one call',
            why="a step trains on groups that were sampled before it began, all with the same settings",
            fix='set algorithm.async_mode = "in_order"',
        )
    count, updates = config.syncs_per_step, recipe.chosen.listened(config).calls.get("policy.update", [])
    reasons = {
        "algorithm.shuffle = false, so that the parts are trained one after the other": config.shuffle,
        "algorithm.epochs = 1": config.epochs > 1,
        f"algorithm.minibatches to a multiple of syncs_per_step, not {config.minibatches}": config.minibatches
        % count,
        f"algorithm.prompts_per_step to a multiple of syncs_per_step, not {config.prompts_per_step}": (
            config.prompts_per_step % count
        ),
        f"algorithm.freshness to at least {count - 1}: the step's last rows are that many versions old": (
            config.freshness < count - 1
        ),
        "algorithm.max_rounds = 1, so that a step draws its prompts once": config.draws_again,
        "algorithm.name to an algorithm that calls policy.update once": len(updates) != 1,
    }
    lacking = [reason for reason, is_lacking in reasons.items() if count > 1 and is_lacking]
    if lacking:
        yield ConfigError(
            f"algorithm.syncs_per_step is {count}",
            why="weights are published between equal parts of a step's minibatches",
            fix=f"set {'; '.join(lacking)}",
        )


def _unread(recipe: Recipe, config: SampledConfig) -> Iterator[ConfigError]:
    """Yield errors about settings of rows that meet new weights, where no row does."""
    bound = config.freshness
    if bound and config.async_mode == "ready_first":
        return
    said = f"algorithm.freshness is {bound}" + (' and algorithm.async_mode "in_order"' if bound else "")
    needed = ("" if bound else "algorithm.freshness = 1 and ") + 'algorithm.async_mode = "ready_first"'
    reasons = {
        "algorithm.on_stale": "in data order, no row can become older than the bound"
        if bound
        else "no row becomes stale",
        "algorithm.syncs_per_step": "weights are published once, at the end of a step",
        "rollout.keep_cache": "every row ends with the weights that it began with",
    }
    given = {
        "algorithm.on_stale": config.on_stale if config.on_stale != "wait" else None,
        "algorithm.syncs_per_step": config.syncs_per_step if config.syncs_per_step > 1 else None,
        "rollout.keep_cache": recipe.rollout.keep_cache or None,
    }
    for name, value in given.items():
        if value is not None:
            yield ConfigError(
                f"{name} is {shown(value)}, and {said}",
                why=reasons[name],
                fix=f"set {needed}, or remove {name}",
            )


def _cut(recipe: Recipe, config: SampledConfig) -> Iterator[ConfigError]:
    """Yield errors about steps that cannot leave their longest rows for later."""
    (prompts, samples), parts = config.begun, recipe.rollout.stream_chunks
    said = f"algorithm.oversample_prompts and oversample_samples start {prompts} prompts x {samples} samples"
    fix = "remove algorithm.oversample_prompts and algorithm.oversample_samples"
    if config.freshness:
        yield ConfigError(
            f"{said}, and algorithm.freshness is {config.freshness}",
            why='a step that samples ahead need not wait for long rows: algorithm.async_mode = "ready_first"',
            fix=f"set algorithm.freshness = 0, or {fix}",
        )
    elif is_ready_first(config):
        yield ConfigError(
            f'{said}, and algorithm.async_mode is "ready_first"',
            why="each of the two forms a step of the rows that end first",
            fix=f'set algorithm.async_mode = "in_order", or {fix}',
        )
    if parts > 1:
        yield ConfigError(
            f"{said}, and rollout.stream_chunks is {parts}",
            why="a step chooses its rows when enough of them have ended, so no chunk can go on before",
            fix=f"set rollout.stream_chunks = 1, or {fix}",
        )
    if recipe.chosen.answers(config) is None:
        yield ConfigError(
            f"{said}, and {config.name} does not sample its step in one call",
            why="a step trains on groups that were sampled before it began, all with the same settings",
            fix=fix,
        )


def _unknown(recipe: Recipe) -> Iterator[ConfigError]:
    """Yield errors about empty or unused pools, and about roles that are unknown or on unknown pools."""
    placement, there, known = recipe.placement, [*roles_of(recipe)], True
    for name, size in placement.pools.items():
        if size < 1:
            yield ConfigError(
                f"placement.pools.{name} is {size}", why="a pool needs at least one rank", fix="set it to 1"
            )
    for role, pool in placement.roles.items():
        if pool not in placement.pools:
            known = False
            yield ConfigError(
                f"placement.roles.{role} is {pool!r}",
                why=f"the pools are {', '.join(placement.pools)}",
                fix=nearest(pool, placement.pools),
            )
        if role not in there:
            known = False
            yield ConfigError(
                f"placement.roles has {role!r}, and the run has no such role",
                why=f"{recipe.algorithm.name} with these settings has {', '.join(there)}",
                fix=nearest(role, there),
            )
    used = {placement.pool_of(role) for role in there}
    for name in placement.pools if known else ():
        if name not in used:
            yield ConfigError(
                f"placement.pools.{name} has no role",
                why=f"the roles {', '.join(there)} are on {', '.join(sorted(used))}; "
                "roles without an entry are on the first pool",
                fix=f'write placement.roles = {{ ROLE = "{name}" }}, or remove the pool',
            )


def _meshes(recipe: Recipe) -> Iterator[ConfigError]:
    """Yield errors about grids that do not fit their pools, or that cannot shard a new model."""
    problems = [*impossible(recipe.placement, model_roles(recipe, recipe.roles))]
    yield from problems
    new = recipe.policy.model.new
    if new is not None and not problems:
        mesh = recipe.placement.mesh_of(recipe.trained_role)
        yield from unfit(mesh, recipe.placement.generate_tp, new.heads, new.kv_heads, new.layers)


def _model(recipe: Recipe) -> Iterator[ConfigError]:
    model = recipe.policy.model
    if model.path is not None and model.new is not None:
        yield ConfigError(
            f'policy.model has both path = "{model.path}" and new',
            why="a run starts from one model",
            fix="remove one, or pass --set policy.model.new=none (or policy.model.path=none)",
        )
    if model.path is None and model.new is None:
        yield ConfigError(
            "policy.model has neither path nor new",
            why="a run needs a model to start from",
            fix='write model.path = "a/directory", or model.new = { hidden = 128, layers = 4 }',
        )
    if model.new is not None:
        yield from misfits(model.new)
    if model.new is not None and model.adapter is not None:
        yield ConfigError(
            "policy.model has both an adapter and a new model",
            why="an adapter's directory names the directory of its base model, and a new model has none",
            fix="train the new model first, and name its checkpoint as policy.model.path",
        )


def _phases(recipe: Recipe) -> Iterator[ConfigError]:
    own = recipe.chosen.called(recipe.algorithm)
    if recipe.trained_role not in own:
        yield ConfigError(
            f"warm_start trains the {recipe.trained_role}, and {recipe.algorithm.name} has none",
            why=f"the algorithm trains the {own[0].replace('_', ' ')}",
            fix="pass --set warm_start=none",
        )
    config = recipe.algorithm
    if isinstance(config, SampledConfig) and config.truncated == "bootstrap" and "critic" not in own:
        yield ConfigError(
            f'algorithm.truncated is "bootstrap", and {config.name} has no critic',
            why="a critic must estimate the return that a row cut off at the token limit would still get",
            fix='set algorithm.truncated = "keep" or "mask", or choose an algorithm with a critic',
        )


def _context(recipe: Recipe) -> Iterator[ConfigError]:
    new, limit = recipe.policy.model.new, recipe.rollout.max_tokens
    if recipe.has_policy and new is not None and limit >= new.context:
        yield ConfigError(
            f"rollout.max_tokens is {limit} and policy.model.new.context is {new.context}",
            why=f"the context holds prompt and answer; {new.context - limit} tokens remain for the prompt",
            fix="lower rollout.max_tokens or raise policy.model.new.context",
        )


def _tail(recipe: Recipe) -> Iterator[ConfigError]:
    config, limit = recipe.algorithm, recipe.rollout.max_tokens
    for name, tokens in config.tails.items():
        if tokens > limit:
            yield ConfigError(
                f"algorithm.{name} is {tokens} and rollout.max_tokens is {limit}",
                why="it counts tokens at the end of the longest answer, which has fewer",
                fix=f"set it to at most {limit}",
            )


def _batch(recipe: Recipe) -> Iterator[ConfigError]:
    config = recipe.algorithm
    if config.minibatches > config.rows_per_step:
        yield ConfigError(
            f"algorithm.minibatches is {config.minibatches}",
            why=f"a step has {step_rows(recipe)}, and every minibatch needs at least one row",
            fix=f"set it to at most {config.rows_per_step}; 1 to 8 is usual",
        )


def _schedule(recipe: Recipe) -> Iterator[ConfigError]:
    train, total = recipe.policy, recipe.algorithm.updates
    if train.schedule == "constant":
        if train.final_lr:
            yield ConfigError(
                f"policy.final_lr is {train.final_lr:g} and policy.schedule is constant",
                why="a constant schedule has no final learning rate",
                fix='set policy.schedule = "cosine" or "linear", or remove policy.final_lr',
            )
    elif total <= train.warmup_steps:
        yield ConfigError(
            f"policy.warmup_steps is {train.warmup_steps}",
            why=f"the phase has {total} optimiser steps, so its {train.schedule} schedule never begins",
            fix=f"set policy.warmup_steps below {total}",
        )


def _weights(recipe: Recipe) -> Iterator[ConfigError]:
    config, judge = recipe.reward, recipe.reward.judge
    weights = config.weights
    if weights is None:
        return
    named = {"function": True, "model": config.model is not None, "judge": judge is not None}
    missing = [name for name in weights if not named.get(name, False)]
    left = [name for name in ("model", "judge") if named[name] and name not in weights]
    if missing or left or not weights or not all(map(isfinite, weights.values())):
        yield ConfigError(
            f"reward.weights is {dict(weights)}",
            why="it needs a finite number for each of function, model and judge that [reward] sets"
            + (f"; [reward] sets no {', no '.join(missing)}" if missing else "")
            + (f"; it has no number for {', '.join(left)}" if left else ""),
            fix="set reward.weights = { function = 0.1, model = 1 }",
        )


def _judge(recipe: Recipe) -> Iterator[ConfigError]:
    judge, config = recipe.reward.judge, recipe.algorithm
    yield from _weights(recipe)
    if judge is None:
        return
    if recipe.reward.model is not None and recipe.reward.weights is None:
        yield ConfigError(
            f"reward.judge.model is {judge.model!r} and reward.model is {recipe.reward.model!r}",
            why="only one of them can score the training rows, unless they have weights",
            fix="remove one of them, or weigh them: reward.weights = { model = 1, judge = 1 }",
        )
    alone = isinstance(config, OnlineConfig) and config.samples_per_prompt < 2
    if alone and (judge.frame is None or judge.frame.compares):
        yield ConfigError(
            "algorithm.samples_per_prompt is 1, and reward.judge compares answers",
            why="the judge scores an answer against other answers to the same prompt",
            fix="set it to at least 2, or rate single answers: reward.judge.frame with {prompt} and {answer}",
        )
    rates = judge.frame is not None and not judge.frame.compares
    if rates and (judge.abstain or judge.compare == "tournament"):
        yield ConfigError(
            f"reward.judge.frame rates, but abstain is {judge.abstain:g} and compare is {judge.compare!r}",
            why="abstain and compare apply to comparisons, and this frame rates each answer alone",
            fix="remove reward.judge.abstain and reward.judge.compare",
        )


def _sampling(recipe: Recipe) -> Iterator[ConfigError]:
    config = recipe.algorithm
    if isinstance(config, SampledConfig) and recipe.rollout.temperature == 0:
        yield ConfigError(
            "rollout.temperature is 0",
            why="all answers to a prompt would be identical, so none could score higher than another",
            fix="set it to 0.7 to 1.0; evaluate.temperature is a separate setting and may be 0",
        )
    samples, judged = recipe.evaluate.samples, recipe.evaluate.problems > 0
    if samples > 1 and judged and recipe.evaluate.temperature == 0 and recipe.rollout.writer is None:
        yield ConfigError(
            f"evaluate.samples is {samples}, and evaluate.temperature is 0",
            why="all answers to a prompt would be identical",
            fix="set evaluate.temperature = 1.0, or evaluate.samples = 1",
        )
    if (writer := recipe.rollout.writer) is None:
        return
    if recipe.rollout.agent is not None and recipe.rollout.environment is not None:
        yield ConfigError(
            "rollout.agent and rollout.environment are both set",
            why="one of them writes the rows",
            fix="remove one of them",
        )
    judge = recipe.reward.judge
    named = {"reward.model": recipe.reward.model, "cost.model": recipe.cost.model}
    named |= {"reward.judge.model": None if judge is None else judge.model}
    for setting, model in ((setting, model) for setting, model in named.items() if model is not None):
        yield ConfigError(
            f"{setting} is {model!r}, and {writer} writes the rows",
            why="a row that failed has no answer, but a model would still score it",
            fix=f"set {setting.split('.')[0]}.function, which scores only the other rows",
        )
    if recipe.rollout.replay_routing:
        yield ConfigError(
            f"rollout.replay_routing is true, and {writer} writes the rows",
            why="such a row joins several answers and keeps their tokens, but not their routes",
            fix="remove one of them",
        )
    if recipe.placement.generate_tp > 1:
        yield ConfigError(
            f"placement.rollout_parallel.tp is {recipe.placement.generate_tp}, and {writer} writes the rows",
            why="ranks that share a copy must run the same steps, but an agent calls one of them, or an "
            "environment answers one of them, at any time",
            fix="set placement.rollout_parallel.tp = 1",
        )
