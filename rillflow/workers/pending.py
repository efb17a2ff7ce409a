"""Pending: a result that exists as references; the controller passes it on without reading it.

stage ── results stay on their ranks ──> Pending ── Rows, Whole ──> the next stage's ranks
                                            └── read() ──> the controller, only if necessary
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rillflow.errors import ClusterError, RillflowError
from rillflow.graph.handle import Handle
from rillflow.workers import program
from rillflow.workers.backend import Backend, Place
from rillflow.workers.values import Facts, Held, Lie, Names, Own, RemoteValue, Rows, Whole, assembled
from rillflow.workers.waits import Awaited, answers

MANY = 16
"""Number of parts above which one rank gathers the facts for all others."""


class Pending(Handle):
    """One stage's result.

    Args:
        stage: name of the stage, in errors.
        given: shapes or types of its arguments, as far as the controller knows them.
        places: ranks that compute it; those whose results are taken come first.
        references: results that are taken, in order.
        others: results that are not taken, watched for errors.
        is_partial: whether results are partial sums.
        sources: pendings among its arguments, to report who waits for whom.
        backend: the backend that runs the stage.
        lie: layout of its rows over the references; None if it has none.
    """

    def __init__(
        self,
        stage: str,
        *,
        given: str,
        places: Sequence[Place],
        references: Sequence[RemoteValue],
        others: Sequence[RemoteValue],
        is_partial: bool,
        sources: Sequence[Pending],
        backend: Backend,
        lie: Lie | None = None,
    ) -> None:
        super().__init__(stage)
        self.lie = lie
        """Layout of its rows over the ranks that hold them; None if unknown or if it has no rows."""
        self.token = object()
        """Identity of the result in a Lie."""
        self._held: Held | None = None
        self.places = tuple(places)
        self._given = given
        self._references = tuple(references)
        self._others = tuple(others)
        self._is_partial = is_partial
        self._sources = tuple(sources)
        self._backend = backend
        self.after = tuple(dict.fromkeys(each.stage for each in sources))
        """Stages whose results are among its arguments."""
        self._since = time.monotonic()
        self._facts: list[Facts] = []
        self.parts: Sequence[Pending] = ()
        """The same result in consecutive parts, if it was produced in parts."""
        self.worked: Sequence[Facts] = ()
        """Work of ranks for this result before it was requested."""

    @property
    def holders(self) -> tuple[Place, ...]:
        """Ranks whose results are taken."""
        return self.places[: len(self._references)]

    @property
    def held(self) -> Held:
        """References to its parts."""
        if self._held is None:
            self._held = Held(table=self._backend.table(self._references))
        return self._held

    def counted(self, place: Place) -> Held:
        """Return the references to its parts; ``place`` gathers their facts if there are many parts."""
        if self.held.facts is None and len(self._references) > MANY:
            facts = self._backend.submit(place, program.gather_facts, self.held)[0]
            packed = self._backend.pack(facts, f"the row counts of {self.stage}")
            self._held = Held(table=self.held.table, facts=packed)
        return self.held

    def own(self, index: int, fields: Names = None) -> Own:
        """Return the description of one rank's part, used without moving rows."""
        return Own(value=self._references[index].value, fields=fields)

    def rows(
        self,
        index: int,
        count: int,
        at: Place,
        unit: int = 1,
        by: Pending | None = None,
        fields: Names = None,
    ) -> Rows:
        """Return the description of one rank's rows; see ``values.Rows``. ``at`` is a requesting rank."""
        weighed = None if by is None else by.counted(at)
        held = self.counted(at)
        return Rows(held=held, index=index, count=count, unit=unit, by=weighed, fields=fields)

    def whole(self, fields: Names = None) -> Whole:
        """Return the description of the whole result."""
        return Whole(held=self.held, is_partial=self._is_partial, fields=fields)

    @property
    def is_ready(self) -> bool:
        """Whether every rank has finished."""
        return all(self._backend.is_ready(each.value) for each in (*self._references, *self._others))

    @property
    def has_failed(self) -> bool:
        """Whether every rank has finished, and at least one with an error."""
        try:
            if self.is_ready:
                self.wait(1.0)
        except RillflowError:
            return True
        return False

    def read(self, deadline_s: float = 3600.0) -> Any:
        """Bring the value to the controller.

        Raises:
            ClusterError: a rank died, or did not finish in time; the message reports who waits for whom, for
                what and since when.
            RillflowError: an error that the role raised.
        """
        self.wait(deadline_s)
        made = self._awaited([each.value for each in self._references])
        try:
            parts = answers(made, self._backend, deadline_s)
        except TimeoutError:
            raise self._silent(deadline_s) from None
        return assembled(parts, is_partial=self._is_partial)

    def facts(self, deadline_s: float = 3600.0) -> list[Facts]:
        """Wait for all ranks, and return the facts of every taken result; see ``read`` for errors."""
        self.wait(deadline_s)
        return self._facts[: len(self._references)]

    @property
    def beside(self) -> list[Facts]:
        """Facts of the results that are not taken, once all ranks have finished."""
        return self._facts[len(self._references) :]

    def wait(self, deadline_s: float = 3600.0) -> None:
        """Wait until every rank has finished; see ``wait_for``.

        Raises:
            ClusterError, RillflowError: see ``read``.
        """
        wait_for([self], deadline_s)

    def _before(self, known: dict[int, Pending]) -> dict[int, Pending]:
        """Add this stage and its sources to the stages not known to be ready, sources first."""
        if not self._facts and id(self) not in known:
            for source in self._sources:
                source._before(known)
            known[id(self)] = self
        return known

    def _awaited(self, made: Sequence[Any]) -> list[Awaited]:
        return [
            Awaited(doing=self.stage, place=place, reference=reference)
            for place, reference in zip(self.places, made, strict=False)
        ]

    def _silent(self, deadline_s: float) -> ClusterError:
        late = self
        while waited := [source for source in late._sources if not source.is_ready]:
            late = waited[0]
        ranks = [
            str(place)
            for place, each in zip(late.places, (*late._references, *late._others), strict=True)
            if not self._backend.is_ready(each.value)
        ]
        told = f"; {self.stage} waits for it" if late is not self else ""
        return ClusterError(
            f"{late.stage} has not answered on {', '.join(ranks)}{told}",
            why=f"it was called {time.monotonic() - late._since:.1f} s ago with {late._given or 'no batch'}; "
            f"the deadline is {deadline_s:g} s",
            fix="check that rank's output and load, or raise placement.deadline_s",
        )


