"""Inline environments: lanes that step one after the other in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rillflow_classic.environments.actions import ActionCheck
from rillflow_classic.environments.lanes import Lane, Rows
from rillflow_classic.environments.vector import EpisodeTotals, Space, Stepped, check_finite
from rillflow_classic.fragment import Array


class LaneGroup:
    """Lanes of equal spaces that write adjacent rows.

    Args:
        lanes: the environments.
        first: index of the first one among all of the vector environment; seeds depend on it.
    """

    def __init__(self, lanes: Sequence[Lane], first: int = 0) -> None:
        self._lanes, self._first = lanes, first
        self._width = len(lanes[0].agents)

    def split(self, rows: Rows) -> list[Rows]:
        """Return the rows of each lane, as views."""
        return [rows.part(index * self._width, self._width) for index in range(len(self._lanes))]

    def begin(self, seed: int, rows: Sequence[Rows]) -> None:
        """Begin a new episode in every lane."""
        for index, lane in enumerate(self._lanes):
            lane.begin(lane_seed(seed, self._first + index), rows[index])

    def step(self, actions: Array, rows: Sequence[Rows]) -> None:
        """Step every lane."""
        listed = actions.tolist() if actions.ndim == 1 else list(actions)
        for index, lane in enumerate(self._lanes):
            lane.step(listed[index * self._width : (index + 1) * self._width], rows[index])

    def render(self, slot: int) -> Array | None:
        """Return a frame of a slot's environment."""
        return self._lanes[slot // self._width].render()

    def close(self) -> None:
        """End all environments."""
        for lane in self._lanes:
            lane.close()


def lane_seed(seed: int, lane: int) -> int:
    """Return the seed of one environment, from the seed of all and its index."""
    return int(np.random.SeedSequence([seed % 2**63, lane]).generate_state(1)[0] >> 1)


class LaneResult:
    """Turns written rows into ``Stepped``, with the episodes that ended."""

    def __init__(self, space: Space, num_slots: int) -> None:
        self.totals = EpisodeTotals(num_slots)
        self._is_real = np.issubdtype(space.dtype, np.floating)

    def read(self, rows: Rows) -> Stepped:
        """Check rows and return them."""
        if self._is_real and not np.isfinite(np.add.reduce(rows.observations, axis=None)):
            check_finite(rows.observations, "observation")
        ended = rows.terminated | rows.truncated
        return Stepped(
            observations=rows.observations,
            rewards=rows.rewards,
            terminated=rows.terminated,
            truncated=rows.truncated,
            episodes=self.totals.add(rows.rewards, ended),
        )


class InlineEnvironment:
    """Slots of lanes in this process.

    Args:
        lanes: environments of equal spaces.
        clip: whether continuous actions are clipped to their bounds.
    """

    def __init__(self, lanes: Sequence[Lane], *, clip: bool = True) -> None:
        self.agents: Sequence[str] = tuple(agent for lane in lanes for agent in lane.agents)
        self.num_slots = len(self.agents)
        self.observation_space = lanes[0].observation_space
        self.action_space = lanes[0].action_space
        self._group = LaneGroup(lanes)
        self._rows = Rows.zeros(self.observation_space, self.num_slots)
        self._parts = self._group.split(self._rows)
        self._check = ActionCheck(self.action_space, self.num_slots, clip=clip)
        self._result = LaneResult(self.observation_space, self.num_slots)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._result.totals.clear()
        self._group.begin(seed, self._parts)
        return self._rows.observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        self._group.step(self._check(actions), self._parts)
        return self._result.read(self._rows)

    def render(self, slot: int) -> Array | None:
        """Return a frame of a slot's environment."""
        return self._group.render(slot)

    def state(self) -> Mapping[str, Array]:
        """Return no statistics."""
        return {}

    def restore(self, state: Mapping[str, Array], *, frozen: bool = False) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End all environments."""
        self._group.close()
