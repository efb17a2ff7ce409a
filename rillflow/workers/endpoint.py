"""Endpoint: the mark on a role's method that a controller may call it.

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
"""The metrics of a batch."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What the controller knows of a method."""

    name: str
    """The method."""
    transfer: Transfer
    """How values travel."""
    reads: tuple[str, ...]
    """Fields its batches must have between them."""
    writes: tuple[str, ...]
    """Fields of the batch it returns; empty where it returns none."""
    says: tuple[str, ...] = ()
    """What a loss among its options is given by the model, beside fields."""
    measures: Measure | None = None
    """What is measured of its result in every step."""
    by_parts: bool = False
    """Whether rows that come in parts may be given to it one part after the other; see ``Policy.update``."""
    also: tuple[str, ...] = ()
    """Fields that it reads of batches that have them."""

    def __post_init__(self) -> None:
        if self.measures is not None and not self.writes:
            raise GraphError(
                f"endpoint {self.name!r} has a measure and says of no field that it writes it",
                why="rows of the step are measured, and without writes= nobody knows that it returns those",
                fix='name the fields of the batch that it returns: writes=("rewards", "valid")',
            )

    @property
    def is_row_by_row(self) -> bool:
        """Whether its result has the rows that it was given: fields of theirs, and no tokens of its own."""
        return bool(self.writes) and "tokens" not in self.writes

    def read(self, options: Mapping[str, Any]) -> tuple[str, ...] | None:
        """The fields that travel to it, with those of the losses among its options; None: all."""
        if not self.reads:
            return None
        losses = [name for term in loss_terms(options, 0) for name in term.reads]
        return tuple(dict.fromkeys((*self.reads, *losses, *self.also)))

    def travels(self, options: Mapping[str, Any]) -> Transfer:
        """How its rows travel: as it says, in units that the losses among its options do not part."""
        sections = [term.loss for term in loss_terms(options, 0) if isinstance(term.loss, LossSection)]
        unit = max((each.rows_together for each in sections), default=1)
        return self.transfer if unit <= self.transfer.unit else replace(self.transfer, unit=unit)

    @property
    def signature(self) -> Signature:
        """For a traced step."""
        return Signature(reads=self.reads, writes=self.writes, transfer=self.transfer.name, says=self.says)


class Marked(Generic[_P, _T]):
    """A method with what its mark says; called through an instance, it is that method."""

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
    says: tuple[str, ...] = (),
    measures: Measure | None = None,
    by_parts: bool = False,
    also: tuple[str, ...] = (),
) -> Callable[[Callable[Concatenate[Any, _P], _T]], Marked[_P, _T]]:
    """Mark a method as an endpoint.

    Args:
        transfer: how arguments and results travel.
        reads: fields its batches must have between them. Where there are any, no others come to it: these,
            ``also`` and what a loss reads.
        writes: fields of the batch it returns: of the rows it was given, unless ``tokens`` are among them.
        says: what a loss among its options is given by the model, beside fields.
        measures: a function of a module: the metrics of a batch that it returned for rows of the step, whose
            fields ``writes`` names.
        by_parts: whether it takes ``part`` = (index, count) and then is given a part of the rows alone.
        also: fields that it reads of batches that have them.

    Raises:
        GraphError: once it marks a method: what is measured is not written.
    """
    how = {"reads": reads, "writes": writes, "says": says, "measures": measures, "by_parts": by_parts}
    said = partial(Endpoint, transfer=transfer, also=also, **how)  # type: ignore[arg-type]
    return lambda method: Marked(method, said(name=method.__name__))


def endpoints_of(role: type) -> dict[str, Endpoint]:
    """The endpoints of a class and of those it inherits from, by name."""
    return {
        name: marked.endpoint
        for owner in reversed(role.__mro__)
        for name, marked in vars(owner).items()
        if isinstance(marked, Marked)
    }
