"""Trace: run an algorithm's step on symbols and record its graph.

    step(Flow(tracer), symbol, config)
        flow.policy.generate(prompts)  ──> a stage, an edge for every symbol argument, a new symbol
        flow.compute(formula, ...)     ──> the same; the formula's parameters name the fields it reads

A symbol knows only the names of its fields. Tracing thus finds a field that no stage provides before a model
is loaded. A step that reads a value raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from rillflow.errors import GraphError, nearest
from rillflow.graph.graph import CONTROLLER, DATA, WEIGHTS, Edge, Graph, Stage
from rillflow.graph.handle import Formula, Handle, Options, reports_of
from rillflow.graph.loss import field_parameters, loss_terms

ROW_FIELDS = ("ids", "groups")
"""Fields that a formula can read from any batch: row ids [B, 3], and the prompt's group number [B]."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Fields that an endpoint reads from its arguments and adds to its result.

    Example:
        Signature(reads=("tokens", "loss_mask"), writes=("values",), transfer="DP_PROTO")
    """

    reads: tuple[str, ...]
    """Fields that some argument must have."""
    writes: tuple[str, ...]
    """Fields of the result; empty if the result is not a batch."""
    transfer: str
    """Name of the transfer of arguments and results."""
    model_outputs: tuple[str, ...] = ()
    """Outputs of the model that a loss among the options can read in addition to fields."""


class Symbol(Handle):
    """Future result: its producing stage and its fields."""

    def __init__(self, stage: str, source: int, fields: tuple[str, ...]) -> None:
        super().__init__(stage)
        self.source = source
        self.fields = fields


class Tracer:
    """Executor of a traced step (see dataflow.flow); records every call as a stage.

    Args:
        endpoints: signatures of every role's endpoints, by name.
    """

    def __init__(self, endpoints: Mapping[str, Mapping[str, Signature]]) -> None:
        self.endpoints = endpoints
        self.stages: list[Stage] = []
        self.edges: list[Edge] = []

    def call(self, role: str, endpoint: str, args: Sequence[Any], options: Options) -> Symbol:
        """Record a stage of a role."""
        signature = self.endpoints[role][endpoint]
        before = [stage.index for stage in self.stages if stage.role == role]
        asked = [name for term in loss_terms(options, len(args)) for name in term.reads]
        reads = (
            *signature.reads,
            *(name for name in dict.fromkeys(asked) if name not in signature.model_outputs),
        )
        index = self._stage(role, endpoint, reads, signature.writes, signature.transfer)
        self._connect(index, reads, [*args, *options.values()])
        if before and not any(edge.destination == index for edge in self.edges):
            self.edges.append(Edge(source=before[-1], destination=index, fields=(WEIGHTS,)))
        return Symbol(self.stages[index].name, index, signature.writes)

    def compute(self, formula: Formula, batches: Sequence[Any], into: str | None, options: Options) -> Symbol:
        """Record a formula; the result is the first batch with one more field, or a number."""
        reads = field_parameters(formula, options)
        kept = self._fields(batches[0]) if into and batches else ()
        writes = tuple(dict.fromkeys((*kept, into))) if into else ()
        index = self._stage(CONTROLLER, formula.__name__, reads, (into,) if into else (), "")
        self._connect(index, reads, [*batches, *options.values()])
        return Symbol(self.stages[index].name, index, writes)

    def filter(self, batch: Any, field: str, by: Any = None) -> Symbol:
        """Record a filter: the rows of a batch whose field, taken from ``by`` if given, is true."""
        kept = self._fields(batch)
        index = self._stage(CONTROLLER, f"where {field}", (field,), kept, "")
        self._connect(index, (field,), [batch] if by is None or by is batch else [by, batch])
        return Symbol(self.stages[index].name, index, kept)

    def collect(self, name: str, batches: Sequence[Any]) -> Symbol:
        """Record collected rows; the result has the fields of the last batch."""
        kept = self._fields(batches[-1])
        index = self._stage(CONTROLLER, f"collect {name}", kept, kept, "")
        self._connect(index, kept, batches[-1:])
        return Symbol(self.stages[index].name, index, kept)

    def _stage(
        self, role: str, endpoint: str, reads: tuple[str, ...], writes: tuple[str, ...], transfer: str
    ) -> int:
        index = len(self.stages)
        self.stages.append(
            Stage(index=index, role=role, endpoint=endpoint, reads=reads, writes=writes, transfer=transfer)
        )
        return index

    def _connect(self, index: int, wanted: Sequence[str], values: Sequence[Any]) -> None:
        """Add edges from every symbol among the values; each field comes from the first symbol that has it.

        A symbol without any wanted field gets an edge with all its fields.
        """
        symbols = [value for value in values if isinstance(value, Symbol)]
        left = list(dict.fromkeys(wanted))
        for symbol in symbols:
            taken = tuple(name for name in left if name in symbol.fields)
            left = [name for name in left if name not in taken]
            self.edges.append(Edge(source=symbol.source, destination=index, fields=taken or symbol.fields))
        missing = [name for name in left if name not in ROW_FIELDS]
        if missing:
            self._refuse(index, missing[0], symbols)

    def _refuse(self, index: int, missing: str, symbols: Sequence[Symbol]) -> NoReturn:
        there = sorted({name for symbol in symbols for name in symbol.fields})
        raise GraphError(
            f"{self.stages[index].name} reads the field {missing!r}, which none of its arguments has",
            why=f"they have {', '.join(there) or 'no fields'}",
            fix=nearest(missing, there),
        )

    def _fields(self, value: Any) -> tuple[str, ...]:
        return value.fields if isinstance(value, Symbol) else ()


class Listener:
    """Executor that only finds the roles of a step; it accepts every role and every endpoint."""

    def __init__(self) -> None:
        self.heard: dict[str, None] = {}
        """Roles that were called, in order."""
        self.calls: dict[str, list[tuple[Sequence[Any], Mapping[str, Any]]]] = {}
        """Arguments and options of every call, by stage; the stage name stands for an argument that is a
        result.
        """
        self.endpoints: Mapping[str, Collection[str]] = _Anything()

    def call(self, role: str, endpoint: str, args: Sequence[Any], options: Options) -> Handle:
        """Record a role's call."""
        self.heard.setdefault(role)
        given = [each.stage if isinstance(each, Handle) else each for each in args]
        named = {name: None if isinstance(each, Handle) else each for name, each in options.items()}
        self.calls.setdefault(f"{role}.{endpoint}", []).append((given, named))
        return Handle(f"{role}.{endpoint}")

    def compute(self, *_: Any) -> Handle:
        """Return the result of a formula, a filter or a collection, without recording it."""
        return Handle(f"{CONTROLLER}'s")

    filter = collect = compute


class _Anything(dict[str, Any]):
    """Mapping that contains every key."""

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, _: str) -> _Anything:
        return _Anything()


def trace(
    name: str,
    run: Callable[..., Any],
    tracer: Tracer,
    data_fields: Sequence[str],
    beside: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Graph:
    """Run a step on symbols and return its graph.

    Args:
        name: name of the algorithm.
        run: function of the tracer and the step's inputs that calls the step with a flow made of the tracer.
        tracer: recorder of the calls.
        data_fields: fields of the step's input.
        beside: fields of the step's further inputs, by name.

    Raises:
        GraphError: a field is missing, a role or endpoint is unknown, the step looks at a value or returns
            no report.
    """
    given = {DATA: data_fields, **beside}
    symbols = [Symbol(of, -1 - place, tuple(fields)) for place, (of, fields) in enumerate(given.items())]
    reports_of(run(tracer, *symbols))
    edges = sorted(tracer.edges, key=lambda edge: (edge.destination, edge.source))
    return Graph(name=name, stages=tuple(tracer.stages), edges=tuple(edges), given=tuple(given))
