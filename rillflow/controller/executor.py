"""GroupExecutor: run stages on groups of ranks.

role stage ──> Group.call ──> Pending       on the group that serves it: the sampler's for policy.generate
formula    ──> computed on a rank that holds the first batch; no batch comes to the controller

``step_executor`` adds what a phase's steps need: the source of their rows, and stages in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from rillflow.errors import RecordError, nearest
from rillflow.formulas import Granularity, granularity
from rillflow.graph.graph import CONTROLLER
from rillflow.graph.handle import Formula, Options
from rillflow.graph.loss import field_parameters
from rillflow.graph.trace import ROW_FIELDS
from rillflow.records.batch import Batch, Field, concatenate, load_batch, save_batch
from rillflow.runs.durable import write_error
from rillflow.workers import program
from rillflow.workers.arguments import GROUPS, Lie, Own, RemoteValue, Rows, Whole, group_shares, groups_of
from rillflow.workers.backend import Backend, Place
from rillflow.workers.config import SAMPLER
from rillflow.workers.endpoint import Endpoint, Measure
from rillflow.workers.group import Group
from rillflow.workers.pending import Pending, Submission, pack_options, stages_of, submitted, wait_for

if TYPE_CHECKING:
    from rillflow.roles.sampler import GroupId


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupPart:
    """Some groups of a step, whose rows come to one rank."""

    place: Place
    """The rank."""
    rows: Mapping[GroupId, Pending]
    """The groups in order, each with the result that holds its rows; it may hold rows of other groups."""


class GroupExecutor:
    """Executor that runs stages on groups.

    Args:
        groups: groups by name; several may serve one role.
        backend: the backend that runs the groups.
    """

    def __init__(self, groups: Mapping[str, Group], backend: Backend) -> None:
        self.groups = groups
        self.backend = backend

    @property
    def endpoints(self) -> Mapping[str, Collection[str]]:
        """See Executor."""
        found: dict[str, set[str]] = {}
        for group in self.groups.values():
            found.setdefault(group.of, set()).update(group.endpoints)
        return found

    def call(self, role: str, endpoint: str, args: Sequence[Any], options: Options) -> Pending:
        """See Executor."""
        return self.serving(role, endpoint).call(endpoint, *args, **options)

    def serving(self, role: str, endpoint: str) -> Group:
        """Return the group that has this endpoint of a role."""
        found = [each for each in self.groups.values() if each.of == role and endpoint in each.endpoints]
        return (found or [self.groups[role]])[0]

    def is_sampled(self, stage: str) -> bool:
        """Return whether the sampler makes the result of a stage."""
        role, _, endpoint = stage.partition(".")
        return role != CONTROLLER and self.serving(role, endpoint).role == SAMPLER

    def load_sampled(self, group: Group, endpoint: str, file: Path) -> Pending:
        """Return rows that ``write_rows`` wrote, as an endpoint of the sampler had made them."""
        places, lie = group.takes(endpoint), Lie.new(is_even=True, is_whole=True)
        cut = [[index, len(places)] for index in range(len(places))]
        return self._at(places, f"{group.of}.{endpoint}", "", load_rows, [file], lie=lie, cut=cut)

    def count_rows(self, rows: Pending, stages: Sequence[Pending], deadline_s: float) -> int:
        """Wait for a step's stages, and return the number of rows of one of their results."""
        wait_for(stages, deadline_s)
        return sum(each.rows for each in rows.facts(deadline_s))

    def endpoint(self, stage: str) -> Endpoint | None:
        """Return the endpoint of a stage; None for a formula."""
        role, _, name = stage.partition(".")
        return None if role == CONTROLLER else self.serving(role, name).endpoints[name]

    def measured(self, measure: Measure, rows: Pending) -> Pending:
        """Return the metrics of rows, computed on every rank that holds some of them."""
        return self._where_rows_are(measure.__name__, "group", measure, [], [rows], ())

    def on_holders(
        self, function: Callable[..., Any], given: Sequence[Sequence[Any]], batches: Sequence[Pending]
    ) -> Pending:
        """Call a function on every rank that holds a part of batches with the same layout.

        Each call gets the arguments given for its part, then its part of each batch.
        """
        cut = [[*each, *(batch.own(index) for batch in batches)] for index, each in enumerate(given)]
        return self._at(batches[0].holders, function.__name__, "", function, [], sources=batches, cut=cut)

    def compute(
        self, formula: Formula, batches: Sequence[Any], into: str | None, options: Options
    ) -> Pending:
        """See Executor."""
        name, seen = formula.__name__, granularity(formula) if into is not None else "batch"
        reads = field_parameters(formula, options)
        return self._where_rows_are(name, seen, apply_formula, [formula, into], batches, reads, options)

    def filter(self, batch: Any, field: str, by: Any = None) -> Pending:
        """See Executor."""
        given, reads = [batch] if by is None else [batch, by], (field,)
        kept = (field, given[-1].token) if isinstance(given[-1], Pending) else ()
        return self._where_rows_are(f"where {field}", "row", rows_where, [field], given, reads, kept=kept)

    def collect(self, name: str, batches: Sequence[Any]) -> Pending:
        """See Executor; the result is on one rank, where the first batch is."""
        after = stages_of(batches[-1:])  # the others belong to earlier steps
        return self._at([self._home(batches)], f"collect {name}", "", laid_together, batches, after=after)

    def gathered(self, stage: str, parts: Sequence[GroupPart], lie: Lie) -> Pending:
        """Return the rows of a step's groups, each part on one rank; see ``rows_of``.

        Args:
            stage: stage that made the rows.
            parts: the groups of each part.
            lie: layout of the rows, which is the same for all stages of the step.
        """
        cut = [[*arguments_of(part.rows)] for part in parts]
        sources = [each for part in parts for each in part.rows.values()]
        places = [part.place for part in parts]
        return self._at(places, stage, "", rows_of, [], lie=lie, sources=sources, cut=cut)

    def loaded(self, file: Path) -> Pending:
        """Return rows that ``write_rows`` wrote, loaded where collected rows are kept."""
        return self.apply(load_batch, file, place=self._home([]))

    def _where_rows_are(
        self,
        name: str,
        seen: Granularity,
        function: Callable[..., Any],
        given: Sequence[Any],
        batches: Sequence[Any],
        reads: tuple[str, ...],
        options: Options = MappingProxyType({}),
        kept: tuple[Any, ...] = (),
    ) -> Pending:
        """Call a function of batches, on every rank that holds the first if it needs only rows or groups.

        Args:
            name: name of the operation.
            seen: what one call must see: a row, a sample group or the whole batch.
            function: called with ``given`` and the batches.
            given: arguments that are the same on every rank.
            batches: batches with the same rows; if their rows differ, one rank computes over all of them.
            reads: fields to send; the first batch is sent with all its fields.
            options: options that are the same on every rank.
            kept: identity of the rows that the function keeps of the first batch; empty: all.
        """
        lies = [each.lie if isinstance(each, Pending) else None for each in batches]
        first = lies[0] if lies else None
        wanted = [reads if index else None for index in range(len(batches))]
        if seen == "batch" or first is None or any(each is None or each.rows != first.rows for each in lies):
            whole = [
                each.whole(fields) if isinstance(each, Pending) else each
                for each, fields in zip(batches, wanted, strict=True)
            ]
            lie = _kept_of(None if first is None else first.again(1), kept)
            return self._at(
                [self._home(batches)], name, "", function, [*given, *whole], options, lie, batches
            )
        places, is_as_held = batches[0].holders, lies.count(first) == len(lies)
        is_as_held = is_as_held and (seen == "row" or first.is_whole)
        cut = [
            [
                each.own(index, fields)
                if is_as_held
                else each.rows(index, len(places), places[0], GROUPS, None, fields)
                for each, fields in zip(batches, wanted, strict=True)
            ]
            for index in range(len(places))
        ]
        lie = _kept_of(first if is_as_held else first.again(len(places)), kept)
        return self._at(places, name, "", function, given, options, lie, batches, cut)

    def gather(self, batches: Sequence[Any], rows: int) -> Pending:
        """Return the first ``rows`` rows of the concatenated batches; see Supply."""
        return self.apply(first_rows, rows, *batches, place=self._home(batches))

    def apply(self, function: Callable[..., Any], *arguments: Any, place: Place, **options: Any) -> Pending:
        """Call a module's function at one rank; batches among its arguments arrive whole."""
        return self._at([place], function.__name__, "", function, arguments, options)

    def _at(
        self,
        places: Sequence[Place],
        name: str,
        role: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        options: Options = MappingProxyType({}),
        lie: Lie | None = None,
        sources: Sequence[Any] = (),
        cut: Sequence[Sequence[Any]] = (),
        after: Sequence[str] | None = None,
    ) -> Pending:
        """Call a function at places; with ``cut``, give each its own arguments and use all results."""
        given = [self._sent(each, name) for each in arguments]
        packed = pack_options(options, name, self.backend)
        calls = [
            (at, program.apply, (name, role, function, [*given, *(cut[index] if cut else ())], packed))
            for index, at in enumerate(places)
        ]
        return submitted(
            name,
            self.backend,
            calls,
            taken=range(len(places) if cut else 1),
            given=(*sources, *arguments, *options.values()),
            after=after,
            lie=lie or Lie.new(is_whole=not cut),
        )

    def _sent(self, argument: Any, name: str) -> Any:
        """Return an argument in the form for sending; pack it unless it is a batch."""
        if isinstance(argument, Pending):
            return argument.whole()
        is_ready = isinstance(argument, Batch | Own | Rows | Whole)
        return argument if is_ready else self.backend.pack(argument, f"an argument of {name}")

    def deal(
        self, role: str, rank: int, parts: int, function: Callable[..., Any], *arguments: Any
    ) -> list[Pending]:
        """Call like ``on_rank``; each of the ``parts`` elements of the returned tuple is one result."""
        place, name = self.groups[role].places[rank], f"{role}.{function.__name__}"
        given = [self._sent(each, name) for each in arguments]
        made = self.backend.submit(place, program.deal, name, role, function, given, {}, results=parts + 1)
        *values, facts = made
        return [
            Pending(
                name,
                Submission(
                    backend=self.backend, places=[place], references=[RemoteValue(value=value, facts=facts)]
                ),
            )
            for value in values
        ]

    def on_rank(self, role: str, rank: int, function: Callable[..., Any], *arguments: Any) -> Pending:
        """Call a function at one rank of the role."""
        return self.on_ranks(role, [rank], function, *arguments)

    def on_ranks(
        self, role: str, ranks: Sequence[int], function: Callable[..., Any], *arguments: Any
    ) -> Pending:
        """Call a function at some ranks of the role; return the first rank's result."""
        places = [self.groups[role].places[rank] for rank in ranks]
        return self._at(places, f"{role}.{function.__name__}", role, function, arguments)

    def on_first_rank(self, role: str, function: Callable[..., Any], *arguments: Any) -> Pending:
        """Call a module's function with a role's object, at the role's first rank."""
        return self.on_rank(role, 0, function, *arguments)

    def on_all_ranks(self, role: str, function: Callable[..., Any], *arguments: Any) -> Pending:
        """Call a function at all ranks of the role; return the first rank's result."""
        return self.on_ranks(role, range(len(self.groups[role].places)), function, *arguments)

    def abandon(self) -> float:
        """End all calls of a step; see Backend."""
        return self.backend.abandon()

    def mend(self, roles: Sequence[str], deadline_s: float) -> None:
        """Let the ranks of these roles communicate again after a failed call; see Backend."""
        self.backend.mend({self.groups[role].places[0].pool for role in roles}, deadline_s)

    def _home(self, batches: Sequence[Any]) -> Place:
        """Return a rank that holds the first batch, or a part of it."""
        for batch in batches:
            if isinstance(batch, Pending):
                return batch.places[0]
        return next(iter(self.groups.values())).places[0]


