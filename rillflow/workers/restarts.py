"""Restarts: replace lost ranks while others work on, until the budget of replacements is used up.

lost ─> spend ─┬─ left: steps of a replacement ─ advance, advance, ... ─> live ─ a result ─> succeeded
               └─ used up: the first cause since the last success is raised
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from rillflow.errors import ClusterError
from rillflow.workers.backend import Place, RankDied


class RestartBudget:
    """Counts the losses of every rank since it last succeeded.

    Args:
        most: replacements of one rank without a success in between; 0: none.

    Example:
        budget = RestartBudget(3)
        budget.spend(error)                      # raises when the rank is lost for the fourth time
        replacement = backend.replace([error.place])
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._causes: dict[Place, list[RankDied]] = {}

    def spend(self, cause: RankDied) -> None:
        """Count the loss of a rank that is to be replaced.

        Raises:
            RankDied: the first cause since the rank's last success, with the number of losses as a note; the
                budget is used up.
        """
        assert cause.place is not None, "a wait for a rank has named it"
        causes = self._causes.setdefault(cause.place, [])
        causes.append(cause)
        if len(causes) > self._most:
            causes[0].add_note(f"{cause.place} was lost {len(causes)} times; the last: {cause.what}")
            raise causes[0]

    def succeeded(self, place: Place) -> None:
        """Forget the losses of a rank whose new process has finished a call."""
        self._causes.pop(place, None)


class ReplacementStep(Protocol):
    """A step of a replacement, which is begun."""

    @property
    def is_ready(self) -> bool:
        """Whether it has ended, or failed."""


class Recovery:
    """The replacement of the ranks of one world, whenever one of them is lost.

    Args:
        places: the ranks.
        budget: counts their losses.
        replace: replaces these ranks, and makes their roles, step by step; None if they cannot be replaced.
    """

    def __init__(
        self,
        places: Sequence[Place],
        budget: RestartBudget,
        replace: Callable[[Sequence[Place]], Iterator[ReplacementStep]] | None,
    ) -> None:
        self.places = tuple(places)
        """The ranks."""
        self._budget, self._replace = budget, replace
        self.failed: RankDied | None = None
        """Why the ranks could not be replaced; None if they can be."""
        self._steps: Iterator[ReplacementStep] | None = None
        self._awaited: ReplacementStep | None = None

    @property
    def is_live(self) -> bool:
        """Whether the ranks take calls: they are not being replaced, and their replacement has not failed."""
        return not (self.is_replacing or self.failed)

    @property
    def is_replacing(self) -> bool:
        """Whether the ranks are being replaced."""
        return self._steps is not None

    def lose(self, died: RankDied) -> None:
        """Begin the replacement of all ranks of the world.

        Raises:
            RankDied: they cannot be replaced, or were lost too often; then it is the first loss in a row.
        """
        if self._replace is None:
            raise died
        self._budget.spend(died)
        self._steps = self._replace(self.places)
        self._awaited = next(self._steps)

    def advance(self) -> None:
        """Go on with the replacement as far as it is ready; ``failed`` tells if it cannot.

        Raises:
            RankDied: a new process has died.
        """
        try:
            while self._steps is not None and self._awaited is not None and self._awaited.is_ready:
                self._awaited = next(self._steps, None)
        except RankDied:
            raise
        except ClusterError as error:
            what = f"{self.places[0]} could not be replaced: {error.what}"
            self.failed = RankDied(what, error.why, error.fix, place=self.places[0])
            self._awaited = None
        if self._awaited is None:
            self._steps = None

    def succeeded(self) -> None:
        """Forget earlier losses: the ranks have finished a call."""
        for place in self.places:
            self._budget.succeeded(place)
