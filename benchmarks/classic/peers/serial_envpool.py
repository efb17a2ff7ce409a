"""PPO as one plain script: EnvPool, one loop, no workers. It is the serial loop of the table."""

from __future__ import annotations

import numpy as np
from task import Clock, Task, read_task


def main(task: Task) -> None:
    """Train, and time both phases of the loop."""
    import envpool
    import torch
    from torch import nn

    torch.manual_seed(task.seed)
    name = "Pong-v5" if task.is_frames else task.environment
    environments = envpool.make_gymnasium(name, num_envs=task.slots, seed=task.seed)
    shape, space = environments.observation_space.shape, environments.action_space
    discrete = hasattr(space, "n")
    size = int(space.n) if discrete else space.shape[0]

    def layer(module: nn.Module, gain: float = 2**0.5) -> nn.Module:
        nn.init.orthogonal_(module.weight, gain)
        nn.init.zeros_(module.bias)
        return module

    def mlp(out: int, gain: float) -> nn.Module:
        first, second = layer(nn.Linear(shape[0], 64)), layer(nn.Linear(64, 64))
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), layer(nn.Linear(64, out), gain))

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
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
                self.actor, self.critic = mlp(size, 0.01), mlp(1, 1.0)

        def forward(self, given: torch.Tensor) -> tuple[torch.distributions.Distribution, torch.Tensor]:
            features = self.trunk(given.float() / 255.0 if task.is_frames else given.float())
            scores = self.actor(features)
            if discrete:
                chosen = torch.distributions.Categorical(logits=scores)
            else:
                normal = torch.distributions.Normal(scores, self.log_std.exp().expand_as(scores))
                chosen = torch.distributions.Independent(normal, 1)
            return chosen, self.critic(features).flatten()

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    observations = torch.zeros(
        (task.steps, task.slots, *shape), dtype=torch.uint8 if task.is_frames else None
    )
    actions = torch.zeros((task.steps, task.slots) + (() if discrete else (size,)))
    logprobs, rewards, dones, values = (torch.zeros(task.steps, task.slots) for _ in range(4))
    now = torch.as_tensor(environments.reset()[0])
    done = torch.zeros(task.slots)
    clock = Clock()
    for update in range(task.warm + task.updates):
        if update == task.warm:
            clock.restart()
        with clock.phase("sampling"):
            for t in range(task.steps):
                observations[t], dones[t] = now, done
                with torch.no_grad():
                    chosen, value = agent(now)
                    action = chosen.sample()
                    logprobs[t], values[t], actions[t] = chosen.log_prob(action), value, action
                sent = action.numpy()
                if discrete:
                    sent = sent.astype(np.int32)
                else:
                    sent = np.clip(sent, space.low, space.high).astype(np.float64)
                following, reward, terminated, truncated, _ = environments.step(sent)
                rewards[t] = torch.as_tensor(reward)
                now, done = torch.as_tensor(following), torch.as_tensor(terminated | truncated).float()
        with clock.phase("learning"):
            with torch.no_grad():
                after, advantages, last = agent(now)[1], torch.zeros_like(rewards), torch.zeros(task.slots)
                for t in reversed(range(task.steps)):
                    ended = done if t == task.steps - 1 else dones[t + 1]
                    following_value = after if t == task.steps - 1 else values[t + 1]
                    delta = rewards[t] + 0.99 * following_value * (1 - ended) - values[t]
                    advantages[t] = last = delta + 0.99 * 0.95 * (1 - ended) * last
            flat = [each.flatten(0, 1) for each in (observations, actions, logprobs, advantages, values)]
            seen, did, before, gains, old_values = flat
            returns = gains + old_values
            for _ in range(task.epochs):
                for part in torch.randperm(task.batch).chunk(task.minibatches):
                    chosen, value = agent(seen[part])
                    ratio = (chosen.log_prob(did[part]) - before[part]).exp()
                    gain = gains[part]
                    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                    loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
                    loss = loss - 0.01 * chosen.entropy().mean()
                    loss = loss + 0.5 * (value - returns[part]).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
        clock.frames += task.batch
    clock.report()


if __name__ == "__main__":
    main(read_task())
