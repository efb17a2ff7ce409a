"""Check: find everything about a recipe that can be known before it runs.

    LoadedRecipe ─┬─ settings, batch arithmetic ─── from the recipe alone
                  ├─ looks ──────────────────────── data, models, machine, reward: the checks of a run
                  └─ run directory ──────────────── new, resumes, finished
                            └─> Report: topics to read, notes to think about, problems that stop a run

Imports torch only to find what ranks will hold, and transformers only to render conversations, so it
answers in one to two seconds. It writes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rillflow.algorithms.config import AnchoredConfig, OnlineConfig, SampledConfig, is_ready_first
from rillflow.app.batch_arithmetic import batch_lines
from rillflow.app.doctor import available_memory
from rillflow.app.preflight_checks import Report, look
from rillflow.app.recipe import LoadedRecipe, Recipe, leaves
from rillflow.app.resume import MAY_CHANGE, after, drawn_from, kill_cost, require_possible, resolved
from rillflow.app.role_table import ROLES, model_roles, roles_of
from rillflow.config.problems import shown
from rillflow.errors import ConfigError, RunDirectoryError
from rillflow.rollout.config import NATIVE, VLLM
from rillflow.runs import layout
from rillflow.runs.changes import allowed_changes
from rillflow.runs.layout import kept_steps
from rillflow.runs.run_directory import holds_step
from rillflow.tasks.files import ENDINGS
from rillflow.workers.config import SAMPLER

DEFAULT = "default"
"""Origin shown for a setting that is not given."""


def check(
    loaded: LoadedRecipe, *, every_setting: bool = False, memory: bool = False, runs_code: bool = True
) -> Report:
    """Check a recipe and return a report; it shows the given settings, or every one.

    Args:
        loaded: the recipe.
        every_setting: whether to show the default settings too.
        memory: whether to run a step's passes on fake tensors for the peak memory, which imports torch.
        runs_code: whether to run the code that the recipe names; see ``look``.
    """
    report = Report()
    report.say("batch", batch_lines(loaded.recipe))
    report.say("placement", placement_lines(loaded.recipe))
    drawn = drawn_from(Path(loaded.recipe.run.dir or "."))
    look(loaded.recipe, loaded.base, report, drawn=drawn, runs_code=runs_code)
    report.attempt(lambda: _look_at_run(loaded, report))
    if memory and not report.problems:
        report.attempt(lambda: _look_at_memory(loaded, report))
    lines = setting_lines(loaded)
    given = [line for line in lines if not line.endswith(f"({DEFAULT})")]
    rest = f"and {len(lines) - len(given)} with their defaults, which --all shows"
    report.say("settings", lines if every_setting else [*given, rest])
    return report


def setting_lines(loaded: LoadedRecipe) -> list[str]:
    """Return every resolved setting that something reads, and its origin."""
    data: dict[str, Any] = loaded.recipe.model_dump(exclude_none=True)
    unread = unread_settings(loaded.recipe)
    lines = []
    for dotted in leaves(data):
        value: Any = data
        for name in dotted.split("."):
            value = value[name]
        origin = loaded.given.get(dotted, DEFAULT)
        dead = any(dotted == prefix or dotted.startswith(f"{prefix}.") for prefix in unread)
        if not dead or origin != DEFAULT:
            lines.append(f"{dotted} = {shown(value)}  ({origin}{', and nothing reads it' if dead else ''})")
    return lines


def unread_settings(recipe: Recipe) -> list[str]:
    """Return settings and sections that have no effect because of another setting's value."""
    config, source = recipe.algorithm, recipe.task.source
    is_file = Path(source).suffix in ENDINGS
    read = {kind.section for kind in roles_of(recipe).values()}
    unread = {kind.section: kind.section not in read for kind in ROLES.values() if kind.section}
    unread |= {
        "evaluate.temperature": not recipe.has_policy,
        "task.size": is_file,
        "task.chat_template_applied": not is_file,
        "task.digits": source != "arithmetic",
        "task.operators": source != "arithmetic",
        "task.held_out": recipe.task.held_out_source is not None,
        "policy.offload": recipe.policy.offload == "reference" and recipe.shares_reference,
        "policy.final_lr": recipe.policy.schedule == "constant",
        "placement.sequence_parallel": recipe.placement.is_inline,
        "placement.tp_across_nodes": recipe.placement.is_inline,
        "rollout.weight_check_interval": recipe.placement.is_inline,
        "rollout.server": recipe.rollout.engine != VLLM,
    }
    if isinstance(config, SampledConfig):
        engine = recipe.rollout.engine
        unread |= {
            "algorithm.gap_tolerance": recipe.policy.model.dtype == "float32" and engine == NATIVE,
            "algorithm.old_logprobs": not (config.is_off_policy and isinstance(config, OnlineConfig)),
            "algorithm.shuffle": config.minibatches == 1,
            "algorithm.freshness": not recipe.placement.samples_apart,
            "algorithm.async_mode": config.freshness == 0,
            "algorithm.on_stale": not is_ready_first(config),
            "algorithm.syncs_per_step": not is_ready_first(config),
            "rollout.keep_cache": not is_ready_first(config),
            "rollout.stream_chunks": len(recipe.placement.pools) == 1,
        }
    if isinstance(config, AnchoredConfig):
        is_there = "reference" in recipe.roles
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


