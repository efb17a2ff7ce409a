"""Transfer: a pair of placements, how arguments reach a group's ranks and how results leave them.

    Batch ── send ──> every rank's part ── method ──> every rank's result ── receive ──> one value

Placements name the axes of the group's mesh; an axis that is not named is Broadcast.
- Split(0): a batch is cut by rows, along one axis after the other; results are laid end to end.
  Neighbours of one unit stay together.
- Broadcast: everyone has the whole; one copy of the result is taken.
- Partial: every rank has a share; metrics are merged by their own reductions.

HybridFlow's protocols (arXiv 2409.19256, Table 3) are such pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rillflow.placement.sbp import Part, Partial, Split

AXES = ("pp", "dp", "micro_dp", "tp")
"""Axes a mesh may leave out: it has one rank along them."""
ROWS = Split(0)
"""Cut by rows."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How values travel to a group and back.

    Example:
        Transfer(name="DP_PROTO", send={"dp": Split(0)}, receive={"dp": Split(0)})
    """

    name: str
    """How a graph shows it."""
    send: Mapping[str, Part]
    """Of every batch among the arguments."""
    receive: Mapping[str, Part]
    """Of the result."""
    at: Mapping[str, int] = field(default_factory=dict)
    """The ranks whose results are taken: coordinates by axis, -1 the last; all ranks where none is given."""
    unit: int = 1
    """So many neighbouring rows are never parted; a batch has a whole number of such units."""
    is_balanced: bool = False
    """Whether rows are shared out so that ranks get as many tokens, rather than as many rows."""


THREE_D = Transfer(name="3D_PROTO", send={"dp": ROWS}, receive={"dp": ROWS}, at={"pp": -1, "tp": 0})
ALL_MICRO_DP = Transfer(
    name="3D_ALL_MICRO_DP", send={"dp": ROWS, "micro_dp": ROWS}, receive={"dp": ROWS, "micro_dp": ROWS}
)
DP = Transfer(name="DP_PROTO", send={"dp": ROWS}, receive={"dp": ROWS})

TRAIN = Transfer(
    name="TRAIN", send={"dp": ROWS}, receive={"dp": Partial()}, at={"pp": -1, "tp": 0}, is_balanced=True
)
"""Rows are shared out over dp by their tokens, reports come back as shares of one."""
TRAIN_PAIRS = Transfer(
    name="TRAIN_PAIRS", send=TRAIN.send, receive=TRAIN.receive, at=TRAIN.at, is_balanced=True, unit=2
)
"""The same with pairs, two rows one after the other, kept whole."""
GROUPS = Transfer(name="GROUPS", send={}, receive={}, at={"pp": -1, "tp": 0})
"""Every rank has all rows: those of a prompt are judged together, and ranks share the work themselves."""
TOGETHER = Transfer(name="TOGETHER", send={}, receive={})
"""Every rank does the same and gives the same."""