def _kept_of(lie: Lie | None, kept: tuple[Any, ...]) -> Lie | None:
    """Return the layout of the rows that a filter keeps of others; all of them if ``kept`` is empty."""
    if not kept:
        return lie
    lie = lie or Lie.new(is_whole=True)
    return replace(lie, rows=(lie.rows, *kept), is_even=False)


def apply_formula(formula: Callable[..., Any], into: str | None, *batches: Batch, **options: Any) -> Any:
    """Apply a formula to the fields that its parameters name.

    Raises:
        RecordError: no batch has one of the fields.
    """
    names = field_parameters(formula, options)
    fields = _fields(names, batches) if batches else {}
    missing = [name for name in names if name not in fields]
    if missing:
        there = sorted({*fields, *(name for batch in batches for name in batch.fields)})
        raise RecordError(
            f"formula {formula.__name__} reads the field {missing[0]!r}, which none of its batches has",
            why=f"the fields are {', '.join(there)}",
            fix=nearest(missing[0], there),
        )
    result = formula(**{name: fields[name] for name in names}, **options)
    return float(result) if into is None else batches[0].with_fields(**{into: result})


def arguments_of(rows: Mapping[GroupId, Pending], fields: Sequence[str] | None = None) -> list[Any]:
    """Return the arguments with which ``rows_of`` returns the rows of some groups.

    Args:
        rows: the groups in order, each with the result that holds its rows.
        fields: fields to send; None for all.
    """
    held: dict[Pending, list[GroupId]] = {}
    for group, result in rows.items():
        held.setdefault(result, []).append(group)
    names = None if fields is None else tuple(fields)
    return [[*rows], [*held.values()], *(each.whole(names) for each in held)]


