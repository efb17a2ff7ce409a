"""Resume: the config that a run keeps, the changes that a resume allows, and the cost of a kill.

Resolved + data + sources ─ run_config ─> config.json ─ compared ─> Changes ─ require_possible ─> recorded
                                             └─ with_choices_of_run ─> Resolved of a resumed run
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rillflow.algorithms.config import SampledConfig
from rillflow.app.any_recipe import AUTO
from rillflow.app.consistency import require_consistent
from rillflow.app.defaults import values_of_run
from rillflow.app.plugin_sections import plugin_changes
from rillflow.app.resolved import Resolved
from rillflow.app.row_writers import row_writers
from rillflow.app.scorers import scorer
from rillflow.app.sections import Recipe
from rillflow.app.standing import NOTHING_TO_STAND_ON, StandsOn
from rillflow.config.schema import value_of
from rillflow.controller.checkpoint import Checkpoint
from rillflow.errors import DataError, RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.changes import Change
from rillflow.runs.integrity import Evidence, read_recovered
from rillflow.runs.json_lines import JSON, encode, read_json
from rillflow.runs.layout import kept_steps
from rillflow.runs.old_settings import present
from rillflow.runs.run_directory import holds_step
from rillflow.tasks.fingerprint import first_changed
from rillflow.tasks.task import Task
from rillflow.workers.config import PlacementConfig

_LOSS = ("kl", "kl_bound", "entropy", "clip_low", "clip_high", "dual_clip", "correction", "correction_bounds")
_TRAIN = ("lr", "schedule", "final_lr", "warmup_steps", "max_grad_norm", "weight_decay", "balance")
_MEMORY = ("tokens_per_micro_batch", "gradient_checkpointing", "optimizer_dtype", "offload")
_RUN = (
    *("checkpoint_minutes", "checkpoint_every", "keep_checkpoints", "rollouts_every", "rollouts_share"),
    *("max_skipped", "restarts", "stop_s", "dir", "device", "threads", "tags"),
)
_REWARD = ("timeout_s", "memory_bytes", "workers", "max_failures")
MAY_CHANGE = (
    *("algorithm.steps", "algorithm.value_loss", "algorithm.ratio_tolerance", "algorithm.gap_tolerance"),
    *(f"algorithm.loss.{name}" for name in _LOSS),
    *(f"policy.{name}" for name in (*_TRAIN, *_MEMORY)),
    *(f"reward.{name}" for name in _REWARD),
    *(f"run.{name}" for name in _RUN),
    *(
        "critic.lr",
        "rollout.max_tokens",
        "rollout.max_rows",
        "task.too_long",
        "evaluate.every",
        "evaluate.patience",
        "placement",
        "sources",
        "data",
    ),
)
"""Settings that a resumed run may change; docs/design/run_directory.md describes each effect."""


_SAME_DECISIONS = (
    *("checkpoint_minutes", "checkpoint_every", "keep_checkpoints", "restarts", "stop_s", "dir"),
    "tags",
)


def keeps_decisions(key: str) -> bool:
    """Return whether a ready-first run with this setting changed may repeat its recorded decisions."""
    names = (*map("run.{}".format, _SAME_DECISIONS), *plugin_changes())
    return any(f"{key}.".startswith(f"{name}.") for name in names if name.startswith("run."))


SEVERAL = "functions."
"""Beginning of the names of the sources of ``reward.functions``."""


def run_config(resolved: Resolved, task: Task, standing: StandsOn = NOTHING_TO_STAND_ON) -> dict[str, Any]:
    """Return a run directory's config: every setting, and digests of data, functions and models."""
    named = sources_of(resolved.recipe, task, resolved.base)
    sources = {setting: digest(text) for setting, text in named.items()}
    data = {"rows": len(task.fingerprint.rows), "digest": task.digest}
    settings = resolved.recipe.model_dump(mode="json")
    if not resolved.names_held_out:
        settings["task"]["held_out"] = len(task.held_out)  # the number that was chosen, for every later use
    return standing.config({**settings, "data": data, "sources": sources})


