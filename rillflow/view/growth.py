"""Growth: throughput against the size of a cluster, and the warning where doubling it gains little.

ClusterSize of each size ─┬─ growth_lines ─> a table, warnings
                          ├─ growth_curve ─> a curve
                          └─ growth_data ──> JSON
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rillflow.observe.wording import number
from rillflow.planner.hardware import Hardware
from rillflow.planner.mapping.doubling import LITTLE, ClusterSize
from rillflow.view.chart import Point, Series
from rillflow.view.columns import columns, seconds
from rillflow.view.ranked import placement_of, pools_text

AXES = "devices; rows a second"
"""What the curve's axes are."""


def growth_lines(hardware: Hardware, sizes: Sequence[ClusterSize]) -> list[str]:
    """What each size of the cluster would come to, and where doubling it does not pay."""
    rows: list[tuple[str, ...]] = [("devices", "step", "rows/s", "gain", "rows/s a device", "pools")]
    for size in sizes:
        if size.best is None:
            rows.append((str(size.devices), "nothing fits", "", "", "", ""))
            continue
        gain = "" if size.gain is None else f"{size.gain:+.0%}"
        each = number(size.rows_per_s / size.devices)
        step = seconds(size.best.evaluation.step_s)
        pools = pools_text(placement_of(size.best.plan))
        rows.append((str(size.devices), step, number(size.rows_per_s), gain, each, pools))
    return ["throughput against the size of the cluster", *columns(rows), *_warnings(hardware, sizes)]


def growth_curve(sizes: Sequence[ClusterSize]) -> Series:
    """Rows a second by devices, of the sizes on which something fits."""
    points = [Point(x=size.devices, y=size.rows_per_s) for size in sizes if size.best is not None]
    return Series(label="", points=points)


def growth_data(sizes: Sequence[ClusterSize]) -> list[dict[str, Any]]:
    """The same as JSON has it."""
    return [
        {
            "devices": size.devices,
            "step_s": None if size.best is None else size.best.evaluation.step_s,
            "rows_per_s": size.rows_per_s,
            "gain": size.gain,
            "gains_little": size.gains_little,
        }
        for size in sizes
    ]


def _warnings(hardware: Hardware, sizes: Sequence[ClusterSize]) -> list[str]:
    found = []
    for before, size in pairwise(sizes):
        if size.gains_little and size.gain is not None:
            found.append(
                f"warning: {size.devices} devices gain {size.gain:.1%} over {before.devices}, "
                f"less than {LITTLE:.0%}"
            )
    here = sum(fleet.devices for fleet in hardware.fleets)
    for fleet in hardware.fleets:
        is_unsaid = fleet.between_bandwidth == fleet.device.inside_bandwidth
        if is_unsaid and fleet.devices == fleet.per_machine and any(size.devices > here for size in sizes):
            found.append(
                f"note: nobody says how machines of {fleet.name} are linked; here as fast as within one"
            )
    return found
