"""Pending: a result that exists as references; the controller passes it on without reading it.

stage ── results stay on their ranks ──> Pending ── Rows, Whole ──> the next stage's ranks
                                            └── read() ──> the controller, only if necessary

A wait covers several results together. If several ranks fail, it reports the cause (``workers.awaited``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from rillflow.errors import ClusterError, RillflowError
from rillflow.graph.handle import Handle
from rillflow.workers import program
from rillflow.workers.arguments import Facts, Held, Lie, Names, Own, RemoteValue, Rows, Whole, assembled
from rillflow.workers.awaited import Awaited, answers
from rillflow.workers.backend import Backend, Place, RankCall

MANY = 16
"""Number of parts above which one rank gathers the facts for all others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Submission:
    """The work of ranks on one stage."""

    backend: Backend
    """Backend that runs it."""
    places: Sequence[Place]
    """Ranks that compute it; the ranks whose results are taken come first."""
    references: Sequence[RemoteValue]
    """Results that are taken, in order."""
    others: Sequence[RemoteValue] = ()
    """Results that are not taken, watched for errors."""
    sources: list[Pending] = field(default_factory=list)
    """Results among its arguments, to report who waits for whom; empty once the work has ended."""
    after: Sequence[str] = ()
    """Stages whose results are among its arguments."""
    about: str = ""
    """Shapes or types of its arguments, as far as the controller knows them."""
    is_partial: bool = False
    """Whether results are partial sums."""
    lie: Lie | None = None
    """Layout of its rows over the references; None if it has none."""
    parts: Sequence[Pending] = ()
    """The same result in consecutive parts, if it was produced in parts."""
    worked: Sequence[Facts] = ()
    """Work of ranks for this result before it was requested."""
    since: float = field(default_factory=time.monotonic)
    """Time of the submission on the monotonic clock."""

    @property
    def every(self) -> list[RemoteValue]:
        """All results, in the order of ``places``."""
        return [*self.references, *self.others]


def stages_of(sources: Sequence[Pending]) -> list[str]:
    """Return the stages of some results, each once."""
    return list(dict.fromkeys(each.stage for each in sources))


class Pending(Handle):
    """One stage's result.

    Args:
        stage: name of the stage, in errors.
        work: the submitted work, or a function that submits it when someone first needs the result.
    """

    def __init__(self, stage: str, work: Submission | Callable[[], Submission]) -> None:
        super().__init__(stage)
        self.token = object()
        """Identity of the result in a Lie."""
        self._work = work
        self._held: Held | None = None
        self._facts: list[Facts] = []

    @property
    def work(self) -> Submission:
        """The work of ranks on the stage; submitted now if nobody needed it before."""
        if not isinstance(self._work, Submission):
            self._work = self._work()
        return self._work

    @property
    def lie(self) -> Lie | None:
        """Layout of its rows over the ranks that hold them; None if unknown or if it has no rows."""
        return self.work.lie

    @property
    def places(self) -> Sequence[Place]:
        """Ranks that compute it; the ranks whose results are taken come first."""
        return self.work.places

    @property
    def holders(self) -> Sequence[Place]:
        """Ranks whose results are taken."""
        return self.places[: len(self.work.references)]

    @property
    def held(self) -> Held:
        """References to its parts."""
        if self._held is None:
            self._held = Held(table=self.work.backend.table(tuple(self.work.references)))
        return self._held

    def counted(self, place: Place) -> Held:
        """Return the references to its parts; ``place`` gathers their facts if there are many parts."""
        if self.held.facts is None and len(self.work.references) > MANY:
            facts = self.work.backend.submit(place, program.gather_facts, self.held)[0]
            packed = self.work.backend.pack(facts, f"the row counts of {self.stage}")
            self._held = Held(table=self.held.table, facts=packed)
        return self.held

    def own(self, index: int, fields: Names = None) -> Own:
        """Return the description of one rank's part, used without moving rows."""
        return Own(value=self.work.references[index].value, fields=fields)

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
        return Whole(held=self.held, is_partial=self.work.is_partial, fields=fields)

    @property
    def unread(self) -> list[Awaited]:
        """The facts of every rank, if nobody has waited for them."""
        return [] if self._facts else self._awaited([made.facts for made in self.work.every])

    @property
    def is_ready(self) -> bool:
        """Whether every rank has finished."""
        return all(self.work.backend.is_ready(each.value) for each in self.work.every)

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
        made = self._awaited([each.value for each in self.work.references])
        try:
            parts = answers(made, self.work.backend, deadline_s)
        except TimeoutError:
            raise self._silent(deadline_s) from None
        return assembled(parts, is_partial=self.work.is_partial)

    def facts(self, deadline_s: float = 3600.0) -> list[Facts]:
        """Wait for all ranks, and return the facts of every taken result; see ``read`` for errors."""
        self.wait(deadline_s)
        return self._facts[: len(self.work.references)]

    @property
    def beside(self) -> list[Facts]:
        """Facts of the results that are not taken, once all ranks have finished."""
        return self._facts[len(self.work.references) :]

    def wait(self, deadline_s: float = 3600.0) -> None:
        """Wait until every rank has finished; see ``wait_for``.

        Raises:
            ClusterError, RillflowError: see ``read``.
        """
        wait_for([self], deadline_s)

    def _before(self, known: dict[int, Pending]) -> dict[int, Pending]:
        """Add this stage and its sources to the stages not known to be ready, sources first."""
        if not self._facts and id(self) not in known:
            for source in self.work.sources:
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
        while waited := [source for source in late.work.sources if not source.is_ready]:
            late = waited[0]
        told = f"; {self.stage} waits for it" if late is not self else ""
        work = late.work
        every = zip(work.places, work.every, strict=True)
        ranks = [str(place) for place, each in every if not work.backend.is_ready(each.value)]
        return ClusterError(
            f"{late.stage} has not answered on {', '.join(ranks)}{told}",
            why=f"it was called {time.monotonic() - work.since:.1f} s ago with {work.about or 'no batch'}; "
            f"the deadline is {deadline_s:g} s",
            fix="check that rank's output and load, or raise placement.deadline_s",
        )


