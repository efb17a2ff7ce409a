"""Seating: units that fill a device's memory to the byte fit on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from plugins.planner.tests.fakes import SHAPE, FakeCosts
from plugins.planner.tests.toys import WORKLOAD, toy_fleet
from rillflow_planner.cost_model.options import Option
from rillflow_planner.misfit import least_devices
from rillflow_planner.problem import Unit


@dataclass(frozen=True, kw_only=True)
class Filled(FakeCosts):
    """On two devices so many bytes are left, on one fewer."""

    left_bytes: float

    def room_bytes(self, fleet: str, options: Mapping[str, Option]) -> float:
        return min(option.grid.devices for option in options.values()) - 2 + self.left_bytes


@pytest.mark.parametrize(("left_bytes", "devices"), [(0.0, 2), (-1.0, 4)])
def test_no_byte_to_spare_is_enough(left_bytes: float, devices: int) -> None:
    unit = Unit(name="policy", shape=SHAPE, stages=())
    costs = Filled(workload=WORKLOAD, left_bytes=left_bytes)
    assert least_devices(costs, [unit], toy_fleet(devices=8)) == devices