def rows_of(groups: Sequence[GroupId], held: Sequence[Sequence[GroupId]], *batches: Batch) -> Batch:
    """Return the rows of some groups, ordered by group as given.

    Args:
        groups: the groups.
        held: the groups whose rows are taken from each batch; it may hold rows of others.
        batches: the batches.
    """
    rows, first = concatenate(batches), 0
    places: dict[GroupId, list[int]] = {group: [] for group in groups}
    for batch, wanted in zip(batches, held, strict=True):
        for place, row in enumerate(batch.row_ids(), first):
            if row.group in wanted:
                places[row.group].append(place)
        first += len(batch)
    chosen = [place for each in places.values() for place in each]
    return rows if chosen == [*range(len(rows))] else rows.select(chosen)


def load_rows(file: Path, index: int, count: int) -> Batch:
    """Return one of ``count`` parts of written rows, split as on the sampler's ranks."""
    rows = load_batch(file)
    ends = [0, *accumulate(group_shares(groups_of(rows), count))]
    return rows.slice(ends[index], ends[index + 1])


def rows_where(field: str, batch: Batch, by: Batch | None = None) -> Batch:
    """Return the rows of a batch whose field, of ``by`` if given, is true."""
    flags = batch if by is None else batch.only().join(by.only(field))
    return batch.select(flags.dense(field).nonzero().squeeze(1))


def first_rows(rows: int, *batches: Batch) -> Batch:
    """Return the first ``rows`` rows, or all there are, of the concatenated batches."""
    everything = concatenate(batches)
    return everything.slice(0, min(rows, len(everything)))


def laid_together(*batches: Batch) -> Batch:
    """Return all rows of the batches, concatenated."""
    return concatenate(batches)


def _fields(names: Sequence[str], batches: Sequence[Batch]) -> dict[str, Field]:
    """Return the fields of the batches; the first batch that has a field supplies it, as in a trace."""
    rows = batches[0]
    for other in batches[1:]:
        taken = [name for name in names if name in other.fields and name not in rows.fields]
        rows = rows.join(other.only(*taken)) if taken else rows
    numbers: torch.Tensor = torch.unique(rows.ids[:, :2], dim=0, return_inverse=True)[1]
    return dict(rows.fields) | dict(zip(ROW_FIELDS, (rows.ids, numbers), strict=True))


def write_rows(path: str, rows: Batch) -> None:
    """Write rows to a file.

    Raises:
        RunDirectoryError: the disk fails.
    """
    try:
        save_batch(rows, Path(path))
    except (OSError, SafetensorError) as error:
        raise write_error(Path(path), error) from error
