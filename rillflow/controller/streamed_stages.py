"""Streamed stages: stages of a step that run group by group, before the step is formed.

    rows of complete groups ─> worker ─ begin ─> its ranks ─ hear ─> groups that are done, and their results
                                 ^                   │ lost
                                 └── forget, while ──┴─> ``Recovery``: new processes

A stage is streamed if the step calls it once, with the sampled rows alone; if it returns one row for each of
them; and if its weights do not change during the phase and its ranks train nothing. A stage on the ranks of a
trained role would wait behind updates, so it runs when the step asks for it.

Ranks that sample and score in turn (``SharedRanks``) compute a stage while no row runs on them. The ranks of
one copy of the model are a worker: the endpoint has no collectives with others (``Endpoint.alone``).

A stage has one worker for each rank of a reward function, and for each world of a model's ranks: a replica,
where replicas are worlds of their own. A world that is lost is replaced while the others work on; its groups
are computed again.

consumes      rows of groups that the table leases to the worker
waits for     nothing: the source waits for ``events``
unblocked by  the ranks of the stage
produces      results of the stage for whole groups, in any order
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rillflow.controller.executor import GroupExecutor, GroupPart, arguments_of, rows_of
from rillflow.controller.source import add_work, collected_each
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch
from rillflow.roles.reward import Reward, Scored
from rillflow.roles.sampler import GroupId
from rillflow.workers.arguments import Facts, Lie
from rillflow.workers.backend import Place
from rillflow.workers.endpoint import Endpoint
from rillflow.workers.group import Group
from rillflow.workers.pending import Pending
from rillflow.workers.restarts import Recovery, ReplacementStep, RestartBudget

WAIT_S = 0.05
"""Longest time, in seconds, that a call of a reward waits for a group to be scored."""
SHARED_WAIT_S = 0.01
"""The same on a rank that other stages share, while it runs no rows."""


@dataclass(frozen=True, kw_only=True)
class SharedRanks:
    """Ranks that sample and score in turn."""

    pool: str
    """The sampler's pool."""
    copies: Mapping[str, int]
    """Ranks that hold one copy of a role's model, by role; 1 without a model. Other roles need all ranks."""
    busy: set[Place]
    """Ranks that run rows; the source changes it."""

    def are_free(self, places: Collection[Place]) -> bool:
        """Return whether none of these ranks runs rows."""
        return self.busy.isdisjoint(places)


class StageWorker(Protocol):
    """Ranks that compute a streamed stage."""

    stage: str
    """Name of the stage, ``role.endpoint``."""
    worked: list[Facts]
    """Times when its ranks worked since the last step was formed."""
    recovery: Recovery
    """Its ranks, and their replacement."""

    @property
    def name(self) -> str:
        """Name of the worker in the table."""

    @property
    def room(self) -> int:
        """Number of groups that it can take now."""

    @property
    def events(self) -> Sequence[Sequence[Pending]]:
        """Lists of pending results; a list is due when all of it is ready."""

    def begin(self, rows: Mapping[GroupId, Pending]) -> None:
        """Begin some groups, each with the result that holds its rows."""

    def give_up(self, group: GroupId) -> None:
        """Drop a group that has begun."""

    def forget(self) -> None:
        """Drop all groups: its ranks are lost."""

    def ask(self) -> None:
        """Submit the calls that its ranks may run now."""

    def hear(self, deadline_s: float) -> Mapping[GroupId, Pending]:
        """Return the results of the groups that are done since the last call.

        Raises:
            RankDied: one of its ranks died.
        """


@dataclass(kw_only=True, eq=False)
class EndpointWorker:
    """Ranks of a model, which compute an endpoint for the groups that are ready, one call at a time."""

    stage: str
    group: Group
    executor: GroupExecutor
    endpoint: str
    options: Mapping[str, Any]
    most: int
    """Largest number of groups of a call."""
    recovery: Recovery
    """See StageWorker."""
    shared: SharedRanks | None = None
    """The sampler's ranks, if it is one copy of a model on them; None: it has ranks of its own."""
    worked: list[Facts] = field(default_factory=list)
    _groups: list[GroupId] = field(default_factory=list)
    _begun: Pending | None = None

    @property
    def name(self) -> str:
        """See StageWorker."""
        return f"{self.group.role} {self.group.places[0].rank}"

    @property
    def room(self) -> int:
        """See StageWorker."""
        is_free = self.shared is None or self.shared.are_free(self.group.places)
        return self.most if self._begun is None and self.recovery.is_live and is_free else 0

    @property
    def events(self) -> Sequence[Sequence[Pending]]:
        """See StageWorker."""
        return [] if self._begun is None else [[self._begun]]

    def begin(self, rows: Mapping[GroupId, Pending]) -> None:
        """See StageWorker."""
        part = GroupPart(place=self.group.places[0], rows=rows)
        gathered = self.executor.gathered(f"rows for {self.stage}", [part], Lie.new(is_whole=True))
        if self.shared is not None and len(self.group.places) > 1:
            every, (taken,) = self.executor.groups[self.group.role].places, self.group.takes(self.endpoint)
            places = [taken, *(each for each in self.group.places if each != taken)]
            ranks = [every.index(each) for each in places]
            how = (score_alone, self.endpoint, dict(self.options), gathered)
            self._begun = self.executor.on_ranks(self.group.role, ranks, *how)
        else:
            self._begun = self.group.call(self.endpoint, gathered, **self.options)
        self._groups = [*rows]

    def give_up(self, group: GroupId) -> None:
        """See StageWorker; the call goes on, and its result for the group is ignored."""
        self._groups.remove(group)

    def forget(self) -> None:
        """See StageWorker."""
        self._groups, self._begun = [], None

    def ask(self) -> None:
        """See StageWorker."""

    def hear(self, deadline_s: float) -> Mapping[GroupId, Pending]:
        """See StageWorker."""
        self.recovery.advance()
        begun = self._begun
        if begun is None or not begun.is_ready:
            return {}
        add_work(self.worked, [*begun.facts(deadline_s), *begun.beside])
        self._begun = None
        self.recovery.succeeded()
        return dict.fromkeys(self._groups, begun)


