"""Replay buffer: keep fragments as transitions of n steps, and draw batches of them.

    Fragment ─ add ─> ring of rows (one observation each) ─ sample ─> Transitions ─> Learner.update
                         ^                                                              │
                         └──────────────── set_priorities(serials, errors) ─────────────┘

A row is one slot at one step, and the rows of a fragment lie in the order of its steps. So a transition needs
no second observation: its successor is the row of the same slot some steps later, and because rows are
overwritten in the order of their serial numbers, the successor lives longer than the transition. Rows that
only reset, and the bootstrap, have length 0 and are never drawn.

If a fragment continues the last one that was added, the steps before the border are computed anew, with the
rewards after it. Otherwise the last steps of a fragment have fewer than n rewards and a discount to match.

Uniform replay is prioritised replay with exponent 0: no tree, and every weight is 1.

Legend: T steps, N slots, B transitions of a batch, C rows of capacity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from rillflow.app.doctor import available_memory
from rillflow.config.schema import Section
from rillflow.errors import ConfigError, RecordError
from rillflow.runs.formatting import size
from rillflow.runs.json_lines import JSON
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.sum_tree import SumTree

A = TypeVar("A")
Space = gymnasium.Space[Any]
Serials = NDArray[np.int64]
LEAST_PRIORITY = 1e-6
"""Added to an error, so that a transition with error 0 can be drawn again."""


_STEP_ARRAYS = ("actions", "rewards", "terminated", "truncated", "valid", "versions")


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


@dataclass(frozen=True, kw_only=True)
class NStep:
    """Transitions of up to n steps that begin at every step of a fragment."""

    returns: Array
    """[T, N] float32: discounted sum of the rewards of the steps."""
    discounts: Array
    """[T, N] float32: factor of the successor's value."""
    lengths: Array
    """[T, N] uint8: number of steps; 0 where none begins, because the row only resets."""


def n_step(fragment: Fragment, discount: float, num_steps: int) -> NStep:
    """Return r_t + g r_{t+1} + ... + g^{k-1} r_{t+k-1} and g^k, for k <= n up to the episode's end.

    The discount is 0 where the environment terminated the episode. An episode that was truncated, or that
    goes on after the fragment, keeps g^k.
    """
    ended, going = fragment.ended, np.array(fragment.valid)
    returns = np.zeros(going.shape, np.float32)
    discounts, lengths = np.ones(going.shape, np.float32), np.zeros(going.shape, np.uint8)
    for k in range(min(num_steps, len(going))):
        rows = slice(k, None)
        here = going[: len(going) - k]
        first = (slice(None, len(going) - k), slice(None))
        returns[first] += np.where(here, discounts[first] * fragment.rewards[rows], 0)
        lengths[first] += here
        factor = np.where(fragment.terminated[rows], 0, discount)
        discounts[first] *= np.where(here, factor, 1).astype(np.float32)
        here &= ~ended[rows]
    return NStep(returns=returns, discounts=discounts, lengths=lengths)


def replay_layout(config: ReplayConfig, observation: Space, action: Space) -> dict[str, tuple[Any, ...]]:
    """Return shape and type of every array of a buffer."""
    return {
        "observations": ((config.capacity, *_shape(observation)), observation.dtype),
        "actions": ((config.capacity, *_shape(action)), action.dtype),
        "returns": ((config.capacity,), np.dtype(np.float32)),
        "discounts": ((config.capacity,), np.dtype(np.float32)),
        "lengths": ((config.capacity,), np.dtype(np.uint8)),
        "strides": ((config.capacity,), np.dtype(np.int32)),
    }


