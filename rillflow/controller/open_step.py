"""An open step: all its stages are submitted, and their results are not complete yet.

step(flow, data, config) ─┬─ stages ─────────────> journal                    ┐
                          ├─ update counts ──────> state of each trained role ├─ finish ─> metrics, spans
                          └─ rows and measures ──> the run directory          ┘

The calls that record a step are submitted with the step. Each rank therefore executes them before the calls
of later steps, however many steps are open.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rillflow.controller.checkpoint import AHEAD, updates_of
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import Flow, Journal, Supply
from rillflow.controller.pipeline_passes import passes_record
from rillflow.controller.saved_flight import FlightSave
from rillflow.controller.source import DataStream, Source
from rillflow.controller.step_executor import StepCalls
from rillflow.controller.telemetry import asked
from rillflow.graph.graph import CONTROLLER
from rillflow.graph.handle import reports_of
from rillflow.records.metrics import Max, Mean, Metric, merge_metrics
from rillflow.roles.policy import Policy
from rillflow.runs.passes import PassesRecord
from rillflow.runs.reader import RankSpan, SpanRecord
from rillflow.runs.run_directory import RunDirectory
from rillflow.training.skipping import taken_skips
from rillflow.workers.arguments import Facts
from rillflow.workers.pending import Pending, wait_for


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some steps of one algorithm."""

    name: str
    """Name in the records."""
    index: int
    """Index among the run's phases."""
    first: int
    """Steps of the run before the phase."""
    steps: int
    """Number of steps."""
    rows: int
    """Prompts, demonstrations or pairs of one step."""
    step: Callable[..., Any]
    """The algorithm; it returns a report, or several."""
    config: Any
    """Settings of the algorithm."""
    flow: Flow
    """The flow that the algorithm's step uses."""
    executor: GroupExecutor
    """The executor of the stages."""
    trained: tuple[str, ...]
    """Roles that the phase trains; checkpoints hold them."""
    source: Source
    """Prompts and sampled rows of its steps."""
    beside: DataStream | None
    """Second batch of each step, with as many rows; None if the algorithm needs only one batch."""
    evaluated: bool
    """Whether the trained model is evaluated before, during and after this phase."""
    freshness: int = 0
    """k: a step samples with the version published k steps before the version that it trains."""
    moving: tuple[str, ...] = ()
    """Untrained roles whose weights still change."""
    calls: StepCalls = field(default_factory=StepCalls)
    """Submits the calls of its steps."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Roles that checkpoints hold."""
        return (*self.trained, *self.moving)

    def updates(self, wait_s: float) -> dict[str, int]:
        """Return how often the weights of every kept role have changed; -1 if its ranks differ.

        Args:
            wait_s: longest wait for each rank, which first finishes its submitted calls.
        """
        executor, found = self.executor, dict[str, int]()
        ranks = {role: range(len(executor.groups[role].places)) for role in self.kept}
        asked = {role: [executor.on_rank(role, rank, updates_of) for rank in ranks[role]] for role in ranks}
        for role, every in asked.items():
            first, *others = {each.read(wait_s) for each in every}
            found[role] = -1 if others else first
        return found

    def state(self, done: int) -> dict[str, Any]:
        """Return the positions in the phase and its data after ``done`` steps, and remembered numbers."""
        beside = dict(self.beside.state()) if self.beside is not None else None
        data = {"stream": self.source.position(), "beside": beside}
        return {"phase": self.index, "done": done, **data, "numbers": dict(self.flow.state)}


@dataclass(frozen=True, kw_only=True)
class Standing:
    """State of a run after a finished step."""

    step: int
    """Number of the step, over all phases."""
    state: Mapping[str, Any]
    """State that the controller resumes from."""
    updates: Mapping[str, int]
    """How often the weights of every kept role have changed."""
    rows: Mapping[str, Pending]
    """Rows that steps have collected, by name."""


@dataclass(kw_only=True, eq=False)
class Save:
    """A checkpoint that ranks are writing."""

    step: int
    """Step that the checkpoint belongs to."""
    folder: Path
    """Folder that the ranks write to."""
    begun: list[Pending]
    """Results that are ready when the ranks have copied their state and may train on."""
    flight: FlightSave | None = None
    """Groups in flight that are being written; None if there are none to keep."""
    state: Mapping[str, Any] | None = None
    """State that the controller resumes from; None until the step is closed."""
    asked: list[Pending] = field(default_factory=list)
    """Latest results of asking every kept role whether its files are written."""

    def forget_flight(self) -> None:
        """Keep no groups in flight if they are not written: nothing writes them any more."""
        if self.flight is not None and not self.flight.is_written:
            self.flight = None
            shutil.rmtree(self.folder / AHEAD, ignore_errors=True)
            (self.folder / AHEAD).mkdir()


