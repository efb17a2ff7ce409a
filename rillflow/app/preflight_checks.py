"""Preflight checks of ``run`` and ``check``: find everything that would stop a run.

    Facts ─┬─ step, engine ───── traced, imported, asked for capabilities
           ├─ rows, model ────── from the disk: counts, files, headers, sizes, tokens, memory
           ├─ scorers, machine ─ files; devices, cores
           ├─ agent, functions ─ called on two rows, in a child that can be killed
           └─ run directory ──── new, resumes, finished: ``check`` only, a run opens it
                 └─> Report: topics to read, notes to think about, problems that stop a run

Imports torch only for an algorithm that is not shipped, a model of an unusual type, or peak memory, so it
answers in 1 to 2 seconds. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.any_recipe import AnyRecipe
from rillflow.app.bias_notes import bias_notes, correction_notes
from rillflow.app.check_report import Report
from rillflow.app.code_checks import look_at_costs, look_at_functions, read_functions, say_left_out
from rillflow.app.facts import RecipeFacts
from rillflow.app.machine import available_memory, cuda_devices, device_memory, machine_memory
from rillflow.app.memory import (
    Peak,
    estimate,
    holds_whole,
    memory_lines,
    peak_lines,
    require_memory,
    require_room,
    require_row,
)
from rillflow.app.meshes import unfit
from rillflow.app.model_files import require_adapter_fits, require_model_files, require_template
from rillflow.app.placement_needs import require_devices
from rillflow.app.plugin_sections import as_kept, plugin_changes
from rillflow.app.plugins import installed, service
from rillflow.app.resolved import Resolved
from rillflow.app.resume import MAY_CHANGE, after, kill_cost, require_possible, run_config, run_state
from rillflow.app.row_writers import require_free_columns
from rillflow.app.schedule_needs import bound_notes, pool_notes
from rillflow.config.problems import together
from rillflow.errors import ConfigError, nearest
from rillflow.models.directory_checks import require_ends
from rillflow.models.locate import base_of
from rillflow.models.nf4 import require_library
from rillflow.models.probes import probe_tokenizer
from rillflow.models.tokenizer import require_rows
from rillflow.rollout.config import NATIVE
from rillflow.runs import layout
from rillflow.runs.changes import allowed_changes
from rillflow.runs.environment import usable_cores
from rillflow.runs.formatting import size
from rillflow.runs.layout import kept_steps
from rillflow.runs.pins import pin_notes
from rillflow.runs.run_directory import holds_step
from rillflow.tasks.example import Example
from rillflow.tasks.task import Task

MOST_REPEATS = 100
"""Maximum times that a step may draw the same prompt; a higher number is treated as a typing error."""
_NO_END = (
    "the model names no end token and rollout.stop is empty, so every answer has rollout.max_tokens = {:,} "
    "tokens. Set eos_token in tokenizer_config.json or eos_token_id in generation_config.json, or add a "
    "stop string to rollout.stop"
)


def look(facts: RecipeFacts, report: Report, *, runs_code: bool = True) -> None:
    """Run the checks of a run and add their results to a report.

    Args:
        facts: the recipe, and what its files say.
        report: the report to add to.
        runs_code: whether to run the engine, the server's Python and the functions that the recipe names.
    """
    checks = [
        _look_at_step,
        *([_look_at_engine] if runs_code else []),
        _look_at_settings,
        _look_at_data,
        _look_at_model,
        _look_at_tokens,
        _look_at_memory,
        _look_at_scorers,
        _look_at_machine,
        _look_at_writers,
        *([look_at_functions, look_at_costs] if runs_code else [read_functions, say_left_out]),
    ]
    for check in checks:
        report.attempt(check, facts)
    look_with_plugins(facts, report)


def look_with_plugins(facts: RecipeFacts | AnyRecipe, report: Report) -> None:
    """Run the checks that plugins bring, and add their results to a report."""
    for plugin in installed().values():
        if plugin.look is not None:
            report.attempt(plugin.look, facts)


def require_sound(facts: RecipeFacts) -> list[str]:
    """Return the notes on a recipe that can run.

    Raises:
        RillflowError: the one problem, or a ConfigError that lists all of them.
    """
    report = Report()
    look(facts, report)
    if report.problems:
        raise together(report.problems, "the recipe")
    return report.notes


def _look_at_step(facts: RecipeFacts, report: Report) -> None:
    """Trace a custom algorithm's step; its file has usually loaded torch already."""
    if facts.recipe.chosen not in ALGORITHMS.values():
        from rillflow.app.graphs import unpublished

        report.notes += filter(None, map(unpublished, facts.resolved.graphs))


