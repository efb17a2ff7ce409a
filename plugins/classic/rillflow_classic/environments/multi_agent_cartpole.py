"""Four CartPoles as one multi-agent environment, as in RLlib Flow's example of two trainers.

An agent ends when its pole falls; the environment ends when all have ended.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from rillflow_classic.fragment import Array


class MultiAgentCartPole:
    """CartPole for several agents, in PettingZoo's parallel form.

    Args:
        num_agents: number of agents.
        render_mode: ``rgb_array`` draws the first agent.
    """

    def __init__(self, num_agents: int = 4, render_mode: str | None = None) -> None:
        self.possible_agents = [f"agent_{index}" for index in range(num_agents)]
        self.agents: list[str] = []
        """Agents that have not ended."""
        self._poles = {
            agent: gymnasium.make("CartPole-v1", disable_env_checker=True, render_mode=render_mode)
            for agent in self.possible_agents
        }

    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the space of an agent's observation."""
        return self._poles[agent].observation_space

    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the space of an agent's action."""
        return self._poles[agent].action_space

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Begin a new episode; agent i gets the seed plus i."""
        self.agents = list(self.possible_agents)
        begun = {
            agent: pole.reset(seed=None if seed is None else seed + index, options=options)
            for index, (agent, pole) in enumerate(self._poles.items())
        }
        return {agent: each[0] for agent, each in begun.items()}, {agent: {} for agent in begun}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        """Step the agents that have not ended; return five dicts by agent."""
        stepped = {agent: self._poles[agent].step(actions[agent]) for agent in self.agents}
        self.agents = [agent for agent, each in stepped.items() if not (each[2] or each[3])]
        return tuple({agent: each[place] for agent, each in stepped.items()} for place in range(5))

    def render(self) -> Any:
        """Return a frame of the first agent; None without a render mode."""
        return self._poles[self.possible_agents[0]].render()

    def close(self) -> None:
        """Close all CartPoles."""
        for pole in self._poles.values():
            pole.close()
