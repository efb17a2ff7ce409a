"""Vector environment: many slots that step together, behind one interface for every provider.

gymnasium, one after the other ──┐
gymnasium, in processes ─────────┼─ VectorEnvironment ── reset, step ──> actor
EnvPool ─────────────────────────┤
multi-agent environments ────────┘

An agent of a multi-agent environment that ends before the others repeats its last observation with reward 0
and ``truncated`` at every step, until all have ended and the environment resets. So every row after the end
is a row after an end, which is no experience.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rillflow.errors import ConfigError, RillflowError
from rillflow_classic.fragment import Array, FinishedEpisode

Space = gymnasium.Space[Any]


class EnvironmentFailure(RillflowError):
    """An environment that raised, hung, died, or returned something wrong."""


@dataclass(frozen=True, kw_only=True)
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

    def arrays(self) -> dict[str, Array]:
        """Return its four arrays by name."""
        return {name: value for name, value in vars(self).items() if name != "episodes"}


class VectorEnvironment(Protocol):
    """Slots that step together; after an end, a slot resets at the next step and ignores its action."""

    num_slots: int
    """Number of slots N."""
    agents: Sequence[str]
    """[N] name of the agent of every slot; empty texts in a single-agent environment."""
    observation_space: gymnasium.Space  # type: ignore[type-arg]
    """Space of one slot's observation."""
    action_space: gymnasium.Space  # type: ignore[type-arg]
    """Space of one slot's action."""

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; the same seed gives the same episodes. Returns [N, ...]."""

    def step(self, actions: Array) -> Stepped:
        """Step every slot with its action [N] or [N, A].

        Raises:
            EnvironmentFailure: an environment raised, hung, died, or returned something wrong.
        """

    def render(self, slot: int) -> Array | None:  # noqa: ARG002
        """Return a frame [H, W, 3] uint8 of a slot; None if the environment shows nothing."""
        return None

    def state(self) -> Mapping[str, Array]:
        """Return the running statistics by name; empty without normalisation."""
        return {}

    def restore(self, state: Mapping[str, Array], *, frozen: bool = False) -> None:  # noqa: ARG002
        """Restore what ``state`` returned; frozen statistics change no more, as evaluation needs them."""
        return

    def close(self) -> None:
        """End all environments and their processes."""
        return


class SlotsBase(VectorEnvironment):
    """Base of all providers: checks actions and results, and counts episodes.

    Args:
        agents: name of the agent of every slot.
        observation_space: space of one slot's observation.
        action_space: space of one slot's action; both are of ``array_space``.
        first: number of the first slot, for errors and episodes.
    """

    def __init__(
        self, agents: Sequence[str], observation_space: Space, action_space: Space, first: int = 0
    ) -> None:
        self.agents, self.num_slots, self._first = agents, len(agents), first
        self.observation_space, self.action_space = observation_space, action_space
        self._is_real = np.issubdtype(observation_space.dtype, np.floating)
        self._totals, self._steps = np.zeros(self.num_slots), 0
        self._starts = np.ones(self.num_slots, np.int64)  # the first step only resets
        self._low: Any
        self._high: Any
        if isinstance(action_space, gymnasium.spaces.Box):
            self._low, self._high, self._kinds = action_space.low, action_space.high, "fiu"
        else:
            self._low, self._high, self._kinds = 0, int(action_space.n) - 1, "iu"  # type: ignore[attr-defined]

    def _begun(self) -> None:
        """Forget all episodes: every slot has reset."""
        self._totals[:], self._starts[:] = 0.0, self._steps

    def _checked(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return the actions to take, in the space's dtype; continuous ones are clipped to their bounds.

        Raises:
            EnvironmentFailure: wrong shape or dtype, an action outside a Discrete space, or NaN.
        """
        shape = (self.num_slots, *(self.action_space.shape or ()))
        if actions.shape != shape or actions.dtype.kind not in self._kinds:
            raise EnvironmentFailure(
                f"the actions are {actions.dtype} {list(actions.shape)}",
                why=f"actions of {self.action_space} for all slots have the shape {list(shape)}",
                fix="use a policy made for this action space",
            )
        if self._kinds == "iu":
            inside = actions.astype(np.uint64) <= self._high  # a negative number becomes a large one
        else:
            actions = np.minimum(np.maximum(actions, self._low), self._high)  # faster than np.clip
            inside = actions <= self._high  # not NaN
        if np.count_nonzero(inside) < inside.size:
            slot = int(np.argwhere(~inside)[0][0])
            what = f"the action of slot {self._first + slot} is {actions[slot]}"
            why = f"it is outside {self.action_space}"
            raise EnvironmentFailure(what, why=why, fix="use a policy made for this action space")
        return actions.astype(self.action_space.dtype, copy=False)

    def _stepped(
        self, observations: Array, rewards: Array, terminated: Array, truncated: Array, ended: Array
    ) -> Stepped:
        """Check the results of a step and return them, with the episodes that ended in it.

        Raises:
            EnvironmentFailure: an observation or a reward is NaN or infinite.
        """
        if self._is_real and not math.isfinite(np.add.reduce(observations, axis=None)):
            self._require_finite(observations, "observation")
        self._totals += rewards
        self._steps += 1
        if not math.isfinite(self._totals.dot(self._totals)):
            self._require_finite(rewards, "reward")
        episodes: Sequence[FinishedEpisode] = ()
        if np.count_nonzero(ended):  # a tenth of the time of any()
            slots = ended.nonzero()[0]
            lengths = self._steps - self._starts[slots]
            episodes = tuple(
                FinishedEpisode(total_reward=total, length=length, slot=self._first + slot)
                for slot, total, length in zip(
                    slots.tolist(), self._totals[slots].tolist(), lengths.tolist(), strict=True
                )
                if length > 0
            )
            self._totals[slots], self._starts[slots] = 0.0, self._steps + 1
        return Stepped(
            observations=observations,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            episodes=episodes,
        )

    def _require_finite(self, values: Array, what: str) -> None:
        """Raise EnvironmentFailure that names the first slot whose values [N, ...] are NaN or infinite."""
        for slot, *rest in np.argwhere(~np.isfinite(values))[:1].tolist():
            place = f" at {rest}" if rest else ""
            value = values[(slot, *rest)]
            raise EnvironmentFailure(
                f"the environment of slot {self._first + slot} returned the {what} {value}{place}",
                why="a network cannot learn from NaN or infinity",
                fix="return finite numbers; look for a division by zero or a diverged simulation",
            )


def array_space(space: Space, what: str) -> Space:
    """Return a space whose values are one array; float64 becomes float32.

    Raises:
        ConfigError: the space is another one than a Box, or a Discrete from 0 on; ``what`` names it.
    """
    if isinstance(space, gymnasium.spaces.Box) and space.dtype == np.float64:
        with np.errstate(over="ignore"):
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        return gymnasium.spaces.Box(low, high, dtype=np.float32)
    is_discrete = isinstance(space, gymnasium.spaces.Discrete) and space.start == 0
    if is_discrete or isinstance(space, gymnasium.spaces.Box):
        return space
    raise ConfigError(
        f"{what} are {space}",
        why="an observation or an action is one array of a Box, or a number of a Discrete from 0 on",
        fix="wrap the environment, for example with gymnasium.wrappers.FlattenObservation, in a class",
    )