def placement_lines(recipe: Recipe) -> list[str]:
    """Return which role runs on which ranks, and the backend."""
    placement = recipe.placement
    device = "cuda" if recipe.run.device.startswith("cuda") else recipe.run.device
    ranks = sum(placement.pools.values())
    where = "in this process" if placement.is_inline else f"on Ray, {ranks} processes"
    lines, models = [f"{where}; device {device}"], model_roles(recipe, recipe.roles)
    for role in recipe.roles:
        pool = placement.pool_of(role)
        size = placement.pools[pool]
        last = f" to {size - 1}" if size > 1 else ""
        grid = f", {placement.mesh_of(role)}" if role in models and size > 1 else ""
        lines.append(f"{role}: pool {pool}, rank 0{last}{grid}")
        if role == "reference" or (role in models and roles_of(recipe)[role].is_trained):
            what = ("weights", "reference") if role == "reference" else ("moments and masters", "optimizer")
            is_within = role == "reference" and recipe.shares_reference
            if recipe.policy.offload in ("all", what[1]) and not is_within:
                lines.append(f"  {what[0]} in host memory between their uses")
        if role == "policy" and placement.samples_apart:
            answers = placement.pools[placement.pool_of(SAMPLER)]
            last = f" to {answers - 1}" if answers > 1 else ""
            config = recipe.algorithm
            ahead = config.freshness if isinstance(config, SampledConfig) else 0
            lines.append(
                f"  answers prompts: pool {placement.pool_of(SAMPLER)}, rank 0{last}, "
                f"tp {placement.generate_tp}; weights are sent there at every publish"
                + (f", and used {ahead} steps later" if ahead else "")
            )
    return lines


def _look_at_run(loaded: LoadedRecipe, report: Report) -> None:
    path = Path(loaded.recipe.run.dir or ".")
    lines = [run_state(path), kill_cost(loaded.recipe)]
    report.say("run directory", lines)
    if report.task is not None and holds_step(path):
        changed = allowed_changes(path, resolved(loaded.recipe, report.task, loaded.base), MAY_CHANGE)
        require_possible(loaded.recipe, path, changed, report.task)
        made = max(kept_steps(path / layout.CHECKPOINTS), default=0)
        if made < loaded.recipe.total_steps:
            lines += [f"a resume changes, {after(made, change)}" for change in changed]


def _look_at_memory(loaded: LoadedRecipe, report: Report) -> None:
    from rillflow.app.peak_memory import peak_lines, peaks_of, require_room

    if report.encoded is None or report.sizes is None:
        raise ConfigError(
            "the memory of ranks cannot be said",
            why="the model's tokeniser and sizes are not on this disk: how long rows are is not known",
            fix="name a directory in policy.model.path",
        )
    placement, free = loaded.recipe.placement, available_memory()
    peaks = peaks_of(loaded.recipe, loaded.base, report.encoded, report.sizes)
    report.say("memory", peak_lines(peaks))
    pools = {peak.pool: placement.pools[peak.pool] for peak in peaks}
    if free is not None and placement.address is None and not loaded.recipe.run.device.startswith("cuda"):
        require_room(peaks, pools, free)


def run_state(path: Path) -> str:
    """Return the state of a run directory: new, begun, resumable or finished.

    Raises:
        RunDirectoryError: the directory holds something else.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return f"{path}: new"
    if not layout.is_run_directory(path):
        raise RunDirectoryError(
            f"{path} exists and is not a run directory",
            why="a run mixes with nothing that it did not make",
            fix="choose another one with --dir",
        )
    if (path / layout.FINISHED).is_file():
        return f"{path}: finished; more algorithm.steps go on, --fresh sets it aside and begins anew"
    steps = kept_steps(path / layout.CHECKPOINTS)
    if not steps:
        return f"{path}: begun and without a checkpoint; begins again"
    return f"{path}: resumes after step {max(steps)}"