def _look_at_engine(facts: RecipeFacts, report: Report) -> None:
    """Import an engine other than the native one, and check it."""
    if facts.resolved.has_policy and facts.recipe.rollout.engine != NATIVE:
        from rillflow.app.engines import engine_notes

        report.notes += engine_notes(facts)


def _look_at_settings(facts: RecipeFacts, report: Report) -> None:
    """Note defaults of a sampler that runs ahead, biases, and a multiplier that needs negative costs."""
    for notes_of in (pool_notes, correction_notes, bound_notes, bias_notes):
        report.notes += notes_of(facts.resolved)
    settings = facts.recipe.algorithm.model_dump()
    if not settings.keys() >= {"cost_limit", "cost_margin"}:
        return
    limit, margin = settings["cost_limit"], settings["cost_margin"]
    if 0 < margin >= limit:
        report.notes.append(
            f"algorithm.cost_margin is {margin:g} and algorithm.cost_limit {limit:g}: the multiplier "
            f"targets a mean cost of {limit - margin:g}, and grows to its maximum if no cost is negative"
        )


def _look_at_data(facts: RecipeFacts, report: Report) -> None:
    recipe, task = facts.recipe, facts.task
    report.say("data", _data_lines(facts.resolved, task, report))
    drawn, there = recipe.algorithm.prompts_per_step, len(task.train)
    if drawn > MOST_REPEATS * there:
        raise ConfigError(
            f"algorithm.prompts_per_step is {drawn:,} and {task.name} has {there:,} prompts",
            why=f"one step would draw every prompt {drawn // there:,} times",
            fix=f"use at most {there:,}; for more answers per prompt, raise algorithm.samples_per_prompt",
        )


def _of_rows(resolved: Resolved) -> str:
    """Say where the number of held-out rows comes from, if no setting names it."""
    said = " (task.held_out is left out: a tenth of the rows, at most 500)"
    return "" if resolved.names_held_out else said


def _data_lines(resolved: Resolved, task: Task, report: Report) -> list[str]:
    recipe = resolved.recipe
    judged = min(recipe.evaluate.problems, len(task.held_out))
    word = "prompts" if resolved.has_policy else "pairs"
    temperature = recipe.evaluate.temperature
    how = f", answered at temperature {temperature:g}" if resolved.has_policy else ""
    prompts = recipe.algorithm.steps * recipe.algorithm.prompts_per_step
    if recipe.algorithm.prompts_per_step > len(task.train):
        report.notes.append(
            f"a step draws {recipe.algorithm.prompts_per_step:,} {word} and the task has "
            f"{len(task.train):,}: {word} repeat within a step"
        )
    sets = [
        f"the set {name} ({min(recipe.evaluate.problems, len(rows)):,})" for name, rows in task.sets.items()
    ]
    if not judged and recipe.evaluate.problems:
        rest = f"only {' and '.join(sets)} will be evaluated" if sets else "nothing will be evaluated"
        report.notes.append(f"nothing is held out, so {rest}")
    elif judged < recipe.evaluate.problems:
        report.notes.append(
            f"evaluate.problems is {recipe.evaluate.problems:,}, but only {judged:,} rows are held out"
        )
    if task.shared_prompts:
        report.notes.append(
            f"{task.shared_prompts:,} training rows have the prompt of a held-out row and differ from it "
            "in another column: the run trains on them"
        )
    counts = [f"{judged:,} {word}", *sets] if judged else sets
    is_judged = bool(counts) and recipe.evaluate.problems > 0
    held_out = f"{len(task.held_out):,} held out{_of_rows(resolved)}"
    return [
        f"{task.name}: {len(task.train):,} {word} to train on, {held_out}, "
        f"{task.left_out:,} left out because they are held out too",
        f"the algorithm draws {prompts:,} {word}: {prompts / len(task.train):.1f} passes over the data",
        f"evaluated on {', '.join(counts)}{how}" if is_judged else "never evaluated",
    ]