def sources_of(recipe: Recipe, task: Task, base: Path) -> dict[str, bytes]:
    """Return the sources of the recipe's functions by setting, including functions given in Python.

    Raises:
        RewardError: a file is missing.
    """
    codes = {key.rpartition(".")[2]: each.code for key, each in row_writers(recipe, base).items()}
    own = {name: code.function for name, code in codes.items() if code.is_own}
    scoring = {"reward": recipe.reward.function, "cost": recipe.cost.function}
    scorers = {name: scorer(text, base, recipe.reward) for name, text in scoring.items() if text is not None}
    several = [scorer(text, base, recipe.reward) for text in recipe.reward.functions or {}]
    scorers |= {f"{SEVERAL}{each.name}": each for each in several}
    own = {**{name: each for name, each in scorers.items() if not each.address}, **own}
    given = {f"reward.{each.name}": each.text.encode() for each in task.reward if each.text}
    return {**given, **{name: each.text.encode() or each.file.read_bytes() for name, each in own.items()}}


def with_choices_of_run(resolved: Resolved, run: Path) -> Resolved:
    """Return the recipe with the choices that a run began with, for settings that the recipe leaves out.

    So a run that resumes on a machine with other devices keeps its data type, its learning rate, its ranks,
    and its bits.

    Raises:
        RillflowError: the recipe contradicts the run's pools.
    """
    if not holds_step(run):
        return resolved
    config: Any = present(read_recovered(run, layout.CONFIG))
    values, origin = values_of_run(resolved, config), f"as {run} began"
    differing = [key for key, value in values.items() if value != value_of(resolved.recipe, key)]
    given = dict.fromkeys(differing, f"{AUTO}: {origin}")
    if not resolved.names_held_out:
        values["task.held_out"], given["task.held_out"] = config["task"]["held_out"], origin
    pools = _pools_of_run(resolved, config)
    resolved = resolved.changed({**values, **pools}, given)
    return require_consistent(resolved) if pools else resolved


def _pools_of_run(resolved: Resolved, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pools that a run chose for a sampler on its own ranks; empty if it chose none."""
    names = ("pools", "roles")
    if not all(resolved.is_open(f"placement.{name}") for name in names):
        return {}
    kept = PlacementConfig.model_validate({name: config["placement"][name] for name in names})
    if not (resolved.recipe.placement.samples_apart and kept.samples_apart):
        return {}
    return {"placement.pools": kept.pools, "placement.roles": kept.roles}


def digest(text: bytes) -> str:
    """Return the first 16 hex digits of a text's SHA-256."""
    return hashlib.sha256(text).hexdigest()[:16]


def keep_sources(recipe: Recipe, task: Task, base: Path, run: Path) -> None:
    """Copy the sources of the run's functions into the run directory, each version once.

    Raises:
        RunDirectoryError: the disk is full or cannot be written.
    """
    for setting, text in sources_of(recipe, task, base).items():
        kept = run / layout.SOURCES / f"{setting}-{digest(text)}.py"
        if not kept.is_file():
            Evidence(run).write(f"{layout.SOURCES}/{kept.name}", text)


def drawn_from(run: Path) -> int | None:
    """Return the number of rows that a resumed run drew its held-out rows from; None for a new run."""
    file = run / layout.DATA
    return _kept_data(run)["drawn"] if file.is_file() and holds_step(run) else None


def keep_data(task: Task, run: Path) -> None:
    """Write the digests of a run's rows into its directory.

    Raises:
        RunDirectoryError: the disk is full or cannot be written.
    """
    now = task.fingerprint
    kept: dict[str, JSON] = {"drawn": now.drawn, "rows": now.rows, "held_out": now.held_out}
    Evidence(run).write(layout.DATA, encode(kept))


def _kept_data(run: Path) -> Mapping[str, Any]:
    kept: Mapping[str, Any] = read_json(run / layout.DATA)
    if [type(kept.get(name)) for name in ("drawn", "rows", "held_out")] != [int, list, list]:
        raise RunDirectoryError(
            f"{run / layout.DATA} has no digests of rows",
            why="Rillflow did not write this file",
            fix="restore it from a backup, or remove it if the data have not changed",
        )
    return kept


def require_same_rows(task: Task, run: Path) -> None:
    """Refuse data in which a row of the run has changed or is missing."""
    kept, now = _kept_data(run), task.fingerprint
    apart, drawn = (task.held_out, ()) if now.held_out else ((), task.held_out)
    for part, digests, rows in (("held_out", now.held_out, apart), ("rows", now.rows, (*task.train, *drawn))):
        place = first_changed(kept[part], digests, may_grow=part == "rows")
        if place is None:
            continue
        row = next((str(row) for row in rows if row.index == place), f"row {place + 1} of {task.name}")
        said = "differs from the row that" if place < len(digests) else "is missing; it is a row that"
        raise DataError(
            f"{row} {said} {run} was started with",
            why="the rows of a run stay the same; new rows may only follow the training rows",
            fix="restore the row, or choose another run directory; --fresh sets the old one aside",
        )


def require_possible(resolved: Resolved, run: Path, changed: Iterable[Change], task: Task) -> None:
    """Refuse a change to an allowed setting whose new value is impossible.

    Raises:
        RunDirectoryError: the run has made more steps than the recipe sets; or a KL penalty needs a
            reference that the run has not kept.
        DataError: a row of the run has changed or is missing; the message names it.
    """
    made = max(kept_steps(run / layout.CHECKPOINTS), default=0)
    if made > resolved.total_steps:
        steps, total = resolved.recipe.algorithm.steps, resolved.total_steps
        raise RunDirectoryError(
            f"algorithm.steps is {steps}, {total} with all phases, but {run} has already made {made}",
            why="a resume cannot undo steps",
            fix="raise algorithm.steps, or choose another run directory",
        )
    for change in changed:
        if change.key == "data.digest":
            require_same_rows(task, run)
        paid = change.key == "algorithm.loss.kl" and change.old == 0
        if paid and not (run / layout.REFERENCE).is_dir():
            raise RunDirectoryError(
                f"{run} holds a run with another config: {change}",
                why="a KL penalty needs the policy from the start of the phase, and the run has not kept it",
                fix="choose another run directory, or add --fresh to set the old one aside",
            )


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
            why="a run writes only to an empty directory or to its own",
            fix="choose another directory with --dir",
        )
    if (path / layout.FINISHED).is_file():
        early = read_json(path / layout.FINISHED).get("early")
        if early:
            return f"{path}: ended early: {early}; another evaluate.patience continues it"
        return f"{path}: finished; raise algorithm.steps to continue, or use --fresh to start again"
    steps = kept_steps(path / layout.CHECKPOINTS)
    if not steps:
        return f"{path}: started, but has no checkpoint; starts again"
    return f"{path}: resumes after step {max(steps)}"


