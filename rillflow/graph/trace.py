"""Trace: an algorithm's step run on symbols, and the graph it leaves behind.

    step(Flow(tracer), symbol, config)
        flow.policy.generate(prompts)  ──> a stage, an edge for every symbol it is given, a new symbol
        flow.compute(formula, ...)     ──> the same, the formula's parameters being what it reads

A symbol has the names of its fields and nothing else, so what no stage provides is found here, before
a model is loaded. A step that looks at a value cannot be traced, and is told so.
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
"""What a formula may read of any batch: its rows' ids [B, 3], and a number [B] that a prompt's rows share."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What an endpoint reads of its arguments and adds to them.

    Example:
        Signature(reads=("tokens", "loss_mask"), writes=("values",), transfer="DP_PROTO")
    """

    reads: tuple[str, ...]
    """Fields some argument must have."""
    writes: tuple[str, ...]
    """Fields of the result; empty where it is no batch."""
    transfer: str
    """The name of how arguments and results travel."""
    says: tuple[str, ...] = ()
    """What a loss among its options is given by the model, beside fields."""


class Symbol(Handle):
    """A result that will exist: where it comes from, and its fields."""

    def __init__(self, stage: str, source: int, fields: tuple[str, ...]) -> None:
        super().__init__(stage)
        self.source = source
        self.fields = fields


class Tracer:
    """The executor of a traced step (see dataflow.flow): every call becomes a stage.

    Args:
        endpoints: of every role, by name.
    """

    def __init__(self, endpoints: Mapping[str, Mapping[str, Signature]]) -> None:
        self.endpoints = endpoints
        self.stages: list[Stage] = []
        self.edges: list[Edge] = []

    def call(self, role: str, endpoint: str, args: Sequence[Any], options: Options) -> Symbol:
        """A role's stage."""
        signature = self.endpoints[role][endpoint]
        before = [stage.index for stage in self.stages if stage.role == role]
        asked = [name for term in loss_terms(options, len(args)) for name in term.reads]
        reads = (*signature.reads, *(name for name in dict.fromkeys(asked) if name not in signature.says))
        index = self._stage(role, endpoint, reads, signature.writes, signature.transfer)
        self._connect(index, reads, [*args, *options.values()])
        if before and not any(edge.destination == index for edge in self.edges):
            self.edges.append(Edge(source=before[-1], destination=index, fields=(WEIGHTS,)))
        return Symbol(self.stages[index].name, index, signature.writes)

    def compute(self, formula: Formula, batches: Sequence[Any], into: str | None, options: Options) -> Symbol:
        """A formula's stage; its result is the first batch with one more field, or a number."""
        reads = field_parameters(formula, options)
        kept = self._fields(batches[0]) if into and batches else ()
        writes = tuple(dict.fromkeys((*kept, into))) if into else ()
        index = self._stage(CONTROLLER, formula.__name__, reads, (into,) if into else (), "")
        self._connect(index, reads, [*batches, *options.values()])
        return Symbol(self.stages[index].name, index, writes)

    def filter(self, batch: Any, field: str, by: Any = None) -> Symbol:
        """The rows of a batch whose field, of ``by`` if there is one, is true."""
        kept = self._fields(batch)
        index = self._stage(CONTROLLER, f"where {field}", (field,), kept, "")
        self._connect(index, (field,), [batch] if by is None or by is batch else [by, batch])
        return Symbol(self.stages[index].name, index, kept)

    def collect(self, name: str, batches: Sequence[Any]) -> Symbol:
        """The rows of batches of one kind; of a step the first one's are all there are."""
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
        """Edges from every symbol among the values; each field comes from the first that has it.

        A symbol that has none of them is given for what it is: all of it travels.
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
    """The executor of a step of which only the roles are wanted: it knows every role and every endpoint."""

    def __init__(self) -> None:
        self.heard: dict[str, None] = {}
        """The roles that were called, in order."""
        self.calls: dict[str, list[tuple[Sequence[Any], Mapping[str, Any]]]] = {}
        """By stage, the arguments and options of every call; of a result, its stage."""
        self.endpoints: Mapping[str, Collection[str]] = _Anything()

    def call(self, role: str, endpoint: str, args: Sequence[Any], options: Options) -> Handle:
        """A role's stage."""
        self.heard.setdefault(role)
        given = [each.stage if isinstance(each, Handle) else each for each in args]
        named = {name: None if isinstance(each, Handle) else each for name, each in options.items()}
        self.calls.setdefault(f"{role}.{endpoint}", []).append((given, named))
        return Handle(f"{role}.{endpoint}")

    def compute(self, *_: Any) -> Handle:
        """A formula's stage, or some rows of a batch."""
        return Handle(f"{CONTROLLER}'s")

    filter = collect = compute


class _Anything(dict[str, Any]):
    """Has whatever is asked for."""

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
    """Run a step on symbols.

    Args:
        name: of the algorithm.
        run: given the tracer and what the step is given, calls the step with a flow made of the tracer.
        tracer: records.
        data_fields: of what the step is given.
        beside: the fields of what it is given beside that, by name.

    Raises:
        GraphError: a field is missing, a role or endpoint is unknown, the step looks at a value or returns
            no report.
    """
    given = {DATA: data_fields, **beside}
    symbols = [Symbol(of, -1 - place, tuple(fields)) for place, (of, fields) in enumerate(given.items())]
    reports_of(run(tracer, *symbols))
    edges = sorted(tracer.edges, key=lambda edge: (edge.destination, edge.source))
    return Graph(name=name, stages=tuple(tracer.stages), edges=tuple(edges), given=tuple(given))