class OpenStep:
    """One step of a phase, submitted on construction.

    Args:
        phase: the phase of the step.
        done: steps of the phase, including this one.
        run: the run directory.
        deadline_s: longest wait for any stage.
        share: share of the prompts whose rollouts are recorded.
    """

    def __init__(
        self,
        phase: Phase,
        done: int,
        run: RunDirectory,
        deadline_s: float,
        share: float = 1.0,
    ) -> None:
        self.done = done
        self.number = number = phase.first + done
        """Number of the step, over all phases."""
        self.saving: Save | None = None
        """Checkpoint that began with the step, if any."""
        self.is_last = False
        """Whether the run ends after this step on request."""
        self.skips: list[str] = []
        """Messages about skipped updates."""
        self._passes: list[PassesRecord] = []
        self._is_cut = False
        self.began = phase.executor.backend.now()
        self._phase, self._run, self._deadline_s = phase, run, deadline_s
        flow, executor, source = phase.flow, phase.executor, phase.source
        count = partial(executor.count_rows, deadline_s=deadline_s)
        flow.begin(Supply(take=source.more, gather=executor.gather, count=count))
        self.journal: Journal = flow.journal
        data = source.take(number, phase.rows)
        beside = [] if phase.beside is None else [phase.beside.take(phase.rows)]
        self._reports: tuple[Any, ...] = reports_of(phase.step(flow, data, phase.config, *beside))
        flow.begin()  # only this object keeps the step's batches
        drawn = source.opened()
        self.journal.measured |= drawn.measured
        self._arriving, self._given_up = drawn.arriving, drawn.given_up
        self._telemetry = asked(executor, self.journal.stages, run.path.absolute(), number, share)
        self._updates = {role: executor.on_first_rank(role, updates_of) for role in phase.kept}
        self._left_out = {role: executor.on_all_ranks(role, taken_skips) for role in phase.trained}
        self.parcels = deque(drawn.parcels)
        """Published versions that no sampler has received yet."""
        self._state = phase.state(done)
        self._rows = dict(flow.rows)

    @property
    def late(self) -> list[Pending]:
        """Results that are not ready."""
        waited = [made.result for made in self.journal.stages]
        waited += [
            *self._telemetry.measured,
            *self._reports,
            *self._updates.values(),
            *self._left_out.values(),
        ]
        return [each for each in waited if not each.is_ready]

    @property
    def has_sampled(self) -> bool:
        """Whether all rows of the step are sampled."""
        made = [each.result for each in self.journal.stages if self._phase.executor.is_sampled(each.stage)]
        return all(each.is_ready and not each.has_failed for each in made)

    @property
    def writing(self) -> Sequence[Pending]:
        """Results that are ready when the rows are on disk; the loop waits for them one step later."""
        return self._telemetry.written

    def finish(self, version: int) -> tuple[Standing, dict[str, Metric]]:
        """Wait for the step, and record its stages and skipped updates.

        Args:
            version: the policy version before the step.

        Returns:
            The state of the run after the step, and the step's metrics.
        """
        moved = self._phase.source.moved(self._arriving)
        wait_for([each.result for each in self.journal.stages], self._deadline_s)
        self._log_spans(moved)
        if self.journal.published is not None:
            version = self.journal.published.read(self._deadline_s)
        return self._closed(version)

    def salvage(self, version: int, wait_s: float) -> tuple[Standing, dict[str, Metric]]:
        """Finish a step whose updates are complete although ranks that made its rows have died.

        The spans of the step, and the metrics of those ranks, are lost.

        Args:
            version: the policy version before the step.
            wait_s: longest wait for any stage.

        Raises:
            ClusterError: a trained role has not finished its updates, or cannot report them.
        """
        self._deadline_s, self._is_cut = wait_s, True
        published = self.journal.published
        if published is not None and published.has_failed:  # on its way to a dead sampler
            published = self._phase.executor.on_first_rank("policy", version_of)
        if published is not None:  # later open steps may have published since
            version = published.read(wait_s)
        return self._closed(version)

    def _closed(self, version: int) -> tuple[Standing, dict[str, Metric]]:
        """Read the results of the step; see ``finish``."""
        wait_s, flow = self._deadline_s, self._phase.flow
        metrics: dict[str, Metric] = dict(self._phase.source.metrics)
        for part in self._reports:
            metrics |= part.read(wait_s)
        metrics = {
            **self._sampled(),
            **self._measured(),
            **self._phase.calls.metrics(self._passes),
            **metrics,
        }
        if self.journal.published is not None:
            metrics["policy/version/max"] = Max(value=version)
        remembered = self._state["numbers"]
        numbers = {name: self._number(number) for name, number in remembered.items()}
        for name, number in numbers.items():
            if flow.state[name] is remembered[name]:  # no later step has changed it
                flow.state[name] = number
        for role, skips in self._left_out.items():
            for skip in skips.read(wait_s):
                self._run.log_skip(self.number, role, skip.reason, skip.rows)
                told = f"an update of the {role} in step {self.number} was skipped: {skip.reason}"
                self.skips.append(told)
        for group, reason in self._given_up:
            self._run.log_given_up(self.number, group, reason)
        updates = {role: each.read(wait_s) for role, each in self._updates.items()}
        state = {**self._state, "numbers": numbers, "version": version}
        self.journal, self._reports = Journal(), ()  # frees the step's batches in the store
        return Standing(step=self.number, state=state, updates=updates, rows=self._rows), metrics

    def _log_spans(self, moved: Mapping[str, Sequence[Facts]]) -> None:
        """Record the spans of the stages and of concurrent weight transfers."""
        wait_s = self._deadline_s
        # A pause of this process between the two clock readings makes the difference smaller.
        ahead_s = max(self._run.elapsed_s() - time.time() for _ in range(3))
        results = [(each.stage, each.result) for each in self.journal.stages]
        names = {part.stage: stage for stage, made in results for part in (made, *made.work.parts)}
        for stage, made in results:
            after = list(dict.fromkeys(names.get(source, source) for source in made.work.after))
            facts = [*made.work.worked, *made.facts(wait_s)]
            self._run.log_span(span_of(stage, self.number, facts, ahead_s, made.beside, after))
            ran = [each for each in (*facts, *made.beside) if each.runs]
            if ran and (passes := passes_record(stage, self.number, ran, ahead_s)) is not None:
                self._run.log_passes(passes)
                self._passes.append(passes)
        for stage, sent in moved.items():
            self._run.log_span(span_of(stage, self.number, sent, ahead_s, [], []))

    def _sampled(self) -> dict[str, Metric]:
        """Return the metrics of the rows, merged over ranks."""
        known = [each for each in self._telemetry.measured if not self._is_lost(each)]
        found = [each.read(self._deadline_s) for each in known]
        return merge_metrics(
            share for each in found for share in (each if isinstance(each, list) else [each])
        )

    def _measured(self) -> dict[str, Metric]:
        """Return the metrics of the controller, and the numbers of formulas."""
        numbers = {
            each.stage.removeprefix(f"{CONTROLLER}."): Mean(total=self._number(each.result), count=1)
            for each in self.journal.stages
            if each.is_number and not self._is_lost(each.result)
        }
        return self.journal.measured | {f"flow/{name}/mean": number for name, number in numbers.items()}

    def _is_lost(self, result: Any) -> bool:
        """Return whether a salvaged step misses this result because its ranks have died."""
        return self._is_cut and isinstance(result, Pending) and result.has_failed

    def _number(self, number: Any) -> float:
        """Return a number of the flow; read it if it is a handle."""
        return number if isinstance(number, float) else float(number.read(self._deadline_s))


def version_of(policy: Policy) -> int:
    """Return the version that a policy has published last."""
    return policy.version


def span_of(
    stage: str, step: int, facts: Sequence[Facts], ahead_s: float, beside: Sequence[Facts], after: list[str]
) -> SpanRecord:
    """Return the span of a stage from the times of its ranks.

    Args:
        stage: name of the stage.
        step: number of its step.
        facts: facts of the ranks whose results are taken.
        ahead_s: clock of the run minus seconds since the epoch.
        beside: facts of the other ranks that ran the stage.
        after: names of the stages whose results are its arguments.
    """
    ranks = []
    for each in (*facts, *beside):
        start_s, took_s = max(0.0, each.began + ahead_s), each.ended - each.began
        size = {"rows": max(0, each.rows), "tokens": each.tokens}
        ranks.append(RankSpan(rank=each.place.rank, start_s=start_s, duration_s=took_s, **size))
    pool = facts[0].place.pool
    return SpanRecord.of_ranks(ranks, len(facts), step=step, stage=stage, pool=pool, after=after)
