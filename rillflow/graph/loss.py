"""Loss: the losses that an update minimises.

    flow.policy.update(rollouts, advantages, loss=mine, clip=0.2, passes=config)          one loss over all
    flow.policy.update(over(rollouts, advantages, loss=mine), over(shown, loss=cross_entropy, weight=0.1),
                       passes=config)                                                     several per update
        └─ laid_flat ─> the batches one after the other, loss = (LossTerm, LossTerm)

A loss is either a top-level function or a recipe's section that stands for a loss. The function's
parameters without a default are fields of the batches, or outputs of the model for each token.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, ClassVar

from rillflow.config.schema import Section
from rillflow.errors import GraphError


class LossSection(Section):
    """Recipe section that stands for a loss."""

    loss_kind: ClassVar[str | type[Any]]
    """Kind of loss: a name in ``training.loss.KINDS``, or a ``training.terms.Loss`` of your own."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """Fields that the loss reads."""

    @property
    def rows_together(self) -> int:
        """Number of neighbouring rows that form a unit and are never separated."""
        return 1


AnyLoss = Callable[..., Any] | LossSection
"""A function with any parameters, or a section that stands for a loss."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossTerm:
    """One loss of an update."""

    loss: AnyLoss
    """Loss to minimise."""
    count: int
    """Number of the update's batches that the loss covers."""
    batches: tuple[Any, ...] = ()
    """These batches in the step's call; they are passed separately."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function that are not fields."""
    weight: float = 1.0
    """Weight of its gradient relative to the other losses."""
    name: str = ""
    """Area of its metrics; empty for the role's area."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields of the batches and outputs of the model that the loss reads."""
        if isinstance(self.loss, LossSection):
            return self.loss.reads
        return field_parameters(self.loss, self.options)


def over(*batches: Any, loss: AnyLoss, weight: float = 1.0, name: str = "", **options: Any) -> LossTerm:
    """Return one of several losses of an update.

    Args:
        batches: rows that are joined.
        loss: a function, or a section of a recipe.
        weight: weight of its gradient relative to the other losses; metrics show the unweighted loss.
        name: area of its metrics; by default the role's area.
        options: arguments of the function that are not fields.
    """
    return LossTerm(loss=loss, count=len(batches), batches=batches, options=options, weight=weight, name=name)


def laid_flat(
    stage: str, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a stage with the batches of every ``over`` in one flat list.

    Raises:
        GraphError: ranks cannot find a loss by name, or some batches are outside of ``over``.
    """
    terms = [each for each in args if isinstance(each, LossTerm)]
    if terms:
        if len(terms) != len(args) or "loss" in options:
            raise GraphError(
                f"{stage} gets batches or a loss outside over(...)",
                why="each loss has its own rows, and arguments outside over(...) belong to no loss",
                fix="pass every batch in an over(..., loss=...)",
            )
        args = [batch for each in terms for batch in each.batches]
        options = {**options, "loss": tuple(replace(each, batches=()) for each in terms)}
    for term in loss_terms(options, len(args)):
        _check_loss(stage, term)
    return args, options


def loss_terms(options: Mapping[str, Any], batches: int) -> tuple[LossTerm, ...]:
    """Return the losses among the options of an update; empty without a loss."""
    loss = options.get("loss")
    if loss is None or isinstance(loss, tuple):
        return loss or ()
    rest = {name: value for name, value in options.items() if name not in ("loss", "passes", "name")}
    return (LossTerm(loss=loss, count=batches, options=rest, name=options.get("name", "")),)


def field_parameters(formula: Callable[..., Any], options: Collection[str]) -> tuple[str, ...]:
    """Return the fields a formula reads: its parameters without a default that are not given as options."""
    return tuple(
        name
        for name, parameter in inspect.signature(formula).parameters.items()
        if name not in options and parameter.default is inspect.Parameter.empty
    )


def only_term(stage: str, loss: AnyLoss | tuple[LossTerm, ...], options: Mapping[str, Any]) -> LossTerm:
    """Return the loss of an update that accepts a single loss.

    Raises:
        GraphError: there are several losses.
    """
    terms = loss_terms({"loss": loss, **options}, 0)
    if len(terms) != 1:
        raise GraphError(f"{stage} got {len(terms)} losses", why="it minimises one loss at a time")
    return terms[0]


def _check_loss(stage: str, term: LossTerm) -> None:
    loss = term.loss
    if isinstance(loss, LossSection):
        for beside in (*term.options, *(["name"] if term.name else [])):
            said = f"{stage} gets {beside!r} in addition to a loss from the recipe"
            raise GraphError(
                said, why="the recipe's loss has its own options and name", fix="set it in the recipe"
            )
        return
    if not isinstance(loss, FunctionType):
        raise GraphError(
            f"the loss of {stage} is {loss!r:.60}",
            why="a loss is a function of log probabilities, advantages and other fields",
            fix="pass a function, or config.loss for the recipe's loss",
        )
    if "<" in loss.__qualname__:
        raise GraphError(
            f"the loss of {stage} is {loss.__qualname__} of {loss.__module__}",
            why="ranks and replays import a loss by its name, and a nested function cannot be imported",
            fix="define it at module level; pass variables of its scope as options: loss=f, clip=0.2",
        )
