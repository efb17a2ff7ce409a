"""Gathering: the last rows of a step run on few replicas; the other ranks score (RLHFuse: 2409.13221).

                 fewer than ``rows`` unfinished
    all replicas ──────────────┬─ m replicas: the last rows ──────────────── score too ─┐
    generate                   └─ release ─> rows, caches ─> take_over ┘                ├─> the step's code
                                  other ranks: score the groups that have ended ────────┘

A step at freshness 0 begins all of its rows before its own code runs. Replicas run them in short calls
(``flight``). When fewer than ``rows`` rows are unfinished, the m replicas with the most of them keep theirs.
The other replicas release theirs: tokens, log probabilities, versions and, by ``cache``, keys and values.
They are references in the store, which the m replicas read. Ranks without rows compute the stages that read
only sampled rows (``streamed_stages``), in calls of a few groups, and the m replicas join them at the end.
The step's code then gets all results as if it had asked for them, with its rows in the order of the prompts.

Weights do not change before the step's own code, so a trained role may score on these ranks. Minibatches are
of the whole step.

loop          ``take``, in the thread of the training loop, before the step's own code runs
consumes      prompts of the stream; results of replicas, of moves and of streamed stages
waits for     the first result of a replica, of a move or of a streamed stage
unblocked by  those ranks; each wait ends at the deadline
produces      the step's prompts, their rows, and the results of the streamed stages
shutdown      nothing is in flight between two steps. A replica that dies ends the step: the run goes on from
              the newest checkpoint, and the rows begin again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf

from rillflow.controller.decisions import Decisions
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flight import Flight
from rillflow.controller.replicas import SamplerReplica
from rillflow.controller.source import DataStream, GroupSampling, OpenedStep, Source
from rillflow.controller.streamed_stages import SharedRanks, StageWorker
from rillflow.controller.weight_sync import WeightSync
from rillflow.records.batch import Batch, concatenate
from rillflow.records.metrics import Max, Mean, Metric, Sum, merge_metrics
from rillflow.roles.sampler import GroupId, Released
from rillflow.workers.arguments import Facts, shares
from rillflow.workers.backend import Place
from rillflow.workers.pending import Pending, joined, wait_for_any

LOOK_S = 0.05
"""Seconds between two looks at ranks that are being replaced."""
CALLS = 4
"""Scoring calls per rank; several, so that ranks freed later can take some."""


@dataclass(frozen=True, kw_only=True)
class GatherRule:
    """When the last rows of a step gather, and where."""

    rows: int
    """They gather with fewer unfinished rows than this."""
    replicas: int
    """m: replicas that run them."""
    with_caches: bool
    """Whether rows bring their KV caches; otherwise their tokens are prefilled again."""


@dataclass(kw_only=True, eq=False)
class _Move:
    """Rows on their way from one replica to others."""

    source: SamplerReplica
    """The replica that gives them up."""
    targets: Sequence[SamplerReplica]
    """Replicas that take them over."""
    made: Sequence[Sequence[Pending]]
    """For each rank of the source: two batches for each target, and what was released."""
    arriving: list[Pending] = field(default_factory=list)
    """Calls of the targets that take them over."""
    released: Released | None = None
    """What was released; None until it is known."""

    @property
    def summary(self) -> Pending:
        """What was released, as a result."""
        return self.made[0][-1]

    @property
    def awaited(self) -> list[Pending]:
        """Pending results."""
        return [self.summary] if self.released is None else self.arriving


class Gathering(Source):
    """Source of steps whose last rows gather on few replicas.

    Args:
        executor: has the groups of ranks.
        stream: prompts of the phase.
        how: how groups are sampled.
        rule: when rows gather, and where.
        step_groups: groups of a step.
        most_rows: largest number of rows of a replica at once.
        streamed: workers of the stages that run before the step's own code.
        shared: the sampler's ranks.
        sync: see Source.
    """

    is_salvageable = False

    def __init__(
        self,
        executor: GroupExecutor,
        stream: DataStream,
        *,
        how: GroupSampling,
        rule: GatherRule,
        step_groups: int,
        most_rows: int,
        streamed: Sequence[StageWorker],
        shared: SharedRanks,
        sync: WeightSync | None = None,
    ) -> None:
        super().__init__(executor, stream, sync=sync)
        self._how, self._rule, self._workers, self._shared = how, rule, streamed, shared
        self._flight = Flight(
            executor,
            stream,
            sync=None,
            how=replace(how, restart=None),
            most_rows=most_rows,
            capacity=2 * step_groups,
            workers=streamed,
            decisions=Decisions(),
            again=[],
        )
        self._moves: list[_Move] = []
        self._is_gathered = False
        self._measured: dict[str, Metric] = {}
        self._moved_facts: list[Facts] = []

    def take(self, step: int, groups: int) -> Batch:  # noqa: ARG002
        """Return the prompts of a step, whose rows ``rows`` then returns."""
        return self.more(groups)

    def more(self, groups: int) -> Batch:
        """See Source."""
        flight, self._is_gathered = self._flight, False
        flight.draw(groups)
        drawn = dict(islice(flight.table.left.items(), groups))
        for replica, share in zip(flight.replicas, shares(groups, len(flight.replicas)), strict=True):
            replica.is_released = False
            for _ in range(share):
                flight.begin(replica)
        self._run()
        taken = [flight.complete[group] for group in drawn]
        results, made = flight.gathered(taken), dict[str, Pending]()
        self._measure()
        for stage, rows in results.items():
            made[stage] = joined(stage, [rows], worked=flight.worked(stage))
        flight.taken(taken)
        flight.decisions.flush()  # nothing repeats them
        return self._made(concatenate([*drawn.values()]), made)

    def opened(self) -> OpenedStep:
        """See Source; the metrics are of the step's moves."""
        measured, self._measured = self._measured, {}
        return replace(super().opened(), measured=measured)

    def moved(self, arriving: Sequence[Pending]) -> Mapping[str, Sequence[Facts]]:
        """See Source; the moves of rows are the stage ``policy.gather``."""
        facts, self._moved_facts = self._moved_facts, []
        return {**super().moved(arriving), **({"policy.gather": facts} if facts else {})}

    def _run(self) -> None:
        """Run and score all rows."""
        flight = self._flight
        while True:
            flight.hear()
            self._land()
            if not flight.unfinished:
                return
            self._gather()
            self._shared.busy.clear()
            self._shared.busy.update(self._busy)
            # Rows that arrive wait for earlier calls, so their replica gets no more until they are known.
            held = {each.number for move in self._moves if move.released is None for each in move.targets}
            for replica in flight.replicas:
                while replica.may_call and replica.number not in held:
                    flight.call(replica)
            flight.compute()
            self._wait([*flight.events, *(move.awaited for move in self._moves)])

    @property
    def _busy(self) -> Iterable[Place]:
        """Ranks of replicas with rows, or to which rows are on their way."""
        expecting = {each.number for move in self._moves for each in (move.source, *move.targets)}
        for replica in self._flight.replicas:
            if replica.rows or replica.number in expecting:
                yield from replica.places

    def _gather(self) -> None:
        """Release the rows of all but m replicas, if few enough are unfinished."""
        replicas, rule = self._flight.replicas, self._rule
        left, is_begun = sum(each.rows for each in replicas), not any(each.begun for each in replicas)
        if self._is_gathered or not is_begun or not 0 < left < rule.rows:
            return
        self._is_gathered = True
        most = sorted(replicas, key=lambda each: (-each.rows, each.number))
        kept, given_up = most[: rule.replicas], [each for each in most[rule.replicas :] if each.rows]
        rows = {each.number: each.rows for each in kept}
        for source in given_up:
            parts: dict[int, list[GroupId]] = {each.number: [] for each in kept}
            for group in self._running(source):
                fewest = min(rows, key=lambda number: rows[number])
                parts[fewest].append(group)
                rows[fewest] += self._how.samples
            made = source.release([*parts.values()], with_caches=rule.with_caches)
            self._moves.append(_Move(source=source, targets=kept, made=made))

    def _running(self, replica: SamplerReplica) -> list[GroupId]:
        """Return the groups of a replica that may still run."""
        held = self._flight.table.held_by(replica.name)
        return [each for each in held if each not in replica.collecting]

    def _land(self) -> None:
        """Have released rows taken over, and end the moves that have arrived."""
        wait_s = self._how.deadline_s
        for move in self._moves:
            if move.released is None and move.summary.is_ready:
                move.released = move.summary.read(wait_s)
                self._take_over(move, move.released)
        for move in [each for each in self._moves if each.released is not None]:
            if all(each.is_ready for each in move.arriving):
                self._moves.remove(move)
                self._arrived(move)

    def _take_over(self, move: _Move, released: Released) -> None:
        for part, (target, groups) in enumerate(zip(move.targets, released.running, strict=True)):
            if not groups:
                continue
            move.arriving += target.take_over([made[2 * part : 2 * part + 2] for made in move.made])
            for group, rows in groups.items():
                self._flight.move(group, target, rows)

    def _arrived(self, move: _Move) -> None:
        assert move.released is not None
        wait_s = self._how.deadline_s
        left = move.summary.facts(wait_s)
        came = [fact for each in move.arriving for fact in each.facts(wait_s)]
        self._moved_facts += [*left, *came]
        waited = max((each.ended for each in came), default=left[0].began) - left[0].began
        found: dict[str, Metric] = {
            "gather/rows/sum": Sum(value=sum(sum(each.values()) for each in move.released.running)),
            "gather/moved_bytes/sum": Sum(value=move.released.nbytes),
            "gather/wait_seconds/max": Max(value=waited),
        }
        self._measured = merge_metrics([self._measured, found])

    def _measure(self) -> None:
        """Measure how much of the tail the sampler's ranks were idle: no row ran, and nothing was scored."""
        replicas = self._flight.replicas
        sampled = [[*each.worked] for each in replicas]
        places = {place for each in replicas for place in each.places}
        every = [fact for part in sampled for fact in part] + self._moved_facts
        every += [fact for worker in self._workers for fact in worker.worked if fact.place in places]
        ends = [max((fact.ended for fact in part), default=inf) for part in sampled]
        begin = min((fact.began for fact in self._moved_facts), default=min(ends))
        end = max((fact.ended for fact in every), default=begin)
        busy = sum(max(0.0, min(fact.ended, end) - max(fact.began, begin)) for fact in every)
        whole = (end - begin) * len(places)
        tail = max((fact.ended for part in sampled for fact in part), default=begin) - begin
        found: dict[str, Metric] = {
            "gather/tail_seconds/mean": Mean(total=tail, count=1),
            "gather/idle/share": Mean(total=max(0.0, whole - busy), count=whole),
        }
        self._measured = merge_metrics([self._measured, found])

    def _wait(self, events: Sequence[Sequence[Pending]]) -> None:
        if any(all(part.is_ready for part in each) for each in events):
            return
        if self._flight.is_replacing:
            self._executor.backend.sleep(LOOK_S)
            return
        parts = [part for each in events for part in each]
        assert parts, "rows are unfinished, so a call runs or a stage computes"
        wait_for_any(parts, self._how.deadline_s)
