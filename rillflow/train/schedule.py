"""The learning rate by step: linear warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math

from rillflow.train.config import OptimizerConfig


def lr_factor(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The share of the peak learning rate that optimiser step ``step`` (from 0) uses.

    Warm-up step s of w uses (s + 1) / w. Linear and cosine then go from 1 at the first step after the
    warm-up to ``final_lr`` at step ``total_steps``, and stay there.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    falling = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.final_lr + (1 - config.final_lr) * falling
