"""Vector environment: many slots that step together, behind one interface for every provider.

    actions ── check ──> advance: lanes here or in processes, EnvPool ── check, count, preprocess ──> actor

An agent of a multi-agent environment that ends before the others repeats its last observation with reward 0
and ``truncated`` at every step, until it returns or all have ended and the environment resets. So every row
after the end is a row after an end, which is no experience, and a return is the same as a reset.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rillflow.errors import ConfigError, RillflowError
from rillflow_classic.environments.actions import within
from rillflow_classic.fragment import Array, FinishedEpisode

if TYPE_CHECKING:
    from rillflow_classic.environments.preprocessing import Preprocessing

Space = gymnasium.Space[Any]
_log = logging.getLogger(__name__)
_BOUNDED_STEPS = 1000
"""Steps in which observations are compared with their bounds."""


class EnvironmentFailure(RillflowError):
    """An environment that raised, hung, died, or returned something wrong."""


@dataclass(kw_only=True, slots=True)  # a frozen one takes 1.5 us more to make, in every step
class Stepped:
    """Result of one step of every slot. Arrays may be overwritten by the next step."""

    observations: NDArray[Any]
    """[N, ...] the observation after the step; after an episode's end, its last one."""
    rewards: NDArray[np.float32]
    """[N] float32; 0 for a reset."""
    terminated: NDArray[np.bool_]
    """[N] bool: the environment ended the episode."""
    truncated: NDArray[np.bool_]
    """[N] bool: a limit cut the episode. Both may be set."""
    episodes: Sequence[FinishedEpisode] = ()
    """Episodes that ended in this step."""


