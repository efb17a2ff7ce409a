"""Lanes: environments of this process, each with one slot, or with a slot for each of its agents.

    actions [k] ─> Lane.step ─> the user's environment ─> rows of arrays: observations, rewards, ...

A lane resets itself at the step after the end of its episode. The arrays of all slots are fields of one
record, so that they are one block of memory, which processes can share.
"""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from rillflow.errors import ConfigError
from rillflow.runs.error_lines import innermost_line
from rillflow_classic.environments.actions import ActionSpaces
from rillflow_classic.environments.observations import ObservationSpaces, WrongValue
from rillflow_classic.environments.pictures import picture_of
from rillflow_classic.environments.vector import EnvironmentFailure, Stepped, VectorEnvironment
from rillflow_classic.fragment import Array
from rillflow_classic.seeds import seed_of

_log = logging.getLogger(__name__)
_RETURNS = {"reset": "observation, info", "step": "observation, reward, terminated, truncated, info"}


class Lane:
    """One environment: a ``gymnasium.Env``, or several agents in PettingZoo's parallel form.

    Args:
        environment: the user's object. If it is no ``gymnasium.Env``, it has ``possible_agents``,
            ``observation_space(agent)``, ``action_space(agent)``, ``reset(seed)``, ``step(actions)``,
            ``render()`` and ``close()``.
        name: its id, for errors.
        time_limit: steps after which all agents are truncated; None: never.
        warns: whether it warns of rewards that are left out; one copy of a run is enough.

    Raises:
        AttributeError: it lacks one of these.
        ConfigError: agents have different spaces, or a space cannot be an array.
    """

    rows: Stepped
    """The rows of its slots in the arrays of all."""

    def __init__(
        self, environment: Any, name: str, time_limit: int | None = None, *, warns: bool = True
    ) -> None:
        self._environment, self.name, self._limit = environment, name, time_limit
        self._methods = {"reset": environment.reset, "step": environment.step}
        self._render, self._close = environment.render, environment.close
        self._returned: Any = None
        self._is_closed = False
        self._is_single = isinstance(environment, gymnasium.Env)
        self._keys = ("",) if self._is_single else tuple(environment.possible_agents)
        spaces = [(environment.observation_space, environment.action_space)]
        if not self._is_single:
            spaces = [(spaces[0][0](key), spaces[0][1](key)) for key in self._keys]
        if any(each != spaces[0] for each in spaces):
            raise ConfigError(
                f"the agents of {name} have different spaces: {dict(zip(self._keys, spaces, strict=True))}",
                why="the slots of an environment share their arrays",
                fix="pad observations and actions to one space in a class of your own",
            )
        self.agents = tuple(map(str, self._keys))
        """Name of the agent of each slot; the empty text in a ``gymnasium.Env``."""
        self.own_spaces = spaces[0]
        """Spaces of an observation and of an action, as the environment has them."""
        self._observations = ObservationSpaces.of(spaces[0][0], f"the observations of {name!r}")
        self.observation_space = self._observations.policy
        self._actions = ActionSpaces.of(spaces[0][1], f"the actions of {name!r}")
        self.action_space = self._actions.policy
        self._length, self._live = 0, dict[Any, int]()
        self._has_list, self._warns, self._away = False, warns, set[Any]()
        box = self.observation_space
        self._blank: Any = np.clip(0, box.low, box.high) if isinstance(box, gymnasium.spaces.Box) else 0
        """Observation of an agent that has not come."""

    def reset(self, seed: int | None) -> None:
        """Begin a new episode of all agents; None continues the environment's own random numbers.

        Agents that come later have rows after an end until then.
        """
        self._length = 0
        self._returned = self._environment.reset(seed=seed)
        observations, _ = self._returned
        if self._is_single:
            observations = {"": observations}
        self._live = self._first_agents(observations)
        self.rows.rewards[:], self.rows.terminated[:], self.rows.truncated[:] = 0.0, False, True
        self.rows.observations[...] = self._blank
        for key, index in self._live.items():
            self.rows.observations[index], self.rows.truncated[index] = (
                self._observations.array(observations[key]),
                False,
            )

    def step(self, actions: Sequence[Any]) -> None:
        """Step the agents that have not ended, and mask the others; begin a new episode if all have."""
        if not self._live:
            self.reset(None)
            return
        self._length += 1
        if self._is_single:
            self._returned = returned = self._environment.step(self._actions.own_action(actions[0]))
            observation, reward, is_terminated, is_truncated, _ = returned
            self._write("", observation, reward, is_terminated, is_truncated)
            return
        chosen = {key: self._actions.own_action(actions[index]) for key, index in self._live.items()}
        self._returned = self._environment.step(chosen)
        observations, rewards, terminated, truncated, _ = self._returned
        self.rows.rewards[:], self.rows.terminated[:], self.rows.truncated[:] = 0.0, False, True
        for key in chosen:
            self._write(key, observations[key], rewards[key], terminated[key], truncated[key])
        if (
            len(observations) == len(rewards) == len(chosen)
            and self._has_list
            and self._listed() == self._live.keys()
        ):
            if len(self._live) < len(chosen):
                self._away |= chosen.keys() - self._live.keys()
            return  # nobody comes or goes without an end, in a fraction of the time
        ended = {key for ends in (terminated, truncated) for key in ends if ends[key]}
        self._look_at_others(chosen.keys(), observations, rewards, ended)

    def _first_agents(self, observations: Mapping[Any, Any]) -> dict[Any, int]:
        """Return the agents that begin an episode, with their rows.

        If ``agents`` of the environment lists those that it shows, others come later; otherwise all begin.
        """
        every = {key: index for index, key in enumerate(self._keys)}
        if self._is_single:
            return every
        listed = self._listed()
        self._require_possible({*observations, *listed})
        self._has_list = bool(listed)
        self._away = every.keys() - listed if self._has_list else set()
        return {key: index for key, index in every.items() if key not in self._away}

    def _look_at_others(
        self,
        acted: Collection[Any],
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        ended: set[Any],
    ) -> None:
        """Let agents that come or return begin an episode; they act from the next step on.

        Raises:
            WrongValue: it is unclear whether an agent acts.
        """
        listed = self._listed() if self._has_list else set(self._keys)
        self._require_possible({*observations, *listed})
        if left := self._live.keys() - listed:
            raise WrongValue(f"no end of agent {min(left, key=str)!r}, which has left agents")
        for index, key in enumerate(self._keys):
            if key in acted:
                continue
            if key in rewards and rewards[key] and self._warns:
                self._warns = False
                said = "%s gave agent %r the reward %s in step %d, in which it did not act: it is left out"
                _log.warning(said, self.name, key, rewards[key], self._length)
            if key in ended or key not in listed or self._length == self._limit:
                continue
            if key in observations:
                self._live[key], self.rows.truncated[index] = index, False
                self.rows.observations[index] = self._observations.array(observations[key])
            elif key in self._away:
                raise WrongValue(f"no observation of agent {key!r}, which has come to agents")
        self._away = (self._away | (set(self._keys) - listed)) - self._live.keys()

    def _listed(self) -> set[Any]:
        """Return the environment's list of agents that act; empty if it has none."""
        try:
            return set(self._environment.agents)
        except AttributeError:
            return set()

    def _require_possible(self, agents: set[Any]) -> None:
        if unknown := agents - set(self._keys):
            named = f"an observation of agent {min(unknown, key=str)!r}, or its name in agents"
            raise WrongValue(f"{named}, but possible_agents are {list(self._keys)}")

    def _write(self, key: Any, observation: Any, reward: Any, is_terminated: Any, is_truncated: Any) -> None:
        """Write the row of an agent, which is not live any more if its episode has ended."""
        rows, index = self.rows, self._live[key]
        is_cut = is_truncated or self._length == self._limit
        rows.observations[index] = self._observations.array(observation)
        try:
            rows.rewards[index] = reward
        except (TypeError, ValueError):
            raise WrongValue(f"the reward {reward!r}, which is no number") from None
        if math.isinf(rows.rewards[index]) and np.isfinite(reward):
            raise WrongValue(f"the reward {reward!r}, and float32 cannot hold it")
        rows.terminated[index], rows.truncated[index] = is_terminated, is_cut
        if is_terminated or is_cut:
            for flag in (is_terminated, is_truncated):
                if not isinstance(flag, bool | np.bool_ | int):
                    raise WrongValue(f"{flag!r} where terminated or truncated is expected")
            del self._live[key]

    def render(self) -> Array | None:
        """Return a frame [H, W, 3] of bytes; None if there is none.

        Raises:
            Exception: the environment's own, or that of ``picture_of``.
        """
        try:
            return picture_of(self._render())
        except NotImplementedError:
            return None

    def close(self) -> None:
        """End the environment, once; an error of its own ``close`` is a warning, because nothing follows."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._close()
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's class may raise anything
            said = "%s.close raised %s: %s, at %s"
            _log.warning(said, self.name, type(error).__name__, error, innermost_line(error))

    def failure(self, method: str, slot: int, error: BaseException) -> EnvironmentFailure:
        """Return the error to raise after ``reset`` or ``step`` of the environment has failed.

        It names the line that raised, or the wrong part of what the method returned, and where it stands.
        """
        name, names = f"{self.name}.{method} of slot {slot}", _RETURNS[method]
        contract = f"{method} returns {names} (Gymnasium since 0.26)"
        when = f"in step {self._length} of an episode; " if method == "step" else ""
        is_ours = traceback.extract_tb(error.__traceback__)[-1].filename == __file__
        if not is_ours and not isinstance(error, WrongValue):
            what, why = f"{name} raised {type(error).__name__}: {error}", f"raised at {innermost_line(error)}"
            return EnvironmentFailure(what, why=why, fix=f"correct the environment; {contract}")
        found: Any = self._returned
        count = names.count(",") + 1
        if not isinstance(found, tuple | list):
            wrong = f"{found!r}"
        elif len(found) != count:
            wrong = f"{len(found)} values instead of {count}"
        elif isinstance(error, KeyError):
            wrong = f"no value for agent {error}"
        else:
            wrong = str(error) if isinstance(error, WrongValue) else f"a wrong value: {error}"
        where = _place_of(self._methods[method])
        return EnvironmentFailure(f"{name} returned {wrong}", why=when + contract, fix=f"correct {where}")


def _place_of(method: Callable[..., Any]) -> str:
    """Return name, file and line of a method; below the wrappers of Gymnasium, it is the environment's."""
    owner = method.__self__ if inspect.ismethod(method) else None
    inner = owner.unwrapped if isinstance(owner, gymnasium.Env) else owner
    function = inspect.getattr_static(type(inner), method.__name__, method)
    try:
        file, line = inspect.getsourcefile(function), inspect.findsource(function)[1] + 1
    except (TypeError, OSError):  # a compiled class
        return f"{method.__name__} of the environment"
    return f"{type(inner).__name__}.{method.__name__} in {file}, line {line}"


