"""System: the way from actors to learners and back, behind one interface for plans.

CallSystem      plan ── call sample ──> actors       load ──> actors            (RLlib Flow)
StreamSystem    actors ── sample stream ──> plan     parameters ──> policy workers, actors  (SRL)
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rillflow.errors import ClusterError, ConfigError
from rillflow.records.metrics import Max, Metrics, merge_metrics
from rillflow.runs.reader import Evaluation
from rillflow.workers.backend import RankLost, Replacement
from rillflow_classic.checkpointed import CheckpointedObjects
from rillflow_classic.fragment import Fragment
from rillflow_classic.operators.context import NotReady, Operator, PlanContext
from rillflow_classic.operators.iterators import LocalIterator, from_function, from_workers
from rillflow_classic.operators.steps import Rollout, join
from rillflow_classic.policy import Learner
from rillflow_classic.streams.streams import Received, Streams
from rillflow_classic.worker_set import DEADLINE_S, WorkerCall, WorkerSet, check_calls
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.evaluation_worker import EvaluationWorker
from rillflow_classic.workers.policy_worker import PolicyWorker
from rillflow_classic.workers.polling import WorkReport
from rillflow_classic.workers.trainer_worker import FragmentQueue, TrainerWorker, assembled

_log = logging.getLogger(__name__)
MOST_LOSSES = 3
"""Losses of a worker before it ends a call, after which the run stops."""
CLOSE_S = 30.0
"""Longest wait for an actor to close its environments."""
TURN_S = 0.05
"""Longest time in which ``rollouts`` looks for a batch before another flow of the plan has its turn."""


class ActorSystem(ABC):
    """Actors, learners, and an evaluation worker if there is one; see ``algorithm.System``.

    Args:
        actors: the actors.
        learners: learner of every policy, by name.
        evaluator: judges the weights by the episodes of all rollouts.
    """

    def __init__(
        self,
        actors: WorkerSet[Actor],
        learners: Mapping[str, Learner],
        evaluator: WorkerSet[EvaluationWorker] | None = None,
    ) -> None:
        self.actors, self.learners, self._evaluator = actors, learners, evaluator
        self.kept = CheckpointedObjects()
        self._judging: deque[WorkerCall] = deque()

    @property
    def learner(self) -> Learner:
        """The learner, if there is one policy.

        Raises:
            ConfigError: there are several policies.
        """
        if len(self.learners) != 1:
            raise ConfigError(
                f"the learner of {len(self.learners)} policies is asked for",
                why=f"each policy has its own: {', '.join(self.learners)}",
                fix="choose one by name: system.learners[NAME]",
            )
        return next(iter(self.learners.values()))

    def rollouts(self, mode: str, *, num_async: int = 1) -> LocalIterator:
        """See System."""
        if mode not in ("bulk_sync", "async"):
            raise ConfigError(f"rollouts have no mode {mode!r}", why="the modes are bulk_sync and async")
        found = self._rounds() if mode == "bulk_sync" else self._as_they_come(num_async)
        if self._evaluator is None:
            return found
        return found.for_each(Operator(label="evaluate", begin=lambda _: self._evaluate))

    def evaluations(self) -> list[Evaluation]:
        """Return the results of the evaluation worker since the last call."""
        found: list[Evaluation] = []
        while self._evaluator is not None and self._judging and self._judging[0].is_ready:
            try:
                found += self._judging.popleft().read(0.0)
            except RankLost as error:  # and with it the episodes that it had
                self._judging.clear()
                self._evaluator.start_again(0, error)
        return found

    def publish(self, learner: Learner | None = None) -> None:
        """See System: send a learner's weights; without one, those of every learner."""
        for name, each in self.learners.items():
            if learner is None or learner is each:
                self._send(name, each)

    def start_workers(self, pool: str, make: Callable[[int], Any]) -> WorkerSet[Any]:
        """See System."""
        return self.actors.beside(pool, make)

    @abstractmethod
    def _rounds(self) -> LocalIterator:
        """Return one fragment of every lane, joined, again and again."""

    @abstractmethod
    def _as_they_come(self, num_async: int) -> LocalIterator:
        """Return fragments as they come."""

    @abstractmethod
    def _send(self, name: str, learner: Learner) -> None:
        """Send the weights of a policy."""

    def _evaluate(self, rollout: Rollout) -> Rollout:
        assert self._evaluator is not None
        for each in [rollout] if isinstance(rollout, Fragment) else rollout.values():
            if each.episodes:
                self._judging.append(self._evaluator.call(0, "add", each.policy, each.episodes))
        return rollout


