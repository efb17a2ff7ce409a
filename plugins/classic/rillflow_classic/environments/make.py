"""Make the environments of a recipe.

config ─> catalog: who has the id ─> choose: inline or processes ─> slots ─> wrappers ─> VectorEnvironment
"""

from __future__ import annotations

import logging
import math
import os
from itertools import cycle
from timeit import Timer

import numpy as np

from rillflow.errors import ConfigError
from rillflow_classic.environments.catalog import (
    ATARI,
    CatalogEntry,
    find,
    gymnasium_ids,
    make_lane,
    make_lanes,
)
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.copies import Copies
from rillflow_classic.environments.envpool_adapter import EnvPoolEnvironment
from rillflow_classic.environments.lanes import InlineEnvironment, Lane
from rillflow_classic.environments.preprocessing import Preprocessing
from rillflow_classic.environments.processes import ProcessEnvironment, num_cores
from rillflow_classic.environments.vector import VectorEnvironment

_log = logging.getLogger(__name__)

ROUND_TRIP_S = 40e-6
"""Time that each child process adds to a step of all slots, in seconds."""
ATARI_FRAMES = 4
"""Observations in each one for Atari."""
_GAIN = 0.9


def choose(config: EnvironmentSettings, entry: CatalogEntry, copies: Copies) -> str:
    """Return ``inline`` or ``processes``: the setting, or the faster one by the measured time of a step.

    Inline, a step of N environments takes N t. In P processes it takes ceil(N / P) t and P round trips.
    Processes are chosen if they save a tenth.
    """
    num_environments = copies.count
    count = min(config.processes or num_cores(), num_cores(), num_environments)
    if config.run != "auto" or count < 2:
        return "inline" if config.run == "auto" else config.run
    step_s = measured_step_s(make_lane(config, entry, copies.first))
    inline_s = num_environments * step_s
    processes_s = math.ceil(num_environments / count) * step_s + count * ROUND_TRIP_S
    run = "processes" if processes_s < _GAIN * inline_s else "inline"
    said = "%s runs %s: %d environments step in about %.0f us inline and %.0f us in %d processes"
    _log.info(said, config.id, run, num_environments, inline_s * 1e6, processes_s * 1e6, count)
    return run


def measured_step_s(lane: Lane) -> float:
    """Return the mean time of a step with random actions, resets included; close the environment."""
    environment = InlineEnvironment([lane])
    lane.action_space.seed(0)
    actions = cycle([np.stack([lane.action_space.sample() for _ in lane.agents]) for _ in range(16)])
    try:
        environment.begin(0)
        steps, elapsed_s = Timer(lambda: environment.advance(next(actions))).autorange()  # at least 0.2 s
    finally:
        environment.close()
    return elapsed_s / steps


def make_environment(
    config: EnvironmentSettings,
    num_environments: int,
    *,
    seed: int = 0,
    copy: int = 0,
    most_steps: int = 0,
) -> VectorEnvironment:
    """Make environments that step together, and begin their episodes.

    Args:
        config: settings of the environment.
        num_environments: number of environments; each has one slot, or one for each of its agents.
        seed: seed of the first episodes; ``reset`` begins others.
        copy: number of the first environment among all of the run, for ``environment.arguments``.
        most_steps: steps after which an episode is truncated, also if its own limit is higher; 0: never.

    Raises:
        ConfigError: the id, the arguments or the number cannot be used.
        EnvironmentFailure: the first reset failed.
    """
    if num_environments < 1:
        what = f"an actor has {num_environments} environments"
        raise ConfigError(what, why="it steps at least one", fix="set at least 1")
    environment = _made(config, find(config), Copies(num_environments, copy, most_steps))
    return _begun(environment, seed)


def make_video_environment(config: EnvironmentSettings, *, seed: int = 0, copy: int = 0) -> VectorEnvironment:
    """Make one environment that renders frames, with the same observations and actions.

    EnvPool renders Atari itself; for its other ids, Gymnasium's environment of the same id is taken.

    Raises:
        RillflowError: it cannot be made; graphics often lack what they need.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws without a display, and says nothing
    shown, entry = config.model_copy(update={"run": "inline"}), find(config)
    if entry.provider == "envpool" and entry.name in gymnasium_ids():
        entry = CatalogEntry(provider="gymnasium", name=entry.name)
    return _begun(_made(shown, entry, Copies(1, copy, 0), shows=True), seed)


def _begun(environment: VectorEnvironment, seed: int) -> VectorEnvironment:
    """Begin the first episodes; close the environment if it fails."""
    try:
        environment.reset(seed)
    except BaseException:
        environment.close()
        raise
    return environment


def _made(
    config: EnvironmentSettings, entry: CatalogEntry, copies: Copies, *, shows: bool = False
) -> VectorEnvironment:
    """Make the environments and what changes their observations and rewards."""
    environment: VectorEnvironment
    frames = config.frame_stack or (ATARI_FRAMES if entry.name.startswith(ATARI) else 1)
    if entry.provider == "envpool":
        environment = pool = EnvPoolEnvironment(entry.name, config, copies, shows=shows)
        frames = 1 if pool.stacks else frames
    elif choose(config, entry, copies) == "processes":
        environment = ProcessEnvironment(config, make_lane(config, entry, copies.first), copies)
    else:
        environment = InlineEnvironment(make_lanes(config, entry, copies, shows=shows))
    if copies.first:
        environment.accept_bounds()
    if config.normalise_rewards or config.normalise_observations or config.clip_rewards or frames > 1:
        space, slots = environment.observation_space, environment.num_slots
        environment.preprocess(Preprocessing(config, frames, slots, space))
    return environment
