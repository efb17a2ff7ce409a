"""Make the environments of a recipe.

config ─> catalog: who has the id ─> choose: inline or processes ─> slots ─> wrappers ─> VectorEnvironment
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass

import numpy as np

from rillflow.errors import ConfigError
from rillflow_classic.environments.catalog import ATARI, CatalogEntry, find, gymnasium_ids, make_lane
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.envpool_adapter import EnvPoolEnvironment
from rillflow_classic.environments.lanes import InlineEnvironment, Lane
from rillflow_classic.environments.processes import ProcessEnvironment, num_cores
from rillflow_classic.environments.vector import VectorEnvironment
from rillflow_classic.environments.wrappers import FrameStack, ObservationScale, RewardClip, RewardScale

_log = logging.getLogger(__name__)

ROUND_TRIP_S = 40e-6
"""Time that each child process adds to a step of all slots, in seconds."""
ATARI_FRAMES = 4
"""Observations in each one for Atari."""
_BUDGET_S, _MOST_STEPS, _GAIN = 0.1, 500, 0.9


@dataclass(frozen=True, kw_only=True)
class EnvironmentChoice:
    """Who provides an environment, and where its slots run."""

    config: EnvironmentSettings
    """The settings with provider and run chosen; environments made from them measure nothing again."""
    step_time_s: float | None = None
    """Measured time of a step of one environment; None if it was not measured."""
    reason: str
    """Sentence for the run's report."""


def choose(
    config: EnvironmentSettings, num_environments: int, *, cores: int | None = None
) -> EnvironmentChoice:
    """Choose the provider, and inline or processes by the measured time of a step.

    Inline, a step of N environments takes N t. In P processes it takes ceil(N / P) t and P round trips.
    Processes are chosen if they save a tenth.

    Args:
        config: settings of the environment.
        num_environments: number of environments of one actor.
        cores: cores that one actor may use; None: all of this process.

    Raises:
        ConfigError: see ``make_environment``.
    """
    entry = find(config)
    cores = cores or num_cores()
    if entry.provider == "envpool":
        chosen = config.model_copy(update={"provider": "envpool"})
        return EnvironmentChoice(config=chosen, reason=f"EnvPool has {entry.name!r} and threads of its own")
    chosen = config.model_copy(update={"provider": entry.provider})
    if config.run != "auto":
        return EnvironmentChoice(config=chosen, reason=f"environment.run is {config.run!r}")
    count = min(config.processes or cores, cores, num_environments)
    if count < 2:
        chosen = chosen.model_copy(update={"run": "inline"})
        return EnvironmentChoice(config=chosen, reason="inline: there is one core, or one environment")
    step_s = measured_step_s(make_lane(config, entry))
    inline_s = num_environments * step_s
    processes_s = math.ceil(num_environments / count) * step_s + count * ROUND_TRIP_S
    run = "processes" if processes_s < _GAIN * inline_s else "inline"
    return EnvironmentChoice(
        config=chosen.model_copy(update={"run": run}),
        step_time_s=step_s,
        reason=f"{run}: a step of one environment takes {step_s * 1e6:.0f} us, and a step of all "
        f"{num_environments} takes about {inline_s * 1e6:.0f} us inline or {processes_s * 1e6:.0f} us in "
        f"{count} processes",
    )


def measured_step_s(lane: Lane) -> float:
    """Return the mean time of a step with random actions, resets included; close the environment."""
    environment, steps = InlineEnvironment([lane]), 0
    lane.action_space.seed(0)
    actions = [np.stack([lane.action_space.sample() for _ in lane.agents]) for _ in range(16)]
    environment.reset(0)
    environment.step(actions[0])
    start = time.perf_counter()
    while steps < _MOST_STEPS and (steps < 1 or time.perf_counter() - start < _BUDGET_S):
        environment.step(actions[steps % len(actions)])
        steps += 1
    elapsed = time.perf_counter() - start
    environment.close()
    return elapsed / steps


def make_environment(
    config: EnvironmentSettings, num_environments: int, *, seed: int = 0
) -> VectorEnvironment:
    """Make environments that step together, and begin their episodes.

    Args:
        config: settings of the environment.
        num_environments: number of environments; each has one slot, or one for each of its agents.
        seed: seed of the first episodes; ``reset`` begins others.

    Raises:
        ConfigError: the id, the arguments or the number cannot be used.
        EnvironmentFailure: the first reset failed.
    """
    if num_environments < 1:
        what = f"an actor has {num_environments} environments"
        raise ConfigError(what, why="it steps at least one", fix="set at least 1")
    config = choose(config, num_environments).config
    entry = find(config)
    if entry.provider == "envpool":
        environment: VectorEnvironment = EnvPoolEnvironment(entry.name, config, num_environments)
    elif config.run == "processes":
        probe = make_lane(config, entry)
        probe.close()
        environment = ProcessEnvironment(config, probe, num_environments)
    else:
        lanes = [make_lane(config, entry) for _ in range(num_environments)]
        environment = InlineEnvironment(lanes, clip=config.clip_actions)
    environment = _wrapped(environment, config, entry)
    environment.reset(seed)
    return environment


def make_video_environment(config: EnvironmentSettings, *, seed: int = 0) -> VectorEnvironment:
    """Make one environment that renders frames, with the same observations and actions.

    EnvPool renders Atari itself; for its other ids, Gymnasium's environment of the same id is taken. Where
    frames cannot be drawn, the environment renders None and a warning says why.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws without a display, and says nothing
    entry = find(config)
    shown = config
    try:
        if entry.provider == "envpool" and entry.name in gymnasium_ids():
            shown = config.model_copy(update={"provider": "gymnasium"})
            entry = find(shown)
        inner: VectorEnvironment = (
            EnvPoolEnvironment(entry.name, shown, 1, shows=True)
            if entry.provider == "envpool"
            else InlineEnvironment([make_lane(shown, entry, shows=True)], clip=config.clip_actions)
        )
        environment = _wrapped(inner, shown, entry)
        environment.reset(seed)
        environment.render(0)
    except Exception as error:  # noqa: BLE001  graphics may raise anything, and a video must not end a run
        _log.warning("%s shows no frames: %s", config.id, error)
        return make_environment(config.model_copy(update={"run": "inline"}), 1, seed=seed)
    return environment


def _wrapped(
    environment: VectorEnvironment, config: EnvironmentSettings, entry: CatalogEntry
) -> VectorEnvironment:
    if config.normalise_rewards:
        environment = RewardScale(environment, config.reward_discount)
    if config.clip_rewards:
        environment = RewardClip(environment)
    if config.normalise_observations:
        environment = ObservationScale(environment)
    is_stacked = isinstance(environment, EnvPoolEnvironment) and environment.stacks
    frames = config.frame_stack or (ATARI_FRAMES if entry.name.startswith(ATARI) else 1)
    return FrameStack(environment, frames) if frames > 1 and not is_stacked else environment
