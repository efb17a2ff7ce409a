"""Inline environments: lanes that step one after the other in this process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rillflow_classic.environments.lanes import Lane, LaneGroup, Rows
from rillflow_classic.environments.spaces import ActionCheck
from rillflow_classic.environments.vector import EpisodeTotals, Slots, Stepped, check_finite
from rillflow_classic.fragment import Array


class LaneSlots(Slots):
    """Base of environments made of lanes, here or in processes.

    Args:
        lane: one of them.
        num_lanes: number of lanes.
        clip: whether continuous actions are clipped to their bounds.
    """

    def __init__(self, lane: Lane, num_lanes: int, *, clip: bool) -> None:
        super().__init__(tuple(lane.agents) * num_lanes, lane.observation_space, lane.action_space)
        self._check = ActionCheck(self.action_space, self.num_slots, clip=clip)
        self._totals = EpisodeTotals(self.num_slots)
        self._is_real = np.issubdtype(self.observation_space.dtype, np.floating)

    def _stepped(self, rows: Rows) -> Stepped:
        """Check rows that were written and return them, with the episodes that ended."""
        if self._is_real and not np.isfinite(np.add.reduce(rows.observations, axis=None)):
            check_finite(rows.observations, "observation")
        episodes = self._totals.add(rows.rewards, rows.terminated | rows.truncated)
        return Stepped(**vars(rows), episodes=episodes)


def zero_rows(lane: Lane, num_slots: int) -> Rows:
    """Return rows for a lane's observations."""
    space = lane.observation_space
    return Rows(
        observations=np.zeros((num_slots, *(space.shape or ())), space.dtype),
        rewards=np.zeros(num_slots, np.float32),
        terminated=np.zeros(num_slots, bool),
        truncated=np.zeros(num_slots, bool),
    )


class InlineEnvironment(LaneSlots):
    """Slots of lanes in this process.

    Args:
        lanes: environments of equal spaces.
        clip: whether continuous actions are clipped to their bounds.
    """

    def __init__(self, lanes: Sequence[Lane], *, clip: bool = True) -> None:
        super().__init__(lanes[0], len(lanes), clip=clip)
        self._group, self._rows = LaneGroup(lanes), zero_rows(lanes[0], self.num_slots)
        self._parts = self._group.split(self._rows)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._totals.clear()
        self._group.begin(seed, self._parts)
        return self._rows.observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        self._group.step(self._check(actions), self._parts)
        return self._stepped(self._rows)

    def render(self, slot: int) -> Array | None:
        """Return a frame of a slot's environment."""
        return self._group.lanes[slot * len(self._group.lanes) // self.num_slots].render()

    def close(self) -> None:
        """End all environments."""
        for lane in self._group.lanes:
            lane.close()
