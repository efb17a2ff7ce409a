"""Notes on the nodes of a run: a clock that is off is reported once, with its direction."""

from __future__ import annotations

from rillflow.workers.backend import Node
from rillflow_parts.nodes.shared_paths import MENTIONED_S, clock_notes


def test_a_clock_that_is_far_off_is_noted_once_for_each_node() -> None:
    near, ahead, behind = (
        Node(address=f"10.0.0.{number}", ahead_s=ahead_s)
        for number, ahead_s in enumerate((MENTIONED_S, 90.0, -MENTIONED_S - 1), 1)
    )
    places = {("main", 0): near, ("main", 1): ahead, ("main", 2): ahead, ("answers", 0): behind}
    one, other = clock_notes(places)
    assert "node 10.0.0.2 is" in one and "ahead of this machine's" in one
    assert "node 10.0.0.3 is" in other and "behind this machine's" in other
    assert clock_notes({("main", 0): near}) == []
