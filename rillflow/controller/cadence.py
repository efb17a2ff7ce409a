"""Cadence: how often a run evaluates, writes checkpoints and records rollouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rillflow.errors import TrainingError
from rillflow.runs import layout
from rillflow.runs.json_lines import read_lines
from rillflow.runs.reader import read_evaluations

CHECKPOINT_SHARE = 0.02
"""Largest share of a run's time spent on checkpoints due by the clock."""


def is_due(done: int, every: int) -> bool:
    """Return whether something is due after a number of steps; never if ``every`` is 0."""
    return every > 0 and done % every == 0


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How often to evaluate, checkpoint and record; 0 means never between the first and last step."""

    evaluate_every: int
    """Steps between two evaluations."""
    checkpoint_every: int
    """Steps between two checkpoints."""
    checkpoint_s: float
    """Seconds between two checkpoints."""
    keep_checkpoints: int
    """Number of checkpoints kept on disk."""
    max_skipped: int
    """Number of skipped non-finite updates that the whole run tolerates before it stops."""
    rollouts_every: int = 1
    """Steps between two recorded rollouts."""
    rollouts_share: float = 1.0
    """Share of the prompts whose rollouts are recorded."""
    patience: int = 0
    """Evaluations in a row without a better held-out result that end the run; 0 for never."""
    last_set: str = ""
    """Name of the set whose line an evaluation writes last; empty for the held-out rows."""

    def wants_checkpoint(self, done: int, *, since_s: float, last_took_s: float) -> bool:
        """Return whether a checkpoint is due, by steps or by the clock.

        Args:
            done: steps so far.
            since_s: seconds since the last checkpoint.
            last_took_s: seconds that training waited for it.
        """
        pause_s = max(self.checkpoint_s, last_took_s / CHECKPOINT_SHARE)
        return (self.checkpoint_s > 0 and since_s >= pause_s) or is_due(done, self.checkpoint_every)

    def exhausted(self, run: Path) -> str:
        """Return why the run ends early; empty if it goes on."""
        known = read_evaluations(run) if self.patience else []
        scored = [each for each in known if not math.isnan(each.mean_reward)]
        if not scored:
            return ""
        best = max(scored, key=lambda each: each.mean_reward)  # the first among equals
        after = len(known) - 1 - known.index(best)
        if after < self.patience:
            return ""
        return (
            f"the {after} evaluations after step {best.step} are not better than {best.text} "
            f"(evaluate.patience = {self.patience})"
        )

    def require_few_skipped(self, run: Path, step: int) -> None:
        """Refuse a finished step with one skipped update too many.

        Raises:
            TrainingError: the run has skipped more updates than ``max_skipped``, the last one in this step.
        """
        lines = read_lines(run / layout.SKIPS).lines
        if len(lines) > self.max_skipped and lines[-1].data["step"] == step:
            raise TrainingError(
                f"{len(lines)} updates were skipped because they were not finite, the last in step {step}",
                why=f"run.max_skipped is {self.max_skipped}; the last: {lines[-1].data['reason']}",
                fix=f"inspect it: rillflow replay {run}/bundles/step-{step:06d}; to resume, lower "
                "policy.lr or raise run.max_skipped",
            )
