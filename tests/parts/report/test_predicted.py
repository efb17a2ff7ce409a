"""Predicted and measured times: medians of the last phase, and the stage with the largest error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan, PlannedPool, PlannedUnit, plan_text
from rillflow.runs import layout
from rillflow.runs.run_data import RunData, load
from rillflow_parts.report.predicted import compare, render_comparison
from rillflow_parts.report.write import render

MakeRun = Callable[..., Path]
PLAN = Plan(
    name="grpo",
    pools=(PlannedPool(name="main", machine_type="cores", devices=1),),
    units={"policy": PlannedUnit(pool="main", grid=Grid(), generate_tp=1)},
    predicted_step_s=1.5,
    predicted_stages_s={"policy.generate": 0.52, "policy.update": 0.1, "policy.publish": 0.001},
)


def planned(run: Path, plan: Plan = PLAN) -> Path:
    (run / layout.PLAN).write_text(plan_text(plan))
    return run


def test_every_stage_is_compared_by_its_median(make_run: MakeRun) -> None:
    data = load(planned(make_run()))
    found = compare(data)
    assert found is not None and found.steps == 39
    assert [one.stage for one in found.stages[:3]] == ["policy.update", "policy.generate", "reward.score"]
    update = found.stages[0]
    spans = [span.duration_s for span in data.spans if span.stage == "policy.update" and span.step > 21]
    assert update.measured_s == pytest.approx(median(spans))
    assert update.error == pytest.approx(0.1 / median(spans) - 1)
    assert found.furthest == update
    unmeasured = next(one for one in found.stages if one.stage == "policy.publish")
    assert unmeasured.error == 0 and unmeasured.measured_s == 0


def test_the_table_says_what_was_furthest_off(make_run: MakeRun) -> None:
    found = compare(load(planned(make_run())))
    assert found is not None
    text = render_comparison(found)
    assert "largest error: policy.update, predicted 100 ms, measured" in text
    assert len({len(line.split()) for line in text.splitlines()}) > 1
    assert text.splitlines()[0] == "predicted and measured, medians of 39 steps:"


def test_the_report_shows_it(make_run: MakeRun) -> None:
    run = make_run()
    assert "Predicted and measured" not in render(load(run))
    assert "Predicted and measured, medians of 39 steps" in render(load(planned(run)))


@pytest.fixture
def whole(make_run: MakeRun) -> RunData:
    """Return a planned run of 60 steps, 20 of them in another phase."""
    return load(planned(make_run()))


def start(after: int, pools: int, is_planned: bool = True) -> dict[str, object]:
    return {"after_step": after, "placement": {"pools": {"main": pools}}, "is_planned": is_planned}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    after=st.lists(st.integers(1, 59), unique=True, max_size=5).map(sorted),
    pools=st.lists(st.sampled_from([1, 2]), min_size=6, max_size=6),
    is_planned=st.booleans(),
)
def test_only_steps_placed_as_the_last_start_are_measured(
    whole: RunData, after: list[int], pools: list[int], is_planned: bool
) -> None:
    begins = [0, *after]
    starts = [start(step, size) for step, size in zip(begins, pools, strict=False)]
    starts[-1] = start(begins[-1], pools[len(after)], is_planned)
    found = compare(replace(whole, starts=starts))
    if not is_planned:
        assert found is None
        return
    ranks = [pools[sum(step > begin for begin in begins) - 1] for step in range(1, 61)]
    since = max((step for step in range(1, 61) if ranks[step - 1] != ranks[-1]), default=0) + 1
    first = max(since, 21)
    assert found is not None and found.steps == max(1, 60 - first)
    spans = [one.duration_s for one in whole.spans if one.stage == "policy.update" and one.step > first]
    if first < 60:
        assert found.stages[0].measured_s == pytest.approx(median(spans))


def test_a_run_that_made_no_step_under_its_plan_is_not_compared(make_run: MakeRun) -> None:
    data = load(planned(make_run()))
    assert compare(replace(data, starts=[start(0, 1), start(60, 2)])) is None
    assert compare(replace(data, starts=[])) is not None, "a directory that does not say is taken as planned"


def test_a_run_without_a_plan_or_a_step_of_it_is_not_compared(make_run: MakeRun) -> None:
    assert compare(load(make_run())) is None
    assert compare(load(planned(make_run(steps=20)))) is None
    assert compare(load(planned(make_run(steps=0)))) is None


def test_a_damaged_plan_is_named(make_run: MakeRun) -> None:
    run = make_run()
    (run / layout.PLAN).write_text("name = 3")
    with pytest.raises(PlanError, match=r"plan\.toml"):
        compare(load(run))
