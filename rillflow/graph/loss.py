"""Loss: what a step asks an update to minimise.

    flow.policy.update(rollouts, advantages, loss=mine, clip=0.2, passes=config)          one loss over all
    flow.policy.update(over(rollouts, advantages, loss=mine), over(shown, loss=cross_entropy, weight=0.1),
                       passes=config)                                                     several in each step
        └─ laid_flat ─> the batches one after the other, loss = (LossTerm, LossTerm)

A loss is a top-level function whose parameters without a default are fields of the batches, or what the model
says of each token; or a recipe's section that stands for a shipped one.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

from rillflow.config.section import Section
from rillflow.errors import GraphError


class LossSection(Section):
    """A recipe's section that stands for a shipped loss."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """The fields that the loss is computed from."""

    @property
    def rows_together(self) -> int:
        """So many neighbouring rows are one unit, which no cut parts."""
        return 1


AnyLoss = Callable[..., Any] | LossSection
"""A function (its parameters are its own business), or a section that stands for a shipped one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossTerm:
    """One loss of an update."""

    loss: AnyLoss
    """What is minimised."""
    count: int
    """How many of the update's batches it is over."""
    batches: tuple[Any, ...] = ()
    """These, as a step says them; they travel beside it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The function's arguments that are no fields."""
    weight: float = 1.0
    """What its gradient counts beside the others'."""
    name: str = ""
    """The area of its metrics; empty for the role's."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields of the batches, and what the model says."""
        if isinstance(self.loss, LossSection):
            return self.loss.reads
        return field_parameters(self.loss, self.options)


def over(*batches: Any, loss: AnyLoss, weight: float = 1.0, name: str = "", **options: Any) -> LossTerm:
    """One of several losses of an update.

    Args:
        batches: rows that are joined.
        loss: a function, or the section of a recipe.
        weight: what its gradient counts beside the others'; metrics are those of the loss itself.
        name: the area of its metrics; the role's if left out.
        options: the function's arguments that are no fields.
    """
    return LossTerm(loss=loss, count=len(batches), batches=batches, options=options, weight=weight, name=name)


def laid_flat(
    stage: str, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a stage with the batches of every ``over`` laid side by side.

    Raises:
        GraphError: a loss has no name that ranks find; some batches are in no ``over``.
    """
    terms = [each for each in args if isinstance(each, LossTerm)]
    if terms:
        if len(terms) != len(args) or "loss" in options:
            raise GraphError(
                f"{stage} is given batches or a loss outside of over(...)",
                why="each loss has its own rows, and what is outside of over(...) has none",
                fix="put every batch into an over(..., loss=...)",
            )
        args = [batch for each in terms for batch in each.batches]
        options = {**options, "loss": tuple(replace(each, batches=()) for each in terms)}
    for term in loss_terms(options, len(args)):
        _check_loss(stage, term)
    return args, options


def loss_terms(options: Mapping[str, Any], batches: int) -> tuple[LossTerm, ...]:
    """The losses among the options of an update, none if there is none."""
    loss = options.get("loss")
    if loss is None or isinstance(loss, tuple):
        return loss or ()
    rest = {name: value for name, value in options.items() if name not in ("loss", "passes", "name")}
    return (LossTerm(loss=loss, count=batches, options=rest, name=options.get("name", "")),)


def field_parameters(formula: Callable[..., Any], options: Collection[str]) -> tuple[str, ...]:
    """The fields a formula reads: its parameters without a default that are not given as options."""
    return tuple(
        name
        for name, parameter in inspect.signature(formula).parameters.items()
        if name not in options and parameter.default is inspect.Parameter.empty
    )


def only_term(stage: str, loss: AnyLoss | tuple[LossTerm, ...], options: Mapping[str, Any]) -> LossTerm:
    """The one loss of an update that takes no more.

    Raises:
        GraphError: there are several.
    """
    terms = loss_terms({"loss": loss, **options}, 0)
    if len(terms) != 1:
        raise GraphError(f"{stage} was given {len(terms)} losses", why="it minimises one at a time")
    return terms[0]


def _check_loss(stage: str, term: LossTerm) -> None:
    loss = term.loss
    if isinstance(loss, LossSection):
        for beside in (*term.options, *(["name"] if term.name else [])):
            said = f"the loss of {stage} is a recipe's section, and {beside!r} is given beside it"
            raise GraphError(said, why="it has its own already", fix="set it in the recipe")
        return
    if not isinstance(loss, FunctionType):
        raise GraphError(
            f"the loss of {stage} is {loss!r:.60}",
            why="a loss is a function of log probabilities, advantages and other fields",
            fix="name a function, or config.loss for the one that the recipe describes",
        )
    if "<" in loss.__qualname__:
        raise GraphError(
            f"the loss of {stage} is {loss.__qualname__} of {loss.__module__}",
            why="ranks and replays find a loss by its name, and one inside another function has none",
            fix="def it at the top of a file; what it takes from around it is an option: loss=f, clip=0.2",
        )
