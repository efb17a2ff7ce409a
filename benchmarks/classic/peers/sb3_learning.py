"""Learning of Stable-Baselines3's PPO, DQN and SAC, with greedy evaluations between fragments.

    PYTHON sb3_learning.py '{"algorithm": "ppo", "environment": "CartPole-v1", ...}'  ->  one line of JSON

The line holds the mean return of greedy episodes before the first update, after every ``every`` frames, and
at the end: [[frames, return], ...].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def main(task: dict[str, Any]) -> None:
    """Train, and write the returns."""
    import torch
    from stable_baselines3 import DQN, PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    judges = make_vec_env(task["environment"], 10, seed=task["seed"] + 1000)
    curve: list[tuple[int, float]] = []

    class Judged(BaseCallback):
        """Evaluates before a fragment, so never between the actions of one."""

        def _on_rollout_start(self) -> None:
            if not curve or self.num_timesteps - curve[-1][0] >= task["every"]:
                self.judge()

        def judge(self) -> None:
            """Add the mean return of greedy episodes."""
            mean, _ = evaluate_policy(self.model, judges, task["episodes"], deterministic=True)
            curve.append((self.num_timesteps, float(mean)))

        def _on_step(self) -> bool:
            return True

    settings, classes = dict(task["settings"]), {"ppo": PPO, "dqn": DQN, "sac": SAC}
    for name in task["falling"]:
        settings[name] = falling(settings[name])
    environments = make_vec_env(task["environment"], task["slots"], seed=task["seed"])
    model = classes[task["algorithm"]]("MlpPolicy", environments, seed=task["seed"], device="cpu", **settings)
    judged = Judged()
    model.learn(task["frames"], callback=judged)
    judged.judge()
    sys.stdout.write("\n" + json.dumps({"curve": curve}) + "\n")


def falling(first: float) -> Callable[[float], float]:
    """Return a schedule that falls linearly to 0."""
    return lambda left: first * left


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
