"""PPO as one plain script: EnvPool, one loop, no workers. It is the serial loop of the table."""

from __future__ import annotations

from typing import Any

import envpool
import numpy as np
import torch
from task import Clock, Task, read_task
from torch import Tensor, nn


def layer(module: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Return a layer with orthogonal weights."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def mlp(wide: int, out: int, gain: float) -> nn.Module:
    """Return an MLP of two hidden layers."""
    first, second = layer(nn.Linear(wide, 64)), layer(nn.Linear(64, 64))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), layer(nn.Linear(64, out), gain))


class PlainAgent(nn.Module):
    """Actor and critic of a task."""

    def __init__(self, task: Task, shape: tuple[int, ...], space: Any) -> None:
        super().__init__()
        self.is_frames, self.is_discrete = task.is_frames, hasattr(space, "n")
        size = int(space.n) if self.is_discrete else space.shape[0]
        self.log_std = nn.Parameter(torch.zeros(size))
        if task.is_frames:
            self.trunk = nn.Sequential(
                *(layer(nn.Conv2d(4, 32, 8, 4)), nn.ReLU(), layer(nn.Conv2d(32, 64, 4, 2)), nn.ReLU()),
                *(layer(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten()),
                *(layer(nn.Linear(3136, 512)), nn.ReLU()),
            )
            self.actor, self.critic = layer(nn.Linear(512, size), 0.01), layer(nn.Linear(512, 1), 1.0)
        else:
            self.trunk = nn.Identity()
            self.actor, self.critic = mlp(shape[0], size, 0.01), mlp(shape[0], 1, 1.0)

    def forward(self, given: Tensor) -> tuple[torch.distributions.Distribution, Tensor]:
        """Return the distribution of the action, and the value."""
        features = self.trunk(given.float() / 255.0 if self.is_frames else given.float())
        scores = self.actor(features)
        if self.is_discrete:
            chosen = torch.distributions.Categorical(logits=scores)
        else:
            normal = torch.distributions.Normal(scores, self.log_std.exp().expand_as(scores))
            chosen = torch.distributions.Independent(normal, 1)
        return chosen, self.critic(features).flatten()


class PlainLoop:
    """The loop's state between updates."""

    def __init__(self, task: Task) -> None:
        self.task = task
        name = "Pong-v5" if task.is_frames else task.environment
        self.environments = envpool.make_gymnasium(name, num_envs=task.slots, seed=task.seed)
        shape, self.space = self.environments.observation_space.shape, self.environments.action_space
        self.agent = PlainAgent(task, shape, self.space)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=2.5e-4, eps=1e-5)
        each = (task.steps, task.slots)
        self.observations = torch.zeros((*each, *shape), dtype=torch.uint8 if task.is_frames else None)
        self.actions = torch.zeros(each + (() if self.agent.is_discrete else self.space.shape))
        self.logprobs, self.rewards, self.dones, self.values = (torch.zeros(each) for _ in range(4))
        self.now, self.done = torch.as_tensor(self.environments.reset()[0]), torch.zeros(task.slots)

    def sample(self) -> None:
        """Step every environment ``steps`` times."""
        for t in range(self.task.steps):
            self.observations[t], self.dones[t] = self.now, self.done
            with torch.no_grad():
                chosen, value = self.agent(self.now)
                action = chosen.sample()
                self.logprobs[t], self.values[t], self.actions[t] = chosen.log_prob(action), value, action
            sent = action.numpy()
            if self.agent.is_discrete:
                sent = sent.astype(np.int32)
            else:
                sent = np.clip(sent, self.space.low, self.space.high).astype(np.float64)
            following, reward, terminated, truncated, _ = self.environments.step(sent)
            self.rewards[t] = torch.as_tensor(reward)
            self.now, self.done = torch.as_tensor(following), torch.as_tensor(terminated | truncated).float()

    def advantages(self) -> Tensor:
        """Return generalised advantage estimates."""
        with torch.no_grad():
            after, found = self.agent(self.now)[1], torch.zeros_like(self.rewards)
        last, ended = torch.zeros(self.task.slots), self.done
        for t in reversed(range(self.task.steps)):
            delta = self.rewards[t] + 0.99 * after * (1 - ended) - self.values[t]
            found[t] = last = delta + 0.99 * 0.95 * (1 - ended) * last
            after, ended = self.values[t], self.dones[t]
        return found

    def learn(self) -> None:
        """Take the optimiser steps of one update."""
        parts = (self.observations, self.actions, self.logprobs, self.advantages(), self.values)
        seen, did, before, gains, old_values = (each.flatten(0, 1) for each in parts)
        returns = gains + old_values
        for _ in range(self.task.epochs):
            for part in torch.randperm(self.task.batch).chunk(self.task.minibatches):
                chosen, value = self.agent(seen[part])
                ratio = (chosen.log_prob(did[part]) - before[part]).exp()
                gain = gains[part]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
                loss = loss - 0.01 * chosen.entropy().mean()
                loss = loss + 0.5 * (value - returns[part]).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.optimizer.step()


def main(task: Task) -> None:
    """Train, and time both phases of the loop."""
    torch.manual_seed(task.seed)
    loop, clock = PlainLoop(task), Clock()
    for update in range(task.warm + task.updates):
        if update == task.warm:
            clock.restart()
        with clock.phase("sampling"):
            loop.sample()
        with clock.phase("learning"):
            loop.learn()
        clock.frames += task.batch
    clock.report()


if __name__ == "__main__":
    main(read_task())
