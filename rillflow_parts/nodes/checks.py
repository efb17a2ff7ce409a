"""Node checks: compare the nodes of a run's ranks with the driver's machine before anything is loaded.

    files, code, models ── node_files ─────> refused, by node and path
    run directory, clock ─ shared_paths ───> refused, or noted
    variables ──────────── node_variables ─> noted, by node and name

Nothing is compared if all ranks are on the driver's machine.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rillflow.app.facts import RecipeFacts
from rillflow.rollout.config import NATIVE
from rillflow.workers.backend import Backend
from rillflow_parts.nodes.files import Subject, require_alike
from rillflow_parts.nodes.imported_code import Root
from rillflow_parts.nodes.shared_paths import clock_notes, require_shared
from rillflow_parts.nodes.variables import variable_notes


def check_nodes(facts: RecipeFacts, run: Path, backend: Backend) -> list[str]:
    """Compare the nodes with this machine, and return notes; do nothing without nodes.

    Args:
        facts: the recipe and what it names.
        run: the run directory.
        backend: the backend with the ranks.

    Raises:
        RunDirectoryError: a node lacks a file or has another one, or cannot use the run directory.
    """
    if not backend.nodes:
        return []
    placement = facts.recipe.placement
    start_s, load_s = placement.start_s, placement.load_s
    texts = require_alike(subject_of(facts), backend, facts.equal_files, start_s, load_s)
    require_shared(run.absolute(), backend, start_s)
    reward = facts.recipe.reward
    keys = [reward.key_variable, reward.judge.key_variable if reward.judge is not None else None]
    notes = variable_notes(texts, [key for key in keys if key is not None], backend, start_s)
    return [*clock_notes(backend.nodes), *notes]


def subject_of(facts: RecipeFacts) -> Subject:
    """Return everything that ranks of a recipe read from their nodes' disks."""
    recipe, functions = facts.recipe, [*facts.functions, *facts.costs]
    functions += [facts.judge] if facts.judge is not None else []
    functions += [writer.code.function for writer in facts.resolved.writers.values()]
    roots = [Root(what=str(each), file=str(each.file), text=each.text) for each in functions]
    roots += [Root(what="the algorithm", module=name) for name in sorted(set(_modules(facts)))]
    critic = {"critic.path": recipe.critic.path} if recipe.critic.path is not None else {}
    policy = recipe.policy.model.path
    return Subject(
        roots=roots,
        files=sorted({str(file) for each in functions for file in each.files}),
        models={**({"policy.model.path": policy} if policy is not None else {}), **critic, **facts.scorers},
        base=str(facts.base.absolute()),
    )


def _modules(facts: RecipeFacts) -> Iterator[str]:
    """Yield the modules of the engine, of what writes the rows, and of an algorithm and what it brings."""
    recipe = facts.recipe
    if facts.resolved.has_policy and recipe.rollout.engine != NATIVE:
        yield facts.engine.__module__
    for writer in facts.resolved.writers.values():
        yield from writer.code.modules
    chosen = recipe.chosen
    for each in (chosen.step, chosen.score, chosen.config, type(chosen.data), *chosen.brings.values()):
        if inspect.isfunction(each) or isinstance(each, type):
            yield from _modules_of(each)


def _modules_of(value: Any) -> Iterator[str]:
    """Yield the module of a function or class; for one of the main program, the modules that it reads."""
    if value.__module__ != "__main__":
        yield value.__module__
        return
    methods = vars(value).values() if isinstance(value, type) else [value]
    for function in filter(inspect.isfunction, methods):
        for name in function.__code__.co_names:
            read = function.__globals__.get(name)
            if isinstance(read, ModuleType):
                yield read.__name__
            elif (inspect.isfunction(read) or isinstance(read, type)) and read.__module__ != "__main__":
                yield read.__module__
