"""Program: run the controller's calls on a rank (see workers.backend.Site).

    start(site, role, factory)          construct the role's object and keep it here
    run(site, call, arguments)          resolve references, run the method, keep its result and Facts here
    ready_call(site, call, ...)         the same call, ready to run
    gather_facts(site, held)            gather the Facts of many parts for all ranks that need them
    apply(site, role, function, ...)    run a function, with the role's object as first argument if named
    deal(site, role, function, ...)     the same, with each element of the returned tuple as a result

This is the supervision boundary: every error of a role leaves with the name of role, method and rank (if
there are several), the number of rows and the source line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rillflow.errors import ClusterError, RecordError, RillflowError, nearest
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.runs.error_lines import innermost_line
from rillflow.workers.arguments import (
    Facts,
    Held,
    Own,
    Pipelined,
    PipelineRun,
    Rows,
    Whole,
    facts_of,
    groups_of,
    lengths_of,
    resolved,
)
from rillflow.workers.backend import RankLost, Site
from rillflow.workers.collectives import Stranded, is_broken_collective

Factory = Callable[[Site], Any]
"""Constructs a role's object on one rank."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of one role's method."""

    role: str
    """Name of the object on the rank."""
    of: str
    """Name of the role in the algorithm."""
    endpoint: str
    """Name of the method."""
    reads: tuple[str, ...] = ()
    """Fields that at least one of its batches must have."""

    def __str__(self) -> str:
        return f"{self.of}.{self.endpoint}"


def start(site: Site, role: str, factory: Factory) -> None:
    """Construct a role's object.

    Raises:
        ClusterError: the name is taken, or the constructor raised.
    """
    if role in site.objects:
        raise ClusterError(
            f"two roles are called {role!r} on {site.place}",
            why="a call finds its role by name, so the second role would replace the first",
            fix="give each role its own name",
        )
    try:
        site.objects[role] = factory(site)
    except Exception as error:
        raise _located(error, f"making {role}", site, []) from error


def run(
    site: Site, call: Call, arguments: Sequence[Any], options: Mapping[str, Any], speaks: bool
) -> tuple[Any, Facts]:
    """Call a role's method; return its result, or None if this rank's result is not taken, and its Facts."""
    return ready_call(site, call, arguments, options, speaks)()


def ready_call(
    site: Site, call: Call, arguments: Sequence[Any], options: Mapping[str, Any], speaks: bool
) -> Callable[[], tuple[Any, Facts]]:
    """Return a call whose arguments are here, ready to run; see ``run``."""
    role, whole = object_of(site, call.role), partial(_whole, site, arguments)
    method = getattr(role, call.endpoint)  # the group has checked the name
    ready = _ready(site, str(call), partial(_reading, call, method, whole), arguments, options)

    def work() -> tuple[Any, Facts]:
        found, facts = ready()
        if isinstance(role, Pipelined):
            facts = replace(facts, runs=tuple(_on_clock(site, each) for each in role.taken_runs()))
        return found if speaks else None, facts

    return work


def _on_clock(site: Site, run: PipelineRun) -> PipelineRun:
    """Return a run with times of the driver's clock."""
    ahead_s = site.ahead_s
    if not ahead_s:
        return run
    passes = [replace(each, began=each.began - ahead_s, ended=each.ended - ahead_s) for each in run.passes]
    return replace(run, passes=tuple(passes))


def gather_facts(site: Site, held: Held) -> list[Facts]:
    """Return the Facts of every part of a result, gathered once for all ranks that split its rows."""
    return facts_of(held, site.fetch)


