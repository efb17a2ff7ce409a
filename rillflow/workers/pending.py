"""Pending: a result that exists as references; the controller passes it on without reading it.

stage ── ranks' results stay where they are ──> Pending ── Rows, Whole ──> the next stage's ranks
                                                   └── read() ──> the controller, where it must
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rillflow.cluster.backend import Backend
from rillflow.cluster.pool import Place
from rillflow.errors import ClusterError
from rillflow.workers.values import Facts, Reference, Rows, Whole, assembled


class Pending:
    """One stage's result.

    Args:
        stage: what makes it, as errors call it.
        given: the shapes or types of its arguments, as far as the controller knows them.
        places: the ranks it is made on.
        references: of the ranks whose results are taken, in order.
        others: of the ranks whose results nobody needs, watched for errors.
        is_partial: whether results are shares.
        sources: pendings among its arguments, to say who waits for whom.
        backend: where it is made.
    """

    def __init__(
        self,
        stage: str,
        *,
        given: str,
        places: Sequence[Place],
        references: Sequence[Reference],
        others: Sequence[Reference],
        is_partial: bool,
        sources: Sequence[Pending],
        backend: Backend,
    ) -> None:
        self.stage = stage
        self.places = tuple(places)
        self._given = given
        self._references = tuple(references)
        self._others = tuple(others)
        self._is_partial = is_partial
        self._sources = tuple(sources)
        self._backend = backend
        self._since = time.monotonic()
        self._facts: list[Facts] = []

    def rows(self, index: int, count: int, unit: int = 1, by: Pending | None = None) -> Rows:
        """The description of one rank's rows; see ``values.Rows``."""
        weighed = None if by is None else by._references
        return Rows(references=self._references, index=index, count=count, unit=unit, by=weighed)

    def whole(self) -> Whole:
        """The description of all of it."""
        return Whole(references=self._references, is_partial=self._is_partial)

    @property
    def is_ready(self) -> bool:
        """Whether every rank has answered."""
        return all(self._backend.is_ready(each.value) for each in (*self._references, *self._others))

    def read(self, deadline_s: float = 3600.0) -> Any:
        """Bring the value to the controller.

        Raises:
            ClusterError: a rank died, or did not answer in time; it says who waits for whom, for what,
                since when.
            RillflowError: what the role raised.
        """
        self.wait(deadline_s)
        parts = self._backend.read_all([each.value for each in self._references], deadline_s)
        return assembled(parts, is_partial=self._is_partial)

    def facts(self, deadline_s: float = 3600.0) -> list[Facts]:
        """What is known of every rank's result, once all have answered; see ``read`` for errors."""
        self.wait(deadline_s)
        return self._facts[: len(self._references)]

    def wait(self, deadline_s: float = 3600.0) -> None:
        """Wait until every rank has answered; the first error of any rank is raised.

        Raises:
            ClusterError, RillflowError: see ``read``.
        """
        if self._facts:
            return
        try:
            everyone = [each.facts for each in (*self._references, *self._others)]
            self._facts = self._backend.read_all(everyone, deadline_s)
        except TimeoutError:
            raise self._silent(deadline_s) from None

    def _silent(self, deadline_s: float) -> ClusterError:
        late = self
        while waited := next((source for source in late._sources if not source.is_ready), None):
            late = waited
        ranks = [
            str(place)
            for place, each in zip(late.places, (*late._references, *late._others), strict=False)
            if not self._backend.is_ready(each.value)
        ]
        told = f"; {self.stage} waits for it" if late is not self else ""
        return ClusterError(
            f"{late.stage} has not answered on {', '.join(ranks)}{told}",
            why=f"asked {time.monotonic() - late._since:.1f} s ago with {late._given or 'no batch'}; "
            f"the deadline is {deadline_s:g} s",
            fix="look at that rank's output and load, or raise placement.deadline_s",
        )
