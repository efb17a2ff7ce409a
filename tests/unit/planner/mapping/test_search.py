"""The search finds what trying every plan finds, and nothing that helps makes its best plan worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import PlanError
from rillflow.planner.evaluate import evaluate
from rillflow.planner.mapping.search import Effort, Ranking, search
from rillflow.planner.mapping.solve import Solver
from rillflow.planner.objective import Goal, Objective
from rillflow.planner.problem import Problem
from tests.unit.planner.mapping.toys import ToyCosts, Tried, every_plan, toy_fleet, toy_problem, variants

seeds = st.integers(0, 10**6)
objectives = st.sampled_from(
    [
        Objective(),
        Objective(goal=Goal.DEVICE_HOURS),
        Objective(goal=Goal.DEVICES, deadline_s=22.0),
        Objective(goal=Goal.COST),
        Objective(deadline_s=25.0),
    ]
)
ALL = Effort(kept=1000, explains=False)


def costs_of(seed: int, **changes: object) -> Callable[[Problem], ToyCosts]:
    return lambda problem: ToyCosts(problem=problem, seed=seed, **changes)


def tried(
    problem: Problem, seed: int, freshness: tuple[int, ...], objective: Objective, **changes: object
) -> list[Tried]:
    return [
        one
        for variant in variants(problem, freshness)
        for one in every_plan(variant, costs_of(seed, **changes)(variant), objective)
    ]


def placements(ranking: Ranking) -> dict[object, tuple[float, int]]:
    return {
        (
            frozenset(
                frozenset(name for name, unit in one.plan.units.items() if unit.pool == pool.name)
                for pool in one.plan.pools
            ),
            one.plan.freshness,
        ): (one.value, one.evaluation.devices)
        for one in ranking.best
    }


def require_equal(ranking: Ranking, found: list[Tried]) -> None:
    """The best of every placement, and of equal ones that with the fewest devices."""
    best: dict[object, tuple[float, int]] = {}
    for one in found:
        key = (one.names, one.freshness)
        best[key] = min(best.get(key, (float("inf"), 0)), (one.value, one.devices))
    assert placements(ranking) == best


@settings(max_examples=30, deadline=None)
@given(seed=seeds, memory=st.sampled_from([30.0, 60.0, 100.0]), objective=objectives)
def test_two_roles_equal_brute_force_with_every_freshness(
    seed: int, memory: float, objective: Objective
) -> None:
    problem = toy_problem(seed, roles=2, fleets=[toy_fleet()])
    found = tried(problem, seed, (0, 1, 3), objective, memory=memory)
    if not found:
        with pytest.raises(PlanError):
            search(
                problem, costs_of(seed, memory=memory), objective=objective, freshness=(0, 1, 3), effort=ALL
            )
        return
    ranking = search(
        problem, costs_of(seed, memory=memory), objective=objective, freshness=(0, 1, 3), effort=ALL
    )
    assert ranking.is_exact
    require_equal(ranking, found)


def publishing_first(problem: Problem) -> Problem:
    """The same step, begun by publishing the weights of the one before."""
    graph = problem.graph
    stages = [replace(stage, index=(stage.index + 1) % len(graph.stages)) for stage in graph.stages]
    edges = [
        replace(edge, source=edge.source + (edge.source >= 0), destination=edge.destination + 1)
        for edge in graph.edges
    ]
    return replace(problem, graph=replace(graph, stages=(stages[-1], *stages[:-1]), edges=tuple(edges)))


@settings(max_examples=30, deadline=None)
@given(seed=seeds, memory=st.sampled_from([30.0, 60.0, 100.0]), objective=objectives, is_first=st.booleans())
def test_a_sampler_apart_in_step_equals_brute_force(
    seed: int, memory: float, objective: Objective, is_first: bool
) -> None:
    problem = toy_problem(seed, roles=2, fleets=[toy_fleet()])
    problem = publishing_first(problem) if is_first else problem
    costs = costs_of(seed, memory=memory, link=8.0 if is_first else 1.0)
    ask = partial(search, objective=objective, freshness=(0, 1), apart_in_step=True, effort=ALL)
    every = [*variants(problem, (0, 1)), problem.apart()]
    found = [one for variant in every for one in every_plan(variant, costs(variant), objective)]
    if not found:
        with pytest.raises(PlanError):
            ask(problem, costs)
        return
    ranking = ask(problem, costs)
    assert ranking.is_exact
    require_equal(ranking, found)


@settings(max_examples=12, deadline=None)
@given(seed=seeds, memory=st.sampled_from([50.0, 100.0]), objective=objectives)
def test_three_roles_on_two_fleets_equal_brute_force(seed: int, memory: float, objective: Objective) -> None:
    fleets = [toy_fleet(devices=2), toy_fleet("there", devices=1, per_machine=1, price=3.0)]
    problem = toy_problem(seed, roles=3, fleets=fleets)
    changes = {"memory": memory, "options_each": 3}
    found = tried(problem, seed, (0,), objective, **changes)
    if not found:
        with pytest.raises(PlanError):
            search(problem, costs_of(seed, **changes), objective=objective, effort=ALL)
        return
    require_equal(search(problem, costs_of(seed, **changes), objective=objective, effort=ALL), found)


@settings(max_examples=6, deadline=None)
@given(seed=seeds)
def test_four_roles_equal_brute_force(seed: int) -> None:
    problem = toy_problem(seed, roles=4, fleets=[toy_fleet(devices=2)])
    found = tried(problem, seed, (0,), Objective())
    if found:
        require_equal(search(problem, costs_of(seed), effort=ALL), found)


@settings(max_examples=12, deadline=None)
@given(seed=seeds, kept=st.integers(1, 3), objective=objectives)
def test_the_few_best_are_the_first_of_all(seed: int, kept: int, objective: Objective) -> None:
    problem = toy_problem(seed, roles=3, fleets=[toy_fleet()])
    try:
        every = search(problem, costs_of(seed), objective=objective, effort=ALL)
    except PlanError:
        return
    few = search(problem, costs_of(seed), objective=objective, effort=Effort(kept=kept, explains=False))
    assert [one.plan for one in few.best] == [one.plan for one in every.best[:kept]]
    assert len(few.losers) == few.counts.placements - len(few.best)
    assert all(loser.bound >= few.best[-1].value for loser in few.losers)


@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_what_is_found_is_what_its_plan_costs(seed: int) -> None:
    problem = toy_problem(seed, roles=3, fleets=[toy_fleet()])
    for one in search(problem, costs_of(seed, memory=300.0), freshness=(0, 1), effort=ALL).best:
        variant = variants(problem, (one.plan.freshness,))[0]
        again = evaluate(variant, costs_of(seed, memory=300.0)(variant), one.plan)
        assert again.step_s == pytest.approx(one.value, rel=1e-9)
        assert one.plan.predicted_step_s == again.step_s


def best_step(problem: Problem, seed: int, **changes: object) -> float:
    effort = Effort(kept=1, explains=False)
    try:
        return search(problem, costs_of(seed, **changes), freshness=(0, 1), effort=effort).best[0].value
    except PlanError:
        return float("inf")


@settings(max_examples=6, deadline=None)
@given(seed=seeds)
def test_what_helps_never_hurts(seed: int) -> None:
    problem = toy_problem(seed, roles=2, fleets=[toy_fleet()])
    normal = best_step(problem, seed, memory=70.0)
    assert best_step(problem, seed, memory=90.0) <= normal
    assert best_step(problem, seed, memory=70.0, link=0.5) <= normal
    assert best_step(problem, seed, memory=70.0, speed=0.8) <= normal
    larger = replace(problem, hardware=replace(problem.hardware, fleets=(toy_fleet(devices=6),)))
    assert best_step(larger, seed, memory=70.0) <= normal
    more = replace(problem, hardware=replace(problem.hardware, fleets=(toy_fleet(), toy_fleet("more"))))
    assert best_step(more, seed, memory=70.0) <= normal


@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_the_names_of_models_decide_nothing(seed: int) -> None:
    problem = toy_problem(seed, roles=3, fleets=[toy_fleet()])
    new = {"critic": "zebra", "reference": "aardvark"}
    graph = problem.graph
    stages = tuple(replace(stage, role=new.get(stage.role, stage.role)) for stage in graph.stages)
    renamed = replace(
        problem,
        graph=replace(graph, stages=stages),
        shapes={new.get(name, name): shape for name, shape in problem.shapes.items()},
    )
    aliases = tuple((now, before) for before, now in new.items())
    assert best_step(renamed, seed, aliases=aliases) == best_step(problem, seed)


def test_what_shares_a_pool_by_order_is_never_apart() -> None:
    problem = replace(toy_problem(3, roles=3, fleets=[toy_fleet()]), fixed={"reference": "critic"})
    found = tried(problem, 3, (0,), Objective(), memory=300.0)
    ranking = search(problem, costs_of(3, memory=300.0), effort=ALL)
    require_equal(ranking, found)
    assert all(one.plan.units["reference"].pool == one.plan.units["critic"].pool for one in ranking.best)


@settings(max_examples=5, deadline=None)
@given(seed=seeds)
def test_a_search_cut_short_says_so_and_says_how_good_a_plan_could_be(seed: int) -> None:
    problem = toy_problem(seed, roles=3, fleets=[toy_fleet(devices=6)])
    exact = search(problem, costs_of(seed, memory=300.0), effort=ALL)
    short = search(
        problem,
        costs_of(seed, memory=300.0),
        effort=Effort(kept=1000, allocations=1, first=1, explains=False),
    )
    assert short.bound <= exact.best[0].value <= short.best[0].value
    assert short.is_exact or short.bound <= short.best[0].value
    if short.is_exact:
        assert placements(short) == placements(exact)


def test_a_search_that_gave_up_on_combinations_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = toy_problem(1, roles=3, fleets=[toy_fleet("one", devices=2)])
    whole = search(problem, costs_of(1), effort=ALL)
    monkeypatch.setattr("rillflow.planner.mapping.search.Solver", lambda *given: Solver(*given[:4], 1))
    assert whole.is_exact
    assert not search(problem, costs_of(1), effort=ALL).is_exact
