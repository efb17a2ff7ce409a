"""Values: how an argument is described to a rank, and how it becomes one there.

    controller                                     rank
    Rows(references, index, count)  ────────────>  its rows of the batch, pulled from the ranks that hold them
    Whole(references, receive)      ────────────>  all of it
    anything else                   ────────────>  as it is

A reference is a pair: the value, and facts about it. The facts are small and pulled first, so that a rank
pulls no value it needs no row of; where there are as many parts as ranks, its own comes with them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rillflow.cluster.backend import Place
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
    lengths: tuple[int, ...] = ()
    """Tokens of each row; empty where rows have none."""
    began: float
    """When the method began, in seconds since the epoch; its arguments were there by then."""
    ended: float
    """When it ended."""
    place: Place
    """Where it ran."""


@dataclass(frozen=True, kw_only=True)
class RemoteValue:
    """What one rank returned, where it is."""

    value: Any
    """The backend's reference to it."""
    facts: Any
    """The backend's reference to its Facts."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One rank's part of a batch that lies on other ranks, end to end."""

    references: tuple[RemoteValue, ...]
    """The parts, in order."""
    index: int
    """Which part is wanted."""
    count: int
    """Of how many."""
    unit: int = 1
    """So many neighbouring rows are never parted."""
    by: tuple[RemoteValue, ...] | None = None
    """Rows are shared out by their tokens, or where they have none by those of this batch; None: evenly."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """All of a value that lies on other ranks."""

    references: tuple[RemoteValue, ...]
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


def balanced_shares(lengths: Sequence[int], count: int, unit: int = 1) -> tuple[int, ...]:
    """How many rows each of ``count`` ranks gets, in order, so that all get about as many tokens.

    Rows are cut where the tokens before the cut are nearest to the ranks' even share of all; no rank is
    further from it than half the longest unit at either end.

    Raises:
        ClusterError: a unit is not whole.
    """
    shares(len(lengths), count, unit)
    before = [0, *accumulate(lengths)][::unit]
    cuts = [0]
    for rank in range(1, count):
        wanted = before[-1] * rank / count
        place = bisect_left(before, wanted)
        if place and wanted - before[place - 1] < before[place] - wanted:
            place -= 1
        cuts.append(place)
    ends = [*cuts, len(before) - 1]
    return tuple(unit * (stop - start) for start, stop in pairwise(ends))


def piece(batch: Batch, index: int, count: int, unit: int = 1, *, balanced: bool = False) -> Batch:
    """One rank's rows of a batch."""
    lengths = lengths_of(batch) if balanced else ()
    sizes = balanced_shares(lengths, count, unit) if lengths else shares(len(batch), count, unit)
    ends = [0, *accumulate(sizes)]
    return batch.slice(ends[index], ends[index + 1])


def lengths_of(batch: Batch) -> tuple[int, ...]:
    """The tokens of each row; empty where rows have none."""
    return tuple(batch.ragged("tokens").lengths.tolist()) if "tokens" in batch.fields else ()


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
    sizes = _sizes(wanted, found[: len(parts)], fetch)
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


def _sizes(wanted: Rows, facts: Sequence[Facts], fetch: Fetch) -> tuple[int, ...]:
    """How many rows each rank gets."""
    rows = sum(each.rows for each in facts)
    if wanted.by is not None:
        tokens = [length for each in facts for length in each.lengths]
        if not tokens and wanted.by:
            tokens = [length for each in fetch([each.facts for each in wanted.by]) for length in each.lengths]
        if len(tokens) == rows:
            return balanced_shares(tokens, wanted.count, wanted.unit)
    return shares(rows, wanted.count, wanted.unit)


def _batch(value: Any) -> Batch:
    assert isinstance(value, Batch)
    return value
