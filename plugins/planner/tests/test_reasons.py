"""Every ranked placement says what it is behind by; where nothing fits, what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.planner.tests.toys import ToyCosts, toy_fleet, toy_problem
from rillflow.errors import PlanError
from rillflow_planner.cost_model.options import Option
from rillflow_planner.hardware import Fleet
from rillflow_planner.problem import Problem, Unit
from rillflow_planner.ranking import Cause, Goal, SearchObjective, order_as_shown
from rillflow_planner.search import search

PROBLEM = toy_problem(5, roles=3, fleets=[toy_fleet(devices=8)])


class PlainCosts(ToyCosts):
    """Seconds fall with devices; generation has a tail that does not; models take half a device and more."""

    def _options(self, unit: Unit, fleet: str, devices: int) -> tuple[Option, ...]:
        generates = any(self.problem.graph.stages[index].endpoint == "generate" for index in unit.stages)
        option = Option(
            grid=super()._option(unit, fleet, devices, 0).grid,
            generate_tp=int(generates),
            seconds=dict.fromkeys(unit.stages, 8.0 * self.speed / devices),
            resident_bytes=40.0,
            working_bytes=10.0,
            sampling_bytes=0.0,
        )
        return (option,) if self.room_bytes(fleet, {unit.name: option}) >= 0 else ()

    def shortfall_bytes(self, unit: Unit, fleet: str, devices: int) -> float:
        return max(0.0, 50.0 - self.memory)

    def transfer_s(self, *_: object) -> float:
        return self.link

    def decoder(self, unit: Unit, option: Option, fleet: str, devices: int, room_bytes: float) -> object:
        return replace(super().decoder(unit, option, fleet, 1, 1000.0), seconds=1.0 + 1.0 / devices)

    def steady_s(self, stage: object, decoder: object) -> float:
        return 0.2


def plain(**changes: float) -> Callable[[Problem], PlainCosts]:
    return lambda problem: PlainCosts(problem=problem, seed=5, **changes)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    link=st.sampled_from([0.0, 1.0, 50.0]),
    objective=st.sampled_from(
        [SearchObjective(), SearchObjective(goal=Goal.DEVICE_HOURS), SearchObjective(goal=Goal.COST)]
    ),
)
def test_each_of_the_best_but_the_first_says_what_it_is_behind_by(
    seed: int, link: float, objective: SearchObjective
) -> None:
    problem = toy_problem(seed, roles=3, fleets=[toy_fleet()])
    costs = lambda one: ToyCosts(problem=one, seed=seed, memory=300.0, link=link)  # noqa: E731
    best, *others = search(problem, costs, objective=objective, freshness=(0, 1)).best
    assert (best.cause, best.why) == (None, "")
    for one in others:
        assert one.cause is not None and one.why
        equal = (one.value, one.evaluation.devices) == (best.value, best.evaluation.devices)
        assert (one.cause is Cause.TIE) == equal
        late = one.evaluation.step_s - best.evaluation.step_s
        share = f"{late / best.evaluation.step_s:+.0%}: "
        slower = one.evaluation.step_s > best.evaluation.step_s * (1 + 1e-9)
        assert (one.cause in (Cause.TIE, Cause.DEVICES)) == (not slower)
        if slower:
            assert one.why.startswith(share) and "e+" not in one.why
        more = sum(
            max(0.0, spent - best.evaluation.seconds[index])
            for index, spent in one.evaluation.seconds.items()
        )
        if one.cause in (Cause.SLOWER, Cause.TURNS):
            assert (one.cause is Cause.SLOWER) == (more >= late / 2)


class EqualCosts(PlainCosts):
    """Everything takes no time, and a model's bytes are cut over its devices."""

    def _options(self, unit: Unit, fleet: str, devices: int) -> tuple[Option, ...]:
        options = super()._options(unit, fleet, devices)
        return tuple(replace(one, resident_bytes=80.0 / devices, working_bytes=0.0) for one in options)

    def decoder(self, *arguments: object) -> object:
        return replace(super().decoder(*arguments), seconds=0.0)

    def function_s(self, *_: object) -> float:
        return 0.0


TIED = "equally good; ties go to fewer device groups, then fresher tokens, then names in order"


@pytest.mark.parametrize(
    ("memory", "pools", "whys"),
    [
        (160.0, 1, [TIED] * 3 + ["as fast, on 3 devices instead of 2"]),
        (80.0, 2, [TIED] * 3),
    ],
)
def test_equal_plans_are_in_the_order_of_the_search_and_say_so(
    memory: float, pools: int, whys: list[str]
) -> None:
    def costs(problem: Problem) -> PlainCosts:
        return EqualCosts(problem=problem, seed=5, memory=memory, link=0.0, speed=0.0)

    best, *others = search(PROBLEM, costs).best
    assert len(best.plan.pools) == pools
    assert [one.why for one in others][: len(whys)] == whys
    assert {one.cause for one in others if one.why == TIED} == {Cause.TIE}