def _rows(facts: RecipeFacts) -> Sequence[Example]:
    """Return the rows to train on and those held out."""
    return (*facts.task.train, *facts.task.held_out)


def _look_at_model(facts: RecipeFacts, report: Report) -> None:
    recipe, new, limit = facts.recipe, facts.recipe.policy.model.new, facts.recipe.rollout.max_tokens
    name = f"a new {new.architecture}" if new is not None else str(facts.source)
    if facts.directory is not None:
        require_model_files(facts.directory)
        if facts.adapter_directory is not None:
            require_adapter_fits(facts.adapter_directory, facts.directory)
    if facts.adapter is not None and facts.adapter.base == "4bit":
        require_library()
    if not facts.is_alike:
        from rillflow.app.engines import attention_notes

        report.notes += attention_notes(facts)
    if facts.sizes is None:
        report.say("model", [f"{name}: its size is unknown until it is loaded"])
    else:
        sizes = facts.sizes
        if facts.generates and limit >= sizes.context:
            raise ConfigError(
                f"rollout.max_tokens is {limit} and the model's context is {sizes.context}",
                why="the context holds prompt and answer",
                fix=f"set rollout.max_tokens below {sizes.context}",
            )
        grid, tp = recipe.placement.mesh_of("policy"), recipe.placement.generate_tp
        for problem in unfit(grid, tp, sizes.heads, sizes.kv_heads, sizes.layers):
            raise problem
        report.say("model", [f"{name}: {sizes.parameters:,} parameters, context {sizes.context:,} tokens"])
        if facts.adapter is not None and sizes.experts:
            report.notes.append(
                f"{sizes.experts:,} of the model's {sizes.parameters:,} parameters get no adapter: the "
                "experts of a layer share one weight, and adapters stand beside linear layers"
            )
    folder = facts.tokenizer_directory
    if folder is not None and any(not isinstance(row.prompt, str) for row in _rows(facts)):
        require_template(folder)


def _look_at_tokens(facts: RecipeFacts, report: Report) -> None:
    """Encode every row, and check that it fits."""
    if report.problems:
        return
    recipe, sizes = facts.recipe, facts.sizes
    if facts.directory is not None:
        probe_tokenizer(facts.directory, [row.key for row in _rows(facts)])
    if facts.model_input is None:
        return
    tokenizer, limit = facts.model_input.tokenizer, recipe.rollout.max_tokens
    if sizes is not None:
        require_rows(tokenizer, sizes.vocabulary)
        if facts.generates:
            require_ends(tokenizer.stop_tokens, sizes.vocabulary)
    if facts.generates and not tokenizer.stop_tokens and not recipe.rollout.stop:
        report.notes.append(_NO_END.format(limit))
    encoded = facts.encoded
    assert encoded is not None, "the tokeniser is there"
    report.problems += encoded.problems
    report.notes += encoded.notes
    longest = max(encoded.train[recipe.chosen.data], key=lambda row: len(row.prompt) if row else 0)
    if longest is not None:
        room = f" and rollout.max_tokens = {limit:,}" if facts.generates else ""
        told = f"longest prompt: {len(longest.prompt):,} tokens{room} of {facts.model_input.context:,}"
        report.say("tokens", [f"{told}: {longest.example}"])
        if sizes is not None and facts.generates:
            require_row(recipe, sizes, len(longest.prompt))


