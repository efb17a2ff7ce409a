"""Schedule: the learning rate of a run that is continued follows the schedule of its new length.

    starts of the run ─> steps of the run when ``anneal_updates`` was set ─┐
    algorithm.steps now ───────────────────────────────────────────────────┴─> anneal_updates, in proportion

A run of 4 steps that anneals over 4 updates anneals over 8 when it is continued to 8 steps. Exploration
stays where it ended: a share of random actions that rose again would undo what the policy has learnt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rillflow.config.schema import Section
from rillflow.runs.json_lines import JSON
from rillflow_classic.flat_learner import LearnerConfig

S = TypeVar("S", bound=Section)
ANNEAL = "anneal_updates"
"""Setting with the updates over which the learning rate falls to 0."""
STEPS = "algorithm.steps"
"""Setting with the length of a run."""
ADJUSTABLE = frozenset(
    {"lr", ANNEAL, "max_gradient_norm", "entropy_weight", "value_weight", "clip"}
    | {"epsilon_first", "epsilon_last", "epsilon_updates"}
)
"""Settings of learners that are read at every update, so that a resumed run may change them."""


@dataclass(frozen=True, kw_only=True)
class Stretched:
    """A schedule that follows the new length of a run."""

    setting: str
    """Dotted key of its ``anneal_updates``."""
    given: int
    """Value in the recipe."""
    updates: int
    """Updates over which the learning rate falls in this run."""
    for_steps: int
    """Length of the run that the recipe's value was given for."""

    def __str__(self) -> str:
        return (
            f"{self.setting} = {self.given:,} was given for {self.for_steps:,} steps: in this run, the "
            f"learning rate falls over {self.updates:,} updates"
        )


def adjustable(settings: Section, but: Collection[str] = (), prefix: str = "algorithm") -> Iterator[str]:
    """Yield the dotted keys of the settings of learners that a resumed run may change.

    Args:
        settings: settings of the algorithm.
        but: names that the members of a population choose themselves.
        prefix: dotted key of the section.
    """
    for name, value in settings:
        if isinstance(value, Section):
            yield from adjustable(value, but, f"{prefix}.{name}")
        elif name in ADJUSTABLE and name not in but:
            yield f"{prefix}.{name}"


def stretched(settings: Section, starts: Sequence[Mapping[str, JSON]], steps: int) -> list[Stretched]:
    """Return the schedules of a run whose length has changed since they were set.

    Args:
        settings: settings of the algorithm, as in the recipe.
        starts: starts of the run with their changes, this one included.
        steps: length of the run.
    """
    found = []
    for key, given in _annealed(settings):
        before = _steps_when_set(key, starts, steps)
        if given and before != steps:
            updates = max(1, round(given * steps / before))
            found.append(Stretched(setting=key, given=given, updates=updates, for_steps=before))
    return found


def with_schedules(settings: S, schedules: Sequence[Stretched], prefix: str = "algorithm") -> S:
    """Return settings with the updates of these schedules."""
    updates = {each.setting: each.updates for each in schedules}
    inner: dict[str, Any] = {}
    for name, value in settings:
        if isinstance(value, Section):
            inner[name] = with_schedules(value, schedules, f"{prefix}.{name}")
        elif f"{prefix}.{name}" in updates:
            inner[name] = updates[f"{prefix}.{name}"]
    return settings.model_copy(update=inner)


def spent(settings: Section, versions: Mapping[str, int], step: int, steps: int) -> str:
    """Return a note on schedules that are over while steps remain; empty if there is none.

    Args:
        settings: settings of the algorithm.
        versions: updates so far by policy.
        step: steps so far.
        steps: length of the run.
    """
    over, remaining = [], steps - step
    for key, updates in _annealed(settings):
        *_, section, _ = key.split(".")
        version = versions[section] if section in versions else max(versions.values(), default=0)
        if 0 < updates <= version:
            over.append(f"{key}={math.ceil(version * steps / step)}")
    if not over or remaining < 1:
        return ""
    return (
        f"the learning rate is 0 from here on; steps that remain and change no weight: {remaining:,}. "
        f"Stop the run, and resume it with --set {' --set '.join(over)} to learn in them"
    )


def _annealed(settings: Section, prefix: str = "algorithm") -> Iterator[tuple[str, int]]:
    """Yield dotted key and value of every ``anneal_updates``."""
    for name, value in settings:
        if isinstance(value, Section):
            yield from _annealed(value, f"{prefix}.{name}")
        elif name == ANNEAL and isinstance(settings, LearnerConfig):
            yield f"{prefix}.{name}", value


def _steps_when_set(key: str, starts: Sequence[Mapping[str, JSON]], steps: int) -> int:
    """Return the length of the run at the start that set a key last."""
    for start in reversed(starts):
        changes: Any = start.get("changes", [])
        old = {each["key"]: each["old"] for each in changes}
        if key in old:
            break
        steps = old.get(STEPS, steps)
    return steps