class VectorEnvironment(ABC):
    """Slots that step together; after an end, a slot resets at the next step and ignores its action.

    Base of all providers, which implement ``begin`` and ``advance``.

    Args:
        agents: [N] name of the agent of every slot; empty texts in a single-agent environment.
        observation_space: space of one slot's observation.
        action_space: space of one slot's action; both are of ``array_space``.
    """

    def __init__(self, agents: Sequence[str], observation_space: Space, action_space: Space) -> None:
        self.agents, self.num_slots = agents, len(agents)
        self.observation_space, self.action_space = observation_space, action_space
        self.plain_space, self.own_spaces = observation_space, (observation_space, action_space)
        """Space of an observation before ``preprocess``; spaces of the environment itself."""
        self.absent = np.zeros(self.num_slots, np.bool_)
        """[N] slots whose agent has not come after ``reset``: the next row is no experience."""
        self._is_real = np.issubdtype(observation_space.dtype, np.floating)
        self._totals, self._steps = np.zeros(self.num_slots), 0
        self._starts = np.ones(self.num_slots, np.int64)  # the first step only resets
        self._action_shape = (self.num_slots, *(action_space.shape or ()))
        self._preprocessing: Preprocessing | None = None
        self._bounded = _finite_bounds(observation_space)

    def preprocess(self, preprocessing: Preprocessing) -> None:
        """Change all observations and rewards from now on."""
        self._preprocessing, self.observation_space = preprocessing, preprocessing.observation_space

    def accept_bounds(self) -> None:
        """Warn no more of observations beyond their bounds, because another environment of the run does."""
        self._bounded = None

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; the same seed gives the same episodes. Returns [N, ...].

        Raises:
            EnvironmentFailure: an environment raised, hung, died, or returned NaN or another wrong value.
        """
        self._totals[:], self._starts[:] = 0.0, self._steps
        observations = self.begin(seed)
        self._starts[self.absent] += 1
        if self._is_real:
            _require_finite(observations, "observation")
        return self._preprocessing.first(observations, self.absent) if self._preprocessing else observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot with its action [N] or [N, A].

        Raises:
            EnvironmentFailure: an action is wrong, or an environment raised, hung, died, or returned NaN or
                another wrong value.
        """
        rows = self.advance(self._checked(actions))
        if self._is_real and not math.isfinite(np.add.reduce(rows.observations, axis=None)):
            _require_finite(rows.observations, "observation")
        self._totals += rows.rewards
        self._steps += 1
        if self._bounded is not None:
            self._warn_of_bounds(rows.observations, self._bounded)
        if not math.isfinite(self._totals.dot(self._totals)):
            _require_finite(rows.rewards, "reward")
        ended = rows.terminated | rows.truncated
        if np.count_nonzero(ended):  # a tenth of the time of any()
            rows = replace(rows, episodes=self._finished(ended.nonzero()[0]))
        return self._preprocessing.changed(rows, ended) if self._preprocessing else rows

    @abstractmethod
    def begin(self, seed: int) -> Array:
        """Begin a new episode in every slot and return its first observation, [N, ...]."""

    @abstractmethod
    def advance(self, actions: Array) -> Stepped:
        """Step every slot with actions that are checked; the results are not, and lack the episodes."""

    def render(self, slot: int) -> Array | None:  # noqa: ARG002
        """Return a frame [H, W, 3] uint8 of a slot; None if the environment shows nothing."""
        return None

    def state(self) -> Mapping[str, Array]:
        """Return the running statistics by name; empty without normalisation."""
        return self._preprocessing.state() if self._preprocessing else {}

    def restore(self, state: Mapping[str, Array], *, frozen: bool = False) -> None:
        """Restore what ``state`` returned; frozen statistics change no more, as evaluation needs them."""
        if self._preprocessing:
            self._preprocessing.restore(state, frozen=frozen)

    def close(self) -> None:  # noqa: B027  most have nothing to end
        """End all environments and their processes."""

    def _warn_of_bounds(self, observations: NDArray[Any], bounds: gymnasium.spaces.Box) -> None:
        """Warn of the first observation beyond its bounds; look for one in the first steps only."""
        outside = (observations < bounds.low) | (observations > bounds.high)
        if self._steps >= _BOUNDED_STEPS or np.count_nonzero(outside):
            self._bounded = None
        for slot, *place in np.argwhere(outside)[:1].tolist():
            value, where = observations[(slot, *place)], f" at {place}"
            said = "the environment of slot %d returned the observation %s%s in step %d, outside its space %s"
            _log.warning(said, slot, value, where, self._steps, bounds)

    def _finished(self, slots: NDArray[np.int64]) -> Sequence[FinishedEpisode]:
        """Return the episodes that ended in some slots, and count from new; a reset is no episode."""
        ends = slots.tolist(), self._totals[slots].tolist(), (self._steps - self._starts[slots]).tolist()
        self._totals[slots], self._starts[slots] = 0.0, self._steps + 1
        return [
            FinishedEpisode(total_reward=total, length=length, slot=slot)
            for slot, total, length in zip(*ends, strict=True)
            if length > 0
        ]

    def _checked(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return the actions to take, in the space's dtype; continuous ones are clipped to their bounds.

        Raises:
            EnvironmentFailure: wrong shape or dtype, an action outside a Discrete space, NaN or infinity.
        """
        space: Any = self.action_space
        is_box = isinstance(space, gymnasium.spaces.Box)
        if actions.shape != self._action_shape or actions.dtype.kind not in ("fiu" if is_box else "iu"):
            raise _refused(
                f"the actions are {actions.dtype} {list(actions.shape)}",
                f"actions of {space} for all slots have the shape {list(self._action_shape)}",
            )
        if is_box:
            actions = within(space, actions)
            inside = np.isfinite(actions)
        else:
            inside = actions.astype(np.uint64) < space.n  # a negative number becomes a large one
        if np.count_nonzero(inside) < inside.size:
            slot = int(np.argwhere(~inside)[0][0])
            raise _refused(f"the action of slot {slot} is {actions[slot]}", f"it is outside {space}")
        return actions.astype(space.dtype, copy=False)


def _finite_bounds(space: Space) -> gymnasium.spaces.Box | None:
    """Return a Box that has a bound which its dtype does not have by itself; None for other spaces."""
    if not isinstance(space, gymnasium.spaces.Box):
        return None
    least, most = -np.inf, np.inf
    if np.issubdtype(space.dtype, np.integer):
        kind: Any = np.iinfo(space.dtype)
        least, most = kind.min, kind.max
    return space if (space.low > least).any() or (space.high < most).any() else None


def _refused(what: str, why: str) -> EnvironmentFailure:
    return EnvironmentFailure(what, why=why, fix="use a policy made for this action space")


def _require_finite(values: Array, what: str) -> None:
    """Raise EnvironmentFailure that names the first slot whose values [N, ...] are NaN or infinite."""
    for slot, *rest in np.argwhere(~np.isfinite(values))[:1].tolist():
        value, place = values[(slot, *rest)], f" at {rest}" if rest else ""
        raise EnvironmentFailure(
            f"the environment of slot {slot} returned the {what} {value}{place}",
            why="a network cannot learn from NaN or infinity",
            fix="return finite numbers; look for a division by zero or a diverged simulation",
        )


def array_space(space: Space, what: str) -> Space:
    """Return a space of observations that are one array.

    A Box of larger floats becomes float32, one number becomes a vector of it, and a Discrete begins at 0.

    Raises:
        ConfigError: the space is neither a Box nor a Discrete; ``what`` names it.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        return gymnasium.spaces.Discrete(int(space.n)) if space.start else space
    if isinstance(space, gymnasium.spaces.Box):
        is_large = space.dtype.kind == "f" and space.dtype.itemsize > np.dtype(np.float32).itemsize
        if not is_large and space.shape:
            return space
        dtype: Any = np.float32 if is_large else space.dtype
        with np.errstate(over="ignore"):
            low, high = (np.atleast_1d(each.astype(dtype)) for each in (space.low, space.high))
        return gymnasium.spaces.Box(low, high, dtype=dtype)
    raise ConfigError(
        f"{what} are {space}",
        why="an observation is an array of a Box, a number of a Discrete, or made of such parts",
        fix="wrap the environment in a class of your own whose observation_space is one of these",
    )