def _look_at_memory(facts: RecipeFacts, report: Report) -> None:
    """Check a rank's memory for the longest row that the data and the settings allow."""
    if report.problems or facts.sizes is None or facts.longest is None:
        return
    recipe, sizes, longest = facts.recipe, facts.sizes, facts.longest
    report.say("model", memory_lines(facts.resolved, sizes, longest))
    if not holds_whole(facts.resolved) or recipe.placement.address is not None:
        return
    device = device_memory(recipe.run.device)
    if device is not None:
        require_memory(facts.resolved, sizes, longest, device, f"the device {recipe.run.device!r}")
        return
    there, free = machine_memory(), available_memory()
    if there is not None:
        require_memory(facts.resolved, sizes, longest, there, "this machine")
    needed = estimate(facts.resolved, sizes, longest).total
    if free is not None and needed > free and not recipe.run.device.startswith("cuda"):
        report.notes.append(f"the run needs about {size(needed)}, and {size(free)} of main memory are free")


def look_at_peaks(facts: RecipeFacts, report: Report) -> None:
    """Report the peak memory of every role from passes over fake tensors, which loads torch."""
    if report.problems:
        return
    peaks: list[Peak] = service("peaks", "rillflow check --memory")(facts)
    if not peaks:
        raise ConfigError(
            "the memory of a rank cannot be computed",
            why="the model's tokeniser and sizes are not on this disk, so row lengths are unknown",
            fix="set policy.model.path to a local directory",
        )
    placement, free = facts.recipe.placement, available_memory()
    report.say("memory", peak_lines(peaks))
    pools = {peak.pool: placement.pools[peak.pool] for peak in peaks}
    if free is not None and placement.address is None and not facts.recipe.run.device.startswith("cuda"):
        require_room(peaks, pools, free)


def look_at_run(facts: RecipeFacts, report: Report) -> None:
    """Report the state of the run directory, and what a resume would change."""
    recipe, path = facts.recipe, facts.resolved.directory
    report.say("run directory", [run_state(path), kill_cost(recipe), *pin_notes(path)])
    if holds_step(path):
        settings = as_kept(run_config(facts.resolved, facts.task, facts.standing), recipe, path)
        may_change = (*MAY_CHANGE, *plugin_changes(), *facts.standing.moved(path))
        changed = allowed_changes(path, settings, may_change)
        require_possible(facts.resolved, path, changed, facts.task)
        made = max(kept_steps(path / layout.CHECKPOINTS), default=0)
        if made < facts.resolved.total_steps:
            changes = [f"a resume changes, {after(made, change)}" for change in changed]
            report.say("run directory", changes)


def _look_at_scorers(facts: RecipeFacts, report: Report) -> None:
    start = {} if facts.critic is None else {"critic.path": facts.critic}
    for setting, source in {**facts.scorers, **start}.items():
        report.say(setting, [source])
        model = Path(base_of(source))
        if model.is_dir():
            require_model_files(model)


def _look_at_writers(facts: RecipeFacts, report: Report) -> None:
    """Run the check of what writes the rows; refuse data with a column that a plugin adds to rows."""
    for writer in facts.resolved.writers.values():
        report.attempt(writer.look, facts)
    require_free_columns(facts.task)


def _look_at_machine(facts: RecipeFacts, report: Report) -> None:
    recipe, device, there = facts.recipe, facts.recipe.run.device, cuda_devices()
    if device.startswith("cuda") and there is not None and recipe.placement.address is None:
        number = int(device.removeprefix("cuda").removeprefix(":") or 0)
        if number >= there:
            names = ["cpu", *(f"cuda:{index}" for index in range(there))]
            raise ConfigError(
                f"there is no device {device!r}",
                why=f"this machine has {', '.join(names)}",
                fix=f"{nearest(device, ['auto', *names])}; rillflow doctor lists the devices that torch sees",
            )
    require_devices(facts.resolved)
    threads, cores = recipe.run.threads, usable_cores()
    if threads > cores:
        report.notes.append(
            f"run.threads is {threads} and there are {cores:g} cores: the extra threads wait for each other"
        )
