"""Replay buffer: keep fragments as transitions of n steps, and draw batches of them.

    Fragment ─ add ─> ring of rows (one observation each) ─ sample ─> Transitions ─> Learner.update
                         ^                                                              │
                         └──────────────── set_priorities(serials, errors) ─────────────┘

A row is one slot at one step, and the rows of a fragment lie in the order of its steps. So a transition needs
no second observation: a draw follows its slot for n rows, to the end of the episode or of the fragment. Rows
are overwritten in the order of their serial numbers, so the successor lives longer than the transition. Rows
that only reset, and the bootstrap, are not ``valid``: they are never drawn, and every transition ends there.

If a fragment continues the last one that was added, it begins over that one's bootstrap, which is the same
observation, and transitions go on into it. Otherwise the last steps of a fragment have fewer than n rewards.

Uniform replay is prioritised replay with exponent 0: no tree, and every weight is 1.

Legend: T steps, N slots, B transitions of a batch, C rows of capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from rillflow.app.machine import available_memory
from rillflow.config.schema import Section
from rillflow.errors import ConfigError, RecordError
from rillflow.runs.formatting import size
from rillflow_classic.checkpointed import State
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.sum_tree import SumTree

A = TypeVar("A")
Space = gymnasium.Space[Any]
Serials = NDArray[np.int64]
LEAST_PRIORITY = 1e-6
"""Added to an error, so that a transition with error 0 can be drawn again."""
PRIORITY_BYTES = 9
"""Bytes of a row in the sum tree: its priority, and its part of the sums above."""
SEEN = ("chosen", "best")
"""Outputs of an actor that first priorities are made of: the value of its action, and the highest one."""


class ReplayConfig(Section):
    """Settings of a replay buffer."""

    capacity: int = Field(100_000, ge=1, description="Rows of the buffer: observations of one slot.")
    priority_exponent: float = Field(
        0.0, ge=0, le=1, description="Exponent of a priority, alpha; 0 draws uniformly, 0.6 is usual."
    )
    weight_exponent: float = Field(
        0.4, ge=0, le=1, description="Exponent of the importance weights, beta, of prioritised replay."
    )


@dataclass(frozen=True, kw_only=True)
class Transitions(Generic[A]):
    """A batch of transitions of n steps, as arrays or as tensors."""

    observations: A
    """[B, ...] observation before the first step."""
    actions: A
    """[B] int64, or [B, A] float32: action of the first step."""
    returns: A
    """[B] float32: discounted sum of the rewards of the steps."""
    discounts: A
    """[B] float32: factor of the successor's value; 0 if the environment ended the episode."""
    next_observations: A
    """[B, ...] observation after the last step."""
    weights: A
    """[B] float32: importance weights, the largest of the batch is 1."""
    serials: A
    """[B] serial numbers, for ``ReplayBuffer.set_priorities``."""


def row_type(config: ReplayConfig, observation: Space, action: Space) -> np.dtype[np.void]:
    """Return the type of a row: a step, and the way to the next row of its slot."""
    seen = SEEN if config.priority_exponent else ()
    numbers = [(name, np.float32, ()) for name in ("rewards", "discounts", *seen)]
    spaces = (("observations", observation), ("actions", action))
    arrays = [(name, each.dtype, each.shape or ()) for name, each in spaces]
    return np.dtype([*arrays, *numbers, ("strides", np.int32, ())], align=True)


