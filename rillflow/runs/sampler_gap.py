"""Sampler gap: find steps in which the trained policy is far from the weights that sampled its rows.

steps ─ far_apart ─> mismatch/kl, or the share of clipped tokens ─ gap_warning ─> one text for a phase

The limits are defined in ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Iterable

from rillflow.records.metrics import Metrics
from rillflow.runs.formatting import number
from rillflow.runs.uniform_rewards import IN_A_ROW

MOST_KL = 0.03
"""Largest ``mismatch/kl/mean`` without a warning, in nats per token."""
MOST_CLIPPED = 0.3
"""Largest ``policy/clipped/share`` without a warning if the ratio is taken against the sampler."""
_AGE, _GAP = "staleness/versions/mean", "mismatch/logprob_gap/max"
_KL, _CLIPPED = "mismatch/kl/mean", "policy/clipped/share"


def far_apart(metrics: Metrics) -> str | None:
    """Return how far a step's trainer is from its sampler, if that is above a limit.

    None if it is not, or if the phase has no stale rows. A run with ``old_logprobs = "sampler"`` measures no
    divergence: all of its gaps are exactly 0, and the share of clipped tokens stands in.
    """
    if _AGE not in metrics:
        return None
    kl, clipped, gap = (metrics.get(name) for name in (_KL, _CLIPPED, _GAP))
    if kl is not None and kl.value > MOST_KL:
        return f"{_KL} is {number(kl.value)} nats, above {MOST_KL:g}"
    if clipped is not None and clipped.value > MOST_CLIPPED and gap is not None and gap.value == 0:
        return f"{_CLIPPED} is {number(clipped.value)}, above {MOST_CLIPPED:g}"
    return None


def gap_warning(steps: Iterable[tuple[int, Metrics]]) -> str | None:
    """Return a warning about the first ``IN_A_ROW`` consecutive steps of a phase that are far apart."""
    row = list[int]()
    for step, metrics in steps:
        found = far_apart(metrics)
        if found is None:
            row = []
            continue
        row = [*row, step] if row and row[-1] == step - 1 else [step]
        if len(row) == IN_A_ROW:
            return (
                f"{found}, in step {step:,}, the last of {IN_A_ROW} in a row: the trainer is far from the "
                "weights that sampled its rows. Lower policy.lr first, then algorithm.freshness; then try "
                "another algorithm.loss.correction"
            )
    return None
