"""Episodes: how far a run in an environment has come: environment steps, their rate, its best return.

metrics "actor/steps/sum" ─┐
spans of the steps ────────┼─> EpisodeFacts ─> summary, report
evaluations ───────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rillflow.runs.reader import EvaluationRecord
from rillflow.runs.run_data import RunData

STEPS = "actor/steps/sum"
"""Metric with the environment steps of a step of the run."""


@dataclass(frozen=True, kw_only=True)
class EpisodeFacts:
    """Facts of a run in an environment."""

    steps: int
    """Environment steps of all slots so far."""
    per_second: float | None
    """Environment steps per second of the steps of the run, without evaluations; None without spans."""
    best: EvaluationRecord | None
    """Evaluation with the highest mean return, the first among equals; None without evaluations."""

    @property
    def steps_text(self) -> str:
        """Environment steps and their rate. Example: ``12,800 (2,560 frames per second)``."""
        rate = "" if self.per_second is None else f" ({self.per_second:,.0f} frames per second)"
        return f"{self.steps:,}{rate}"

    @property
    def best_text(self) -> str:
        """The best mean return and its step; empty without an evaluation."""
        return "" if self.best is None else f"{self.best.value:.3f} after step {self.best.step:,}"


def episode_facts(data: RunData) -> EpisodeFacts | None:
    """Return the facts of a run in an environment; None for another run, or before its first step."""
    curve = data.curves.curve(STEPS)
    steps = round(float(np.nansum(curve.y)))
    if not steps:
        return None
    seconds = float(data.stages.column("duration").sum()) if len(data.stages) else 0.0
    returns = [each for each in data.evaluations if each.is_return and each.mean_reward == each.mean_reward]
    return EpisodeFacts(
        steps=steps,
        per_second=steps / seconds if seconds > 0 else None,
        best=max(returns, key=lambda each: each.mean_reward, default=None),
    )
