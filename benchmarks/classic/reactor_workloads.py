"""Objects of the six workloads: senders, environments, learners and agents, without any way to run them.

Every form of a workload (serial loop, static plan, Ray actors) calls the same methods of the same objects.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TextIO

import ale_py
import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[Any]
Transition = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Observation, action, reward, next observation, whether the episode ended: tiny tensors, as in the paper."""
GAMMA = 0.99
STEPS = 100
"""Environment steps of a Q-learning actor in a round."""


class Sender:
    """Makes a new object of some bytes for every round."""

    def __init__(self, size: int) -> None:
        self._size, self._round = size, 0

    def make(self) -> Array:
        """Return the object."""
        self._round += 1
        return np.full(self._size, self._round % 251, np.uint8)


class Receiver:
    """Reads an object and sleeps."""

    def __init__(self, pause_s: float, index: int) -> None:
        self._pause_s, self._index = pause_s, index

    def use(self, sent: Array) -> int:
        """Return the object's first byte, after a pause."""
        time.sleep(self._pause_s)
        return int(sent[0])


class EnvironmentWorker:
    """An environment that takes random actions."""

    def __init__(self, make: Callable[[], Any], index: int) -> None:
        self._environment = make()
        self._environment.reset(seed=index)
        self._environment.action_space.seed(index)

    def step(self) -> Any:
        """Return the observation after one step."""
        environment = self._environment
        observation, _, terminated, truncated, _ = environment.step(environment.action_space.sample())
        if terminated or truncated:
            observation, _ = environment.reset()
        return observation

    def fragment(self, steps: int) -> Array:
        """Return the observations of some steps as one array."""
        return np.array([self.step() for _ in range(steps)])


class Smaller(gymnasium.ObservationWrapper):  # type: ignore[type-arg]
    """Grey frames of 84 x 84: every second or third line and column, without interpolation."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        height, width = environment.observation_space.shape
        self._rows = np.linspace(0, height - 1, 84).astype(int)[:, None]
        self._columns = np.linspace(0, width - 1, 84).astype(int)

    def observation(self, observation: Array) -> Array:
        """Return the smaller frame."""
        return observation[self._rows, self._columns]


def gym_environment(name: str) -> Any:
    """Make an environment of Gymnasium."""
    return gymnasium.make(name)


def atari_environment(name: str, is_small: bool) -> Any:
    """Make an Atari game, with RGB frames of 210 x 160 or grey ones of 84 x 84."""
    gymnasium.register_envs(ale_py)
    made = gymnasium.make(f"ALE/{name}-v5", obs_type="grayscale" if is_small else "rgb")
    return Smaller(made) if is_small else made


def shown(observations: Sequence[Any], sink: TextIO | None) -> None:
    """Print every observation, if there is a file."""
    for each in observations if sink is not None else ():
        print(each, file=sink)


def q_network() -> nn.Module:
    """Make the Q-network of Blackjack."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 2))


class QActor:
    """Plays Blackjack with a copy of the Q-network."""

    def __init__(self, index: int) -> None:
        self._environment, self._network = gymnasium.make("Blackjack-v1"), q_network()
        self._observation, _ = self._environment.reset(seed=index)
        self._random = np.random.default_rng(index)

    @torch.no_grad()
    def play(self, weights: dict[str, Tensor]) -> list[Transition]:
        """Return the transitions of a round, each of small tensors."""
        self._network.load_state_dict(weights)
        return [self._step() for _ in range(STEPS)]

    def play_arrays(self, weights: dict[str, Tensor]) -> tuple[Array, ...]:
        """Return the transitions of a round as one array of each field."""
        return tuple(
            np.stack([each.numpy() for each in column]) for column in zip(*self.play(weights), strict=True)
        )

    def _step(self) -> Transition:
        before = torch.tensor(self._observation, dtype=torch.float32)
        action = int(self._network(before).argmax())
        if self._random.random() < 0.1:
            action = int(self._random.integers(2))
        self._observation, reward, terminated, truncated, _ = self._environment.step(action)
        after = torch.tensor(self._observation, dtype=torch.float32)
        if terminated or truncated:
            self._observation, _ = self._environment.reset()
        return (
            before,
            torch.tensor(action),
            torch.tensor(float(reward)),
            after,
            torch.tensor(float(terminated)),
        )


class QBuffer:
    """Keeps transitions, and returns the oldest ones, as the paper's programs do."""

    def __init__(self, batch: int, index: int = 0) -> None:
        del index
        self._batch = batch
        self._held: deque[Transition] = deque(maxlen=20_000)

    def add(self, experiences: Sequence[Sequence[Transition]]) -> list[Transition]:
        """Keep the transitions of all actors, and return a minibatch."""
        for each in experiences:
            self._held.extend(each)
        return list(islice(self._held, self._batch))


