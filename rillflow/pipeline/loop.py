"""The loop: one thread, one step after the other (freshness 0).

          ┌──────────────────────── for every step of every phase ───────────────────────┐
stream ── take ──> step(flow, data, config) ──> record ──> evaluate ──> checkpoint ──> interrupted?

consumes      prompts, demonstrations or pairs, in the stream's order
waits for     nothing but the stages themselves
produces      metrics, spans and rollouts of the step in the run directory; then, if due, an
              evaluation and a checkpoint. Batches stay with the ranks; it reads reports alone
shutdown      healthy: after the last step, with a checkpoint. First signal: after the present step,
              with a checkpoint. An error: with a checkpoint of the last whole step, where no trained role
              has made an optimiser step since. Second signal or crash: at once; the last checkpoint resumes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rillflow.dataflow.checkpoint import save_checkpoint, updates_of, write_role
from rillflow.dataflow.executor import GroupExecutor
from rillflow.dataflow.flow import Flow, Supply
from rillflow.errors import Interrupted, TrainingError
from rillflow.graph.graph import CONTROLLER
from rillflow.graph.handle import reports_of
from rillflow.observe import layout
from rillflow.observe.json_lines import read_lines
from rillflow.observe.progress import Progress
from rillflow.observe.reader import Evaluation, SpanRecord, best_checkpoint, read_evaluations
from rillflow.observe.run_directory import RunDirectory
from rillflow.observe.wording import duration
from rillflow.pipeline.interrupt import Interruption
from rillflow.pipeline.telemetry import record
from rillflow.records.batch import Batch
from rillflow.records.metrics import Max, Mean, Metric, Metrics
from rillflow.training.skipping import taken_skips
from rillflow.workers.pending import wait_for
from rillflow.workers.values import Facts

CHECKPOINT_SHARE = 0.02
"""The most of a run's time that checkpoints by the clock take."""
RESCUE_S = 600.0
"""The longest wait for each stage of a checkpoint after an error: a rank may have gone with it."""


@dataclass(frozen=True, kw_only=True)
class DataStream:
    """Where a phase's data comes from, and where it stands."""

    take: Callable[[int], Batch]
    """The next rows."""
    state: Callable[[], Mapping[str, int]]
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
    """The roles it trains; checkpoints hold them, and rows are recorded where the first one is."""
    stream: DataStream
    """Its data."""
    beside: DataStream | None
    """What its step is given beside them, as many rows; None where that is nothing."""
    evaluated: bool
    """Whether what is trained is judged before, after and during this phase."""


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How often the loop does what is not training; 0 means never between first and last."""

    evaluate_every: int
    """Steps between two evaluations."""
    checkpoint_every: int
    """Steps between two checkpoints."""
    checkpoint_s: float
    """Seconds between two checkpoints."""
    keep_checkpoints: int
    """Checkpoints that stay on the disk."""
    max_skipped: int
    """Updates that are not finite and left out, in the whole run, before it stops."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a run stands after a whole step."""

    step: int
    """The step, over all phases."""
    state: Mapping[str, Any]
    """What the controller goes on from."""
    updates: Mapping[str, int]
    """The optimiser steps of every trained role."""


