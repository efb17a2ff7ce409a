"""Arguments: describe an argument to a rank, and resolve the description there.

    controller                             rank
    Own(value)                 ─────────>  its own part, if the Lie shows that rows are already in place
    Rows(held, index, count)   ─────────>  its rows of the batch, pulled from the ranks that hold them
    Whole(held, is_partial)    ─────────>  the whole value
    anything else              ─────────>  the value unchanged

A reference is a pair: the value, and facts about it. The facts are small and pulled first, so that a rank
pulls no value from which it needs no row. If there are as many parts as ranks, a rank pulls its own part
together with the facts. For many parts, the references are a table in the object store, and one rank gathers
the facts for all. From a batch, only the fields that are read are pulled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

from rillflow.errors import ClusterError
from rillflow.placement.boxing import boxing
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement, Split
from rillflow.records.batch import Batch, concatenate
from rillflow.records.metrics import merge_metrics
from rillflow.workers.backend import Place

RECORDED_RANKS = 16
"""Ranks of a pool whose pipeline passes are recorded, the first ones: those that a timeline draws."""
GROUPS = 0
"""Unit that keeps neighbouring rows of one prompt together."""
Names = tuple[str, ...] | None
"""Names of wanted fields; None: all."""


class Fetcher(Protocol):
    """Function that fetches the values of references."""

    def __call__(self, references: Sequence[Any], fields: Names = None) -> list[Any]:
        """Return the values; batches have at least these fields."""


@dataclass(frozen=True, kw_only=True)
class TimedPass:
    """One pass of a micro-batch through a pipeline stage, in seconds since the epoch."""

    micro_batch: int
    """Index of the micro-batch in its replica."""
    is_backward: bool
    """Whether it is the backward pass."""
    began: float
    """Start of the computation."""
    ended: float
    """End of the computation."""


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """The passes of one rank for one optimiser step of a pipeline."""

    stage: int
    """Pipeline stage of the rank."""
    passes: tuple[TimedPass, ...]
    """Its passes in order."""
    gain: float | None = None
    """Predicted share of time that running two pipelines together saves; None without a partner."""
    bubble: float | None = None
    """Predicted share of idle time of both; None if the pipeline ran alone."""


class Pipelined(ABC):
    """A role whose calls may run the passes of a pipeline."""

    @abstractmethod
    def taken_runs(self) -> Sequence[PipelineRun]:
        """Return the first runs with backward passes since the last call."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Metadata of a result."""

    rows: int
    """Number of rows; -1 if the result is not a batch."""
    tokens: int
    """Number of tokens."""
    lengths: tuple[int, ...] = ()
    """Tokens of each row; empty if rows have no tokens."""
    groups: tuple[int, ...] = ()
    """Number of neighbouring rows of each prompt, in order."""
    ends: tuple[tuple[int, int], ...] = ()
    """Epoch and prompt of the first and the last group; empty if there is no row."""
    began: float
    """Start time of the method in seconds since the epoch, after its arguments had arrived."""
    ended: float
    """End time of the method in seconds since the epoch."""
    place: Place
    """Rank that ran the method."""
    runs: tuple[PipelineRun, ...] = ()
    """Runs of its pipeline with backward passes, the first ones of the call."""


@dataclass(frozen=True, kw_only=True)
class RemoteValue:
    """References to the result of one rank."""

    value: Any
    """Reference to the value."""
    facts: Any
    """Reference to its Facts."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """References to the parts of a result."""

    table: Any
    """RemoteValues of the parts, in order; for many parts a reference to them, see Backend.table."""
    facts: Any = None
    """Reference to the Facts of all parts; None: each part's Facts are fetched separately."""


@dataclass(frozen=True, kw_only=True)
class Lie:
    """The layout of a result's rows over its parts; equal layouts have the same rows in each part."""

    rows: Any
    """Identity of the rows: equal values have the same rows in the same order."""
    cut: Any
    """Identity of the split."""
    is_even: bool
    """Whether parts have similar sizes, so that ranks may use them in place."""
    is_whole: bool
    """Whether all rows of a prompt are in one part."""

    @classmethod
    def new(cls, *, is_even: bool = False, is_whole: bool = False) -> Lie:
        """Return the layout of rows that match no other result's."""
        return cls(rows=object(), cut=object(), is_even=is_even, is_whole=is_whole)

    def again(self, count: int, unit: int = GROUPS) -> Lie:
        """Return the layout of the same rows split again over ``count`` ranks."""
        whole = count == 1 or unit == GROUPS
        return Lie(rows=self.rows, cut=(count, unit), is_even=True, is_whole=whole)


@dataclass(frozen=True, kw_only=True)
class Own:
    """One rank's existing part of a batch."""

    value: Any
    """Reference to the part."""
    fields: Names = None
    """Fields to read."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One rank's share of a batch that other ranks hold in consecutive parts."""

    held: Held
    """References to the parts."""
    index: int
    """Index of the wanted share."""
    count: int
    """Number of shares."""
    unit: int = 1
    """Number of neighbouring rows that stay together; GROUPS: the rows of one prompt."""
    by: Held | None = None
    """Batch whose tokens balance the shares if the rows have none; None: shares have equal rows."""
    fields: Names = None
    """Fields to read."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The whole of a value that other ranks hold."""

    held: Held
    """References to the parts."""
    is_partial: bool
    """Whether the parts are partial sums to add, not pieces to concatenate."""
    fields: Names = None
    """Fields to read."""