@dataclass(kw_only=True, eq=False)
class RewardWorker:
    """One rank of a reward, which scores each group in child processes: a slow group delays no other."""

    stage: str
    role: str
    rank: int
    executor: GroupExecutor
    reads: Sequence[str]
    """Fields of the rows that the reward reads."""
    wait_s: float
    """Longest time, in seconds, that a call waits; 0 if the rank serves other roles as well."""
    most: int
    """Largest number of groups at once."""
    window: int
    """Rows over which failures of the reward are judged."""
    recovery: Recovery
    """See StageWorker."""
    shared: SharedRanks | None = None
    """The sampler's ranks, if it has one of them."""
    worked: list[Facts] = field(default_factory=list)
    _queued: dict[GroupId, Pending] = field(default_factory=dict)
    _given_up: list[GroupId] = field(default_factory=list)
    _running: set[GroupId] = field(default_factory=set)
    _asked: Pending | None = None
    _collecting: dict[GroupId, Pending] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """See StageWorker."""
        return f"{self.role} {self.rank}"

    @property
    def room(self) -> int:
        """See StageWorker."""
        return max(0, self.most - len(self._running)) if self.recovery.is_live else 0

    @property
    def events(self) -> Sequence[Sequence[Pending]]:
        """See StageWorker."""
        asked = [] if self._asked is None else [self._asked]
        return [asked, [*self._collecting.values()][:1]]

    def begin(self, rows: Mapping[GroupId, Pending]) -> None:
        """See StageWorker."""
        self._queued |= rows
        self._running.update(rows)

    def give_up(self, group: GroupId) -> None:
        """See StageWorker; the process that scores the group is ended."""
        self._running.discard(group)
        if self._queued.pop(group, None) is None and self._collecting.pop(group, None) is None:
            self._given_up.append(group)

    def forget(self) -> None:
        """See StageWorker."""
        self._asked = None
        for kept in (self._queued, self._given_up, self._running, self._collecting):
            kept.clear()

    def ask(self) -> None:
        """See StageWorker."""
        if self._asked is not None or not (self._running or self._given_up) or not self.recovery.is_live:
            return
        rows = arguments_of(self._queued, self.reads) if self._queued else []
        place = self.executor.groups[self.role].places[self.rank]
        may_wait = self.shared is None or self.shared.are_free([place])
        how = (self._given_up, self.wait_s if may_wait else 0.0, self.window, *rows)
        self._queued, self._given_up = {}, []
        self._asked = self.executor.on_rank(self.role, self.rank, score_groups, *how)

    def hear(self, deadline_s: float) -> Mapping[GroupId, Pending]:
        """See StageWorker."""
        self.recovery.advance()
        asked = self._asked
        if asked is not None and asked.is_ready:
            made: Scored = asked.read(deadline_s)
            self._asked = None
            add_work(self.worked, asked.facts(deadline_s))
            self._collect(made.complete)
        done = {group: scores for group, scores in self._collecting.items() if scores.is_ready}
        for group, scores in done.items():  # they are stored, so that they outlive the rank
            scores.wait(deadline_s)
            del self._collecting[group]
            self._running.discard(group)
            self.recovery.succeeded()
        return done

    def _collect(self, groups: Sequence[GroupId]) -> None:
        """Have the scores of groups stored, except of groups that were given up meanwhile."""
        if groups:
            found = self.executor.deal(self.role, self.rank, len(groups), collected_each, groups)
            self._collecting |= dict(zip(groups, found, strict=True))
            for group in [each for each in self._given_up if each in groups]:
                self._given_up.remove(group)
                del self._collecting[group]


def score_alone(role: Any, endpoint: str, options: Mapping[str, Any], rows: Batch) -> Batch:
    """Have the ranks of one copy of a model compute an endpoint; see ``Parallel.copy_alone``."""
    with role.share.parallel.copy_alone():
        scored: Batch = getattr(role, endpoint)(rows, **options)
    return scored