class ReplayBuffer:
    """Rows of fragments, and batches of transitions drawn from them.

    Args:
        config: capacity and priorities.
        observation_space: space of one observation.
        action_space: space of one action.
        discount: discount of a reward one step later.
        num_steps: most steps of a transition, n.
        seed: seed of the draws.

    Raises:
        ConfigError: the machine lacks the memory.
    """

    def __init__(
        self,
        config: ReplayConfig,
        observation_space: Space,
        action_space: Space,
        *,
        discount: float,
        num_steps: int = 1,
        seed: int = 0,
    ) -> None:
        require_memory(config, observation_space, action_space)
        self._rows: Array = np.zeros(config.capacity, row_type(config, observation_space, action_space))
        self._tree = SumTree(config.capacity) if config.priority_exponent else None
        self._config, self._discount, self._num_steps = config, discount, num_steps
        self._random = np.random.default_rng(seed)
        self._count = 0  # serial number of the next row; its place is the serial number modulo the capacity
        self._largest = 1.0
        self._begun = 0  # serial number of the first row of fragments that continue each other
        self._last: tuple[int, str] | None = None  # actor and policy of the newest fragment
        self.num_transitions = 0
        """Number of transitions that can be drawn."""

    def add(self, fragment: Fragment) -> None:
        """Add the steps of a fragment, over the oldest rows.

        Raises:
            RecordError: the fragment has more rows than the buffer.
        """
        num_rows, num_slots = fragment.observations.shape[:2]
        capacity = self._config.capacity
        if num_rows * num_slots > capacity:
            raise RecordError(
                f"a fragment of {num_rows * num_slots} rows does not fit replay.capacity = {capacity}",
                why=f"it has {num_rows - 1} steps and a bootstrap of {num_slots} slots",
                fix="set a larger replay.capacity, or fewer workers.slots or workers.steps",
            )
        first, changed = self._count, self._count
        if self._continues(fragment):
            first -= num_slots
            changed = max(self._begun, first - num_slots * (self._num_steps - 1))
        else:
            self._begun = first
        places = np.arange(first, first + num_rows * num_slots) % capacity
        self._last, self._count = (fragment.actor, fragment.policy), first + len(places)
        self.num_transitions += fragment.num_steps - int(np.count_nonzero(self._rows["strides"][places]))
        self._rows[places] = self._rows_of(fragment).ravel()
        if self._tree is not None:
            self._set_first_priorities(np.arange(max(changed, self._count - capacity), self._count))

    def is_ready(self, starts: int) -> bool:
        """Return whether there are ``starts`` transitions, or no free rows."""
        return self.num_transitions >= starts or self._count >= self._config.capacity

    def sample(self, batch_size: int) -> Transitions[Array]:
        """Draw transitions, with replacement.

        Raises:
            RecordError: the buffer has fewer transitions than the batch.
        """
        if self.num_transitions < batch_size:
            raise RecordError(
                f"a batch of {batch_size} is larger than the {self.num_transitions} transitions kept",
                why="a batch would repeat the same transitions",
                fix="raise algorithm.learning_starts to algorithm.batch_size, or replay.capacity if full",
            )
        serials = self._draw(batch_size) if self._tree is None else self._draw_by_priority(batch_size)
        rows, places = self._rows, serials % self._config.capacity
        returns, discounts, following = self._followed(places)
        return Transitions(
            observations=rows["observations"][places],
            actions=rows["actions"][places],
            returns=returns,
            discounts=discounts,
            next_observations=rows["observations"][following],
            weights=self._weights(places),
            serials=serials,
        )

    def set_priorities(self, serials: Serials, errors: Array) -> None:
        """Make priorities of the errors [B] of drawn transitions; those overwritten since are left out."""
        if self._tree is None:
            return
        kept = serials >= self._count - self._config.capacity
        places = serials[kept] % self._config.capacity
        priorities = np.abs(errors[kept].astype(np.float64)) + LEAST_PRIORITY
        priorities **= self._config.priority_exponent
        self._tree.set(places, priorities)
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))

    def state(self) -> State:
        """Return everything a resumed run needs, with views of the rows so far.

        The next fragment is not taken as a continuation, because environments reset where a run may resume.
        """
        self._last = None
        rows = self._rows[: self._count]
        tensors = {name: torch.from_numpy(rows[name]) for name in rows.dtype.names or ()}
        state = {"rows": tensors, "count": self._count, "largest": self._largest}
        if self._tree is not None:
            state["priorities"] = torch.from_numpy(self._tree.leaves[: len(rows)])
        return {**state, "random": self._random.bit_generator.state}

    def restore(self, state: State) -> None:
        """Restore what ``state`` of a buffer of the same settings returned."""
        self._last = None
        self._count, self._largest = state["count"], state["largest"]
        self._random.bit_generator.state = state["random"]
        rows = self._rows[: self._count]
        for name, values in state["rows"].items():
            rows[name] = values.numpy()
        self.num_transitions = int(np.count_nonzero(rows["strides"]))
        if self._tree is not None:
            self._tree.set(np.arange(len(rows)), state["priorities"].numpy())

    def _continues(self, fragment: Fragment) -> bool:
        """Return whether a fragment begins where the newest one ended."""
        ends = np.arange(self._count - fragment.observations.shape[1], self._count) % self._config.capacity
        return self._last == (fragment.actor, fragment.policy) and np.array_equal(
            self._rows["observations"][ends], fragment.observations[0]
        )

    def _rows_of(self, fragment: Fragment) -> Array:
        """Return the rows [T + 1, N] of a fragment; those that are no step lead nowhere."""
        rows: Array = np.zeros(fragment.observations.shape[:2], self._rows.dtype)
        steps, is_step = rows[:-1], fragment.valid
        rows["observations"], rows["discounts"] = fragment.observations, 1.0
        steps["actions"], steps["rewards"] = fragment.actions, np.where(is_step, fragment.rewards, 0)
        steps["discounts"][is_step] = np.where(fragment.terminated[is_step], 0, self._discount)
        steps["strides"][is_step] = rows.shape[1]
        for name in SEEN if self._tree is not None else ():
            rows[name] = np.nan
            if name in fragment.outputs:
                steps[name] = fragment.outputs[name]
        return rows

    def _followed(self, places: Serials) -> tuple[Array, Array, Serials]:
        """Return r_t + g r_{t+1} + ... + g^{k-1} r_{t+k-1}, g^k, and the places of s_{t+k}, for k <= n.

        The discount is 0 where the environment terminated the episode. An episode that was truncated, or that
        goes on after the fragment, keeps g^k.
        """
        rows, capacity = self._rows, self._config.capacity
        returns, discounts = np.zeros(len(places), np.float32), np.ones(len(places), np.float32)
        for _ in range(self._num_steps):
            returns += discounts * rows["rewards"][places]
            discounts *= rows["discounts"][places]
            places = (places + rows["strides"][places]) % capacity
        return returns, discounts, places

    def _set_first_priorities(self, serials: Serials) -> None:
        """Set the priorities of new transitions: from the values that actors saw, or the largest so far."""
        assert self._tree is not None
        rows, places = self._rows, serials % self._config.capacity
        self._tree.set(places, np.where(rows["strides"][places] > 0, self._largest, 0.0))
        returns, discounts, following = self._followed(places)
        errors = returns + discounts * rows["best"][following] - rows["chosen"][places]
        known = (rows["strides"][places] > 0) & ~np.isnan(errors)  # NaN: no actor saw both observations
        self.set_priorities(serials[known], errors[known])

    def _draw(self, batch_size: int) -> Serials:
        oldest = max(0, self._count - self._config.capacity)
        drawn = np.zeros(0, np.int64)
        while len(drawn) < batch_size:
            serials = self._random.integers(oldest, self._count, 2 * batch_size)
            strides = self._rows["strides"][serials % self._config.capacity]
            drawn = np.concatenate((drawn, serials[strides > 0]))
        return drawn[:batch_size]

    def _draw_by_priority(self, batch_size: int) -> Serials:
        assert self._tree is not None
        strata = (np.arange(batch_size) + self._random.random(batch_size)) / batch_size
        places = self._tree.find(strata * self._tree.total)
        return self._count - 1 - (self._count - 1 - places) % self._config.capacity

    def _weights(self, places: Serials) -> Array:
        if self._tree is None:
            return np.ones(len(places), np.float32)
        weights: Array = self._tree.leaves[places] ** -self._config.weight_exponent
        weights /= weights.max()
        return weights.astype(np.float32)


def require_memory(config: ReplayConfig, observation: Space, action: Space) -> None:
    """Raise ConfigError if a buffer needs more memory than the machine has left."""
    row_bytes = row_type(config, observation, action).itemsize
    row_bytes += PRIORITY_BYTES if config.priority_exponent else 0
    num_bytes, available = config.capacity * row_bytes, available_memory()
    if available is not None and num_bytes > available:
        most = int(config.capacity * 0.9 * available / num_bytes)
        raise ConfigError(
            f"algorithm.replay.capacity is {config.capacity}, which takes {size(num_bytes)}",
            why=f"this machine has {size(available)} of memory available",
            fix=f"set algorithm.replay.capacity to at most {most}",
        )