def joined(
    stage: str, parts: Sequence[Pending], *, is_partial: bool = False, worked: Sequence[Facts] = ()
) -> Pending:
    """Join several results, by concatenation or by adding partial sums; for ``worked`` see Pending."""
    taken = [place for each in parts for place in each.places[: len(each._references)]]
    watched = [place for each in parts for place in each.places[len(each._references) :]]
    made = Pending(
        stage,
        given=parts[0]._given,
        places=[*taken, *watched],
        references=[made for each in parts for made in each._references],
        others=[made for each in parts for made in each._others],
        is_partial=is_partial,
        sources=[source for each in parts for source in each._sources],
        backend=parts[0]._backend,
        lie=None if is_partial else _laid([each.lie for each in parts]),
    )
    made.parts, made.worked = parts, worked
    return made


def _laid(lies: Sequence[Lie | None]) -> Lie | None:
    """Return the layout of concatenated rows."""
    known = [each for each in lies if each is not None]
    if len(known) < len(lies):
        return None
    rows, cut = tuple(each.rows for each in known), tuple(each.cut for each in known)
    return Lie(rows=rows, cut=cut, is_even=False, is_whole=all(each.is_whole for each in known))


def wait_for_any(stages: Sequence[Pending], deadline_s: float) -> None:
    """Wait until one more rank of several stages finishes; return at once if all have finished.

    Raises:
        ClusterError: none finishes by the deadline; the message reports who waits for whom, for what and
            since when.
    """
    made = {each.value for stage in stages for each in (*stage._references, *stage._others)}
    late = [each for each in made if not stages[0]._backend.is_ready(each)]
    if late and not stages[0]._backend.wait_for_any(late, deadline_s):
        silent = (stage for stage in stages if not stage.is_ready)
        raise min(silent, key=lambda stage: stage._since)._silent(deadline_s)


def wait_for(stages: Sequence[Pending], deadline_s: float) -> None:
    """Wait until every rank of some stages, and of the stages they depend on, has finished.

    All of them are watched: the first error of any ends the wait at once, even while others still run.

    Args:
        stages: stages to wait for.
        deadline_s: longest time without any finished result.

    Raises:
        ClusterError, RillflowError: see ``Pending.read``.
    """
    known: dict[int, Pending] = {}
    for stage in stages:
        stage._before(known)
    awaited = [
        (stage, each)
        for stage in known.values()
        for each in stage._awaited([made.facts for made in (*stage._references, *stage._others)])
    ]
    if not awaited:
        return
    backend, ready = awaited[0][0]._backend, 0
    while True:
        try:
            found = answers([each for _, each in awaited], backend, deadline_s)
            break
        except TimeoutError:
            before, ready = ready, sum(backend.is_ready(each.reference) for _, each in awaited)
            late = [stage for stage in stages if not stage.is_ready]
            if late and ready == before:
                raise late[0]._silent(deadline_s) from None
    for (stage, _), facts in zip(awaited, found, strict=True):
        stage._facts.append(facts)
        stage._sources = ()  # already ready; releases their results
