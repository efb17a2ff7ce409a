"""Endpoint: mark a role's method as callable by the controller.

class Critic:
    @endpoint(DP, reads=("tokens", "loss_mask"), writes=("values",))
    def values(self, rollouts: Batch) -> Batch: ...

endpoints_of(Critic) == {"values": Endpoint(...)}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from rillflow.errors import GraphError
from rillflow.graph.loss import LossSection, loss_terms
from rillflow.graph.trace import Signature
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric
from rillflow.workers.transfer import Transfer

Measure = Callable[[Batch], Mapping[str, Metric]]
"""A function that returns the metrics of a batch."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The controller's description of a method."""

    name: str
    """Name of the method."""
    transfer: Transfer
    """Transfer of arguments and results."""
    reads: tuple[str, ...]
    """Fields that at least one of its batches must have."""
    writes: tuple[str, ...]
    """Fields of the batch it returns; empty if it returns none."""
    model_outputs: tuple[str, ...] = ()
    """Model outputs that it passes to a loss among its options, in addition to fields."""
    measures: Measure | None = None
    """Function that measures its result in every step."""
    by_parts: bool = False
    """Whether it may receive rows one part after the other; see ``Policy.update``."""
    by_groups: bool = False
    """Whether its role also computes it group by group, with ``advance`` and ``collect``."""
    alone: bool = False
    """Whether a rank that holds the whole model computes it without the other ranks."""
    optional_fields: tuple[str, ...] = ()
    """Optional fields that it reads if batches have them."""

    def __post_init__(self) -> None:
        if self.measures is not None and not self.writes:
            raise GraphError(
                f"endpoint {self.name!r} has a measure but declares no written fields",
                why="only rows of the step are measured, and writes= declares that it returns them",
                fix='list the fields of the returned batch: writes=("rewards", "valid")',
            )

    @property
    def is_row_by_row(self) -> bool:
        """Whether its result has the rows of its argument: it writes fields, but no tokens."""
        return bool(self.writes) and "tokens" not in self.writes

    def read(self, options: Mapping[str, Any]) -> tuple[str, ...] | None:
        """Return the fields sent to it, including those of the losses among its options; None: all."""
        if not self.reads:
            return None
        losses = [name for term in loss_terms(options, 0) for name in term.reads]
        return tuple(dict.fromkeys((*self.reads, *losses, *self.optional_fields)))

    def travels(self, options: Mapping[str, Any]) -> Transfer:
        """Return its transfer, with a unit that keeps the rows of its losses together."""
        sections = [term.loss for term in loss_terms(options, 0) if isinstance(term.loss, LossSection)]
        unit = max((each.rows_together for each in sections), default=1)
        return self.transfer if unit <= self.transfer.unit else replace(self.transfer, unit=unit)

    @property
    def signature(self) -> Signature:
        """Signature for a traced step."""
        return Signature(
            reads=self.reads,
            writes=self.writes,
            transfer=self.transfer.name,
            model_outputs=self.model_outputs,
        )


class Marked(Generic[_P, _T]):
    """A marked method; called through an instance, it behaves like the method."""

    def __init__(self, method: Callable[Concatenate[Any, _P], _T], endpoint: Endpoint) -> None:
        self.method, self.endpoint = method, endpoint
        self.__doc__ = method.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[_P, _T]:
        return MethodType(self.method, instance)


def endpoint(
    transfer: Transfer,
    *,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    model_outputs: tuple[str, ...] = (),
    measures: Measure | None = None,
    by_parts: bool = False,
    by_groups: bool = False,
    alone: bool = False,
    optional_fields: tuple[str, ...] = (),
) -> Callable[[Callable[Concatenate[Any, _P], _T]], Marked[_P, _T]]:
    """Mark a method as an endpoint.

    Args:
        transfer: how arguments and results travel.
        reads: fields that at least one of its batches must have. If there are any, only these fields,
            ``optional_fields`` and the fields that a loss reads are sent.
        writes: fields of the returned batch, which has the rows of its argument unless ``tokens`` are
            included.
        model_outputs: model outputs that it passes to a loss among its options, in addition to fields.
        measures: a module's function: the metrics of a batch that it returned for rows of the step;
            ``writes`` must name the fields of that batch.
        by_parts: whether it takes ``part`` = (index, count) and then receives one part of the rows.
        by_groups: whether the role also computes it group by group, without waiting: see ``Reward.advance``.
        alone: whether a rank that holds the whole model computes its rows without collectives; then the ranks
            that have no more rows to sample compute it first (``controller.gathering``).
        optional_fields: fields that it reads if batches have them.

    Raises:
        GraphError: when it marks a method with ``measures`` and without ``writes``.
    """
    how = {
        "reads": reads,
        "writes": writes,
        "model_outputs": model_outputs,
        "measures": measures,
        "by_parts": by_parts,
        "by_groups": by_groups,
        "alone": alone,
    }
    said = partial(Endpoint, transfer=transfer, optional_fields=optional_fields, **how)  # type: ignore[arg-type]
    return lambda method: Marked(method, said(name=method.__name__))


def endpoints_of(role: type) -> dict[str, Endpoint]:
    """Return the endpoints of a class and its base classes, by name."""
    return {
        name: marked.endpoint
        for owner in reversed(role.__mro__)
        for name, marked in vars(owner).items()
        if isinstance(marked, Marked)
    }
