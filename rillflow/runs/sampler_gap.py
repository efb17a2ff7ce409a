"""Sampler gap: find steps whose sampler was far from the trained policy, or from the trainer's arithmetic.

steps ─ staleness/kl above MOST_KL ─ gap_warning ─> one text for a phase, after three steps in a row
steps ─ mismatch/first_gap large or grown ─ MismatchWatch ─> one text for a phase, at once

The limits are defined in ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Iterable

from rillflow.records.metrics import Metrics
from rillflow.runs.formatting import number
from rillflow.runs.uniform_rewards import IN_A_ROW

MOST_KL = 0.05
"""Largest ``staleness/kl/mean`` without a warning, in nats."""
KL = "staleness/kl/mean"
MEAN_GAP, LARGEST_GAP = "mismatch/first_gap/mean", "mismatch/first_gap/max"
ROW_GAP = "mismatch/first_row_gap/max"
MOST = {LARGEST_GAP: 0.5, ROW_GAP: 0.1}
"""Largest values without a warning, in nats."""
GROWTH, LEAST_GAP = 5.0, 0.002
"""``mismatch/first_gap/mean`` is warned of above this multiple of all earlier steps, and above this value."""


def gap_warning(steps: Iterable[tuple[int, Metrics]]) -> str | None:
    """Return a warning about the first ``IN_A_ROW`` consecutive steps of a phase above the limit."""
    row = list[int]()
    for step, metrics in steps:
        kl = metrics.get(KL)
        if kl is None or kl.value <= MOST_KL:
            row = []
            continue
        row = [*row, step] if row and row[-1] == step - 1 else [step]
        if len(row) == IN_A_ROW:
            return (
                f"{KL} is {number(kl.value)} nats in step {step:,}, and above {MOST_KL:g} for {IN_A_ROW} "
                "steps: the policy is far from the weights that sampled its rows. Lower policy.lr first, "
                "then schedule.freshness; then try another algorithm.loss.correction"
            )
    return None


class MismatchWatch:
    """Finds the first step of a phase in which sampler and trainer disagree more than by rounding.

    ``check_gap`` stops a run at a clear disagreement; these steps are below its limits.
    """

    def __init__(self) -> None:
        self._means = list[float]()

    def observe(self, step: int, metrics: Metrics) -> str | None:
        """Take a step's metrics; return a warning if its mismatch is large, or far above earlier steps'."""
        mean = metrics.get(MEAN_GAP)
        if mean is None:
            return None
        before = max(self._means, default=0.0)
        has_grown = len(self._means) >= IN_A_ROW and mean.value > max(LEAST_GAP, GROWTH * before)
        self._means.append(mean.value)
        above = [name for name, most in MOST.items() if name in metrics and metrics[name].value > most]
        if has_grown:
            now, then = number(mean.value), number(before)
            what = f"{MEAN_GAP} is {now} nats in step {step:,}, and was at most {then}"
        elif above:
            value = number(metrics[above[0]].value)
            what = f"{above[0]} is {value} nats in step {step:,}, above {MOST[above[0]]:g}"
        else:
            return None
        return (
            f"{what}: sampler and trainer differ by more than rounding usually does, at some tokens. Compare "
            'with one run at policy.model.dtype = "float32" and rollout.engine = "native", where every token '
            "is checked; a lower algorithm.gap_tolerance stops the run"
        )


def mismatch_warning(steps: Iterable[tuple[int, Metrics]]) -> str | None:
    """Return the first warning of a ``MismatchWatch`` about the steps of a phase."""
    watch = MismatchWatch()
    return next((text for step, metrics in steps if (text := watch.observe(step, metrics))), None)
