"""Transfer: a pair of placements that says how arguments reach a group's ranks and how results leave them.

    Batch ── send ──> every rank's part ── method ──> every rank's result ── receive ──> one value

Placements name the axes of the group's mesh; an axis that is not named is Broadcast.
- Split(0): a batch is split by rows, along one axis after the other; results are concatenated. Rows of one
  unit stay together.
- Broadcast: every rank has the whole batch; one copy of the result is taken.
- Partial: every rank has a partial sum; metrics are merged by their own reductions.

HybridFlow's protocols (arXiv 2409.19256, Table 3) are such pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rillflow.placement.sbp import Part, Partial, Split

AXES = ("pp", "dp", "micro_dp", "tp")
"""Axes a mesh may leave out; it then has one rank along them."""
ROWS = Split(0)
"""Placement that splits by rows."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How values travel to a group and back.

    Example:
        Transfer(name="DP_PROTO", send={"dp": Split(0)}, receive={"dp": Split(0)})
    """

    name: str
    """Name in a graph."""
    send: Mapping[str, Part]
    """Placement of every batch among the arguments, by axis."""
    receive: Mapping[str, Part]
    """Placement of the result, by axis."""
    at: Mapping[str, int] = field(default_factory=dict)
    """Coordinates, by axis, of the ranks whose results are taken; -1 is the last. Empty: all ranks."""
    unit: int = 1
    """Number of neighbouring rows that stay together; a batch has a whole number of such units."""
    is_balanced: bool = False
    """Whether parts have equal numbers of tokens, rather than of rows."""


SPLIT_DP = Transfer(name="SPLIT_DP", send={"dp": ROWS}, receive={"dp": ROWS}, at={"pp": -1, "tp": 0})
SPLIT_ALL = Transfer(
    name="SPLIT_ALL", send={"dp": ROWS, "micro_dp": ROWS}, receive={"dp": ROWS, "micro_dp": ROWS}
)
DP = Transfer(name="DP_PROTO", send={"dp": ROWS}, receive={"dp": ROWS})

SPLIT_DP_REDUCE = Transfer(
    name="SPLIT_DP_REDUCE",
    send={"dp": ROWS},
    receive={"dp": Partial()},
    at={"pp": -1, "tp": 0},
    is_balanced=True,
)
"""Splits rows over dp, balanced by tokens; returns partial reports."""
SPLIT_PAIRS_REDUCE = Transfer(
    name="SPLIT_PAIRS_REDUCE",
    send=SPLIT_DP_REDUCE.send,
    receive=SPLIT_DP_REDUCE.receive,
    at=SPLIT_DP_REDUCE.at,
    is_balanced=True,
    unit=2,
)
"""The same transfer for pairs: two consecutive rows stay together."""
GROUPS = Transfer(name="GROUPS", send={}, receive={}, at={"pp": -1, "tp": 0})
"""Gives every rank all rows: rows of a prompt are judged together, and ranks divide the work."""
BROADCAST = Transfer(name="BROADCAST", send={}, receive={})
"""Every rank runs the same call and returns the same result."""