class Loop:
    """Runs one phase from where it stands to its end.

    Args:
        run: where everything is recorded.
        progress: what the user sees.
        cadence: how often to evaluate and to checkpoint.
        judge: evaluates what is trained; None where nothing is held out.
        deadline_s: longest wait for any stage.
        interruption: the user's wish to stop.
        total_steps: steps of all phases; after the last one there is nothing left to interrupt.
        clock: seconds; what checkpoints by the clock are due by.
    """

    def __init__(
        self,
        run: RunDirectory,
        progress: Progress,
        cadence: Cadence,
        judge: Callable[[GroupExecutor], Evaluation] | None,
        interruption: Interruption,
        total_steps: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._progress = progress
        self._cadence = cadence
        self._judge = judge
        self._interruption = interruption
        self._total_steps = total_steps
        self._deadline_s = deadline_s
        self._clock = clock
        self._saved_at, self._saving_s, self._saved_step = clock(), 0.0, 0
        self._judged = {record.step for record in read_evaluations(run.path)}
        self._best = best_checkpoint(run.path)
        self.version = 0
        """The policy version published last."""

    def run_phase(self, phase: Phase, index: int, first: int, start: int) -> None:
        """Do the phase's steps ``start`` .. ``phase.steps``; ``first`` is the run's step before the phase.

        Raises:
            Interrupted: the user asked to stop; a checkpoint was written.
        """
        self._saved_step = first + start
        self._place = self._whole(phase, index, first + start, start)
        with self._rescued(phase):
            if start in (0, phase.steps) or _due(start, self._cadence.evaluate_every):
                self._evaluate(phase, first + start)
            for done in range(start + 1, phase.steps + 1):
                step, last = first + done, done == phase.steps
                metrics = self._step(phase, step)
                self._place = self._whole(phase, index, step, done)
                self._progress.step(phase.name, step, metrics, metrics["run/step_seconds/mean"].value)
                self._require_few_skipped(step)
                stopping = self._interruption.requested and step < self._total_steps
                best = False
                if last or (not stopping and _due(done, self._cadence.evaluate_every)):
                    best = self._evaluate(phase, step)
                if last or stopping or best or self._is_due(done):
                    path = self._checkpoint(phase, self._deadline_s)
                    if stopping:
                        raise Interrupted(
                            f"stopped after step {step}, as asked",
                            why=f"everything up to it is in {path}",
                            fix="give the same command to go on from there",
                        )

    def _note_skipped(self, phase: Phase, step: int, metrics: Metrics) -> None:
        """Write down the updates that the step left out."""
        if not any(name.endswith("/skipped/sum") for name in metrics):
            return
        for role in phase.trained:
            for skip in phase.executor.on_all_ranks(role, taken_skips).read(self._deadline_s):
                self._run.log_skip(step, role, skip.reason, skip.rows)
                self._progress.note(f"an update of the {role} in step {step} was left out: {skip.reason}")
        self._run.keep_bundle(step)

    def _require_few_skipped(self, step: int) -> None:
        lines = read_lines(self._run.path / layout.SKIPS).lines
        if len(lines) > self._cadence.max_skipped and lines[-1].data["step"] == step:
            raise TrainingError(
                f"{len(lines)} updates in all were not finite, the last in step {step}",
                why=f"run.max_skipped is {self._cadence.max_skipped}; that one: {lines[-1].data['reason']}",
                fix=f"look: rillflow replay {self._run.path}/bundles/step-{step:06d}; a lower policy.lr or a "
                "larger run.max_skipped goes on from here",
            )

    @contextmanager
    def _rescued(self, phase: Phase) -> Iterator[None]:
        """Keep the last whole step, if its weights are still there, when an error ends the run."""
        try:
            yield
        except Interrupted:
            raise
        except Exception as first:
            if self._place.step > self._saved_step:  # ranks that are at work, or stuck, may take their time
                what = (str(first) or type(first).__name__).splitlines()[0]
                self._progress.note(f"{what}; saving step {self._place.step} first")
            try:
                self._rescue(phase)
            except Exception as second:  # noqa: BLE001  what ended the run is the first error
                self._progress.note(f"no checkpoint could be written after the error: {second}")
            kept, lost = self._saved_step, self._place.step - self._saved_step
            again = f"; {lost} steps after it are made again" if lost else ""
            there = f"is saved{again}: the same command goes on from there"
            self._progress.note(f"step {kept} {there}" if kept else "no step is saved")
            raise

    def _rescue(self, phase: Phase) -> None:
        wait_s = min(RESCUE_S, self._deadline_s)
        if self._place.step > self._saved_step:
            phase.executor.mend(phase.trained, wait_s)
            if self._updates(phase, wait_s) == self._place.updates:
                self._checkpoint(phase, wait_s)

    def _step(self, phase: Phase, step: int) -> Metrics:
        began = time.monotonic()
        phase.flow.begin(
            Supply(take=phase.stream.take, gather=phase.executor.gather, deadline_s=self._deadline_s)
        )
        data, *beside = (each.take(phase.rows) for each in (phase.stream, phase.beside) if each is not None)
        reports = reports_of(phase.step(phase.flow, data, phase.config, *beside))
        metrics = {**self._record(phase, step), **phase.stream.metrics}
        for part in reports:
            metrics |= part.read(self._deadline_s)
        for name, number in phase.flow.state.items():
            phase.flow.state[name] = self._number(number)
        seconds = time.monotonic() - began
        self._note_skipped(phase, step, metrics)
        metrics["run/step_seconds/mean"] = Mean(total=seconds, count=1)
        self._run.log_metrics(step, phase.name, metrics)
        self._interruption.pace = f" (the last one took {duration(seconds)})"
        phase.flow.begin()  # evaluation and checkpoint need none of its batches, and the store wants the room
        return metrics

    def _record(self, phase: Phase, step: int) -> dict[str, Metric]:
        """Write down the step's stages and rows; return what was measured of them."""
        measures, batches = [], []
        numbers: dict[str, Metric] = dict(phase.flow.measured)
        wait_for([entry.result for entry in phase.flow.journal], self._deadline_s)
        for entry in phase.flow.journal:
            facts = entry.result.facts(self._deadline_s)
            self._run.log_span(_span(entry.stage, step, facts, self._run.elapsed_s()))
            role, _, name = entry.stage.partition(".")
            measure = phase.executor.measure(entry.stage)
            if facts[0].rows >= 0 and (measure is not None or role == CONTROLLER):
                measures.append(measure)
                batches.append(entry.result)
            if role == CONTROLLER and facts[0].rows < 0:
                numbers[f"flow/{name}/mean"] = Mean(total=self._number(entry.result), count=1)
        if phase.flow.published is not None:
            self.version = phase.flow.published.read(self._deadline_s)
            numbers["policy/version/max"] = Max(value=self.version)
        moved, phase.executor.moved = phase.executor.moved, {}
        for stage, facts in moved.items():
            self._run.log_span(_span(stage, step, facts, self._run.elapsed_s()))
        home, run = phase.trained[0], self._run.path.absolute()
        measured = phase.executor.on_first_rank(home, record, run, step, measures, *batches)
        return dict(measured.read(self._deadline_s)) | numbers

    def _number(self, number: Any) -> float:
        """A number of the flow, read where it is still a handle."""
        return number if isinstance(number, float) else float(number.read(self._deadline_s))

    def _evaluate(self, phase: Phase, step: int) -> bool:
        """Judge what is trained, where that is wanted and not yet done; whether it is the best so far."""
        if self._judge is None or not phase.evaluated or step in self._judged:
            return False
        found = self._judge(phase.executor)
        self._run.log_evaluation(step, **asdict(found))
        self._progress.note(f"after step {step}: {found.text}")
        self._judged.add(step)
        best = self._best
        return bool(found.mean_reward > (best.mean_reward if best is not None else -math.inf))

    def _is_due(self, done: int) -> bool:
        """Whether a checkpoint is, by steps or by the clock."""
        pause_s = max(self._cadence.checkpoint_s, self._saving_s / CHECKPOINT_SHARE)
        late = self._cadence.checkpoint_s > 0 and self._clock() - self._saved_at >= pause_s
        return late or _due(done, self._cadence.checkpoint_every)

    def _whole(self, phase: Phase, index: int, step: int, done: int) -> _Place:
        """Where the run stands now, after a whole step."""
        state = {
            "phase": index,
            "done": done,
            "version": self.version,
            "stream": dict(phase.stream.state()),
            "beside": dict(phase.beside.state()) if phase.beside is not None else None,
            "numbers": {name: self._number(number) for name, number in phase.flow.state.items()},
        }
        return _Place(step=step, state=state, updates=self._updates(phase, self._deadline_s))

    def _updates(self, phase: Phase, wait_s: float) -> dict[str, int]:
        """The optimiser steps of every trained role, once what it was last given is done."""
        asked = {role: phase.executor.on_first_rank(role, updates_of) for role in phase.trained}
        return {role: each.read(wait_s) for role, each in asked.items()}

    def _checkpoint(self, phase: Phase, wait_s: float) -> Path:
        """Save the last whole step, whose weights are those of now."""
        began, step = self._clock(), self._place.step

        def write(folder: Path) -> None:
            for role in phase.trained:
                phase.executor.on_all_ranks(role, write_role, folder.absolute()).read(wait_s)

        kept, spared = self._cadence.keep_checkpoints, self._best.step if self._best is not None else None
        path = save_checkpoint(
            self._run.checkpoints, step, write, self._place.state, kept, run=self._run.id, spare=spared
        )
        self._saved_step, self._saved_at = step, self._clock()
        self._saving_s = self._saved_at - began
        self._best = best_checkpoint(self._run.path)
        return path


def _span(stage: str, step: int, facts: Sequence[Facts], now_s: float) -> SpanRecord:
    """A stage as its ranks saw it: from the first that began to the last that ended."""
    began, ended = min(each.began for each in facts), max(each.ended for each in facts)
    return SpanRecord(
        step=step,
        stage=stage,
        start_s=max(0.0, now_s - (time.time() - began)),
        duration_s=ended - began,
        rows=sum(max(0, each.rows) for each in facts),
        tokens=sum(each.tokens for each in facts),
        pool=facts[0].pool,
    )


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
