"""Program: what happens on a rank when the controller calls (see cluster.backend.Site).

    start(site, role, factory)          the role's object is made and stays here
    run(site, call, arguments)          references become values, the method runs, its result and Facts stay
    gather_facts(site, held)            the Facts of many parts, for all ranks that want to know them
    apply(site, role, function, ...)    the same for a function, given the role's object first if one is named
    deal(site, role, function, ...)     the same, each element of the tuple it returns a result of its own

This is the supervision boundary: whatever a role raises leaves with the name of role, method and rank (where
there are several), how many rows it was given, and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rillflow.cluster.backend import Site
from rillflow.cluster.ranks import Stranded
from rillflow.errors import ClusterError, RecordError, RillflowError, nearest
from rillflow.observe.raised import innermost_line
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.workers.values import Facts, Held, Own, Rows, Whole, facts_of, groups_of, lengths_of, resolved

Factory = Callable[[Site], Any]
"""Makes a role's object on one rank."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One method of one role."""

    role: str
    """The name of the object here."""
    of: str
    """The role's name, as the algorithm calls it."""
    endpoint: str
    """The method's."""
    reads: tuple[str, ...] = ()
    """Fields that its batches must have between them."""

    def __str__(self) -> str:
        return f"{self.of}.{self.endpoint}"


def start(site: Site, role: str, factory: Factory) -> None:
    """Make a role's object.

    Raises:
        ClusterError: there is one of this name already, or its constructor raised.
    """
    if role in site.objects:
        raise ClusterError(
            f"two roles are called {role!r} on {site.place}",
            why="a call finds its role by name; the second would take the first one's place",
            fix="give each a name of its own",
        )
    try:
        site.objects[role] = factory(site)
    except Exception as error:
        raise _located(error, f"making {role}", site, []) from error


def run(
    site: Site, call: Call, arguments: Sequence[Any], options: Mapping[str, Any], speaks: bool
) -> tuple[Any, Facts]:
    """Call a role's method; its result, None of a rank whose result nobody takes, and the facts about it."""
    method = getattr(site.objects[call.role], call.endpoint)  # the group has checked the name
    whole = partial(_whole, site, arguments)
    found, facts = _run(site, str(call), partial(_reading, call, method, whole), arguments, options)
    return found if speaks else None, facts


def gather_facts(site: Site, held: Held) -> list[Facts]:
    """What is known of every part of a result, gathered once for all ranks that share out its rows."""
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
    work = partial(function, site.objects[role]) if role else function
    return _run(site, name, work, arguments, options)


def deal(site: Site, *described: Any) -> tuple[Any, ...]:
    """As ``apply``; each element of the result is there by itself, the facts are the last."""
    found, facts = apply(site, *described)
    return (*found, facts)


def _run(
    site: Site, name: str, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Any, Facts]:
    given = [resolved(argument, site.fetch) for argument in arguments]
    named = {key: resolved(option, site.fetch) for key, option in options.items()}
    began, before = site.clock(), _written([*given, *named.values()])
    try:
        result = function(*given, **named)
        _refuse_writes(name, before, _written([*given, *named.values()]))
    except Exception as error:
        raise _located(error, name, site, given) from error
    return result, _facts(result, began, site)


def _whole(site: Site, arguments: Sequence[Any]) -> list[Any]:
    """The arguments with all of their fields."""
    described = [
        replace(each, fields=None) if isinstance(each, Own | Rows | Whole) else each for each in arguments
    ]
    return [resolved(each, site.fetch) for each in described]


def _reading(
    call: Call, method: Callable[..., Any], whole: Callable[[], list[Any]], *arguments: Any, **options: Any
) -> Any:
    """The method's result; the fields it reads are there before it begins."""
    batches = [each for each in (*arguments, *options.values()) if isinstance(each, Batch)]
    there = sorted({name for batch in batches for name in batch.fields})
    missing = [name for name in call.reads if name not in there]
    if missing:
        batches += [each for each in whole() if isinstance(each, Batch)]
        there = sorted({name for batch in batches for name in batch.fields})
        raise RecordError(
            f"{call} reads the field {missing[0]!r}, which no batch it is given has",
            why=f"the fields are {', '.join(there) or 'none'}",
            fix=nearest(missing[0], there),
        )
    return method(*arguments, **options)


def _written(values: Sequence[Any]) -> list[tuple[str, int]]:
    """How often each tensor of the batches among some values has been written to, with its field's name."""
    fields = [item for value in values if isinstance(value, Batch) for item in value.fields.items()]
    tensors = [(name, field.values if isinstance(field, Ragged) else field) for name, field in fields]
    return [(name, tensor._version) for name, tensor in tensors if not tensor.is_inference()]


def _refuse_writes(name: str, before: list[tuple[str, int]], after: list[tuple[str, int]]) -> None:
    """Batches are shared: with later stages, and on Ray with every rank of the machine, through its store."""
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
    """The error with where it happened; one a user can mend keeps its words."""
    rank = f" on {site.place}" if site.ranks.size > 1 else ""
    rows = described(given)
    where = f"in {name}{rank}{f', given {rows}' if rows else ''}"
    if isinstance(error, RillflowError):
        error.add_note(where)
        return error
    is_echo = isinstance(error, RuntimeError) and site.ranks.size > 1  # as torch tells of a broken collective
    return (Stranded if is_echo else ClusterError)(
        f"{type(error).__name__} {where}{f': {error}' if str(error) else ''}",
        why=f"raised at {innermost_line(error)}",
        fix="mend what that line does; inline and with one rank, breakpoint() works there",
    )


def described(values: Sequence[Any]) -> str:
    """The batches among some values in a few words. Example: ``64 rows``."""
    sizes = dict.fromkeys(len(value) for value in values if isinstance(value, Batch))
    return f"{' and '.join(map(str, sizes))} rows" if sizes else ""
