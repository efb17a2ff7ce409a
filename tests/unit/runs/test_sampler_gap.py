"""Steps whose policy is far from the weights that sampled its rows are found, only if consecutive."""

from __future__ import annotations

from rillflow.records.metrics import Mean, Metrics
from rillflow.runs.sampler_gap import MOST_KL, gap_warning


def moved(kl: float) -> Metrics:
    return {"staleness/kl/mean": Mean(total=kl, count=1.0)}


FAR, NEAR = moved(0.1), moved(MOST_KL)


def test_three_in_a_row_are_warned_of_and_the_fix_begins_with_the_rate() -> None:
    steps = [FAR, FAR, NEAR, FAR, FAR, FAR, moved(0.2)]
    told = gap_warning(enumerate(steps, 1))
    assert told is not None and "staleness/kl/mean is 0.100 nats in step 6, and above 0.05" in told
    assert told.index("policy.lr") < told.index("algorithm.freshness") < told.index("loss.correction")


def test_fewer_in_a_row_or_rows_that_are_never_stale_are_not() -> None:
    assert gap_warning([(1, FAR), (2, FAR), (4, FAR), (5, FAR)]) is None, (
        "steps that were not made are no row"
    )
    assert gap_warning(enumerate([FAR, FAR, NEAR] * 3)) is None
    assert gap_warning(enumerate([FAR, FAR, {}, FAR, FAR])) is None
