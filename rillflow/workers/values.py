"""Values: how an argument is described to a rank, and how it becomes one there.

    controller                                     rank
    Rows(references, index, count)  ────────────>  its rows of the batch, pulled from the ranks that hold them
    Whole(references, receive)      ────────────>  all of it
    anything else                   ────────────>  as it is

A reference is a pair: the value, and facts about it. The facts are small and pulled first, so that a rank
pulls no value it needs no row of; where there are as many parts as ranks, its own comes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rillflow.errors import ClusterError
from rillflow.placement.boxing import boxing
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement, Split
from rillflow.records.batch import Batch, concatenate
from rillflow.records.metrics import merge_metrics

Fetch = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a result without looking at it."""

    rows: int
    """Its rows; -1 where it is no batch."""
    tokens: int
    """Tokens in them."""
    began: float
    """When the method began, in seconds since the epoch; its arguments were there by then."""
    ended: float
    """When it ended."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one rank returned, where it is."""

    value: Any
    """The backend's reference to it."""
    facts: Any
    """The backend's reference to its Facts."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One rank's part of a batch that lies on other ranks, end to end."""

    references: tuple[Reference, ...]
    """The parts, in order."""
    index: int
    """Which part is wanted."""
    count: int
    """Of how many."""
    unit: int = 1
    """So many neighbouring rows are never parted."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """All of a value that lies on other ranks."""

    references: tuple[Reference, ...]
    """The parts, in order."""
    is_partial: bool
    """Whether the parts are shares to be added, not pieces to be laid end to end."""


def resolved(value: Any, fetch: Fetch) -> Any:
    """What a described argument stands for."""
    if isinstance(value, Rows):
        return _rows(value, fetch)
    if isinstance(value, Whole):
        return assembled(fetch([each.value for each in value.references]), is_partial=value.is_partial)
    return value


def assembled(parts: Sequence[Any], *, is_partial: bool) -> Any:
    """One value of the ranks' results."""
    if len(parts) == 1:
        return parts[0]
    if is_partial:
        return merge_metrics(list(parts))
    if all(isinstance(part, Batch) for part in parts):
        return concatenate(list(parts))
    return list(parts)


def shares(rows: int, count: int, unit: int = 1) -> tuple[int, ...]:
    """How many of ``rows`` each of ``count`` ranks gets: sizes differ by one unit at most, larger ones first.

    Raises:
        ClusterError: a unit is not whole.
    """
    if rows % unit:
        raise ClusterError(
            f"{rows} rows cannot be shared out in units of {unit}",
            why=f"the last unit has {rows % unit} rows; those of one unit stand one after the other",
            fix="look at what filtered or drew the rows",
        )
    least, more = divmod(rows // unit, count)
    return tuple(unit * (least + (index < more)) for index in range(count))


def piece(batch: Batch, index: int, count: int, unit: int = 1) -> Batch:
    """One rank's rows of a batch."""
    ends = [0, *accumulate(shares(len(batch), count, unit))]
    return batch.slice(ends[index], ends[index + 1])


def _rows(wanted: Rows, fetch: Fetch) -> Batch:
    parts = [each.facts for each in wanted.references]
    likely = [wanted.references[wanted.index].value] if len(parts) == wanted.count else []
    found = fetch([*parts, *likely])  # in one request, for cut as they are wanted is how parts mostly are
    lengths = tuple(facts.rows for facts in found[: len(parts)])
    if min(lengths) < 0:
        raise ClusterError(
            "an argument that is to be cut by rows is no batch",
            why="the method that made it returned something else",
            fix="give it as an option by name: options are the same for every rank",
        )
    sizes = shares(sum(lengths), wanted.count, wanted.unit)
    if lengths == sizes:
        return _batch(found[-1])
    held = Placement(Mesh.of(part=len(lengths)), {"part": Split(0, sizes=lengths)})
    first = len(lengths)
    asked = Placement(Mesh.of(part=wanted.count, first=first), {"part": Split(0, sizes=sizes)})
    starts = [0, *accumulate(lengths)]
    moves = boxing(held, asked, (sum(lengths),)).moves
    mine = [move for move in moves if move.destination == first + wanted.index]
    if not mine:
        return _batch(fetch([wanted.references[0].value])[0]).slice(0, 0)
    sources = fetch([wanted.references[move.source].value for move in mine])
    pieces = []
    for move, source in zip(mine, sources, strict=True):
        begin, end = move.slice.bounds[0]
        pieces.append(_batch(source).slice(begin - starts[move.source], end - starts[move.source]))
    return concatenate(pieces)


def _batch(value: Any) -> Batch:
    assert isinstance(value, Batch)
    return value
