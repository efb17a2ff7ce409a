"""EnvPool: its arrays as they are, seeds by a new pool, and time limits that keep a true end.

    actions ─> pool._send ─> EnvPool's threads ─> pool._recv ─> Stepped

EnvPool itself resets at the next step. It reports an episode that truly ends in the last step of its limit as
truncated only. So the pool's own limit is one step longer, and this adapter cuts: such a step is both.

``_send``, ``_recv`` and ``_reset`` are methods of EnvPool's compiled class. Its Python methods around them
cost a third of a step of 8 CartPoles.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from rillflow.errors import ConfigError
from rillflow_classic.environments.actions import ActionCheck
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.spaces import array_space
from rillflow_classic.environments.vector import EpisodeTotals, Stepped, check_finite
from rillflow_classic.fragment import Array

_LONGEST = 2**30
_FIELDS = ("obs", "reward", "done", "trunc")


def envpool_ids() -> frozenset[str]:
    """Return every id that EnvPool has; empty if it is not installed."""
    try:
        import envpool
    except ImportError:
        return frozenset()
    return frozenset(envpool.list_all_envs())


class EnvPoolEnvironment:
    """Slots of one EnvPool.

    Args:
        name: EnvPool's id.
        config: settings; ``arguments`` are EnvPool's, such as num_threads.
        num_slots: number of slots N.
        show: whether Atari renders frames.

    Raises:
        ConfigError: EnvPool refuses an argument, or its spaces cannot be arrays.
    """

    def __init__(self, name: str, config: EnvironmentSettings, num_slots: int, *, show: bool = False) -> None:
        self._name, self.num_slots = name, num_slots
        self.agents: Sequence[str] = ("",) * num_slots
        self._arguments = {"num_envs": num_slots, **config.arguments}
        spec = _spec(name, self._arguments)
        self.stacks = "stack_num" in spec.config._fields
        """Whether the pool itself stacks observations."""
        self._look = {"render_mode": "rgb_array"} if show and self.stacks else {}
        if self.stacks and config.frame_stack:
            self._arguments["stack_num"] = config.frame_stack
        self._limit = config.time_limit or min(int(spec.config.max_episode_steps), _LONGEST)
        self._arguments["max_episode_steps"] = self._limit + 1
        spec = _spec(name, self._arguments)
        if "max_num_players" in spec.config._fields and spec.config.max_num_players > 1:
            raise ConfigError(
                f"environment.id is {name!r} with {spec.config.max_num_players} players",
                why="slots of EnvPool have one agent each",
                fix='use a multi-agent environment with environment.provider = "parallel"',
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            observation_space, action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space
        self.observation_space = array_space(observation_space, name)
        self.action_space: gymnasium.Space[Any] = action_space
        self._check = ActionCheck(action_space, num_slots, clip=config.clip_actions)
        self._dtype = self.observation_space.dtype
        self._is_real = np.issubdtype(self.observation_space.dtype, np.floating)
        self._totals = EpisodeTotals(num_slots)
        self._cut = np.zeros(num_slots, bool)
        self._every = np.arange(num_slots, dtype=np.int32)
        self._pool: Any = None

    def reset(self, seed: int) -> Array:
        """Make a new pool with the seed, the only way to seed EnvPool, and reset it."""
        import envpool

        self._pool = envpool.make(
            self._name, env_type="gymnasium", seed=seed % 2**31, **self._arguments, **self._look
        )
        keys = list(self._pool._state_keys)
        self._order = [next(i for i, key in enumerate(keys) if key.split(":")[0] == name) for name in _FIELDS]
        self._action_dtype = self._pool._spec._action_spec[-1][0]
        self._totals.clear()
        self._cut[:] = False
        self._pool._reset(self._every)
        observations: Array = self._received()[0]
        return observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        actions = self._check(actions).astype(self._action_dtype, order="C", copy=False)
        if self._cut.any():
            observations, rewards, done, truncated = self._stepped_in_parts(actions)
        else:
            self._pool._send([self._every, self._every, actions])
            observations, rewards, done, truncated = self._received()
        if self._is_real and not np.isfinite(np.add.reduce(observations, axis=None)):
            check_finite(observations, "observation")
        terminated = done & ~truncated
        self._cut = (self._totals.lengths + 1 >= self._limit) & ~done
        truncated = truncated | (self._totals.lengths + 1 >= self._limit)
        return Stepped(
            observations=observations,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            episodes=self._totals.add(rewards, done | truncated),
        )

    def _stepped_in_parts(self, actions: Array) -> list[Any]:
        """Reset the slots that this adapter has cut, and step the others."""
        ids, others = self._every[self._cut], self._every[~self._cut]
        self._pool._reset(ids)
        parts = [(ids, self._received())]
        if len(others):
            self._pool._send([others, others, actions[others]])
            parts.append((others, self._received()))
        whole = [np.empty((self.num_slots, *part.shape[1:]), part.dtype) for part in parts[0][1]]
        for slots, arrays in parts:
            for target, part in zip(whole, arrays, strict=True):
                target[slots] = part
        whole[1][ids] = 0.0
        return whole

    def _received(self) -> list[Any]:
        arrays = self._pool._recv()
        observations, rewards, done, truncated = (arrays[index] for index in self._order)
        return [observations.astype(self._dtype, copy=False), rewards, done, truncated]

    def render(self, slot: int) -> Array | None:
        """Return a frame of a slot if ``show`` is set and the id is one of Atari; None otherwise."""
        return self._pool.render(np.array([slot], np.int32))[0] if self._look else None

    def state(self) -> Mapping[str, Array]:
        """Return no statistics."""
        return {}

    def restore(self, state: Mapping[str, Array], *, frozen: bool = False) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End the pool and its threads."""
        self._pool = None


def _spec(name: str, arguments: Mapping[str, Any]) -> Any:
    import envpool

    try:
        return envpool.make_spec(name, **arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"EnvPool cannot make {name!r} with {dict(arguments)}",
            why=str(error).splitlines()[0] if str(error) else repr(error),
            fix="environment.arguments holds EnvPool's settings of this id, such as num_threads",
        ) from None