class CallSystem(ActorSystem):
    """Actors that sample when they are called; the policies act in the actors.

    Args:
        actors: the actors.
        learners: learner of every policy, by name.
        evaluator: see ActorSystem.
        next_round: returns the fragments of a round, in place of calls of ``sample``: see ``static_rounds``.

    Example:
        system = CallSystem(actors, {"policy": learner})
        for fragment in system.rollouts("bulk_sync"):
            learner.update(fragment)
            system.publish()
    """

    def __init__(
        self,
        actors: WorkerSet[Actor],
        learners: Mapping[str, Learner],
        evaluator: WorkerSet[EvaluationWorker] | None = None,
        *,
        next_round: Callable[[], Rollout] | None = None,
    ) -> None:
        super().__init__(actors, learners, evaluator)
        self._next_round, self._loads = next_round, list[WorkerCall]()

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

    def reset(self, seed: int) -> None:
        """Begin new episodes in all actors with random numbers of this seed, with the present weights."""
        self.publish()
        self.ask_actors("reset", seed)

    def close_environments(self) -> None:
        """Close the environments of all actors after the last step."""
        close_all(self.actors.call_all("close"))

    def _rounds(self) -> LocalIterator:
        if self._next_round is not None:
            return from_function(self._next_round, f"static plan of {self.actors.size} actors")
        return from_workers(self.actors, "sample").batch_across_workers().for_each(join)

    def _as_they_come(self, num_async: int) -> LocalIterator:
        return from_workers(self.actors, "sample").gather_async(num_async)

    def _send(self, name: str, learner: Learner) -> None:
        """Load weights into all actors; a ``sample`` that is submitted afterwards acts with them."""
        calls = self.actors.call_all("load", learner.version, learner.weights(), name)
        self._loads = [*check_calls(self._loads), *calls]

    def _start_again(self, index: int, error: RankLost) -> None:
        self.actors.start_again(index, error)
        for name, learner in self.learners.items():
            self.actors.call(index, "load", learner.version, learner.weights(), name).read(DEADLINE_S)


def close_all(calls: Sequence[WorkerCall]) -> None:
    """Wait for calls that close something; one that is lost or takes long has no result to miss."""
    for call in calls:
        with suppress(RankLost, TimeoutError):
            call.read(CLOSE_S)


