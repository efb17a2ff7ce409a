"""Check: show a recipe's settings, batch arithmetic and placement, and what the preflight checks find.

Resolved ─┬─ settings, batch arithmetic, placement ─ from the recipe alone ─┬─> Report
          └─ facts ─ look, look_at_run, look_at_peaks ──────────────────────┘
"""

from __future__ import annotations

from pathlib import Path

from rillflow.algorithms.config import AnchoredConfig, OnlineConfig, SampledConfig
from rillflow.app.batch_arithmetic import batch_lines
from rillflow.app.check_report import Report
from rillflow.app.encoding import data_uses
from rillflow.app.engine_sources import unread_by_engine
from rillflow.app.facts import RecipeFacts
from rillflow.app.plugin_recipe import PluginRecipe
from rillflow.app.preflight_checks import look, look_at_peaks, look_at_run, look_with_plugins
from rillflow.app.resolved import Resolved
from rillflow.app.resume import drawn_from, with_choices_of_run
from rillflow.app.role_table import ROLES
from rillflow.app.standing import NOTHING_TO_STAND_ON, standing_of
from rillflow.errors import RunDirectoryError
from rillflow.rollout.config import NATIVE
from rillflow.runs.run_directory import holds_step
from rillflow.tasks.files import ENDINGS
from rillflow.tasks.huggingface import HUB
from rillflow.tasks.kinds import DEMONSTRATIONS
from rillflow.workers.config import SAMPLER


def check(
    loaded: Resolved, *, every_setting: bool = False, memory: bool = False, runs_code: bool = True
) -> Report:
    """Check a recipe and return a report; it shows the given settings, or every one.

    Args:
        loaded: the recipe.
        every_setting: whether to show the default settings too.
        memory: whether to run a step's passes on fake tensors for the peak memory, which imports torch.
        runs_code: whether to run the code that the recipe names; see ``look``.
    """
    report = Report()
    run = loaded.directory
    resolved = with_choices_of_run(loaded, run)
    try:
        standing = standing_of(resolved, run if holds_step(run) else None)
    except RunDirectoryError:  # the checks raise it again, and report it beside other problems
        standing = NOTHING_TO_STAND_ON
    resolved = resolved.changed(standing.places)
    facts = RecipeFacts(resolved=resolved, drawn=drawn_from(run), runs_code=runs_code, standing=standing)
    report.say("batch", batch_lines(resolved.recipe))
    report.say("placement", placement_lines(resolved))
    look(facts, report, runs_code=runs_code)
    report.attempt(look_at_run, facts)
    if memory:
        report.attempt(look_at_peaks, facts)
    report.say("settings", setting_lines(resolved, every=every_setting))
    return report


def check_plugin_recipe(
    recipe: PluginRecipe, *, every_setting: bool = False, runs_code: bool = True
) -> Report:
    """Check a recipe of a plugin's kind and return a report; see ``check``."""
    report = Report()
    recipe.look(report, runs_code=runs_code)
    look_with_plugins(recipe, report)
    report.say("settings", recipe.setting_lines(every=every_setting))
    return report


def setting_lines(resolved: Resolved, *, every: bool = True) -> list[str]:
    """Return the resolved settings that something reads, and their origins; see ``AnyRecipe``."""
    return resolved.setting_lines(every=every, unread=unread_settings(resolved))


def unread_settings(resolved: Resolved) -> list[str]:
    """Return settings and sections that have no effect because of another setting's value."""
    recipe = resolved.recipe
    config, source = recipe.algorithm, recipe.task.source
    is_hub, is_file = source.startswith(HUB), Path(source).suffix in ENDINGS
    read = {kind.section for kind in resolved.roles.values()}
    unread = {kind.section: kind.section not in read for kind in ROLES.values() if kind.section}
    unread |= {
        "evaluate.temperature": not resolved.has_policy,
        "task.size": is_file or is_hub,
        "task.split": not is_hub,
        "task.subset": not is_hub,
        "task.chat_template_applied": not (is_file or is_hub),
        "task.digits": source != "arithmetic",
        "task.operators": source != "arithmetic",
        "task.clock": recipe.task.clock is None,
        "task.turns": DEMONSTRATIONS not in data_uses(resolved),
        "task.held_out": recipe.task.held_out_source is not None,
        "policy.offload": recipe.policy.offload == "reference" and resolved.shares_reference,
        "policy.final_lr": recipe.policy.schedule == "constant",
        "placement.sequence_parallel": recipe.placement.is_inline,
        "placement.tp_across_nodes": recipe.placement.is_inline,
        "rollout.weight_check_interval": recipe.placement.is_inline,
        **unread_by_engine(recipe.rollout.engine),
    }
    if isinstance(config, SampledConfig):
        engine = recipe.rollout.engine
        unread |= {
            "algorithm.gap_tolerance": recipe.policy.model.dtype == "float32" and engine == NATIVE,
            "algorithm.old_logprobs": not (config.is_off_policy and isinstance(config, OnlineConfig)),
            "algorithm.shuffle": config.minibatches == 1,
        }
    unread |= {f"schedule.{name}": True for name in recipe.schedule.unread(recipe.placement)}
    if isinstance(config, AnchoredConfig):
        is_there = "reference" in resolved.called
        unread |= {
            "algorithm.reference": not is_there and config.reference != "previous",
            "algorithm.reference_rate": not (is_there and config.moves_reference),
            "algorithm.reference_every": not (is_there and config.moves_reference),
        }
    if isinstance(config, OnlineConfig):
        unread |= {
            "algorithm.loss.constant": config.loss.aggregation != "constant",
            "algorithm.loss.correction_bounds": config.loss.correction == "none",
            "algorithm.loss.kl_estimator": config.loss.kl == 0,
            "algorithm.loss.kl_in": config.loss.kl == 0,
            "algorithm.loss.kl_bound": config.loss.kl_paid != "loss" or config.loss.estimator != "k3",
        }
    return [name for name, is_unread in unread.items() if is_unread]


def placement_lines(resolved: Resolved) -> list[str]:
    """Return which role runs on which ranks, and the backend."""
    recipe, placement = resolved.recipe, resolved.recipe.placement
    device = "cuda" if recipe.run.device.startswith("cuda") else recipe.run.device
    ranks = sum(placement.pools.values())
    on = "of this machine" if placement.backend == "process" else "on Ray"
    where = "in this process" if placement.is_inline else f"{ranks} processes {on}"
    lines, models = [f"{where}; device {device}"], resolved.models()
    for role in resolved.called:
        pool = placement.pool_of(role)
        size = placement.pools[pool]
        last = f" to {size - 1}" if size > 1 else ""
        grid = f", {resolved.meshes[role]}" if role in models and size > 1 else ""
        lines.append(f"{role}: pool {pool}, rank 0{last}{grid}")
        if role == "reference" or (role in models and resolved.roles[role].is_trained):
            what = ("weights", "reference") if role == "reference" else ("moments and masters", "optimizer")
            is_within = role == "reference" and resolved.shares_reference
            if recipe.policy.offload in ("all", what[1]) and not is_within:
                lines.append(f"  {what[0]} in host memory while not in use")
        if role == "policy" and placement.samples_apart:
            answers = placement.pools[placement.pool_of(SAMPLER)]
            last = f" to {answers - 1}" if answers > 1 else ""
            ahead = recipe.schedule.lag
            lines.append(
                f"  generation: pool {placement.pool_of(SAMPLER)}, rank 0{last}, "
                f"tp {placement.generate_tp}; weights are sent there at every publish"
                + (f", and used {ahead} steps later" if ahead else "")
            )
    return lines
