"""Sampler gap: find steps in which the trained policy is far from the weights that sampled its rows.

steps ─ staleness/kl above MOST_KL ─ gap_warning ─> one text for a phase, after three steps in a row

The limit is defined in ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Iterable

from rillflow.records.metrics import Metrics
from rillflow.runs.formatting import number
from rillflow.runs.uniform_rewards import IN_A_ROW

MOST_KL = 0.05
"""Largest ``staleness/kl/mean`` without a warning, in nats."""
KL = "staleness/kl/mean"


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
                "then algorithm.freshness; then try another algorithm.loss.correction"
            )
    return None