class PolledWorkers:
    """Workers that poll in the background: one call in flight at each, and a new process for a lost one.

    Args:
        workers: the workers.
        budget_s: duration of a call; 0: one turn, for a backend that runs calls in the caller's thread.
    """

    def __init__(self, workers: WorkerSet[Any], budget_s: float) -> None:
        self.workers, self._budget_s = workers, budget_s
        self._calls: dict[int, WorkerCall] = {}
        self._starts: dict[int, Replacement | WorkerCall] = {}
        """New processes, and then the workers that are made in them."""
        self._reports: list[Metrics] = []
        self.lost = 0
        """Number of workers that were lost."""

        self._losses = Counter[int]()
        """Losses of a worker since it last ended a call."""

    @property
    def alive(self) -> set[int]:
        """Workers that are not being replaced."""
        return set(range(self.workers.size)) - self._starts.keys()

    def pump(self) -> None:
        """Call every worker that has ended its call.

        Raises:
            RillflowError: a worker's call failed, or a lost worker could not be replaced.
        """
        for index, start in list(self._starts.items()):
            if start.is_ready:
                self._read(index, start)
        for index in self.alive:
            call = self._calls.get(index)
            if call is None or (call.is_ready and self._read(index, self._calls.pop(index))):
                self._calls[index] = self.workers.call(index, "poll", self._budget_s)

    def settle(self) -> None:
        """Wait until no call is in flight; the trainer has stopped all workers."""
        while self._calls:
            self._read(*self._calls.popitem())

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Return the results of a method of every worker that is not lost."""
        calls = [self.workers.call(index, method, *arguments) for index in sorted(self.alive)]
        return [found[0] for call in calls if (found := self._read(call.worker, call))]

    def take_reports(self) -> list[Metrics]:
        """Return the metrics of the calls that have ended since the last time."""
        found, self._reports = self._reports, []
        return found

    def _read(self, index: int, call: WorkerCall | Replacement) -> list[Any]:
        """Return the result of a call, or nothing if the worker was lost, which then starts again."""
        self._starts.pop(index, None)
        try:
            found = call.read(DEADLINE_S)
        except RankLost as error:
            _log.warning("worker %d of %s is lost, and starts again: %s", index, self.workers.pool, error)
            self.lost += 1
            self._losses[index] += 1
            if self._losses[index] > MOST_LOSSES:
                raise ClusterError(
                    f"worker {index} of {self.workers.pool!r} was lost {self._losses[index]} times in a row",
                    why=f"the last one {error.what}: {error.why}",
                    fix="correct what ends it, then run the same command to resume",
                ) from error
            self._starts[index] = self.workers.replace(index)
            return []
        if isinstance(call, Replacement):
            self._starts[index] = self.workers.make_again(index)
        elif isinstance(found, WorkReport):
            self._losses[index] = 0
            self._reports.append(found.metrics)
        return [found]


class StreamSystem(ActorSystem):
    """Actors and other workers that poll in the background; fragments come by a sample stream.

    Where the policies act is decided by what is given: in the actors (no policy workers and no ``server``),
    in policy workers, or beside the learners in this process (``server``).

    Args:
        streams: the trainer's end of the streams.
        actors: the actors, with their ends.
        learners: learner of every policy, by name.
        others: policy workers that act for the actors, and buffer workers.
        server: acts with the learners' own policies while this process waits for fragments.
        queue: fragments that wait, in mode ``async``; one for single fragments by default.
        prefetch: whether a thread assembles the next batch.
        budget_s: see PolledWorkers.
        evaluator: see ActorSystem.
    """

    def __init__(
        self,
        streams: Streams,
        actors: WorkerSet[Actor],
        learners: Mapping[str, Learner],
        *,
        others: Sequence[WorkerSet[Any]] = (),
        server: PolicyWorker | None = None,
        queue: FragmentQueue | None = None,
        prefetch: bool = True,
        budget_s: float = 5.0,
        evaluator: WorkerSet[EvaluationWorker] | None = None,
    ) -> None:
        super().__init__(actors, learners, evaluator)
        self.streams, self._server, self._prefetch = streams, server, prefetch
        self._polled = [PolledWorkers(each, budget_s) for each in (actors, *others)]
        self._queue = queue or FragmentQueue(streams.spec.lanes * streams.spec.depth)
        self._trainer: TrainerWorker | None = None
        self._arrived: dict[tuple[int, int], Received] = {}
        self._count = self._round = 0
        self._begin(0)
        self.publish()

    def ask_actors(self, method: str, *arguments: Any) -> list[Any]:
        """Stop all workers, return the result of a method of every actor, and let the workers go on."""
        self._stop()
        found = self._polled[0].call_all(method, *arguments)
        self._begin(self._round)
        return found

    def reset(self, seed: int) -> None:
        """Stop all workers, drop what is under way, and begin new episodes with this seed."""
        self.close()
        self._queue.clear()
        while self._arrived:
            self._arrived.popitem()[1].release()
        for polled in self._polled:
            polled.call_all("reset", seed)
        if self._server is not None:
            self._server.reset(seed)
        self.publish()
        self._begin(0)

    def close(self) -> None:
        """Stop all workers and the thread; the backend ends the processes."""
        self._stop()
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def close_environments(self) -> None:
        """Stop all workers, and close the environments of all actors after the last step."""
        self.close()
        actors = self._polled[0]
        close_all([actors.workers.call(index, "close") for index in sorted(actors.alive)])

    def _rounds(self) -> LocalIterator:
        found = from_function(self._next_round, "sample stream, in rounds")
        return found.for_each(Operator(label="record", begin=self._recorder))

    def _as_they_come(self, num_async: int) -> LocalIterator:  # noqa: ARG002
        """See ActorSystem; the streams' ``depth`` bounds what is under way, and not ``num_async``."""
        found = from_function(self._next_batch, "sample stream")
        return found.for_each(Operator(label="record", begin=self._recorder))

    def _send(self, name: str, learner: Learner) -> None:
        if self._server is None:  # otherwise the learner's own policy acts
            self.streams.publish(name, learner.version, learner.weights())

    def _begin(self, round_: int) -> None:
        """Let all workers go on, in a round."""
        self._round = round_
        self.streams.control(is_stopped=False, round_=round_)

    def _stop(self) -> None:
        """Let all workers end their present calls."""
        self.streams.control(is_stopped=True, round_=self._round)
        for polled in self._polled:
            polled.settle()

    def _next_batch(self) -> Rollout | NotReady:
        if self._trainer is None:
            self._count += 1
            self._begin(-self._count)
            self._trainer = TrainerWorker(self.learners, self.streams, self._queue, prefetch=self._prefetch)
        return self._look(self._trainer.next)

    def _next_round(self) -> Rollout | NotReady:
        if self._round == 0:
            self._count += 1
            self._begin(self._count)
        return self._look(self._whole_round)

    def _whole_round(self, wait_s: float) -> Rollout | None:
        """Return the fragment of every lane side by side, once all are there."""
        for each in self.streams.take(wait_s):
            if (doubled := self._arrived.pop((each.actor, each.lane), None)) is not None:
                doubled.release()  # of an actor that was lost after it had sent it
            self._arrived[each.actor, each.lane] = each
        alive, ring = self._polled[0].alive, range(self.streams.spec.ring)
        if not alive or not {(actor, lane) for actor in alive for lane in ring} <= self._arrived.keys():
            return None
        items, self._arrived, self._round = [self._arrived[key] for key in sorted(self._arrived)], {}, 0
        rollout = assembled([each.fragments for each in items])
        for each in items:
            each.release()
        return rollout

    def _look(self, take: Callable[[float], Rollout | None]) -> Rollout | NotReady:
        """Let workers go on, and act for actors, until there is a batch or the turn is over."""
        until, server = time.monotonic() + TURN_S, self._server
        while True:
            for polled in self._polled:
                polled.pump()
            is_busy = server is not None and server.turn()
            found = take(0.0 if server is not None else TURN_S / 4)
            if found is not None:
                return found
            if time.monotonic() > until:
                return NotReady(polls=True)
            if server is not None and not is_busy:
                server.wait(TURN_S / 50)

    def _recorder(self, context: PlanContext) -> Callable[[Rollout], Rollout]:
        def record(rollout: Rollout) -> Rollout:
            found = [metrics for polled in self._polled for metrics in polled.take_reports()]
            found += [] if self._trainer is None else [self._trainer.metrics()]
            lost = sum(polled.lost for polled in self._polled)
            context.record({**merge_metrics(found), "actor/lost/max": Max(value=float(lost))})
            return rollout

        return record
