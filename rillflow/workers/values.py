"""Values: how an argument is described to a rank, and how it becomes one there.

    controller                             rank
    Own(value)                 ─────────>  its part, where rows lie as they are wanted: a Lie says so
    Rows(held, index, count)   ─────────>  its rows of the batch, pulled from the ranks that hold them
    Whole(held, is_partial)    ─────────>  all of it
    anything else              ─────────>  as it is

A reference is a pair: the value, and facts about it. The facts are small and pulled first, so that a rank
pulls no value it needs no row of; where there are as many parts as ranks, its own comes with them. Of many
parts the references are a table in the object store, and one rank gathers the facts for all. Of a batch the
fields that are read come, and no others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

from rillflow.cluster.backend import Place
from rillflow.errors import ClusterError
from rillflow.placement.boxing import boxing
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement, Split
from rillflow.records.batch import Batch, concatenate
from rillflow.records.metrics import merge_metrics

GROUPS = 0
"""A unit: rows of one prompt, which stand one after the other, are never parted."""
Names = tuple[str, ...] | None
"""Fields that are wanted; None: all."""


class Fetcher(Protocol):
    """Gets the values of references."""

    def __call__(self, references: Sequence[Any], fields: Names = None) -> list[Any]:
        """The values; of batches these fields at least."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a result without looking at it."""

    rows: int
    """Its rows; -1 where it is no batch."""
    tokens: int
    """Tokens in them."""
    lengths: tuple[int, ...] = ()
    """Tokens of each row; empty where rows have none."""
    groups: tuple[int, ...] = ()
    """Neighbouring rows of one prompt, prompt after prompt."""
    ends: tuple[tuple[int, int], ...] = ()
    """The first of these groups and the last, by epoch and prompt; empty where there is no row."""
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
class Held:
    """Where the parts of a result are."""

    table: Any
    """Their RemoteValues, in order; of many a reference to these, see Backend.table."""
    facts: Any = None
    """A reference to the Facts of all; None: each part's own are asked for."""


@dataclass(frozen=True, kw_only=True)
class Lie:
    """How the rows of a result lie over its parts; of two that are equal a part has the same rows."""

    rows: Any
    """Stands for the rows: what is equal here has the same, in the same order."""
    cut: Any
    """Stands for where they are cut."""
    is_even: bool
    """Whether parts are about as large, so that ranks may take them as they are."""
    is_whole: bool
    """Whether all rows of a prompt are in one part."""

    @classmethod
    def new(cls, *, is_even: bool = False, is_whole: bool = False) -> Lie:
        """Rows that nothing else is known to have."""
        return cls(rows=object(), cut=object(), is_even=is_even, is_whole=is_whole)

    def again(self, count: int, unit: int = GROUPS) -> Lie:
        """The same rows shared out anew over so many ranks."""
        whole = count == 1 or unit == GROUPS
        return Lie(rows=self.rows, cut=(count, unit), is_even=True, is_whole=whole)


