"""System: the way from actors to learners and back, behind one interface for plans.

CallSystem      plan ── call sample ──> actors       load ──> actors            (RLlib Flow)
StreamSystem    actors ── sample stream ──> plan     parameters ──> policy workers, actors  (SRL)
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rillflow.errors import ConfigError
from rillflow.records.metrics import Max, Metrics, merge_metrics
from rillflow.workers.backend import RankLost, Replacement
from rillflow_classic.checkpointed import CheckpointedObjects
from rillflow_classic.operators.context import NotReady, Operator, PlanContext
from rillflow_classic.operators.iterators import LocalIterator, from_function, from_workers
from rillflow_classic.operators.steps import Rollout, join
from rillflow_classic.policy import Learner
from rillflow_classic.streams.stream import UNLIMITED, Received, Transport
from rillflow_classic.worker_set import DEADLINE_S, WorkerCall, WorkerSet, check_calls
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.buffer_worker import FragmentQueue
from rillflow_classic.workers.policy_worker import PolicyWorker
from rillflow_classic.workers.trainer_worker import TrainerWorker, copied

_log = logging.getLogger(__name__)
TURN_S = 0.05
"""Longest time in which ``rollouts`` looks for a batch before another flow of the plan has its turn."""


class CallSystem:
    """Actors that sample when they are called; the policies act in the actors.

    Args:
        actors: the actors.
        learners: learner of every policy, by name.

    Example:
        system = CallSystem(actors, {"policy": learner})
        for fragment in system.rollouts("bulk_sync"):
            learner.update(fragment)
            system.publish()
    """

    def __init__(self, actors: WorkerSet[Actor], learners: Mapping[str, Learner]) -> None:
        self.actors, self.learners = actors, learners
        self.kept = CheckpointedObjects()
        self._loads: list[WorkerCall] = []

    @property
    def learner(self) -> Learner:
        """The learner, if there is one policy."""
        return only_learner(self.learners)

    def rollouts(self, mode: str, *, num_async: int = 1) -> LocalIterator:
        """See System."""
        match mode:
            case "bulk_sync":
                return from_workers(self.actors, "sample").batch_across_workers().for_each(join)
            case "async":
                return from_workers(self.actors, "sample").gather_async(num_async)
        raise unknown_mode(mode)

    def publish(self, learner: Learner | None = None) -> None:
        """Send a learner's weights to all actors; without one, those of every learner.

        A call of ``sample`` that is submitted afterwards acts with them.
        """
        self._loads = check_calls(self._loads)
        for name, each in self.learners.items():
            if learner is None or learner is each:
                self._loads += self.actors.call_all("load", each.version, each.weights(), name)

    def start_workers(self, pool: str, make: Callable[[int], Any]) -> WorkerSet[Any]:
        """See System."""
        return self.actors.beside(pool, make)

    def ask_actors(self, method: str, *arguments: Any) -> list[Any]:
        """Return the result of a method of every actor, which runs between two fragments.

        An actor that was lost gets a new process, with the present weights.
        """
        calls, found = self.actors.call_all(method, *arguments), []
        for call in calls:
            try:
                found.append(call.read(DEADLINE_S))
            except RankLost as error:
                self._start_again(call.worker, error)
                found.append(self.actors.call(call.worker, method, *arguments).read(DEADLINE_S))
        return found

    def _start_again(self, index: int, error: RankLost) -> None:
        _log.warning("worker %d of %s is lost, and starts again: %s", index, self.actors.pool, error)
        self.actors.replace(index).read()
        self.actors.make_again(index).read(DEADLINE_S)
        for name, learner in self.learners.items():
            self.actors.call(index, "load", learner.version, learner.weights(), name).read(DEADLINE_S)

    def reset(self, seed: int) -> None:
        """Begin new episodes in all actors with random numbers of this seed, with the present weights."""
        self.publish()
        self.ask_actors("reset", seed)


class PolledWorkers:
    """Workers that poll in the background: one call in flight at each, and a new process for a lost one.

    Args:
        workers: the workers.
        budget_s: duration of a call; 0: one turn, for a backend that runs calls in the caller's thread.
    """

    def __init__(self, workers: WorkerSet[Any], budget_s: float) -> None:
        self.workers, self._budget_s = workers, budget_s
        self._calls: dict[int, WorkerCall] = {}
        self._starts: dict[int, Replacement] = {}
        self._makes: dict[int, WorkerCall] = {}
        self.lost = 0
        """Number of workers that were lost."""

    @property
    def alive(self) -> set[int]:
        """Workers that are not being replaced."""
        return set(range(self.workers.size)) - self._starts.keys() - self._makes.keys()

    def pump(self) -> Iterator[Any]:
        """Call every worker that has ended its call, and yield the reports of those calls.

        Raises:
            RillflowError: a worker's call failed, or a lost worker could not be replaced.
        """
        self._replace()
        for index in self.alive:
            call = self._calls.get(index)
            if call is not None and not call.is_ready:
                continue
            try:
                if call is not None:
                    yield call.read(0.0)
                self._calls[index] = self.workers.call(index, "poll", self._budget_s)
            except RankLost as error:
                self._calls.pop(index, None)
                self._lose(index, error)

    def settle(self) -> Iterator[Any]:
        """Wait until no call is in flight, and yield the reports; the trainer has stopped all workers."""
        calls, self._calls = self._calls, {}
        for index, call in calls.items():
            try:
                yield call.read(DEADLINE_S)
            except RankLost as error:
                self._lose(index, error)

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Return the results of a method of every worker that is not lost."""
        calls, found = [self.workers.call(index, method, *arguments) for index in sorted(self.alive)], []
        for call in calls:
            try:
                found.append(call.read(DEADLINE_S))
            except RankLost as error:
                self._lose(call.worker, error)
        return found

    def _lose(self, index: int, error: RankLost) -> None:
        _log.warning("worker %d of %s is lost, and starts again: %s", index, self.workers.pool, error)
        self.lost += 1
        self._starts[index] = self.workers.replace(index)

    def _replace(self) -> None:
        for index, start in list(self._starts.items()):
            if start.is_ready:
                start.read()
                del self._starts[index]
                self._makes[index] = self.workers.make_again(index)
        for index, made in list(self._makes.items()):
            if made.is_ready:
                del self._makes[index]
                try:
                    made.read()
                except RankLost as error:
                    self._lose(index, error)