def record_type(lane: Lane, num_slots: int) -> np.dtype[np.void]:
    """Return the type of a record of the arrays of some slots: a step's results, and ``actions``."""
    spaces = {"observations": lane.observation_space, "actions": lane.action_space}
    arrays = [(name, each.dtype, (num_slots, *(each.shape or ()))) for name, each in spaces.items()]
    flags = [(name, np.bool_, (num_slots,)) for name in ("terminated", "truncated")]
    return np.dtype([*arrays, ("rewards", np.float32, (num_slots,)), *flags], align=True)


def rows_of(record: Array, slots: slice) -> Stepped:
    """Return the results of some slots in a record, without a copy."""
    names = ("observations", "rewards", "terminated", "truncated")
    arrays: dict[str, Any] = {name: record[name][slots] for name in names}
    return Stepped(**arrays)


class InlineEnvironment(VectorEnvironment):
    """Slots of lanes in this process; the boundary to the user's code.

    Args:
        lanes: environments of equal spaces.
        num_lanes: number of all lanes, where other processes run the rest; 0: those here are all.
        first: index of the first lane here.
        record: arrays of all slots, of ``record_type``; None makes them.
    """

    def __init__(
        self, lanes: Sequence[Lane], num_lanes: int = 0, first: int = 0, record: Array | None = None
    ) -> None:
        lane, self._lanes, self._first, self._width = lanes[0], lanes, first, len(lanes[0].agents)
        super().__init__(lane.agents * (num_lanes or len(lanes)), lane.observation_space, lane.action_space)
        self.own_spaces = lane.own_spaces
        self._record = np.zeros((), record_type(lane, self.num_slots)) if record is None else record
        self._rows = rows_of(self._record, slice(None))
        for index, each in enumerate(lanes, first):
            each.rows = rows_of(self._record, slice(index * self._width, (index + 1) * self._width))

    def begin(self, seed: int) -> Array:
        """Reset the lanes here; see ``VectorEnvironment.begin``."""
        self._each(Lane.reset, [seed_of(seed, self._first + index) for index in range(len(self._lanes))])
        self.absent[:] = self._rows.truncated
        return self._rows.observations

    def advance(self, actions: Array) -> Stepped:
        """Step the lanes here; see ``VectorEnvironment.advance``."""
        listed = actions.tolist() if actions.ndim == 1 else list(actions)
        self._each(Lane.step, [listed[at : at + self._width] for at in range(0, len(listed), self._width)])
        return self._rows

    def _each(self, call: Callable[[Lane, Any], None], arguments: Sequence[Any]) -> None:
        for index, argument in enumerate(arguments):
            try:
                call(self._lanes[index], argument)
            except (Exception, SystemExit) as error:  # the user's class may raise anything
                slot = (self._first + index) * self._width
                raise self._lanes[index].failure(call.__name__, slot, error) from error

    def render(self, slot: int) -> Array | None:
        """Return a frame of a slot's environment."""
        return self._lanes[slot // self._width].render()

    def close(self) -> None:
        """End all environments."""
        for lane in self._lanes:
            lane.close()