@dataclass(frozen=True, kw_only=True)
class Own:
    """One rank's part of a batch, as it lies."""

    value: Any
    """The backend's reference to it."""
    fields: Names = None
    """What is read of it."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One rank's part of a batch that lies on other ranks, end to end."""

    held: Held
    """The parts."""
    index: int
    """Which part is wanted."""
    count: int
    """Of how many."""
    unit: int = 1
    """So many neighbouring rows are never parted; GROUPS: those of one prompt."""
    by: Held | None = None
    """Rows are shared out by their tokens, or where they have none by those of this batch; None: evenly."""
    fields: Names = None
    """What is read of it."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """All of a value that lies on other ranks."""

    held: Held
    """The parts."""
    is_partial: bool
    """Whether the parts are shares to be added, not pieces to be laid end to end."""
    fields: Names = None
    """What is read of it."""


def resolved(value: Any, fetch: Fetcher) -> Any:
    """What a described argument stands for."""
    if isinstance(value, Own):
        return _read(fetch([value.value], value.fields)[0], value.fields)
    if isinstance(value, Rows):
        return _rows(value, fetch)
    if isinstance(value, Whole):
        parts = fetch([each.value for each in parts_of(value.held, fetch)], value.fields)
        return assembled([_read(part, value.fields) for part in parts], is_partial=value.is_partial)
    return value


def parts_of(held: Held, fetch: Fetcher) -> tuple[RemoteValue, ...]:
    """The parts of a result."""
    found: tuple[RemoteValue, ...] = held.table if isinstance(held.table, tuple) else fetch([held.table])[0]
    return found


def facts_of(held: Held, fetch: Fetcher) -> list[Facts]:
    """What is known of each part."""
    if held.facts is not None:
        return list(fetch([held.facts])[0])
    return fetch([each.facts for each in parts_of(held, fetch)])


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


def groups_of(batch: Batch) -> tuple[int, ...]:
    """Neighbouring rows of one prompt, prompt after prompt."""
    prompts = batch.ids[:, :2]
    starts = (prompts[1:] != prompts[:-1]).any(1).nonzero().squeeze(1).add(1).tolist()
    ends = [0, *starts, len(batch)] if len(batch) else [0]
    return tuple(stop - start for start, stop in pairwise(ends))


def are_whole(batch: Batch, sizes: Sequence[int]) -> bool:
    """Whether pieces of such sizes part no rows of one prompt."""
    return {*accumulate(sizes)} <= {0, *accumulate(groups_of(batch))}


def _rows(wanted: Rows, fetch: Fetcher) -> Batch:
    parts, fields = parts_of(wanted.held, fetch), wanted.fields
    about = [wanted.held.facts] if wanted.held.facts is not None else [each.facts for each in parts]
    likely = [parts[wanted.index].value] if len(parts) == wanted.count else []
    found = fetch([*about, *likely], fields)  # one request: cut as they are wanted is how parts mostly are
    facts = found[0] if wanted.held.facts is not None else found[: len(parts)]
    lengths = tuple(each.rows for each in facts)
    if min(lengths) < 0:
        raise ClusterError(
            "an argument that is to be cut by rows is no batch",
            why="the method that made it returned something else",
            fix="give it as an option by name: options are the same for every rank",
        )
    sizes = _sizes(wanted, facts, fetch)
    if lengths == sizes:
        return _batch(found[-1], fields)
    held = Placement(Mesh.of(part=len(lengths)), {"part": Split(0, sizes=lengths)})
    first = len(lengths)
    asked = Placement(Mesh.of(part=wanted.count, first=first), {"part": Split(0, sizes=sizes)})
    starts = [0, *accumulate(lengths)]
    moves = boxing(held, asked, (sum(lengths),)).moves
    mine = [move for move in moves if move.destination == first + wanted.index]
    if not mine:
        return _batch(fetch([parts[0].value], fields)[0], fields).slice(0, 0)
    sources = fetch([parts[move.source].value for move in mine], fields)
    pieces = []
    for move, source in zip(mine, sources, strict=True):
        begin, end = move.slice.bounds[0]
        pieces.append(_batch(source, fields).slice(begin - starts[move.source], end - starts[move.source]))
    return concatenate(pieces)


def _sizes(wanted: Rows, facts: Sequence[Facts], fetch: Fetcher) -> tuple[int, ...]:
    """How many rows each rank gets."""
    rows = sum(each.rows for each in facts)
    if wanted.by is not None:
        tokens = [length for each in facts for length in each.lengths]
        if not tokens:
            tokens = [length for each in facts_of(wanted.by, fetch) for length in each.lengths]
        if len(tokens) == rows:
            return balanced_shares(tokens, wanted.count, wanted.unit)
    if wanted.unit != GROUPS:
        return shares(rows, wanted.count, wanted.unit)
    return group_shares(_groups(facts), wanted.count)


def group_shares(groups: Sequence[int], count: int) -> tuple[int, ...]:
    """How many rows each of ``count`` ranks gets of groups of such sizes, as ``shares`` of whole groups."""
    before = [0, *accumulate(groups)]
    ends = [before[end] for end in (0, *accumulate(shares(len(groups), count)))]
    return tuple(stop - start for start, stop in pairwise(ends))


def _groups(facts: Sequence[Facts]) -> list[int]:
    """The rows of every group, those that go on in the next part in one."""
    sizes, last = list[int](), None
    for each in facts:
        if each.ends:
            first, *rest = each.groups
            if each.ends[0] == last:
                sizes[-1] += first
                sizes += rest
            else:
                sizes += each.groups
            last = each.ends[1]
    return sizes


def _batch(value: Any, fields: Names) -> Batch:
    assert isinstance(value, Batch)
    found: Batch = _read(value, fields)
    return found


def _read(value: Any, fields: Names) -> Any:
    """A value; of a batch what is read."""
    if fields is None or not isinstance(value, Batch):
        return value
    return value.only(*(name for name in value.fields if name in fields))