def score_groups(
    reward: Reward, given_up: Sequence[GroupId], wait_s: float, window: int, *rows: Any
) -> Scored:
    """Have a reward score the rows of some groups; see ``Reward.advance`` and ``arguments_of``."""
    return reward.advance(rows_of(*rows) if rows else None, given_up, wait_s, window)


def streamed_stages(
    calls: Mapping[str, Sequence[tuple[Sequence[Any], Mapping[str, Any]]]],
    executor: GroupExecutor,
    *,
    changing: Collection[str],
    most: int,
    step_rows: int,
    restarts: int = 0,
    restart: Callable[[str], Callable[[Sequence[Place]], Iterator[ReplacementStep]] | None] = lambda _: None,
    shared: SharedRanks | None = None,
) -> list[StageWorker]:
    """Return the workers of the stages that run group by group.

    Args:
        calls: arguments and options of a step's calls, by stage, as the algorithm makes them.
        executor: has the groups of ranks.
        changing: roles that the phase trains or moves.
        most: largest number of groups in flight.
        step_rows: rows of a step.
        restarts: replacements of a rank in a row, without a result in between.
        restart: returns, for a pool, what replaces some of its ranks; None if they cannot be replaced.
        shared: the sampler's ranks, if they compute stages too.
    """
    budget, recoveries = RestartBudget(restarts), dict[tuple[Place, ...], Recovery]()
    busy = {executor.groups[role].places[0].pool for role in changing}
    found: list[StageWorker] = []

    def recovery(place: Place) -> Recovery:
        world = executor.backend.world_of(place)  # all workers on these ranks share it
        return recoveries.setdefault(world, Recovery(world, budget, restart(place.pool)))

    for stage, made in calls.items():
        role, _, name = stage.partition(".")
        if len(made) != 1 or role not in executor.groups or role in changing:
            continue
        (args, options), group = made[0], executor.serving(role, name)
        described, pool = group.endpoints.get(name), group.places[0].pool
        turns = shared if shared is not None and shared.pool == pool else None
        if described is None or pool in busy or not _fits(described, role, turns):
            continue
        if list(args) != ["policy.generate"] or None in options.values():
            continue
        if described.by_groups:
            found += _rewards(stage, group, executor, recovery, most, step_rows, turns)
            continue
        replicas = _replicas(group, executor, turns.copies[role] if turns else 0)
        found += [
            EndpointWorker(
                stage=stage,
                group=replica,
                executor=executor,
                endpoint=name,
                options=options,
                most=-(-most // len(replicas)),
                recovery=recovery(replica.places[0]),
                shared=turns,
            )
            for replica in replicas
        ]
    return found


def _fits(described: Endpoint, role: str, shared: SharedRanks | None) -> bool:
    """Return whether an endpoint computes fields of rows, and single ranks can do so if they have to."""
    return described.is_row_by_row and (shared is None or (described.alone and role in shared.copies))


def before_updates(
    calls: Mapping[str, Sequence[tuple[Sequence[Any], Mapping[str, Any]]]], executor: GroupExecutor
) -> dict[str, Sequence[tuple[Sequence[Any], Mapping[str, Any]]]]:
    """Return the calls of a step before the first stage that may change weights."""
    found = {}
    for stage, made in calls.items():
        role, _, name = stage.partition(".")
        described = executor.serving(role, name).endpoints.get(name) if role in executor.groups else None
        if described is not None and not described.writes:
            break
        found[stage] = made
    return found


def _rewards(
    stage: str,
    group: Group,
    executor: GroupExecutor,
    recovery: Callable[[Place], Recovery],
    most: int,
    step_rows: int,
    shared: SharedRanks | None,
) -> list[RewardWorker]:
    """Return a worker for each rank of a reward."""
    wait_s = 0.0 if shared is None else SHARED_WAIT_S
    pool = group.places[0].pool
    is_alone = all(each is group or each.places[0].pool != pool for each in executor.groups.values())
    return [
        RewardWorker(
            stage=stage,
            role=group.role,
            rank=rank,
            executor=executor,
            reads=group.endpoints[stage.partition(".")[2]].reads,
            wait_s=WAIT_S if is_alone else wait_s,
            most=most,
            window=-(-step_rows // len(group.places)),
            recovery=recovery(place),
            shared=shared,
        )
        for rank, place in enumerate(group.places)
    ]


def _replicas(group: Group, executor: GroupExecutor, size: int = 0) -> list[Group]:
    """Return a group for each world of a role's ranks, or each ``size`` ranks; ``dp`` is the first axis."""
    worlds = list(dict.fromkeys(executor.backend.world_of(place) for place in group.places))
    if size:
        worlds = [(*group.places[first : first + size],) for first in range(0, len(group.places), size)]
    if len(worlds) == 1:
        return [group]
    first, *others = group.mesh.axes
    sizes = {first.name: first.size // len(worlds), **{axis.name: axis.size for axis in others}}
    pool, backend = group.places[0].pool, executor.backend
    meshes = [Mesh.of(ranks=[place.rank for place in world], **sizes) for world in worlds]
    return [
        Group(group.role, group.endpoints, mesh=mesh, pool=pool, backend=backend, of=group.of)
        for mesh in meshes
    ]