def is_finished(resolved: Resolved, run: Path) -> bool:
    """Return whether a run has made the last step of its recipe, or ended early by the same patience."""
    mark = run / layout.FINISHED
    if not mark.is_file():
        return False
    found, patience = read_json(mark), resolved.recipe.evaluate.patience
    return found["steps"] == resolved.total_steps and found.get("patience", patience) == patience


def kill_cost(recipe: Recipe) -> str:
    """Return the most work that a kill or a power cut costs with these settings."""
    run = recipe.run
    parts = [f"{run.checkpoint_minutes:g} minutes (run.checkpoint_minutes)"] if run.checkpoint_minutes else []
    parts += [f"{run.checkpoint_every:,} steps (run.checkpoint_every)"] if run.checkpoint_every else []
    if not parts:
        return "a kill costs all steps of the phase: run.checkpoint_minutes and run.checkpoint_every are 0"
    return f"a kill costs at most {' or '.join(parts)} of work, and the step in progress"


def fresher_steps(resolved: Resolved, checkpoint: Checkpoint) -> str:
    """Return a note on the steps that fresher weights sample after a resume; empty if there are none.

    A finished run has sampled nothing ahead, and its older weights are gone. The same holds if a sampler has
    died. An interrupted run has sampled ahead, and its checkpoint keeps the rows.
    """
    ahead, step = resolved.recipe.schedule.steps_ahead, checkpoint.step
    begun = step > resolved.main.first
    if not (ahead and begun):
        return ""
    last = min(step + ahead, resolved.total_steps)
    if last <= step or checkpoint.sampled(step + 1):
        return ""
    which = f"step {last} is" if last == step + 1 else f"steps {step + 1} to {last} are"
    return (
        f"; {which} sampled by the weights after step {step}: its checkpoint keeps no rows sampled "
        "ahead. An uninterrupted run samples them with older weights, so its results differ"
    )


def shorter_phase(recipe: Recipe, changes: Iterable[Change]) -> str:
    """Return a note on prompts that the end of a shorter phase chose; empty if there are none."""
    config = recipe.algorithm
    steps = [change.old for change in changes if change.key == "algorithm.steps"]
    before = [number for number in steps if isinstance(number, int)]
    if not before or not isinstance(config, SampledConfig):
        return ""
    return recipe.schedule.shortened(config, before[0])


def after(step: int, change: Change) -> str:
    """Describe a change and the first step that it applies to."""
    return f"from step {step + 1} on, {change}"
