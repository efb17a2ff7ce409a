"""Steps are found whose policy is far from the weights that sampled, or whose sampler computes otherwise."""

from __future__ import annotations

from rillflow.records.metrics import Max, Mean, Metrics
from rillflow.runs.sampler_gap import LARGEST_GAP, MOST, MOST_KL, ROW_GAP, gap_warning, mismatch_warning


def moved(kl: float) -> Metrics:
    return {"staleness/kl/mean": Mean(total=kl, count=1.0)}


FAR, NEAR = moved(0.1), moved(MOST_KL)


def test_three_in_a_row_are_warned_of_and_the_fix_begins_with_the_rate() -> None:
    steps = [FAR, FAR, NEAR, FAR, FAR, FAR, moved(0.2)]
    told = gap_warning(enumerate(steps, 1))
    assert told is not None and "staleness/kl/mean is 0.100 nats in step 6, and above 0.05" in told
    assert told.index("policy.lr") < told.index("schedule.freshness") < told.index("loss.correction")


def test_fewer_in_a_row_or_rows_that_are_never_stale_are_not() -> None:
    assert gap_warning([(1, FAR), (2, FAR), (4, FAR), (5, FAR)]) is None, (
        "steps that were not made are no row"
    )
    assert gap_warning(enumerate([FAR, FAR, NEAR] * 3)) is None
    assert gap_warning(enumerate([FAR, FAR, {}, FAR, FAR])) is None


def mismatch(mean: float, largest: float, row: float = 0.01) -> Metrics:
    return {
        "mismatch/first_row_gap/max": Max(value=row),
        "mismatch/first_gap/mean": Mean(total=mean * 400, count=400.0),
        "mismatch/first_gap/max": Max(value=largest),
    }


def test_a_large_difference_is_warned_of_in_the_first_step() -> None:
    text = mismatch_warning([(1, mismatch(0.0077, 1.32))])
    assert text is not None and "mismatch/first_gap/max is 1.32 nats in step 1, above 0.5" in text
    assert 'policy.model.dtype = "float32"' in text and "gap_tolerance" in text
    assert mismatch_warning([(1, mismatch(0.0077, MOST[LARGEST_GAP], MOST[ROW_GAP]))]) is None
    text = mismatch_warning([(1, mismatch(0.0077, 0.4, 0.125))])
    assert text is not None and "mismatch/first_row_gap/max is 0.125 nats in step 1, above 0.1" in text


def test_a_mean_that_grows_between_steps_is_warned_of() -> None:
    steps = [mismatch(mean, 0.02) for mean in (0.0006, 0.0005, 0.0007)]
    text = mismatch_warning(enumerate([*steps, mismatch(0.0077, 0.2)], 1))
    assert text is not None and "is 0.00770 nats in step 4, and was at most 7.0e-4" in text
    assert mismatch_warning(enumerate([*steps, mismatch(0.0030, 0.2)], 1)) is None, "it grew four times"
    assert mismatch_warning(enumerate([*steps[:2], mismatch(0.0077, 0.2)], 1)) is None, "two steps are few"
    assert mismatch_warning(enumerate([{}, FAR, {}], 1)) is None