def submitted(
    stage: str,
    backend: Backend,
    calls: Sequence[tuple[Place, RankCall, Sequence[Any]]],
    *,
    taken: Sequence[int],
    given: Sequence[Any],
    after: Sequence[str] | None = None,
    **described: Any,
) -> Pending:
    """Submit one call to each of several ranks, and return their result.

    Args:
        stage: name of the stage.
        backend: the backend that runs the calls.
        calls: rank, function and arguments of every call; the function returns a value and its Facts.
        taken: indices of the calls whose results are taken, in order.
        given: arguments and options as the caller gave them, among them results of other stages.
        after: stages that the result follows, if not those of all sources.
        described: further fields of ``Submission``.
    """
    made = []
    for place, function, arguments in calls:
        value, facts = backend.submit(place, function, *arguments, results=2)
        made.append((place, RemoteValue(value=value, facts=facts)))
    return pending_of(stage, backend, made, taken=taken, given=given, after=after, **described)


def pending_of(
    stage: str,
    backend: Backend,
    made: Sequence[tuple[Place, RemoteValue]],
    *,
    taken: Sequence[int],
    given: Sequence[Any],
    after: Sequence[str] | None = None,
    **described: Any,
) -> Pending:
    """Return the result of submitted calls: every rank, and what it makes; see ``submitted``."""
    others = sorted({*range(len(made))} - {*taken})
    sources = [each for each in given if isinstance(each, Pending)]
    work = Submission(
        backend=backend,
        places=[made[index][0] for index in (*taken, *others)],
        references=[made[index][1] for index in taken],
        others=[made[index][1] for index in others],
        sources=sources,
        after=stages_of(sources) if after is None else after,
        **described,
    )
    made_result = Pending(stage, work)
    backend.recent.append(ref(made_result))
    return made_result


def pack_options(options: Mapping[str, Any], stage: str, backend: Backend) -> Any:
    """Serialise the options of a call once for all ranks; results among them arrive whole."""
    named = {key: each.whole() if isinstance(each, Pending) else each for key, each in options.items()}
    return backend.pack(named, f"option of {stage}:") if named else named


def joined(
    stage: str, parts: Sequence[Pending], *, is_partial: bool = False, worked: Sequence[Facts] = ()
) -> Pending:
    """Join several results, by concatenation or by adding partial sums; for ``worked`` see Submission."""
    taken = [place for each in parts for place in each.holders]
    watched = [place for each in parts for place in each.places[len(each.holders) :]]
    work = Submission(
        backend=parts[0].work.backend,
        places=[*taken, *watched],
        references=[made for each in parts for made in each.work.references],
        others=[made for each in parts for made in each.work.others],
        sources=[source for each in parts for source in each.work.sources],
        after=list(dict.fromkeys(stage for each in parts for stage in each.work.after)),
        about=parts[0].work.about,
        is_partial=is_partial,
        lie=None if is_partial else _laid([each.lie for each in parts]),
        parts=parts,
        worked=worked,
        since=parts[0].work.since,
    )
    return Pending(stage, work)


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
    made, backend = {each.value for stage in stages for each in stage.work.every}, stages[0].work.backend
    late = [each for each in made if not backend.is_ready(each)]
    if late and not backend.wait_for_any(late, deadline_s):
        silent = (stage for stage in stages if not stage.is_ready)
        raise min(silent, key=lambda stage: stage.work.since)._silent(deadline_s)


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
        for each in stage._awaited([made.facts for made in stage.work.every])
    ]
    if not awaited:
        return
    backend, ready = awaited[0][0].work.backend, 0
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
        stage.work.sources.clear()  # already ready; releases their results