class StreamSystem:
    """Actors and policy workers that poll in the background; fragments come by a sample stream.

    Where the policies act is decided by what is given: in the actors (no ``policy_workers`` and no
    ``server``), in policy workers, or beside the learners in this process (``server``).

    Args:
        transport: the streams.
        actors: the actors, with their ends of the streams.
        learners: learner of every policy, by name.
        policy_workers: workers that act for the actors.
        server: acts with the learners' own policies while this process waits for fragments.
        fragments: queue of fragments; one for a batch of ``batch`` by default.
        batch: fragments of a batch in mode ``async``.
        prefetch: whether a thread assembles the next batch.
        budget_s: see PolledWorkers.
    """

    def __init__(
        self,
        transport: Transport,
        actors: WorkerSet[Actor],
        learners: Mapping[str, Learner],
        *,
        policy_workers: WorkerSet[PolicyWorker] | None = None,
        server: PolicyWorker | None = None,
        fragments: FragmentQueue | None = None,
        batch: int = 1,
        prefetch: bool = True,
        budget_s: float = 5.0,
    ) -> None:
        self.transport, self.learners = transport, learners
        self.kept = CheckpointedObjects()
        self._server = server
        self._actors = PolledWorkers(actors, budget_s)
        self._polled = [self._actors]
        self._polled += [PolledWorkers(policy_workers, budget_s)] if policy_workers is not None else []
        self._queue = fragments or FragmentQueue(max(2 * batch, transport.spec.lanes))
        self._batch, self._prefetch = batch, prefetch
        self._writer = transport.writer()
        self._source = transport.source()
        self._trainer: TrainerWorker | None = None
        self._round: defaultdict[tuple[int, int], deque[Received]] = defaultdict(deque)
        self._limit, self._has_begun = 0, False
        self._metrics: list[Metrics] = []
        self.publish()

    @property
    def learner(self) -> Learner:
        """The learner, if there is one policy."""
        return only_learner(self.learners)

    def rollouts(self, mode: str, *, num_async: int = 1) -> LocalIterator:  # noqa: ARG002
        """See System. The transport's ``depth`` bounds what is under way, and not ``num_async``."""
        match mode:
            case "bulk_sync":
                source = from_function(self._next_round, "sample stream, in rounds")
            case "async":
                source = from_function(self._next_batch, "sample stream")
            case _:
                raise unknown_mode(mode)
        return source.for_each(Operator(label="record", begin=self._recorder))

    def publish(self, learner: Learner | None = None) -> None:
        """See System; a server beside the learners needs nothing."""
        for name, each in self.learners.items() if self._server is None else ():
            if learner is None or learner is each:
                self._writer.publish(name, each.version, each.weights())

    def start_workers(self, pool: str, make: Callable[[int], Any]) -> WorkerSet[Any]:
        """See System."""
        return self._actors.workers.beside(pool, make)

    def ask_actors(self, method: str, *arguments: Any) -> list[Any]:
        """Stop all workers, return the result of a method of every actor, and let the workers go on."""
        self._stop()
        found = self._actors.call_all(method, *arguments)
        self._writer.control(is_stopped=False, limit=self._limit)
        return found

    def reset(self, seed: int) -> None:
        """Stop all workers, drop what is under way, and begin new episodes with this seed."""
        self._stop()
        self._end_trainer()
        for received in self._source.take(0.0):
            received.release()
        for lane in self._round.values():
            while lane:
                lane.popleft().release()
        self._queue.clear("the actors begin anew")
        self._has_begun = False
        self._actors.call_all("reset", seed)
        for polled in self._polled[1:]:
            polled.call_all("seed", seed)
        if self._server is not None:
            self._server.seed(seed)
        self.publish()
        self._writer.control(is_stopped=False, limit=self._limit)

    def close(self) -> None:
        """Stop all workers and the thread; the backend ends the processes."""
        self._stop()
        self._end_trainer()

    def _stop(self) -> None:
        """Let all workers end their present calls."""
        self._writer.control(is_stopped=True, limit=self._limit)
        for polled in self._polled:
            self._read(polled.settle())

    def _next_batch(self) -> Rollout | NotReady:
        if self._trainer is None:
            self._allow(UNLIMITED)
            self._trainer = TrainerWorker(
                self.learners,
                self._source,
                self._queue,
                batch=self._batch,
                prefetch=self._prefetch,
                room=self.transport.spec.lanes * self.transport.spec.depth,
            )
        trainer = self._trainer
        found = self._look(lambda wait_s: trainer.next(wait_s))
        return NotReady(polls=True) if found is None else found

    def _next_round(self) -> Rollout | NotReady:
        if not self._has_begun:
            self._allow(self._limit + 1)
            self._has_begun = True
        found = self._look(self._whole_round)
        return NotReady(polls=True) if found is None else found

    def _whole_round(self, wait_s: float) -> Rollout | None:
        """Return the next fragment of every lane side by side, once all are there."""
        for each in self._source.take(wait_s):
            self._round[each.actor, each.lane].append(each)
        alive, ring = sorted(self._actors.alive), self.transport.spec.ring
        if not alive:
            return None
        if not all(self._round[actor, lane] for actor in alive for lane in range(ring)):
            return None
        items = [self._round[each].popleft() for each in sorted(self._round) if self._round[each]]
        self._has_begun = False
        views = items if len(items) > 1 else [copied(items[0])]
        several = len(items[0].fragments) > 1
        joined = join([each.fragments if several else next(iter(each.fragments.values())) for each in views])
        for each in items:
            each.release()
        return joined

    def _look(self, take: Callable[[float], Rollout | None]) -> Rollout | None:
        """Let workers go on, and act for actors, until there is a batch or the turn is over."""
        until = time.monotonic() + TURN_S
        while True:
            for polled in self._polled:
                self._read(polled.pump())
            is_busy = self._server is not None and self._server.answer() > 0
            found = take(0.0 if self._server is not None else TURN_S / 4)
            if found is not None or time.monotonic() > until:
                return found
            if self._server is not None and not is_busy:
                self._server.wait(TURN_S / 50)

    def _allow(self, limit: int) -> None:
        self._limit = limit
        self._writer.control(is_stopped=False, limit=limit)

    def _end_trainer(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._metrics.append(self._trainer.metrics())
            self._trainer = None

    def _read(self, reports: Iterator[Any]) -> None:
        self._metrics += [each.metrics for each in reports]

    def _recorder(self, context: PlanContext) -> Callable[[Rollout], Rollout]:
        def record(rollout: Rollout) -> Rollout:
            found, self._metrics = self._metrics, []
            if self._trainer is not None:
                found.append(self._trainer.metrics())
            lost = sum(polled.lost for polled in self._polled)
            context.record({**merge_metrics(found), "actor/lost/max": Max(value=float(lost))})
            return rollout

        return record


def only_learner(learners: Mapping[str, Learner]) -> Learner:
    """Return the learner.

    Raises:
        ConfigError: there are several policies.
    """
    if len(learners) != 1:
        raise ConfigError(
            f"the learner of {len(learners)} policies is asked for",
            why=f"each policy has its own: {', '.join(learners)}",
            fix="choose one by name: system.learners[NAME]",
        )
    return next(iter(learners.values()))


def unknown_mode(mode: str) -> ConfigError:
    """Return the error for a mode of rollouts that does not exist."""
    return ConfigError(f"rollouts have no mode {mode!r}", why="the modes are bulk_sync and async")
