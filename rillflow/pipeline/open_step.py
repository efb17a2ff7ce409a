"""An open step: all it does is submitted, and its results are not there yet.

step(flow, data, config) ─┬─ stages ─────────────> journal                        ┐
                          ├─ marks, after them ──> where each trained role stands ├─ finish ─> metrics, spans
                          └─ rows and measures ──> the run directory              ┘

What is asked of the ranks for the records is submitted with the step: it is done before what later steps
ask of the same ranks, however many of them are open.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rillflow.dataflow.checkpoint import updates_of
from rillflow.dataflow.delivery import Delivery, Parcel
from rillflow.dataflow.executor import GroupExecutor
from rillflow.dataflow.flow import Flow, Journal, Supply
from rillflow.dataflow.ready_first import ReadyFirst
from rillflow.dataflow.tail_cut import TailCut
from rillflow.graph.graph import CONTROLLER
from rillflow.graph.handle import reports_of
from rillflow.observe.reader import RankSpan, SpanRecord
from rillflow.observe.run_directory import RunDirectory
from rillflow.pipeline.telemetry import asked
from rillflow.records.batch import Batch
from rillflow.records.metrics import Max, Mean, Metric, merge_metrics
from rillflow.roles.policy import Policy
from rillflow.training.skipping import taken_skips
from rillflow.workers.pending import Pending, wait_for
from rillflow.workers.values import Facts


@dataclass(frozen=True, kw_only=True)
class DataStream:
    """Where a phase's data comes from, and where it stands."""

    take: Callable[[int], Batch]
    """The next rows."""
    state: Callable[[], Mapping[str, Any]]
    """The place in the data, for a checkpoint."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What every step says of the data."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some steps of one algorithm."""

    name: str
    """What the records call it."""
    steps: int
    """Iterations."""
    rows: int
    """Prompts, demonstrations or pairs of one iteration."""
    step: Callable[..., Any]
    """The algorithm; it returns a report, or several."""
    config: Any
    """Its settings."""
    flow: Flow
    """What its step is written in."""
    executor: GroupExecutor
    """What runs it."""
    trained: tuple[str, ...]
    """The roles it trains; checkpoints hold them."""
    stream: DataStream
    """Its data."""
    beside: DataStream | None
    """What its step is given beside them, as many rows; None where that is nothing."""
    evaluated: bool
    """Whether what is trained is evaluated before, after and during this phase."""
    freshness: int = 0
    """k: a step is sampled by the version that was published k steps before the one it trains."""
    delivery: Delivery | None = None
    """How versions get to a sampler on ranks of its own."""
    ready: ReadyFirst | None = None
    """What samples where a step is made of the groups that are ready; None where prompts are in order."""
    cut: TailCut | None = None
    """What samples where a step leaves the longest for later; None where it trains all that it begins."""
    moving: tuple[str, ...] = ()
    """The roles that it does not train and whose weights change all the same."""
    sampled: Callable[[int], Sequence[Path]] = lambda _: ()
    """By step of the run, files of rows that it had sampled before the run was interrupted."""

    @property
    def kept(self) -> tuple[str, ...]:
        """The roles that checkpoints hold."""
        return (*self.trained, *self.moving)

    @property
    def place(self) -> dict[str, Any]:
        """The places in its data, and the numbers that its steps remember."""
        beside = dict(self.beside.state()) if self.beside is not None else None
        return {"stream": dict(self.stream.state()), "beside": beside, "numbers": dict(self.flow.state)}


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a run stands after a whole step."""

    step: int
    """The step, over all phases."""
    state: Mapping[str, Any]
    """What the controller goes on from."""
    updates: Mapping[str, int]
    """The optimiser steps of every trained role."""
    rows: Mapping[str, Pending]
    """What steps have collected, by name."""


@dataclass(kw_only=True, eq=False)
class Save:
    """A checkpoint that ranks are writing."""

    step: int
    """The step that it is of."""
    folder: Path
    """Where they write."""
    begun: list[Pending]
    """What tells when they have copied all they write, and may train on."""
    place: Mapping[str, Any]
    """The place in the data then, where later steps were open."""
    state: Mapping[str, Any] | None = None
    """What the controller goes on from; None until the step is closed."""
    asked: list[Pending] = field(default_factory=list)
    """What was asked last of every trained role: whether its files are written."""


class OpenStep:
    """One step of a phase, submitted as it is made.

    Args:
        phase: of which it is one.
        index: of the phase.
        number: the step, over all phases.
        done: the steps of the phase with it.
        arriving: the version it samples with, on its way to the sampler; empty where it is there.
        run: the run directory.
        deadline_s: longest wait for any stage.
        share: of the prompts whose rollouts are written down.
    """

    def __init__(
        self,
        phase: Phase,
        index: int,
        number: int,
        done: int,
        arriving: list[Pending],
        run: RunDirectory,
        deadline_s: float,
        share: float = 1.0,
    ) -> None:
        self.number, self.done = number, done
        self.saving: Save | None = None
        """Its checkpoint, where that was begun with it."""
        self.is_last = False
        """Whether the run ends after it, as asked."""
        self.skips: list[str] = []
        """Updates that were left out, as they are told."""
        self._is_cut = False
        self.began = time.monotonic()
        self._phase, self._arriving, self._run, self._deadline_s = phase, arriving, run, deadline_s
        flow, executor = phase.flow, phase.executor
        executor.sampled.extend(phase.sampled(number))
        source, ready = phase.stream, phase.ready
        sampling = ready or phase.cut
        take, more = (source.take, source.take) if sampling is None else (sampling.take, sampling.more)
        flow.begin(Supply(take=more, gather=executor.gather, deadline_s=deadline_s))
        self.journal: Journal = flow.journal
        data = take(phase.rows)
        beside = [] if phase.beside is None else [phase.beside.take(phase.rows)]
        self._reports: tuple[Any, ...] = reports_of(phase.step(flow, data, phase.config, *beside))
        flow.begin()  # nothing but this object keeps its batches
        self._given_up: list[tuple[tuple[int, int], str]] = []
        if sampling is not None:
            self.journal.measured |= sampling.measured
        if ready is not None:
            self._given_up = ready.opened()
        self._telemetry = asked(executor, self.journal.stages, run.path.absolute(), number, share)
        self._updates = {role: executor.on_first_rank(role, updates_of) for role in phase.trained}
        self._left_out = {role: executor.on_all_ranks(role, taken_skips) for role in phase.trained}
        self.parcels = deque[Parcel](phase.delivery.take() if phase.delivery is not None else ())
        """The versions that it publishes and that no sampler has been given yet."""
        self._state = {"phase": index, "done": done, **phase.place}
        self._rows = dict(flow.rows)

    @property
    def late(self) -> list[Pending]:
        """What has not been done of it."""
        waited = [made.result for made in self.journal.stages]
        waited += [
            *self._telemetry.measured,
            *self._reports,
            *self._updates.values(),
            *self._left_out.values(),
        ]
        return [each for each in waited if not each.is_ready]

    @property
    def writing(self) -> Sequence[Pending]:
        """What tells when its rows are on the disk; nobody waits for them before the next step is done."""
        return self._telemetry.written

    def finish(self, version: int) -> tuple[Standing, dict[str, Metric]]:
        """Wait for all of it, and write down its stages and what was left out.

        Args:
            version: the policy's before it.

        Returns:
            Where the run stands after it, and what was measured.
        """
        if self._arriving:
            assert self._phase.delivery is not None
            self._phase.delivery.arrived(self._arriving)
        wait_for([each.result for each in self.journal.stages], self._deadline_s)
        self._log_spans()
        if self.journal.published is not None:
            version = self.journal.published.read(self._deadline_s)
        return self._closed(version)

    def salvage(self, version: int, wait_s: float) -> tuple[Standing, dict[str, Metric]]:
        """Finish a step whose updates are whole, although ranks that made its rows have died.

        Its spans, and what those ranks measured, are lost.

        Args:
            version: the policy's before it.
            wait_s: longest wait for any stage.

        Raises:
            ClusterError: a trained role has not made its updates, or cannot tell.
        """
        self._deadline_s, self._is_cut = wait_s, True
        if self.journal.published is not None:
            version = self._phase.executor.on_first_rank("policy", version_of).read(wait_s)
        return self._closed(version)

    def _closed(self, version: int) -> tuple[Standing, dict[str, Metric]]:
        """Read what is known of it; see ``finish``."""
        wait_s, flow = self._deadline_s, self._phase.flow
        metrics: dict[str, Metric] = dict(self._phase.stream.metrics)
        for part in self._reports:
            metrics |= part.read(wait_s)
        metrics = self._sampled() | self._measured() | metrics
        if self.journal.published is not None:
            metrics["policy/version/max"] = Max(value=version)
        remembered = self._state["numbers"]
        numbers = {name: self._number(number) for name, number in remembered.items()}
        for name, number in numbers.items():
            if flow.state[name] is remembered[name]:  # no later step has remembered another
                flow.state[name] = number
        for role, skips in self._left_out.items():
            for skip in skips.read(wait_s):
                self._run.log_skip(self.number, role, skip.reason, skip.rows)
                told = f"an update of the {role} in step {self.number} was left out: {skip.reason}"
                self.skips.append(told)
        for group, reason in self._given_up:
            self._run.log_given_up(self.number, group, reason)
        updates = {role: each.read(wait_s) for role, each in self._updates.items()}
        state = {**self._state, "numbers": numbers, "version": version}
        self.journal, self._reports = Journal(), ()  # the store wants the room of its batches
        return Standing(step=self.number, state=state, updates=updates, rows=self._rows), metrics

    def _log_spans(self) -> None:
        """Write down the stages, and what moved meanwhile."""
        wait_s, executor = self._deadline_s, self._phase.executor
        # Whatever holds this process up between the two clocks makes it less.
        ahead_s = max(self._run.elapsed_s() - time.time() for _ in range(3))
        results = [(each.stage, each.result) for each in self.journal.stages]
        names = {part.stage: stage for stage, made in results for part in (made, *made.parts)}
        for stage, made in results:
            after = list(dict.fromkeys(names.get(source, source) for source in made.after))
            facts = [*made.worked, *made.facts(wait_s)]
            self._run.log_span(span_of(stage, self.number, facts, ahead_s, made.beside, after))
        moved, executor.moved = executor.moved, {}
        for stage, facts in moved.items():
            self._run.log_span(span_of(stage, self.number, facts, ahead_s, [], []))

    def _sampled(self) -> dict[str, Metric]:
        """What ranks measured of the rows that they hold."""
        known = [each for each in self._telemetry.measured if not self._is_lost(each)]
        found = [each.read(self._deadline_s) for each in known]
        return merge_metrics(
            share for each in found for share in (each if isinstance(each, list) else [each])
        )

    def _measured(self) -> dict[str, Metric]:
        """What the controller measured, and the numbers of formulas."""
        numbers: dict[str, Metric] = dict(self.journal.measured)
        for entry in self.journal.stages:
            if entry.is_number and not self._is_lost(entry.result):
                name = entry.stage.removeprefix(f"{CONTROLLER}.")
                numbers[f"flow/{name}/mean"] = Mean(total=self._number(entry.result), count=1)
        return numbers

    def _is_lost(self, result: Any) -> bool:
        """Whether the ranks of a result that a cut step may miss are gone with it."""
        return self._is_cut and isinstance(result, Pending) and result.has_failed

    def _number(self, number: Any) -> float:
        """A number of the flow, read where it is still a handle."""
        return number if isinstance(number, float) else float(number.read(self._deadline_s))


def version_of(policy: Policy) -> int:
    """The version that a policy has published last."""
    return policy.version


def span_of(
    stage: str, step: int, facts: Sequence[Facts], ahead_s: float, beside: Sequence[Facts], after: list[str]
) -> SpanRecord:
    """A stage as its ranks saw it.

    Args:
        stage: its name.
        step: the step it belongs to.
        facts: of the results that are taken.
        ahead_s: seconds of the run less those since the epoch.
        beside: facts of the same on ranks whose results nobody needs.
        after: the stages whose results it was given.
    """
    ranks = []
    for each in (*facts, *beside):
        start_s, took_s = max(0.0, each.began + ahead_s), each.ended - each.began
        size = {"rows": max(0, each.rows), "tokens": each.tokens}
        ranks.append(RankSpan(rank=each.place.rank, start_s=start_s, duration_s=took_s, **size))
    pool = facts[0].place.pool
    return SpanRecord.of_ranks(ranks, len(facts), step=step, stage=stage, pool=pool, after=after)
