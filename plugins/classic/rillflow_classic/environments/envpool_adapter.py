"""EnvPool: its arrays as they are, seeds by a new pool, and time limits that keep a true end.

    actions ─> pool._send ─> EnvPool's threads ─> pool._recv ─> Stepped

EnvPool itself resets at the next step. It reports an episode that truly ends in the last step of its limit as
truncated only. So the pool's own limit is one step longer, and this adapter cuts: such a step is both.

``_send``, ``_recv`` and ``_reset`` are methods of EnvPool's compiled class. Its Python methods around them
cost a third of a step of 8 CartPoles.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import ConfigError
from rillflow_classic.environments.actions import ActionSpaces
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.copies import Copies, with_copy
from rillflow_classic.environments.vector import Stepped, VectorEnvironment, array_space
from rillflow_classic.fragment import Array
from rillflow_classic.seeds import seed_of

_LONGEST = 2**30
_FIELDS = ("obs", "reward", "done", "trunc")


def envpool_ids() -> frozenset[str]:
    """Return every id that EnvPool has; empty if it is not installed."""
    try:
        import envpool
    except ImportError:
        return frozenset()
    return frozenset(envpool.list_all_envs())


def envpool_arguments(name: str) -> frozenset[str]:
    """Return the names of the arguments that EnvPool takes for an id of its own."""
    import envpool

    return frozenset(envpool.make_spec(name).config._fields)


class EnvPoolEnvironment(VectorEnvironment):
    """Slots of one EnvPool.

    Args:
        name: EnvPool's id.
        config: settings; ``arguments`` are EnvPool's, such as num_threads.
        copies: its slots N.
        shows: whether Atari renders frames.

    Raises:
        ConfigError: EnvPool refuses an argument, or its spaces cannot be arrays.
    """

    def __init__(
        self, name: str, config: EnvironmentSettings, copies: Copies, *, shows: bool = False
    ) -> None:
        num_slots, arguments = copies.count, with_copy(config.arguments, copies.first)
        self._name, self._arguments = name, {"num_envs": num_slots, **arguments}
        spec = self._spec()
        self.stacks = "stack_num" in spec.config._fields
        """Whether the pool itself stacks observations."""
        if self.stacks and config.frame_stack:
            self._arguments["stack_num"] = config.frame_stack
        limit = copies.limit(config.time_limit or min(spec.config.max_episode_steps, _LONGEST))
        self._limit = limit or _LONGEST
        self._arguments["max_episode_steps"] = self._limit + 1
        spec = self._spec()
        if spec.config.max_num_players > 1:
            raise ConfigError(
                f"environment.id is {name!r} with {spec.config.max_num_players} players",
                why="a slot of EnvPool has one agent",
                fix="use a multi-agent environment in PettingZoo's parallel form",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of float64 bounds
            own = spec.gymnasium_observation_space, spec.gymnasium_action_space
            observed = array_space(own[0], f"the observations of {name!r}")
            self._actions = ActionSpaces.of(own[1], f"the actions of {name!r}")
        super().__init__(("",) * num_slots, observed, self._actions.policy)
        self.own_spaces = own
        self._shows, self._dtype = shows and self.stacks, observed.dtype
        self._every = np.arange(num_slots, dtype=np.int32)
        self.pool: Any = None
        """The pool; None before the first reset."""

    def _spec(self) -> Any:
        import envpool

        try:
            return envpool.make_spec(self._name, **self._arguments)
        except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as error:
            raise ConfigError(
                f"EnvPool cannot make {self._name!r} with {self._arguments}",
                why=str(error).splitlines()[0] if str(error) else repr(error),
                fix="environment.arguments holds EnvPool's settings of this id, such as num_threads",
            ) from None

    def begin(self, seed: int) -> Array:
        """Make a new pool with the seed, the only way to seed EnvPool, and reset it."""
        import envpool

        given = self._arguments | ({"render_mode": "rgb_array"} if self._shows else {})
        # EnvPool gives slot i this seed plus i
        self.pool = envpool.make(self._name, env_type="gymnasium", seed=seed_of(seed, 0), **given)
        keys = [key.split(":")[0] for key in self.pool._state_keys]
        self._order = [keys.index(name) for name in _FIELDS]
        self._action_dtype = self.pool._spec._action_spec[-1][0]
        self._steps_left, self._cut = self._limit, None
        self.pool._reset(self._every)
        observations: Array = self._received()[0]
        return observations

    def advance(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.advance``."""
        actions = self._actions.own_actions(actions).astype(self._action_dtype, order="C", copy=False)
        if self._cut is None:
            self.pool._send([self._every, self._every, actions])
            observations, rewards, done, truncated = self._received()
        else:
            observations, rewards, done, truncated = self._stepped_in_parts(actions, self._cut)
        terminated, self._cut = done, None
        if np.count_nonzero(truncated):
            terminated = done & ~truncated
        self._steps_left -= 1
        if self._steps_left <= 0:  # only now can a slot have reached the limit
            lengths = self._steps + 1 - self._starts
            late = lengths >= self._limit
            cut, truncated = late & ~done, truncated | late
            self._cut = cut if cut.any() else None
            self._steps_left = self._limit - int(lengths[~late].max(initial=0))
        return Stepped(observations=observations, rewards=rewards, terminated=terminated, truncated=truncated)

    def _stepped_in_parts(self, actions: Array, cut: NDArray[np.bool_]) -> list[Any]:
        """Reset the slots that this adapter has cut, and step the others."""
        ids, others = self._every[cut], self._every[~cut]
        self.pool._reset(ids)
        parts = self._received()
        parts[1][:] = 0.0
        if len(others):
            self.pool._send([others, others, actions[others]])
            parts = [np.concatenate(each) for each in zip(parts, self._received(), strict=True)]
        order = np.argsort(np.concatenate([ids, others]))
        return [each[order] for each in parts]

    def _received(self) -> list[Any]:
        arrays = self.pool._recv()
        observation, reward, done, truncated = self._order
        observations = arrays[observation].astype(self._dtype, copy=False)
        return [observations, arrays[reward], arrays[done], arrays[truncated]]

    def render(self, slot: int) -> Array | None:
        """Return a frame of a slot if ``shows`` is set and the id is one of Atari; None otherwise."""
        return self.pool.render(np.array([slot], np.int32))[0] if self._shows else None