def test_a_placement_with_slow_links_is_behind_by_transfer() -> None:
    _, *others = search(PROBLEM, plain(memory=300.0, link=50.0)).best
    assert {one.cause for one in others} == {Cause.TRANSFER}
    assert "for transfers between device groups" in others[0].why


def test_placements_too_large_for_a_device_are_counted() -> None:
    ranking = search(PROBLEM, plain(memory=70.0))
    assert {len(one.plan.pools) for one in ranking.best} == {3}
    assert (ranking.placements, len(ranking.best), ranking.nowhere) == (5, 1, 4)


def test_with_the_fewest_devices_wanted_a_faster_placement_is_behind_by_devices() -> None:
    fewest = SearchObjective(goal=Goal.DEVICES, deadline_s=1000.0)
    best, *others = search(PROBLEM, plain(memory=300.0, link=0.0), objective=fewest).best
    assert best.evaluation.devices == 1
    assert Cause.DEVICES in {one.cause for one in others}


def test_where_no_plan_fits_the_role_the_bytes_and_the_least_cluster_are_told() -> None:
    with pytest.raises(PlanError, match="no plan of toy fits on toys") as error:
        search(PROBLEM, plain(memory=43.0))
    assert "every device lacks 7 bytes: policy" in error.value.why
    assert "4096 machines of toy of machine type here are not enough" in error.value.fix


def test_the_least_cluster_that_would_do_is_named() -> None:
    small = replace(PROBLEM, hardware=replace(PROBLEM.hardware, fleets=(toy_fleet(devices=2),)))
    with pytest.raises(PlanError) as error:
        search(small, plain(memory=70.0))
    assert "use at least 4 toy of machine type here instead of 2" in error.value.fix


def test_a_deadline_none_keeps_is_told() -> None:
    fastest = search(PROBLEM, plain(memory=300.0)).best[0].value
    with pytest.raises(PlanError, match="meets the deadline") as error:
        search(PROBLEM, plain(memory=300.0), objective=SearchObjective(deadline_s=0.1))
    assert error.value.why == f"the fastest step takes {fastest:.4g} s"


def test_the_least_cost_needs_prices() -> None:
    free = replace(PROBLEM, hardware=replace(PROBLEM.hardware, fleets=(toy_fleet(price=0.0),)))
    with pytest.raises(PlanError, match="machine type here has no price"):
        search(free, plain(), objective=SearchObjective(goal=Goal.COST))


def test_doubling_brings_less_and_less_and_says_so() -> None:
    found = search(PROBLEM, plain(memory=300.0), times=(1, 2, 4)).sizes
    assert [one.devices for one in found] == [8, 16, 32]
    assert found[0].gain is None
    gains = [one.gain for one in found[1:] if one.gain is not None]
    assert all(gain >= 0 for gain in gains)
    assert gains[0] > gains[1]
    assert [one.gains_little for one in found] == [False, *(gain < 0.1 for gain in gains)]
    assert found[-1].best is not None
    assert found[-1].rows_per_s == PROBLEM.workload.rows / found[-1].best.evaluation.step_s


def test_a_size_on_which_nothing_fits_is_told_as_such() -> None:
    machines = Fleet(**{**vars(toy_fleet()), "devices": 4})
    problem = replace(PROBLEM, hardware=replace(PROBLEM.hardware, fleets=(machines,)))
    found = search(problem, plain(memory=70.0), times=(Fraction(1, 2), 1)).sizes
    assert [(one.devices, one.best is None, one.gain) for one in found] == [(2, True, None), (4, False, None)]


def test_the_first_plans_stand_in_the_order_of_what_is_shown() -> None:
    ranking = search(PROBLEM, plain())
    first, second, third = ranking.best[:3]
    assert first.evaluation.step_s < second.evaluation.step_s <= third.evaluation.step_s
    shown, order = order_as_shown(ranking, [9.0, 7.0, 8.0])
    assert order == [1, 2, 0]
    assert [one.plan for one in shown.best[:3]] == [second.plan, third.plan, first.plan]
    assert [one.plan for one in shown.best[3:]] == [one.plan for one in ranking.best[3:]]
    assert (shown.best[0].cause, shown.best[0].why) == (None, "")
    assert (shown.best[2].cause, shown.best[2].why) == (Cause.SIMULATED, "9.00 s a step when simulated")
    assert shown.best[1].cause not in (None, Cause.SIMULATED), "formulas say the same of it"
    assert order_as_shown(ranking, [7.0, 8.0, 9.0])[0].best == ranking.best