def replay_bytes(config: ReplayConfig, observation: Space, action: Space) -> int:
    """Return the bytes that a buffer takes when it is full."""
    layout = replay_layout(config, observation, action)
    rows: int = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
    return rows + (9 * config.capacity if config.priority_exponent else 0)


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
        require_memory(replay_bytes(config, observation_space, action_space), config)
        layout = replay_layout(config, observation_space, action_space)
        self._arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}
        self._tree = SumTree(config.capacity) if config.priority_exponent else None
        self._config, self._discount, self._num_steps = config, discount, num_steps
        self._random = np.random.default_rng(seed)
        self._count = 0  # serial number of the next row; its place is the serial number modulo the capacity
        self._largest = 1.0
        self._tail: Fragment | None = None
        self.num_transitions = 0
        """Number of transitions that can be drawn."""
        self.num_added = 0
        """Number of environment steps that were added so far."""

    def add(self, fragment: Fragment) -> None:
        """Add the steps of a fragment, over the oldest rows.

        Raises:
            RecordError: the fragment has more rows than the buffer.
        """
        self.num_added += fragment.num_steps
        tail, self._tail = self._tail, _last_steps(fragment, self._num_steps - 1)
        if tail is not None and _continues(tail, fragment):
            fragment = _after(tail, fragment)
            self._count -= tail.observations.shape[0] * tail.observations.shape[1]
            self._tail = _last_steps(fragment, self._num_steps - 1)
        num_rows, num_slots = fragment.observations.shape[:2]
        capacity = self._config.capacity
        if num_rows * num_slots > capacity:
            raise RecordError(
                f"a fragment of {num_rows * num_slots} rows does not fit replay.capacity = {capacity}",
                why=f"it has {num_rows - 1} steps and a bootstrap of {num_slots} slots",
                fix="set a larger replay.capacity, or fewer workers.slots or workers.steps",
            )
        steps = n_step(fragment, self._discount, self._num_steps)
        places = np.arange(self._count, self._count + num_rows * num_slots) % capacity
        lengths = self._arrays["lengths"]
        self.num_transitions -= int(np.count_nonzero(lengths[places]))
        self._arrays["observations"][places] = fragment.observations.reshape(len(places), *_row(fragment))
        self._arrays["strides"][places] = num_slots
        lengths[places[-num_slots:]] = 0
        own = places[:-num_slots]
        for name, values in (("actions", fragment.actions), *vars(steps).items()):
            self._arrays[name][own] = values.reshape(len(own), *values.shape[2:])
        self.num_transitions += int(np.count_nonzero(steps.lengths))
        self._count += len(places)
        if self._tree is not None:
            self._tree.set(places, np.where(lengths[places] > 0, self._largest, 0.0))
            _set_first_priorities(self, fragment, steps, self._count - len(places))

    def sample(self, batch_size: int) -> Transitions[Array]:
        """Draw transitions, with replacement.

        Raises:
            RecordError: the buffer has fewer transitions than the batch.
        """
        if self.num_transitions < batch_size:
            raise RecordError(
                f"a batch of {batch_size} is larger than the {self.num_transitions} transitions kept",
                why="a batch would repeat the same transitions",
                fix="set algorithm.learning_starts to at least algorithm.batch_size",
            )
        serials = self._draw(batch_size) if self._tree is None else self._draw_by_priority(batch_size)
        arrays, capacity = self._arrays, self._config.capacity
        places = serials % capacity
        following = (places + arrays["lengths"][places] * arrays["strides"][places]) % capacity
        return Transitions(
            observations=arrays["observations"][places],
            actions=arrays["actions"][places],
            returns=arrays["returns"][places],
            discounts=arrays["discounts"][places],
            next_observations=arrays["observations"][following],
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

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, JSON]]:
        """Return everything a resumed run needs: views of the rows so far, and JSON.

        The next fragment is not taken as a continuation, because environments reset where a run may resume.
        """
        self._tail = None
        rows = min(self._count, self._config.capacity)
        tensors = {name: torch.from_numpy(array[:rows]) for name, array in self._arrays.items()}
        if self._tree is not None:
            tensors["priorities"] = torch.from_numpy(self._tree.leaves[:rows])
        numbers = {"count": self._count, "num_added": self.num_added, "largest": self._largest}
        return tensors, {**numbers, "random": self._random.bit_generator.state}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore what ``state`` of a buffer of the same settings returned."""
        self._tail = None
        self._count, self.num_added, self._largest = state["count"], state["num_added"], state["largest"]
        self._random.bit_generator.state = state["random"]
        rows = min(self._count, self._config.capacity)
        for name, array in self._arrays.items():
            array[:rows] = tensors[name].numpy()
        self.num_transitions = int(np.count_nonzero(self._arrays["lengths"][:rows]))
        if self._tree is not None:
            self._tree.set(np.arange(rows), tensors["priorities"].numpy())

    def _draw(self, batch_size: int) -> Serials:
        oldest = max(0, self._count - self._config.capacity)
        drawn = np.zeros(0, np.int64)
        while len(drawn) < batch_size:
            serials = self._random.integers(oldest, self._count, 2 * batch_size)
            lengths = self._arrays["lengths"][serials % self._config.capacity]
            drawn = np.concatenate((drawn, serials[lengths > 0]))
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


def require_memory(num_bytes: int, config: ReplayConfig) -> None:
    """Raise ConfigError if a buffer needs more memory than the machine has left."""
    available = available_memory()
    if available is not None and num_bytes > available:
        most = int(config.capacity * 0.9 * available / num_bytes)
        raise ConfigError(
            f"algorithm.replay.capacity is {config.capacity}, which takes {size(num_bytes)}",
            why=f"this machine has {size(available)} of memory available",
            fix=f"set algorithm.replay.capacity to at most {most}",
        )


def _set_first_priorities(buffer: ReplayBuffer, fragment: Fragment, steps: NStep, first: int) -> None:
    """Set priorities from the values ``chosen`` and ``best`` that actors saw before both observations."""
    if "chosen" not in fragment.outputs:
        return
    chosen, best = fragment.outputs["chosen"], fragment.outputs["best"]
    t, n = np.nonzero((steps.lengths > 0) & (np.arange(len(best))[:, None] + steps.lengths < len(best)))
    errors = steps.returns[t, n] + steps.discounts[t, n] * best[t + steps.lengths[t, n], n] - chosen[t, n]
    buffer.set_priorities(first + t * best.shape[1] + n, errors)


def _last_steps(fragment: Fragment, num_steps: int) -> Fragment:
    """Return the last steps of a fragment, and its bootstrap."""
    begin = max(0, len(fragment.rewards) - num_steps)
    arrays: dict[str, Any] = {
        name: np.array(getattr(fragment, name)[begin:]) for name in ("observations", *_STEP_ARRAYS)
    }
    outputs = {name: np.array(values[begin:]) for name, values in fragment.outputs.items()}
    return replace(fragment, **arrays, outputs=outputs, episodes=())


def _continues(tail: Fragment, fragment: Fragment) -> bool:
    same_slots = tail.actor == fragment.actor and tail.policy == fragment.policy
    return same_slots and np.array_equal(tail.observations[-1], fragment.observations[0])


def _after(tail: Fragment, fragment: Fragment) -> Fragment:
    """Return a fragment with the steps of a tail before it."""
    arrays: dict[str, Any] = {
        name: np.concatenate((getattr(tail, name), getattr(fragment, name))) for name in _STEP_ARRAYS
    }
    outputs = {name: np.concatenate((tail.outputs[name], new)) for name, new in fragment.outputs.items()}
    observations = np.concatenate((tail.observations[:-1], fragment.observations))
    return replace(fragment, **arrays, observations=observations, outputs=outputs)


def _shape(space: Space) -> tuple[int, ...]:
    if space.shape is None:
        raise ConfigError(
            f"a replay buffer cannot store the space {space}",
            why="a row is one array of a fixed shape",
            fix="flatten the environment's observations with a wrapper",
        )
    return space.shape


def _row(fragment: Fragment) -> tuple[int, ...]:
    return fragment.observations.shape[2:]