class QLearner:
    """Takes a step of Q-learning on a minibatch."""

    def __init__(self, index: int = 0) -> None:
        del index
        self._network = q_network()
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=1e-3)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights."""
        return {name: value.clone() for name, value in self._network.state_dict().items()}

    def learn(self, batch: Sequence[Transition]) -> dict[str, Tensor]:
        """Step, and return new weights."""
        return self.learn_columns([torch.stack(column) for column in zip(*batch, strict=True)])

    def learn_columns(self, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        """Step on one tensor of each field, and return new weights."""
        before, action, reward, after, ended = columns
        with torch.no_grad():
            target = reward + GAMMA * (1 - ended) * self._network(after).max(dim=1).values
        value = self._network(before).gather(1, action[:, None])[:, 0]
        self._optimizer.zero_grad()
        nn.functional.mse_loss(value, target).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return self.weights()


class TrafficJunction:
    """Cars on two roads that cross; each car sees the nine fields around it.

    A road is a line of 14 fields. Half of the cars drive east on row 7, the others south on column 7. A car
    enters its road with some probability if the first field is free. Action 0 drives on, 1 brakes.
    Observation [16]: the cars in the 3 x 3 fields around, position, road, time, whether it drives.
    """

    SIZE, MIDDLE, WIDTH = 14, 7, 16

    def __init__(self, agents: int, seed: int = 0) -> None:
        self.agents = agents
        self._random = np.random.default_rng(seed)
        self._is_east = np.arange(agents) % 2 == 0
        self._at = np.full(agents, -1)
        self._time = np.zeros(agents, np.int64)

    def step(self, actions: Sequence[int] | None) -> list[Array]:
        """Move every car, and return the observation of each; None begins."""
        if actions is not None:
            moving = (self._at >= 0) & (np.asarray(actions) == 0)
            self._at[moving] += 1
            self._at[self._at >= self.SIZE] = -1
        self._time = np.where(self._at >= 0, self._time + 1, 0)
        for car in np.flatnonzero(self._at < 0):
            beside = self._is_east == self._is_east[car]
            if self._random.random() < 0.3 and not (self._at[beside] == 0).any():
                self._at[car] = 0
        return self._observations()

    def _observations(self) -> list[Array]:
        grid = np.zeros((self.SIZE + 2, self.SIZE + 2), np.float32)
        rows = np.where(self._is_east, self.MIDDLE, self._at) + 1
        columns = np.where(self._is_east, self._at, self.MIDDLE) + 1
        driving = self._at >= 0
        np.add.at(grid, (rows[driving], columns[driving]), 1)
        found = []
        for car in range(self.agents):
            seen = np.zeros(self.WIDTH, np.float32)
            if driving[car]:
                row, column = rows[car], columns[car]
                seen[:9] = grid[row - 1 : row + 2, column - 1 : column + 2].ravel()
                seen[9:11] = row / self.SIZE, column / self.SIZE
                seen[11 + int(self._is_east[car])] = 1
                seen[13:15] = self._time[car] / 40, 1
            found.append(seen)
        return found


class AgentPolicy:
    """A small network of one agent."""

    def __init__(self, index: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(index)
        self._network = nn.Sequential(
            nn.Linear(TrafficJunction.WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )

    @torch.no_grad()
    def act(self, observation: Array) -> int:
        """Return the agent's action."""
        return int(self._network(torch.from_numpy(observation.copy())).argmax())


class WholeJunction:
    """The environment and all its agents in one object, for fragments of many steps."""

    def __init__(self, agents: int, index: int = 0) -> None:
        del index
        self._environment = TrafficJunction(agents)
        self._policies = [AgentPolicy(agent) for agent in range(agents)]
        self._actions: list[int] | None = None

    def fragment(self, steps: int) -> list[list[Array]]:
        """Return the observations of some steps."""
        return [self.step() for _ in range(steps)]

    def step(self) -> list[Array]:
        """Return the observations of one step, after which all agents act."""
        observations = self._environment.step(self._actions)
        self._actions = [policy.act(each) for policy, each in zip(self._policies, observations, strict=True)]
        return observations


GYM = {name: partial(gym_environment, name) for name in ("CartPole-v1", "Blackjack-v1", "Pendulum-v1")}
ATARI = {
    f"{name} {'84x84' if is_small else 'RGB'}": partial(atari_environment, name, is_small)
    for name in ("Pacman", "Pong", "SpaceInvaders")
    for is_small in (False, True)
}
