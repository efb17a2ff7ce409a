"""Sweep: run the runs of a plan, a few at once; skip finished ones, resume others, and write the table.

    waiting ─ at most at_once ─> running ─┬─ exit 0 ──────────────────────────> finished
       ^                                  ├─ median rule: interrupt ──────────> stopped, for good
       └── 130: a run of another sweep ───┼─ exit 1, 2: the error of its log ─> failed; others go on
                                          └─ Ctrl-C: every run writes a checkpoint; the same command resumes

Loop (in the main thread)
    consumes      exit codes of jobs; evaluations in their run directories
    waits for     the next look, LOOK_S later
    produces      run directories, as ``rillflow run`` does; sweep.json, table.json and table.csv
    shuts down    first signal: all jobs are interrupted, and it waits for their checkpoints; second: killed
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rillflow.app.resolved import Resolved
from rillflow.app.resume import is_finished
from rillflow.errors import Interrupted, signal_of
from rillflow.runs import durable
from rillflow.runs.ending_signals import ENDING, signal_name
from rillflow.runs.json_lines import JSON, encode, read_json
from rillflow.runs.reader import EvaluationRecord, read_evaluations
from rillflow.runs.summary import alike
from rillflow_parts.sweeps.jobs import ForeignJob, Jobs, SweepJob, is_held
from rillflow_parts.sweeps.median import Result, below_median
from rillflow_parts.sweeps.plan import SweepPlan, SweepRun
from rillflow_parts.sweeps.table import CaseResult, RunResult, RunState, as_csv, as_json, as_text, ranked

LOOK_S = 0.2
"""Seconds between two looks at the runs."""
_TAIL_BYTES = 8192


class Sweep:
    """The runs of a sweep.

    Args:
        plan: what to run.
        jobs: where to run it.
        say: receives one line about each run that starts or ends.
    """

    def __init__(self, plan: SweepPlan, jobs: Jobs, say: Callable[[str], None]) -> None:
        self._plan, self._jobs, self._say = plan, jobs, say
        self._running: dict[SweepRun, SweepJob] = {}
        self._waiting: list[SweepRun] = []
        self._failed: dict[SweepRun, str] = {}
        self._stopped = dict[SweepRun, str]()
        self._seen: dict[SweepRun, int] = {}
        self._found: dict[SweepRun, list[Result]] = {}

    def run(self) -> list[CaseResult]:
        """Run everything that is not finished; return the table, which is also in the sweep's directory.

        Raises:
            Interrupted: the user asked to stop; every run has a checkpoint.
        """
        with durable.writing(self._plan.path):
            self._plan.path.mkdir(parents=True, exist_ok=True)
        kept = self._kept()
        for run in self._plan.runs:
            if str(run.path) in kept and not self._is_done(run):
                self._stopped[run] = kept[str(run.path)]
            elif not self._is_done(run):
                self._waiting.append(run)
        left = len(self._plan.runs) - len(self._waiting)
        self._say(
            f"{len(self._plan.runs)} runs in {self._plan.path}" + (f", {left} of them done" if left else "")
        )
        with self._ended_on_signal():
            while self._waiting or self._running:
                self._settle()
                self._begin()
                self._stop_worst()
                time.sleep(LOOK_S if self._running else 0.0)
        return self._written()

    def table(self) -> list[CaseResult]:
        """Return the table so far; run nothing."""
        kept = self._kept()
        self._stopped = {run: kept[str(run.path)] for run in self._plan.runs if str(run.path) in kept}
        return ranked(self._results())

    def _is_done(self, run: SweepRun) -> bool:
        if isinstance(run.recipe, Resolved):
            return is_finished(run.recipe, run.path)
        return run.recipe.is_finished

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._plan.config.at_once:
            run = self._waiting.pop(0)
            if is_held(run.path):
                self._say(f"{run.name}: another process runs it")
                self._running[run] = ForeignJob(run.path)
                continue
            with durable.writing(run.path):
                run.path.parent.mkdir(parents=True, exist_ok=True)
            self._say(f"{run.name}: {'resumes' if run.path.exists() else 'starts'}")
            self._running[run] = self._jobs.start(run.words, run.log)

    def _settle(self) -> None:
        """Process the runs that have ended."""
        for run, job in [*self._running.items()]:
            code = job.poll()
            if code is None:
                continue
            del self._running[run]
            if self._is_done(run):
                self._say(f"{run.name}: {_told(self._result(run, _last(run.path)))}")
            elif run in self._stopped:
                self._say(f"{run.name}: {self._stopped[run]}")
            elif isinstance(job, ForeignJob):
                self._waiting.insert(0, run)
            else:
                why = (
                    f"it was ended by {signal_name(code - 128)}"
                    if code - 128 in ENDING
                    else error_in(run.log)
                )
                self._failed[run] = why or f"it ended with exit code {code}"
                self._say(f"{run.name}: failed: {self._failed[run]}")
            self._written()

    def _stop_worst(self) -> None:
        """Interrupt the runs that the median rule stops, at their newest evaluation."""
        rule = self._plan.config.stop
        if rule is None:
            return
        for run in self._running:
            self._found[run] = results_of(run.path)
        found = {run: self._found.get(run) or results_of(run.path) for run in self._plan.runs}
        self._found |= found
        for run, job in self._running.items():
            own = found[run]
            if run in self._stopped or not own or own[-1].step == self._seen.get(run):
                continue
            self._seen[run] = own[-1].step
            others = [results for other, results in found.items() if other is not run]
            why = below_median(own, others, rule)
            if why:
                self._stopped[run] = why
                job.interrupt()

    @contextmanager
    def _ended_on_signal(self) -> Iterator[None]:
        """End the runs in order if a signal ends the loop.

        Raises:
            Interrupted: a signal came.
        """
        try:
            yield
        except KeyboardInterrupt as signalled:
            number = signal_of(signalled)
            try:
                for job in self._running.values():
                    job.interrupt()
                name = "Ctrl-C" if number == signal.SIGINT else signal_name(number)
                self._say(
                    f"{name}: each run finishes its step and writes a checkpoint; repeat to stop at once"
                )
                while any(
                    job.poll() is None for job in self._running.values() if not isinstance(job, ForeignJob)
                ):
                    time.sleep(LOOK_S)
            except KeyboardInterrupt:
                for job in self._running.values():
                    job.kill()
            self._written()
            raise Interrupted(
                "the sweep was stopped, as requested",
                why=f"its runs are in {self._plan.path}",
                fix="run the same command to resume",
                number=number,
            ) from None
        except BaseException:
            for job in self._running.values():
                job.interrupt()
            raise

    def _results(self) -> list[RunResult]:
        """Return the result of every run: accuracies only if every run has one."""
        last = {run: found for run in self._plan.runs if (found := _last(run.path)) is not None}
        comparable = dict(zip(last, alike([*last.values()]), strict=True))
        return [self._result(run, comparable.get(run)) for run in self._plan.runs]

    def _result(self, run: SweepRun, last: EvaluationRecord | None) -> RunResult:
        state, why = RunState.WAITING, ""
        if self._is_done(run):
            state = RunState.FINISHED
        elif run in self._running:
            state = RunState.RUNNING
        elif run in self._stopped:
            state, why = RunState.STOPPED, self._stopped[run]
        elif run in self._failed:
            state, why = RunState.FAILED, self._failed[run]
        if last is None or last.value != last.value:
            return RunResult(run=run, state=state, why=why)
        return RunResult(run=run, state=state, why=why, step=last.step, value=last.value, measure=last.name)

    def _written(self) -> list[CaseResult]:
        """Write the sweep's files; return the table."""
        cases = ranked(self._results())
        stopped: dict[str, JSON] = {str(run.path): why for run, why in self._stopped.items()}
        files = {
            "sweep.json": encode({"name": self._plan.name, "stopped": stopped}, indent=2),
            "table.json": encode(as_json(self._plan.name, cases), indent=2),
            "table.csv": as_csv(cases).encode(),
            "table.txt": f"{as_text(cases)}\n".encode(),
        }
        for name, content in files.items():
            durable.replace(self._plan.path / name, [content])
        return cases

    def _kept(self) -> dict[str, str]:
        """Return the runs that the median rule stopped in an earlier start, with the reasons."""
        file = self._plan.path / "sweep.json"
        found = read_json(file).get("stopped") if file.exists() else {}
        return {path: str(why) for path, why in found.items()} if isinstance(found, dict) else {}


def _last(run: Path) -> EvaluationRecord | None:
    """Return a run's last evaluation on held-out rows; None without one."""
    found = read_evaluations(run)
    return found[-1] if found else None


def results_of(run: Path) -> list[Result]:
    """Return the held-out results of a run so far, without that before its first step."""
    found = read_evaluations(run)
    return [
        Result(step=each.step, value=each.value) for each in found if each.step and each.value == each.value
    ]


def error_in(log: Path) -> str:
    """Return the error at the end of a run's output, with its reason, in one line."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("error: ")]
    if not starts:
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    what, *rest = lines[starts[-1] :]
    why = [line.strip() for line in rest if line.startswith("  why: ")]
    return "; ".join([what.removeprefix("error: "), *(each.removeprefix("why: ") for each in why[:1])])


def _told(result: RunResult) -> str:
    if result.value is None:
        return "finished, without a held-out result"
    return f"finished with a held-out {result.measure} of {result.value:.4g}"
