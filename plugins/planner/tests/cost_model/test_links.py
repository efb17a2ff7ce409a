"""Links: collectives within and across machines."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow_planner.cost_model.links import (
    Links,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    members,
    send_s,
)

LINKS = Links(inside=100e9, between=10e9, host=20e9, per_machine=8, inside_s=0.0, between_s=0.0)
groups = st.sampled_from([1, 2, 4, 8, 16, 32, 64])
strides = st.sampled_from([1, 2, 4, 8, 16])
sizes = st.floats(1e3, 1e11)


def test_a_ring_within_a_machine_moves_all_but_its_own_part() -> None:
    assert float(all_gather_s(LINKS, 8e9, 4)) == pytest.approx(0.75 * 8e9 / 100e9)
    assert float(all_reduce_s(LINKS, 8e9, 4)) == pytest.approx(2 * 0.75 * 8e9 / 100e9)


def test_machines_exchange_over_all_their_devices_at_once() -> None:
    near = replace(LINKS, inside=1e12)
    whole = float(all_gather_s(near, 8e9, 16))
    one_a_machine = float(all_gather_s(near, 8e9, 2, 8))
    assert whole == pytest.approx(0.5 * 8e9 / (8 * 10e9))
    assert one_a_machine == pytest.approx(0.5 * 8e9 / 10e9)


@pytest.mark.parametrize(
    ("group", "stride", "near"), [(8, 1, 8), (16, 1, 8), (4, 4, 2), (4, 8, 1), (2, 16, 1)]
)
def test_members_of_one_machine(group: int, stride: int, near: int) -> None:
    assert int(members(LINKS, group, stride)) == near


@given(size=sizes, stride=strides)
def test_one_device_needs_no_link(size: float, stride: int) -> None:
    for collective in (all_gather_s, all_reduce_s, all_to_all_s, send_s):
        assert float(collective(LINKS, size, 1, stride)) == 0.0


@given(size=sizes, group=groups, stride=strides, faster=st.floats(1.0, 10.0))
def test_faster_links_and_fewer_bytes_never_hurt(size: float, group: int, stride: int, faster: float) -> None:
    better = replace(LINKS, inside=LINKS.inside * faster, between=LINKS.between * faster)
    for collective in (all_gather_s, all_reduce_s, all_to_all_s, send_s):
        took = float(collective(LINKS, size, group, stride))
        assert float(collective(better, size, group, stride)) <= took
        assert float(collective(LINKS, size / 2, group, stride)) <= took


@given(size=sizes, group=st.sampled_from([2, 4, 8, 16]), stride=strides)
def test_latency_is_that_of_the_farther_link(size: float, group: int, stride: int) -> None:
    slow = replace(LINKS, inside_s=1.0, between_s=3.0)
    more = float(all_gather_s(slow, size, group, stride)) - float(all_gather_s(LINKS, size, group, stride))
    machines = -(-group * min(stride, 8) // 8)
    assert more == pytest.approx(3.0 * math.log2(machines) if machines > 1 else 1.0)
