"""Costs: options are all there are and none is worse than another; what does not fit says by how much."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.planner.tests.cost_model.settings import DEVICE, FLEET, MIXTURE, SHAPE, WORKLOAD, problem, seat
from rillflow.errors import PlanError
from rillflow.graph.graph import Edge
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.options import (
    LAYOUTS,
    Layouts,
    Option,
    copy_sizes_of,
    cuts_heads,
    grids,
    undominated,
)
from rillflow_planner.hardware import EngineFactors, Factors
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import Problem, Unit


def unit(step: Problem, name: str) -> Unit:
    return next(one for one in step.units if one.name == name)


def values(option: Option) -> list[float]:
    return [sum(option.seconds.values()), option.resident_bytes, option.working_bytes, option.sampling_bytes]


OWN = LAYOUTS["rillflow"]


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("shape", [SHAPE, MIXTURE])
@pytest.mark.parametrize("devices", [1, 2, 8, 24, 32])
def test_grids_use_all_devices_and_cut_evenly(shape: ModelShape, devices: int, layouts: Layouts) -> None:
    found = list(grids(shape, devices, 8, layouts))
    assert len(found) == len(set(found)) > 0
    for grid in found:
        assert grid.devices == devices
        assert 8 % grid.tp == 0
        assert cuts_heads(shape, grid.tp)
        assert grid.cp <= layouts.context and (grid.pp * grid.tp == 1 or layouts.cuts_layers)
        assert grid.pp <= 16
        assert grid.ep == 1 or (16 % grid.ep == 0 and (grid.dp * grid.cp * grid.tp) % grid.ep == 0)


@given(
    points=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30
    )
)
def test_undominated_points_are_those_of_brute_force(points: list[tuple[int, int, int]]) -> None:
    costs = np.array(points, dtype=np.float64)
    kept = {points[place] for place in undominated(costs)}
    best = {
        one
        for one in points
        if not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in points)
    }
    assert kept == best
    assert len(undominated(costs)) == len(best)


@pytest.mark.parametrize("name", ["policy", "critic", "reference"])
@pytest.mark.parametrize("devices", [1, 4, 8, 16, 32])
def test_options_are_complete_and_none_beats_another(name: str, devices: int) -> None:
    step = problem()
    costs, one = CostModel(step), unit(step, name)
    options = costs.options(one, "toys", devices)
    for option in options:
        others = [other for other in options if other is not option]
        assert not any(
            other.generate_tp == option.generate_tp
            and all(a <= b for a, b in zip(values(other), values(option), strict=True))
            for other in others
        )
        assert option == costs.option(one, "toys", devices, option.grid, option.generate_tp)
    for grid in grids(SHAPE, devices, min(8, devices), OWN):
        for size in copy_sizes_of(SHAPE, grid, min(8, devices), OWN) if name == "policy" else (0,):
            every = costs.option(one, "toys", devices, grid, size)
            if costs.room_bytes("toys", {name: every}) < 1e9:
                continue
            assert any(
                option.generate_tp == size
                and all(a <= b * (1 + 1e-12) for a, b in zip(values(option), values(every), strict=True))
                for option in options
            )


def test_the_same_question_is_answered_once() -> None:
    step = problem()
    costs = CostModel(step)
    assert costs.options(unit(step, "policy"), "toys", 8) is costs.options(unit(step, "policy"), "toys", 8)


def test_seconds_are_given_for_every_stage_but_generation() -> None:
    step = problem()
    option = CostModel(step).options(unit(step, "policy"), "toys", 8)[0]
    assert set(option.seconds) == {3, 7, 8}
    assert option.generate_tp > 0
    assert CostModel(step).options(unit(step, "critic"), "toys", 8)[0].generate_tp == 0


def test_a_sampler_keeps_weights_alone() -> None:
    step = problem(samples_apart=True)
    costs = CostModel(step)
    for option in costs.options(unit(step, SAMPLER), "toys", 16):
        assert option.resident_bytes == pytest.approx(2 * SHAPE.parameters / option.generate_tp)
        assert option.sampling_bytes == 0.0
        assert option.seconds == {}
    trained = costs.options(unit(step, "policy"), "toys", 16)[0]
    assert trained.generate_tp == 0
    assert trained.seconds[8] == 0.0


@pytest.mark.parametrize("memory", [1e7, 1e9, 4e9])
def test_what_does_not_fit_says_by_how_much(memory: float) -> None:
    step = problem(fleet=replace(FLEET, device=replace(DEVICE, memory_bytes=memory)))
    costs, policy = CostModel(step), unit(step, "policy")
    assert costs.options(policy, "toys", 1) == ()
    missing = costs.shortfall_bytes(policy, "toys", 1)
    assert missing > 0
    share = step.hardware.factors.memory
    enough = replace(FLEET, device=replace(DEVICE, memory_bytes=memory + 1.001 * missing / share))
    step = problem(fleet=enough)
    assert CostModel(step).options(unit(step, "policy"), "toys", 1) != ()
    assert CostModel(step).shortfall_bytes(unit(step, "policy"), "toys", 1) == 0.0


@pytest.mark.parametrize(("share", "fits"), [(0.9, False), (1.1, True)])
def test_a_sampler_fits_if_its_longest_row_does(share: float, fits: bool) -> None:
    row = WORKLOAD.longest_tokens * SHAPE.cached_numbers * 2
    memory = (2 * SHAPE.parameters + share * row) / Factors().memory
    step = problem(samples_apart=True, fleet=replace(FLEET, device=replace(DEVICE, memory_bytes=memory)))
    assert bool(CostModel(step).options(unit(step, SAMPLER), "toys", 1)) is fits
    missing = CostModel(step).shortfall_bytes(unit(step, SAMPLER), "toys", 1)
    assert missing == pytest.approx(max(1 - share, 0) * row, rel=1e-6)


@settings(max_examples=20)
@given(
    memory=st.floats(2e9, 2e10),
    more=st.floats(1.0, 3.0),
    faster=st.floats(1.0, 4.0),
    devices=st.sampled_from([2, 8, 16]),
)
def test_more_memory_and_faster_links_never_hurt(
    memory: float, more: float, faster: float, devices: int
) -> None:
    small = replace(FLEET, device=replace(DEVICE, memory_bytes=memory))
    large = replace(
        small,
        device=replace(
            small.device, memory_bytes=memory * more, inside_bandwidth=DEVICE.inside_bandwidth * faster
        ),
        between_bandwidth=FLEET.between_bandwidth * faster,
    )
    best = []
    for fleet in (small, large):
        step = problem(fleet=fleet)
        options = CostModel(step).options(unit(step, "critic"), "toys", devices)
        best.append(min((sum(option.seconds.values()) for option in options), default=math.inf))
    assert best[1] <= best[0]


def test_room_is_what_units_leave_and_negative_where_they_do_not_fit() -> None:
    step = problem()
    costs = CostModel(step)
    policy, critic = (costs.options(unit(step, name), "toys", 8)[0] for name in ("policy", "critic"))
    alone = costs.room_bytes("toys", {"policy": policy})
    both = costs.room_bytes("toys", {"policy": policy, "critic": critic})
    assert alone - both == pytest.approx(critic.resident_bytes)
    huge = replace(critic, resident_bytes=1e12)
    assert costs.room_bytes("toys", {"policy": policy, "critic": huge}) < 0
    assert costs.room_bytes("toys", {"critic": replace(critic, working_bytes=1e12)}) < 0


def test_offloaded_models_leave_memory_and_take_time() -> None:
    here, away = problem(), problem(offloads=True)
    stay = CostModel(here).option(unit(here, "critic"), "toys", 8, Grid(dp=8), 0)
    leave = CostModel(away).option(unit(away, "critic"), "toys", 8, Grid(dp=8), 0)
    assert leave.resident_bytes == 0 < stay.resident_bytes
    assert all(leave.seconds[stage] > stay.seconds[stage] for stage in (4, 6))
    assert leave.seconds[6] - stay.seconds[6] > leave.seconds[4] - stay.seconds[4]


def test_generation_in_a_batch_takes_longer_than_streamed() -> None:
    step = problem(samples_apart=True, freshness=1)
    costs, sampler = CostModel(step), unit(step, SAMPLER)
    option = costs.options(sampler, "toys", 8)[0]
    decoder = costs.decoder(sampler, option, "toys", 8, costs.room_bytes("toys", {SAMPLER: option}))
    assert decoder is not None
    stage = step.graph.stages[0]
    assert costs.steady_s(stage, decoder) < costs.generate_s(stage, decoder)


def test_transfers_without_fields_cost_nothing() -> None:
    costs = CostModel(problem())
    here, there = seat("a", 8, Grid(dp=8)), seat("b", 8, Grid(dp=8))
    edge = Edge(source=0, destination=4, fields=("tokens",))
    assert costs.transfer_s(replace(edge, fields=()), here, there) == 0.0
    assert costs.transfer_s(edge, here, there) > 0.0


def with_engine(step: Problem, **settings: object) -> Problem:
    hardware = replace(step.hardware, engine=EngineFactors(**settings))  # type: ignore[arg-type]
    return replace(step, hardware=hardware)


def with_factors(step: Problem, **values: float) -> Problem:
    hardware = replace(step.hardware, factors=replace(step.hardware.factors, **values))
    return replace(step, hardware=hardware)


def test_zero_1_cuts_the_state_of_the_optimiser_and_nothing_else() -> None:
    whole, cut = problem(), with_engine(problem(), zero1=True)
    one, other = (
        CostModel(step).option(unit(step, "policy"), "toys", 8, Grid(dp=8), 1) for step in (whole, cut)
    )
    assert one.resident_bytes == pytest.approx(SHAPE.parameters * (2 + 12))
    assert other.resident_bytes == pytest.approx(SHAPE.parameters * (2 + 12 / 8))
    assert other.working_bytes == one.working_bytes > SHAPE.parameters * 4  # gradients, while it trains


def test_context_parallelism_cuts_rows_and_not_parameters() -> None:
    step = problem()
    costs = CostModel(step)
    alone, shared = (
        costs.option(unit(step, "policy"), "toys", devices, Grid(cp=devices), 1) for devices in (1, 4)
    )
    assert shared.resident_bytes == alone.resident_bytes
    assert shared.seconds[3] < alone.seconds[3] and shared.seconds[7] < alone.seconds[7]


def test_whole_tensors_are_moved_at_the_rates_of_the_stack_and_only_by_the_stack() -> None:
    own = with_factors(problem(), refit=1e9, refit_separate=4e9)
    step = replace(own, layouts=LAYOUTS["megatron"])
    total = 2 * SHAPE.parameters
    costs = CostModel(step)
    option = costs.option(unit(step, "policy"), "toys", 8, Grid(dp=8), 1)
    publish = next(stage.index for stage in step.graph.stages if stage.endpoint == "publish")
    assert option.seconds[publish] == pytest.approx(total / 1e9)
    apart = CostModel(step.apart(1))
    here, there = seat("a", 8, Grid(dp=8)), seat("b", 8, Grid(dp=8))
    assert apart.crossing_s(here, there) == pytest.approx(total / 4e9)
    matching = CostModel(own).option(unit(own, "policy"), "toys", 8, Grid(dp=2, tp=4), 4)
    assert matching.seconds[publish] == 0.0, "Rillflow's own runtime moves only what a rank lacks"
    assert CostModel(own.apart(1)).crossing_s(here, there) == CostModel(problem().apart(1)).crossing_s(
        here, there
    )


def test_a_share_for_the_cache_leaves_weights_and_cache_no_more() -> None:
    step = with_engine(problem(), cache=0.25)
    option = CostModel(step).option(unit(step, "policy"), "toys", 8, Grid(dp=8), 1)
    room = CostModel(step).room_bytes("toys", {"policy": option})
    assert room == pytest.approx(0.25 * DEVICE.memory_bytes - option.sampling_bytes)


def test_rows_that_wait_for_weights_or_for_their_prompts_stream_slower() -> None:
    def steady_s(step: Problem) -> float:
        costs, sampler = CostModel(step), unit(step, SAMPLER)
        option = costs.option(sampler, "toys", 8, Grid(dp=8), 1)
        decoder = costs.decoder(sampler, option, "toys", 8, costs.room_bytes("toys", {SAMPLER: option}))
        assert decoder is not None
        return costs.steady_s(step.graph.stages[0], decoder)

    step = problem(samples_apart=True, freshness=1)
    free = steady_s(step)
    assert steady_s(with_engine(step, holds_prompts=True)) > free
    assert steady_s(with_engine(step, interrupts=False)) > free


def test_a_copy_of_a_sharded_model_may_be_cut_more_than_training_but_not_beyond_its_key_value_heads() -> None:
    sharded, split = Grid(dp=8, is_sharded=True), Grid(dp=4, tp=2)
    heads = replace(SHAPE, heads=8, kv_heads=4)
    assert copy_sizes_of(heads, sharded, 8, OWN) == [1, 2, 4]
    assert copy_sizes_of(heads, sharded, 2, OWN) == [1, 2], "it lies in a machine"
    assert copy_sizes_of(heads, split, 8, OWN) == [1, 2]
    assert copy_sizes_of(heads, split, 8, LAYOUTS["megatron"]) == [1, 2, 4, 8]
    odd = replace(SHAPE, heads=28, kv_heads=4)
    assert copy_sizes_of(odd, Grid(dp=224), 8, LAYOUTS["fsdp"]) == [1, 2, 4], "7 and 14 are no equal parts"


@pytest.mark.parametrize("stack", ["megatron", "fsdp"])
def test_replicas_of_published_stacks_have_equal_rows(stack: str) -> None:
    step = replace(problem(fleet=replace(FLEET, devices=96)), layouts=LAYOUTS[stack])
    costs = CostModel(step)
    assert {option.grid.dp for option in costs.every_option(unit(step, "policy"), "toys", 96)} <= {
        2,
        4,
        8,
        16,
        32,
    }
    assert any(
        option.grid.dp == 3 for option in CostModel(problem()).every_option(unit(step, "policy"), "toys", 24)
    )


def test_a_pipeline_that_a_runtime_does_not_have_is_refused() -> None:
    step = replace(problem(), layouts=LAYOUTS["megatron"])
    with pytest.raises(PlanError, match="16 layers of policy are spread over pp 12"):
        CostModel(step).option(unit(step, "policy"), "toys", 24, Grid(dp=2, pp=12), 1)