def resolved(value: Any, fetch: Fetcher) -> Any:
    """Return the value that a description stands for."""
    if isinstance(value, Own):
        return _read(fetch([value.value], value.fields)[0], value.fields)
    if isinstance(value, Rows):
        return _rows(value, fetch)
    if isinstance(value, Whole):
        parts = fetch([each.value for each in parts_of(value.held, fetch)], value.fields)
        return assembled([_read(part, value.fields) for part in parts], is_partial=value.is_partial)
    return value


def parts_of(held: Held, fetch: Fetcher) -> tuple[RemoteValue, ...]:
    """Return the references to the parts of a result."""
    found: tuple[RemoteValue, ...] = held.table if isinstance(held.table, tuple) else fetch([held.table])[0]
    return found


def facts_of(held: Held, fetch: Fetcher) -> list[Facts]:
    """Return the facts of each part."""
    if held.facts is not None:
        return list(fetch([held.facts])[0])
    return fetch([each.facts for each in parts_of(held, fetch)])


def assembled(parts: Sequence[Any], *, is_partial: bool) -> Any:
    """Combine the ranks' results into one value."""
    if len(parts) == 1:
        return parts[0]
    if is_partial:
        return merge_metrics(list(parts))
    if all(isinstance(part, Batch) for part in parts):
        return concatenate(list(parts))
    return list(parts)


def shares(rows: int, count: int, unit: int = 1) -> tuple[int, ...]:
    """Return the number of ``rows`` for each of ``count`` ranks: equal up to one unit, largest first.

    Raises:
        ClusterError: the rows are not a whole number of units.
    """
    if rows % unit:
        raise ClusterError(
            f"{rows} rows cannot be split over ranks in units of {unit}",
            why=f"the last unit has only {rows % unit} rows; the rows of one unit must be consecutive",
            fix="check the stage that filtered or drew the rows",
        )
    least, more = divmod(rows // unit, count)
    return tuple(unit * (least + (index < more)) for index in range(count))


def balanced_shares(lengths: Sequence[int], count: int, unit: int = 1) -> tuple[int, ...]:
    """Return how many rows each of ``count`` ranks gets, in order, with about equal numbers of tokens.

    Each cut is placed where the tokens before it are nearest to the ranks' even share. A rank differs from
    the even share by at most half the longest unit at either end.

    Raises:
        ClusterError: the rows are not a whole number of units.
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
    """Return one rank's rows of a batch."""
    lengths = lengths_of(batch) if balanced else ()
    sizes = balanced_shares(lengths, count, unit) if lengths else shares(len(batch), count, unit)
    ends = [0, *accumulate(sizes)]
    return batch.slice(ends[index], ends[index + 1])


def lengths_of(batch: Batch) -> tuple[int, ...]:
    """Return the tokens of each row; empty if rows have no tokens."""
    return tuple(batch.ragged("tokens").lengths.tolist()) if "tokens" in batch.fields else ()


def groups_of(batch: Batch) -> tuple[int, ...]:
    """Return the number of neighbouring rows of each prompt, in order."""
    prompts = batch.ids[:, :2]
    starts = (prompts[1:] != prompts[:-1]).any(1).nonzero().squeeze(1).add(1).tolist()
    ends = [0, *starts, len(batch)] if len(batch) else [0]
    return tuple(stop - start for start, stop in pairwise(ends))


def are_whole(batch: Batch, sizes: Sequence[int]) -> bool:
    """Return whether pieces of these sizes keep the rows of each prompt together."""
    return {*accumulate(sizes)} <= {0, *accumulate(groups_of(batch))}


def _rows(wanted: Rows, fetch: Fetcher) -> Batch:
    parts, fields = parts_of(wanted.held, fetch), wanted.fields
    about = [wanted.held.facts] if wanted.held.facts is not None else [each.facts for each in parts]
    likely = [parts[wanted.index].value] if len(parts) == wanted.count else []
    found = fetch([*about, *likely], fields)  # one request: the parts mostly have the wanted split
    facts = found[0] if wanted.held.facts is not None else found[: len(parts)]
    lengths = tuple(each.rows for each in facts)
    if min(lengths) < 0:
        raise ClusterError(
            "an argument that is to be split by rows is not a batch",
            why="the method that returned it returned another type",
            fix="pass it as a keyword option: every rank gets the same options",
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
    """Return how many rows each rank gets."""
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
    """Return how many rows each of ``count`` ranks gets when whole groups are shared out."""
    before = [0, *accumulate(groups)]
    ends = [before[end] for end in (0, *accumulate(shares(len(groups), count)))]
    return tuple(stop - start for start, stop in pairwise(ends))


def _groups(facts: Sequence[Facts]) -> list[int]:
    """Return the number of rows of every group; a group that continues in the next part counts once."""
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
    """Return a value; select the read fields of a batch."""
    if fields is None or not isinstance(value, Batch):
        return value
    return value.only(*(name for name in value.fields if name in fields))
