"""The training loop: run steps in order in one thread, with at most freshness + 1 in flight.

           ┌───────────── for every step of every phase ─────────────┐
source ── take, rows ──> open: step(flow, data, config) ──> close ──> interrupted?
   ^                       └─ up to k more are opened ─┘      │
   └──────────── deliver: the version that it published ──────┴─> records, evaluation, checkpoint

consumes      prompts and rows of the source; demonstrations or pairs, in the stream's order
waits for     the oldest open step; at k = 0 it is the only one. Meanwhile the source may run rows
unblocked by  the ranks of that step; every wait ends at the deadline
produces      metrics, spans and rollouts of the step in the run directory; a version for the source; then,
              if due, an evaluation and a checkpoint. Batches stay on the ranks; the loop reads only reports
shutdown      healthy: after the last step, with a checkpoint. First signal: after the newest open step,
              with a checkpoint; before a step is open, at once. If the open steps do not end in ``stop_s``:
              with a checkpoint of the newest finished step, if no weights have changed since. Error:
              with a checkpoint of the newest step with complete updates, on the same condition; a dead
              sampler does not prevent it. Second signal or crash: at once; resume from the last checkpoint.

With k > 0 the sampler runs on its own ranks and receives a version when the step that published it is closed.
Step t samples with version max(0, t - k) of the phase, independent of timing, since ranks run calls in order.
Trained roles write a checkpoint between their step and the next. The source adds what it has sampled or drawn
for later steps (``controller.source``). The loop asks the source at these points and never which kind it is.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rillflow.controller.cadence import Cadence, is_due
from rillflow.controller.checkpoint import AHEAD, COLLECTED, begin_saving, written
from rillflow.controller.executor import GroupExecutor, write_rows
from rillflow.controller.interrupt import Interruption, RunStage, stopped
from rillflow.controller.open_step import OpenStep, Phase, Save, Standing
from rillflow.controller.run_checkpoint import save_in
from rillflow.controller.saved_flight import FLIGHT
from rillflow.errors import Interrupted, RillflowError
from rillflow.records.metrics import Mean, Metric, Metrics
from rillflow.runs.durable import write_error
from rillflow.runs.formatting import duration
from rillflow.runs.progress import Progress
from rillflow.runs.reader import Evaluation, best_checkpoint, read_every_evaluation
from rillflow.runs.run_directory import RunDirectory
from rillflow.workers.backend import RankDied
from rillflow.workers.pending import Pending, wait_for

RESCUE_S = 600.0
"""Longest wait, in seconds, for each stage of a checkpoint after an error: a rank may have died."""


class Loop:
    """Loop over the steps of one phase, from its current step to its end.

    Args:
        run: the run directory that receives all records.
        progress: the display for the user.
        cadence: how often to evaluate and to checkpoint.
        evaluator: evaluates the trained model on the held-out rows, if there are any, and then on each
            named set; None if there are neither.
        deadline_s: longest wait for any stage.
        interruption: tells whether the user wants to stop.
        total_steps: steps of all phases; after the last one there is nothing left to interrupt.
        clock: returns seconds on the backend's clock, for checkpoints that are due and the time of a step.
    """

    def __init__(
        self,
        run: RunDirectory,
        progress: Progress,
        cadence: Cadence,
        evaluator: Callable[[GroupExecutor], Sequence[Evaluation]] | None,
        interruption: Interruption,
        total_steps: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._progress = progress
        self._cadence = cadence
        self._evaluator = evaluator
        self._interruption = interruption
        self._total_steps = total_steps
        self._deadline_s = deadline_s
        self._clock = clock
        self._saved_at, self._saving_s, self._saved_step = clock(), 0.0, 0
        self._finished_at = 0.0
        self._writing: Sequence[Pending] = ()
        self._written_step = 0
        known = read_every_evaluation(run.path)
        self._evaluated = {record.step for record in known if record.set == cadence.last_set}
        self._graded = {record.set for record in known if not record.is_accuracy}
        best = best_checkpoint(run.path)
        self._best_reward = -math.inf if best is None else best.mean_reward
        self._saves = deque[Save]()
        self._left = ""
        self._discard()  # leftovers of a killed run
        self.version = 0
        """Policy version of the last publish."""

    def run_phase(self, phase: Phase, start: int) -> None:
        """Run the steps of a phase that follow the first ``start`` ones.

        Raises:
            Interrupted: the user asked to stop; a checkpoint was written.
        """
        self._place = self._here(phase, start)
        self._saved_step = self._place.step
        opened = deque[OpenStep]()
        with self._rescued(phase, opened):
            if start in (0, phase.steps) or is_due(start, self._cadence.evaluate_every):
                self._evaluate(phase, self._place.step)
            phase.source.begin(partial(self._close_done, phase, opened), self._place.step)
            for done in range(start + 1, phase.steps + 1):
                self._close_until(phase, opened, phase.freshness)
                if not opened:
                    self._stop_between(phase)
                self._interruption.stage = RunStage.TRAINING
                opened.append(self._open(phase, done))
            self._close_until(phase, opened, 0)

    def _close_until(self, phase: Phase, opened: deque[OpenStep], most: int) -> None:
        """Finish open steps, oldest first, until at most ``most`` are left."""
        with self._interruption.abandonable():
            phase.source.until(lambda: len(opened) <= most)
        while len(opened) > most:
            self._close(phase, opened)

    def _close_done(self, phase: Phase, opened: deque[OpenStep]) -> Sequence[Pending] | None:
        """Deliver a version, or finish the oldest open step, if it is ready; see ``Source.begin``."""
        if not opened:
            return ()
        oldest = opened[0]
        late = oldest.parcels[0].late if oldest.parcels else []
        if oldest.parcels and not late:
            phase.source.deliver(oldest.parcels.popleft())
        elif late := [*late, *oldest.late]:
            return late
        else:
            self._close(phase, opened)
        return None

    @contextmanager
    def _rescued(self, phase: Phase, opened: deque[OpenStep]) -> Iterator[None]:
        """Save the last complete step when an error ends the run, if its weights still exist."""
        try:
            yield
        except Interrupted:
            raise
        except KeyboardInterrupt:
            if not self._interruption.is_over:  # a second signal
                raise
            raise self._abandoned(phase, opened) from None
        except Exception as first:
            cut = opened if self._is_cut(phase, first) else ()
            what = (str(first) or type(first).__name__).splitlines()[0]
            if cut or self._saves or self._is_unsaved(phase):  # before any message, which may fail
                outcome = "the finished steps were saved first"
                slow = self._progress.if_slow("an error; saving the finished steps first")
                try:  # running or stuck ranks may take a while
                    with slow, self._interruption.abandonable():
                        self._rescue(phase, cut)
                except Exception as second:  # noqa: BLE001  the first error ended the run
                    outcome = f"no checkpoint could be written after the error: {second}"
                except KeyboardInterrupt:
                    if not self._interruption.is_over:  # a second signal
                        raise
                    self._progress.note(f"{what}; saving took too long")
                    self._discard()
                    raise self._abandoned(phase, ()) from None
                self._progress.note(f"{what}; {outcome}")
            kept, lost = self._saved_step, self._place.step - self._saved_step
            again = f"; {lost} steps after it will run again" if lost else ""
            again += "" if isinstance(first, RankDied) else ": run the same command to resume"
            self._progress.note(f"step {kept} is saved{again}" if kept else "no step is saved")
            raise
        finally:
            self._discard()

    def _is_cut(self, phase: Phase, error: Exception) -> bool:
        """Return whether open steps may be complete although a rank died: its pool has no trained role."""
        pools = {phase.executor.groups[role].places[0].pool for role in phase.trained}
        return phase.source.is_salvageable and isinstance(error, RankDied) and error.pool not in pools

    def _is_unsaved(self, phase: Phase) -> bool:
        """Return whether the last complete step is not saved yet and no later step has begun."""
        return self._place.step > self._saved_step and not phase.freshness

    def _abandoned(self, phase: Phase, opened: Collection[OpenStep]) -> Interrupted:
        """End all calls; save the newest finished step, and at k > 0 rows of later ones. Return the error."""
        wait_s, last = phase.executor.abandon(), self._place.step
        why = self._left or f"step {last + 1}"
        why += f" did not end within {self._interruption.stop_s:g} s (run.stop_s) and was abandoned"
        try:
            phase.executor.mend(phase.kept, wait_s)
            for save in self._saves:
                save.forget_flight()
            is_unchanged = phase.updates(wait_s) == self._place.updates
            self._settle(phase, RESCUE_S, wait=True)
            begun = next((save for save in self._saves if save.step == last), None)
            if last > self._saved_step and (begun or is_unchanged):
                self._keep_written(RESCUE_S)
                save = begun or self._begin_saving(phase, last, self._place.rows)
                later = [each for each in opened if phase.freshness and each.has_sampled]
                self._checkpoint(phase, RESCUE_S, save, later, wait=True)
            elif last > self._saved_step:
                why += f" after its first update, so step {last} could not be saved"
        except RillflowError as error:
            why += f"; step {last} could not be saved: {error.what}"
        return self._stopped(self._saved_step, why)

    def _stopped(self, step: int, why: str = "") -> Interrupted:
        path = self._run.checkpoints / f"step-{step:06d}" if step else None
        return stopped(step, path, why, by=self._interruption.by)

    def _rescue(self, phase: Phase, cut: Collection[OpenStep]) -> None:
        """Save the newest step with complete updates, if the weights of its roles have not changed since.

        Args:
            phase: the phase that an error ended.
            cut: open steps that may be complete except for results of dead ranks, oldest first.
        """
        wait_s = min(RESCUE_S, self._deadline_s)
        if not cut and not phase.freshness:  # nothing of the open step is kept
            self._keep_written(wait_s)
            phase.executor.abandon()
        phase.executor.mend(phase.trained, wait_s)
        self._saves = deque(each for each in self._saves if each.flight is None or each.flight.is_written)
        self._settle(phase, wait_s, wait=True)
        self._discard()
        may_save = bool(cut) or self._is_unsaved(phase)
        for step in cut:
            if not self._salvaged(phase, step, wait_s):
                break
        if may_save and self._place.step > self._saved_step and phase.updates(wait_s) == self._place.updates:
            self._keep_written(wait_s)
            save = self._begin_saving(phase, self._place.step, self._place.rows)
            self._checkpoint(phase, wait_s, save, wait=True)

    def _salvaged(self, phase: Phase, step: OpenStep, wait_s: float) -> bool:
        """Record a step if its updates are complete; return whether they are."""
        try:
            place, metrics = step.salvage(self.version, wait_s)
        except RillflowError:
            return False
        self._keep_written(wait_s)
        self._record(phase, step, place, metrics)
        return True

    def _keep_written(self, wait_s: float) -> None:
        """Wait until rows of finished steps are on disk; record the rows on dead ranks as lost."""
        left = [each for each in self._writing if not each.has_failed]
        if len(left) < len(self._writing):
            self._run.evidence.of_lost_rollouts(
                self._written_step, "the ranks that held them died or could not write"
            )
        self._writing = left
        self._written(wait_s)

    def _open(self, phase: Phase, done: int) -> OpenStep:
        """Submit a step; at k > 0 also begin its checkpoint if one, or an evaluation, is due after it."""
        is_recorded = is_due(phase.first + done, self._cadence.rollouts_every)
        share = self._cadence.rollouts_share if is_recorded else 0.0
        with self._interruption.abandonable():
            step = OpenStep(phase, done, self._run, self._deadline_s, share)
        for save in (each for each in self._saves if all(asked.is_ready for asked in each.asked)):
            self._ask(phase, save, wait=False)
        looked_at = phase.evaluated and is_due(done, self._cadence.evaluate_every)
        is_last = step.number == self._interruption.last
        if phase.freshness and (done == phase.steps or looked_at or is_last or self._is_due(done)):
            step.saving = self._begin_saving(phase, step.number, phase.flow.rows, is_ahead=True)
        return step

    def _close(self, phase: Phase, opened: deque[OpenStep]) -> None:
        """Finish the oldest open step, then do the evaluation and checkpoint that are due after it.

        Raises:
            Interrupted: the user asked to stop after this step; a checkpoint was written.
        """
        step = opened[0]
        with self._interruption.abandonable():
            wait_for([each.result for each in step.journal.stages], self._deadline_s)
        with self._interruption.abandonable(False):
            metrics = self._finish(phase, step)
            opened.popleft()
            self._closed(phase, step, metrics, opened)

    def _closed(self, phase: Phase, step: OpenStep, metrics: Metrics, opened: Collection[OpenStep]) -> None:
        """Do what is due after a finished step; see ``_close``."""
        self._progress.step(phase.name, step.number, metrics, metrics["run/step_seconds/mean"].value)
        self._cadence.require_few_skipped(self._run.path, step.number)
        last, reward = step.done == phase.steps, -math.inf
        if self._interruption.requested and step.number < self._total_steps:
            self._stop_after(phase, step, opened)
        while step.parcels:
            phase.source.deliver(step.parcels.popleft())
        self._settle(phase, self._deadline_s, wait=False)
        if last or (not step.is_last and is_due(step.done, self._cadence.evaluate_every)):
            reward = self._evaluate(phase, step.number)
        best, self._best_reward = reward > self._best_reward, max(self._best_reward, reward)
        self._interruption.end_early(self._cadence.exhausted(self._run.path))
        ends = step.is_last or step.number == self._interruption.last
        if step.saving or (not phase.freshness and (last or best or ends or self._is_due(step.done))):
            self._checkpoint(phase, self._deadline_s, step.saving, opened, wait=last or ends)
            if ends:
                raise self._stopped(step.number)

    def _stop_between(self, phase: Phase) -> None:
        """End the run on request while no step is open.

        Raises:
            Interrupted: the user asked to stop.
        """
        step = self._place.step
        self._interruption.end_early(self._cadence.exhausted(self._run.path))
        if not self._interruption.requested or step >= self._total_steps:
            return
        if self._is_unsaved(phase):
            self._checkpoint(phase, self._deadline_s, wait=True)
        if step == self._saved_step:
            raise self._stopped(step)

    def _stop_after(self, phase: Phase, step: OpenStep, later: Collection[OpenStep]) -> None:
        """Mark the newest open step as the run's last; the steps before it still run to their end."""
        every = (step, *later)
        newest = every[-1]
        if newest.number < self._total_steps and not any(each.is_last for each in every):
            newest.is_last = True
            if phase.freshness and newest.saving is None:
                newest.saving = self._begin_saving(phase, newest.number, phase.flow.rows, is_ahead=True)

    def _finish(self, phase: Phase, step: OpenStep) -> Metrics:
        """Wait for a step and record it."""
        place, metrics = step.finish(self.version)
        self._written(self._deadline_s)  # the rows of the previous step
        self._record(phase, step, place, metrics)
        return metrics

    def _record(self, phase: Phase, step: OpenStep, place: Standing, metrics: dict[str, Metric]) -> None:
        """Record a finished step."""
        self._writing, self._written_step, self.version = step.writing, step.number, place.state["version"]
        began, self._finished_at = max(step.began, self._finished_at), self._clock()
        seconds = self._finished_at - began
        if step.skips:
            self._run.keep_bundle(step.number)
        metrics["run/step_seconds/mean"] = Mean(total=seconds, count=1)
        self._run.log_metrics(step.number, phase.name, metrics)
        self._place = place  # a step without a line of metrics runs again
        for told in step.skips:
            self._progress.note(told)
        self._interruption.pace = f" (the last one took {duration(seconds)})"

    def _evaluate(self, phase: Phase, step: int) -> float:
        """Evaluate the trained model if an evaluation is due and not done yet.

        Returns:
            The mean reward of the held-out rows; minus infinity if they were not evaluated.
        """
        if self._evaluator is None or not phase.evaluated or step in self._evaluated:
            return -math.inf
        self._written(self._deadline_s)  # frees the memory of its rows
        try:
            with self._interruption.abandonable():
                phase.source.settle(step)
                every = self._evaluator(phase.executor)
        except KeyboardInterrupt:
            self._left = f"the evaluation after step {step}"
            raise
        self._graded |= {found.set for found in every if not found.is_accuracy}
        for found in reversed(every):  # the last line shows that all are written
            # A mean reward keeps its name even if all rewards of a later evaluation are 0 or 1.
            told = replace(found, is_accuracy=found.set not in self._graded)
            self._run.log_evaluation(step, told)
            self._progress.note(f"after step {step}: {told.text}")
        self._evaluated.add(step)
        return -math.inf if every[0].set else every[0].mean_reward

    def _is_due(self, done: int) -> bool:
        """Return whether a checkpoint is due, by steps or by the clock."""
        since_s = self._clock() - self._saved_at
        return self._cadence.wants_checkpoint(done, since_s=since_s, last_took_s=self._saving_s)

    def _here(self, phase: Phase, done: int) -> Standing:
        """Return the state of the run where a phase begins or resumes."""
        state = {**phase.state(done), "version": self.version}
        updates = phase.updates(self._deadline_s)
        return Standing(step=phase.first + done, state=state, updates=updates, rows=dict(phase.flow.rows))

    def _begin_saving(
        self, phase: Phase, step: int, rows: Mapping[str, Pending], *, is_ahead: bool = False
    ) -> Save:
        """Have the ranks write their state and collected rows, and the source its groups in flight."""
        folder = self._run.checkpoints.absolute() / f".step-{step:06d}.begun"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            (folder / (COLLECTED if rows else "")).mkdir(parents=True, exist_ok=True)
            if phase.freshness:
                (folder / AHEAD).mkdir()
        except OSError as error:
            raise write_error(folder, error) from error
        begun = [phase.executor.on_all_ranks(role, begin_saving, folder) for role in phase.kept]
        for name, each in rows.items():
            file = str(folder / COLLECTED / f"{name}.safetensors")
            begun.append(phase.executor.apply(write_rows, file, each, place=each.places[0]))
        flight = phase.source.begin_saving(folder / AHEAD) if is_ahead else None
        save = Save(step=step, folder=folder, begun=begun, flight=flight)
        self._saves.append(save)
        self._ask(phase, save, wait=False)
        self._saved_at = self._clock()
        return save

    def _ask(self, phase: Phase, save: Save, *, wait: bool) -> None:
        asked = (phase.executor.on_all_ranks(role, written, save.folder, wait) for role in phase.kept)
        save.asked = list(asked)

    def _written(self, wait_s: float) -> None:
        """Wait until the rows of finished steps are on disk."""
        wait_for(self._writing, wait_s)
        for each in self._writing:
            made = each.read(wait_s)
            for digests in made if isinstance(made, list) else [made]:
                self._run.evidence.of_rollouts(self._written_step, digests)
        self._writing = ()

    def _checkpoint(
        self,
        phase: Phase,
        wait_s: float,
        save: Save | None = None,
        later: Collection[OpenStep] = (),
        *,
        wait: bool,
    ) -> None:
        """Save the last complete step: the ranks' state now, or their state before later steps began.

        The previous checkpoint is complete afterwards; this one is complete only if ``wait``.
        """
        began = self._clock()
        self._written(wait_s)
        self._settle(phase, wait_s, wait=True)
        save = save or self._begin_saving(phase, self._place.step, self._place.rows)
        wait_for([*save.begun, *save.asked], wait_s)
        for each in later:
            name = str(save.folder / AHEAD / f"step-{each.number:06d}")
            wait_for(phase.source.save_sampled(each.journal.stages, name), wait_s)
        save.state = self._place.state
        self._settle(phase, wait_s, wait=wait, must=True)
        self._saved_at = self._clock()
        self._saving_s = self._saved_at - began

    def _settle(self, phase: Phase, wait_s: float, *, wait: bool, must: bool = False) -> None:
        """Complete written checkpoints of closed steps; leave out others if none ``must`` be there."""
        while self._saves and self._saves[0].state is not None:
            save = self._saves.popleft()
            try:
                if save.flight is not None and wait:
                    if not phase.source.finish_saving(save.flight, must=must):
                        continue
                elif save.flight is not None and not save.flight.is_written:
                    self._saves.appendleft(save)
                    return
                if wait:
                    self._ask(phase, save, wait=True)
                is_told = wait or all(each.is_ready for each in save.asked)
                answers = [each.read(wait_s) for each in save.asked] if is_told else []
                if not answers or None in answers:
                    self._saves.appendleft(save)
                    return
                self._complete(save, {name: it for files in answers for name, it in files.items()})
            finally:
                if save not in self._saves:
                    shutil.rmtree(save.folder, ignore_errors=True)

    def _discard(self) -> None:
        """Remove unfinished checkpoints."""
        self._saves.clear()
        for left in self._run.checkpoints.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)

    def _complete(self, save: Save, files: Mapping[str, Any]) -> None:
        def write(folder: Path) -> Mapping[str, Any]:
            for part in save.folder.iterdir():
                part.rename(folder / part.name)
            save.folder.rmdir()
            return files

        assert save.state is not None  # its step is closed
        flight = {} if save.flight is None else {FLIGHT: save.flight.finish(self._deadline_s)}
        save_in(self._run, save.step, write, {**save.state, **flight}, self._cadence.keep_checkpoints)
        self._saved_step = save.step
