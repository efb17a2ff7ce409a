"""Transfers: rows between pools, weights in place and apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.planner.tests.cost_model.settings import WORKLOAD, seat, setting
from rillflow.placement.grid import Grid
from rillflow_planner.cost_model import transfers
from rillflow_planner.cost_model.options import grids_of


@pytest.mark.parametrize(
    ("parameters", "grid", "size", "gigabytes"),
    [
        (70e9, Grid(dp=2, pp=8, tp=8), 8, 15.3),
        (7e9, Grid(dp=16, tp=8), 2, 5.25),
    ],
)
def test_bytes_received_are_those_of_the_paper(
    parameters: float, grid: Grid, size: int, gigabytes: float
) -> None:
    received = float(transfers.received_in_place(2 * parameters, grids_of(grid), size)[0])
    assert received / 1e9 == pytest.approx(gigabytes, rel=0.01)


@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]), part=st.sampled_from([1, 2, 4, 8]))
def test_what_is_trained_lies_in_what_generates(tp: int, pp: int, part: int) -> None:
    size = max(tp // part, 1)
    received = float(transfers.received_in_place(1.0, grids_of(Grid(pp=pp, tp=tp)), size)[0])
    assert received == pytest.approx((tp * pp - size) / (size * tp * pp))


def test_nothing_moves_where_both_grids_are_one() -> None:
    assert transfers.in_place_s(setting(), grids_of(Grid(dp=4, tp=4)), 4)[0] == 0.0
    assert transfers.in_place_s(setting(), grids_of(Grid(dp=4, tp=4)), 2)[0] > 0.0


@given(dp=st.sampled_from([1, 2, 4, 8]), other=st.sampled_from([1, 2, 4, 8]))
def test_as_many_pairs_send_rows_as_the_smaller_side_has_ranks(dp: int, other: int) -> None:
    one = transfers.rows_s(
        WORKLOAD, ("tokens",), seat("a", 8, Grid(dp=dp)), seat("b", 8, Grid(dp=other)), 1e9
    )
    bytes_ = WORKLOAD.rows * 8 * WORKLOAD.row_tokens
    assert one == pytest.approx(bytes_ / min(dp, other) / 1e9)


def test_a_number_a_row_is_less_than_a_number_a_token() -> None:
    assert transfers.field_bytes(WORKLOAD, "rewards") < transfers.field_bytes(WORKLOAD, "values")


@given(size=st.sampled_from([1, 2, 4, 8]))
def test_more_devices_a_copy_make_the_crossing_no_longer(size: int) -> None:
    one, links = setting(), setting().links
    source = seat("a", 8, Grid(dp=1, tp=8))
    few, more = (seat("b", 16, Grid(dp=16), generate_tp=tp) for tp in (size, 2 * size))
    took = transfers.apart_s(one, links, source, few)
    assert transfers.apart_s(one, links, source, more) <= took
    faster = replace(links, between=10 * links.between)
    assert transfers.apart_s(one, faster, source, few) <= took