def apply(
    site: Site,
    name: str,
    role: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> tuple[Any, Facts]:
    """Call a function, with a role's object before the arguments if one is named; errors call it ``name``."""
    work = partial(function, object_of(site, role)) if role else function
    return _ready(site, name, work, arguments, options)()


def deal(site: Site, *described: Any) -> tuple[Any, ...]:
    """Call like ``apply``; return each element of the result separately, and the facts last."""
    found, facts = apply(site, *described)
    return (*found, facts)


def object_of(site: Site, role: str) -> Any:
    """Return the object of a role.

    Raises:
        ClusterError: the rank has none.
    """
    if role not in site.objects:
        raise ClusterError(
            f"there is no {role} on {site.place}",
            why="the role was never made there, or the rank's process was replaced since",
            fix="call Group.restart after Backend.replace",
        )
    return site.objects[role]


def _ready(
    site: Site, name: str, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> Callable[[], tuple[Any, Facts]]:
    """Resolve the arguments, and return the call."""
    given = [resolved(argument, site.fetch) for argument in arguments]
    named = {key: resolved(option, site.fetch) for key, option in options.items()}

    def work() -> tuple[Any, Facts]:
        began, before = site.clock(), _written([*given, *named.values()])
        try:
            result = function(*given, **named)
            _refuse_writes(name, before, _written([*given, *named.values()]))
        except Exception as error:
            raise _located(error, name, site, given) from error
        return result, _facts(result, began, site)

    return work


def _whole(site: Site, arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments with all of their fields."""
    described = [
        replace(each, fields=None) if isinstance(each, Own | Rows | Whole) else each for each in arguments
    ]
    return [resolved(each, site.fetch) for each in described]


def _reading(
    call: Call, method: Callable[..., Any], whole: Callable[[], list[Any]], *arguments: Any, **options: Any
) -> Any:
    """Run the method after checking that the fields it reads are present."""
    batches = [each for each in (*arguments, *options.values()) if isinstance(each, Batch)]
    there = sorted({name for batch in batches for name in batch.fields})
    missing = [name for name in call.reads if name not in there]
    if missing:
        batches += [each for each in whole() if isinstance(each, Batch)]
        there = sorted({name for batch in batches for name in batch.fields})
        raise RecordError(
            f"{call} reads the field {missing[0]!r}, which none of its batches has",
            why=f"the fields are {', '.join(there) or 'none'}",
            fix=nearest(missing[0], there),
        )
    return method(*arguments, **options)


def _written(values: Sequence[Any]) -> list[tuple[str, int]]:
    """Return, for each tensor in the batches among some values, its field's name and its number of writes."""
    fields = [item for value in values if isinstance(value, Batch) for item in value.fields.items()]
    tensors = [(name, field.values if isinstance(field, Ragged) else field) for name, field in fields]
    return [(name, tensor._version) for name, tensor in tensors if not tensor.is_inference()]


def _refuse_writes(name: str, before: list[tuple[str, int]], after: list[tuple[str, int]]) -> None:
    """Raise RecordError if a call wrote into its batches, which later stages and other ranks share."""
    for (field, writes), (_, now) in zip(before, after, strict=True):
        if now != writes:
            raise RecordError(
                f"{name} wrote into the field {field!r} of a batch it was given",
                why="other ranks and later stages read the same memory",
                fix="write into a copy: values.clone()",
            )


def _facts(result: Any, began: float, site: Site) -> Facts:
    when: dict[str, Any] = {"began": began, "ended": site.clock(), "place": site.place}
    if not isinstance(result, Batch):
        return Facts(rows=-1, tokens=0, **when)
    lengths, rows = lengths_of(result), len(result)
    ends = tuple(result.row_id(index).group for index in (0, -1)) if rows else ()
    return Facts(rows=rows, tokens=sum(lengths), lengths=lengths, groups=groups_of(result), ends=ends, **when)


def _located(error: Exception, name: str, site: Site, given: Sequence[Any]) -> RillflowError:
    """Add the location to an error; wrap any error that is not a RillflowError."""
    rank = f" on {site.place}" if site.pool_size > 1 else ""
    rows = described(given)
    where = f"in {name}{rank}{f', given {rows}' if rows else ''}"
    if isinstance(error, RankLost):
        error.place = site.place
    if isinstance(error, RillflowError):
        error.add_note(where)
        return error
    is_echo = site.ranks.size > 1 and is_broken_collective(error)
    return (Stranded if is_echo else ClusterError)(
        f"{type(error).__name__} {where}{f': {error}' if str(error) else ''}",
        why=f"raised at {innermost_line(error)}",
        fix='correct that line; with placement.backend = "inline" or one rank, breakpoint() works there',
    )


def described(values: Sequence[Any]) -> str:
    """Describe the batches among some values in a few words. Example: ``64 rows``."""
    sizes = dict.fromkeys(len(value) for value in values if isinstance(value, Batch))
    return f"{' and '.join(map(str, sizes))} rows" if sizes else ""
