"""Progress: the output during a run.

on a terminal     one bar per phase, redrawn in place, with the time left; notes scroll by above
anywhere else     one plain line per step, readable and searchable in a log file or a notebook
quiet             nothing
output failed     one plain line per step in the run directory's output.log, after a note there and on stderr

No method raises an error of an output: a run goes on without its screen (``runs.standard_streams``).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import RLock, Timer
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from rillflow.records.metrics import Mean, Metrics
from rillflow.runs.formatting import duration, number, visible
from rillflow.runs.output_log import OutputLog
from rillflow.runs.sampler_gap import MismatchWatch, gap_warning
from rillflow.runs.standard_streams import failure_of
from rillflow.runs.uniform_rewards import IN_A_ROW, NOTHING_SEEN, streaks

SLOW_S = 5.0
"""Seconds after which ``if_slow`` writes its line."""
HEADLINE = {
    "reward/score/mean": "reward",
    "episode/return/mean": "return",
    "supervised/nll/mean": "nll",
    "supervised/accuracy/mean": "token accuracy",
    "policy/loss/mean": "loss",
    "preference/loss/mean": "loss",
    "preference/accuracy/mean": "accuracy",
    "policy/entropy/mean": "entropy",
    "mismatch/weight/mean": "importance weight",
    "mismatch/bounded/share": "bounded",
    "rollout/length/mean": "length",
}
"""Metrics in a step's line, if the step has them."""
OUTPUT = "standard output"
"""Name of the stream of the lines in the note on its failure."""
WINDOW = 21
"""Number of recent steps of a phase in the median that estimates the time left."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated time left."""

    seconds: float
    """Seconds left in all phases with timed steps."""
    is_complete: bool
    """False if a remaining phase has no timed step; the seconds are then a lower bound."""


class TimeLeft:
    """Estimates the time left from the steps of consecutive phases.

    The estimate is the median of a phase's last steps, times its remaining steps. A single slow step (a
    compilation, a checkpoint, a busy machine) does not move it.

    Example:
        left = TimeLeft({"sft": 350, "grpo": 60})
        left.observe("sft", 1, seconds=0.1)
        left.estimate() == Estimate(seconds=34.9, is_complete=False)

    Args:
        total_steps: number of steps of every phase, in order. A step's number counts from 1 over all phases.
    """

    def __init__(self, total_steps: Mapping[str, int]) -> None:
        self.total_steps = dict(total_steps)
        self._recent: dict[str, deque[float]] = {phase: deque(maxlen=WINDOW) for phase in total_steps}
        self._step = 0

    def observe(self, phase: str, step: int, seconds: float) -> None:
        """Record that a step of a phase took ``seconds``."""
        self._recent[phase].append(seconds)
        self._step = step

    def done(self, phase: str) -> int:
        """Return the number of completed steps of the phase, including those before a resume."""
        before = 0
        for name, total in self.total_steps.items():
            if name == phase:
                return min(max(self._step - before, 0), total)
            before += total
        raise KeyError(phase)

    def of_phase(self, phase: str) -> float | None:
        """Return the seconds left in a phase; None if it has steps left and no timed step."""
        left = self.total_steps[phase] - self.done(phase)
        recent = self._recent[phase]
        return left * median(recent) if recent else None if left else 0.0

    def estimate(self) -> Estimate:
        """Return the seconds until the last step of the last phase."""
        known = [self.of_phase(phase) for phase in self.total_steps]
        return Estimate(
            seconds=sum(time for time in known if time is not None), is_complete=None not in known
        )


class Progress:
    """Shows a run's steps on a stream. Use it in a ``with`` statement.

    Example:
        with Progress(total_steps={"sft": 350, "grpo": 60}, stream=sys.stdout) as progress:
            progress.step("sft", 1, metrics, seconds=0.1)

    Args:
        total_steps: number of steps of every phase, in order. A step's number counts from 1 over all phases.
        stream: output stream; by default the standard output.
        quiet: show nothing.
        told: called after each step, even when quiet, with its phase, number and metrics.
        log: file for the lines that the stream does not take any more; None: they are lost.
    """

    def __init__(
        self,
        *,
        total_steps: Mapping[str, int],
        stream: TextIO | None = None,
        quiet: bool = False,
        told: Callable[[str, int, Metrics], None] | None = None,
        log: Path | None = None,
    ) -> None:
        self._left = TimeLeft(total_steps)
        self._quiet, self._told = quiet, told
        self._streams = {OUTPUT: sys.stdout if stream is None else stream, "standard error": sys.stderr}
        self._console = _console(self._streams[OUTPUT], quiet=quiet)
        self._log, self._lock = OutputLog(log), RLock()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._recent: list[tuple[int, Metrics]] = []
        self._earlier = NOTHING_SEEN
        self._said = ""
        self._apart: set[str] = set()
        self._mismatch: dict[str, MismatchWatch | None] = {phase: MismatchWatch() for phase in total_steps}

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._quiet:
            self._bars = _bars(self._console)
            for phase, total in self._left.total_steps.items():
                self._tasks[phase] = self._bars.add_task(phase, total=total, left="", numbers="")
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._end_bars()
        self._look_at_streams()
        if kind is not None and len(self._streams) < 2:  # nobody may see it on a screen
            self._log.write(str(error) or kind.__name__)

    def _end_bars(self) -> None:
        bars, self._bars = self._bars, None
        if bars is not None:
            with suppress(OSError, ValueError):
                bars.stop()

    def step(self, phase: str, step: int, metrics: Metrics, seconds: float) -> None:
        """Show a completed step as bar or line, and warn of uniform rewards and of a distant sampler."""
        self._left.observe(phase, step, seconds)
        numbers = _numbers(metrics)
        if self._bars is None:
            totals = self._left.total_steps
            beside = [f"step {step}"] if len(totals) > 1 else []
            left = _left_text(self._left.estimate())
            parts = [
                f"{phase} {self._left.done(phase)}/{totals[phase]}",
                *beside,
                *numbers,
                duration(seconds),
            ]
            self._write("  ".join([*parts, left] if left else parts))
        else:
            for name, task in self._tasks.items():
                self._bars.update(task, completed=self._left.done(name), left=self._phase_text(name))
            self._bars.update(self._tasks[phase], numbers="  ".join(numbers))
            self._look_at_streams()
        self._warn(phase, step, metrics)
        if self._told is not None:
            self._told(phase, step, metrics)

    def _warn(self, phase: str, step: int, metrics: Metrics) -> None:
        """Warn of each streak of uniform rewards; once in a phase of a distant sampler, and of a mismatch."""
        recent = [*self._recent, (step, metrics)]
        for _, left in recent[:-IN_A_ROW]:
            self._earlier = self._earlier.widened(left)
        self._recent = recent[-IN_A_ROW:]
        found = streaks(self._recent, self._earlier)
        if found and found[0].why != self._said:
            self.note(f"warning: {found[0].text}")
        self._said = found[0].why if found else ""
        apart = None if phase in self._apart else gap_warning(self._recent)
        if apart is not None:
            self._apart.add(phase)
            self.note(f"warning: {apart}")
        watch = self._mismatch[phase]
        mismatch = None if watch is None else watch.observe(step, metrics)
        if mismatch is not None:
            self._mismatch[phase] = None
            self.note(f"warning: {mismatch}")

    def note(self, text: str) -> None:
        """Write a permanent line, such as an evaluation or a resume."""
        self._write(visible(text))

    @contextmanager
    def if_slow(self, text: str) -> Iterator[None]:
        """Write a permanent line if the body takes longer than ``SLOW_S``."""
        slow = Timer(SLOW_S, self.note, [text])
        slow.daemon = True
        slow.start()
        try:
            yield
        finally:
            slow.cancel()

    @staticmethod
    def say(text: str) -> None:
        """Write a text to the standard output after the progress display has ended."""
        sys.stdout.write(f"{visible(text)}\n")
        sys.stdout.flush()

    def _phase_text(self, phase: str) -> str:
        seconds = self._left.of_phase(phase)
        if self._left.done(phase) == self._left.total_steps[phase]:
            return "done"
        return "" if seconds is None else f"{duration(seconds)} left"

    def _write(self, text: str) -> None:
        with self._lock:
            if OUTPUT in self._streams:
                try:
                    # A console would wrap a long line at its width; a log needs unbroken lines.
                    self._console.print(text, soft_wrap=True)
                except (OSError, ValueError) as error:  # of a stream that is not guarded, or closed
                    self._lose(OUTPUT, error)
                self._look_at_streams()
            if OUTPUT not in self._streams:
                self._log.write(text)

    def _look_at_streams(self) -> None:
        """Note each stream that has failed."""
        with self._lock:
            for name, stream in [*self._streams.items()]:
                if (error := failure_of(stream)) is not None:
                    self._lose(name, error)

    def _lose(self, name: str, error: OSError | ValueError) -> None:
        """Go on without a stream; note that in the log and on the other stream."""
        del self._streams[name]
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = f"note: {name} cannot be written any more ({reason}); the run goes on"
        if name == OUTPUT:
            self._end_bars()
            text += f", and its lines are in {self._log.path}" if self._log.path else " without it"
        self._log.write(text)
        for stream in self._streams.values():
            with suppress(OSError, ValueError):
                stream.write(f"{visible(text)}\n")
                stream.flush()


def _console(stream: TextIO, *, quiet: bool) -> Console:
    return Console(file=stream, quiet=quiet, highlight=False, markup=False, emoji=False, force_jupyter=False)


def _bars(console: Console) -> Bars:
    return Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[numbers]}", markup=False),
        console=console,
        refresh_per_second=4,
    )


def _numbers(metrics: Metrics) -> list[str]:
    there = {name: metrics[name] for name in HEADLINE if name in metrics}
    counted = {name: each for name, each in there.items() if not (isinstance(each, Mean) and not each.count)}
    found = [f"{HEADLINE[name]} {number(each.value)}" for name, each in counted.items()]
    return [*found, *_ahead(metrics)]


def _ahead(metrics: Metrics) -> list[str]:
    """Return the age of tokens, the wait for rows and the dropped groups, if the sampler runs ahead."""
    mean, oldest = metrics.get("staleness/versions/mean"), metrics.get("staleness/versions/max")
    waited, dropped = metrics.get("flight/waited_seconds/mean"), metrics.get("flight/given_up/sum")
    found = list[str]()
    if mean is not None and oldest is not None:
        is_even = mean.value == oldest.value
        found.append(f"age {mean.value:.0f}" if is_even else f"age {mean.value:.1f} (max {oldest.value:.0f})")
    if waited is not None:
        found.append(f"waited {duration(waited.value)}")
    if dropped is not None and dropped.value:
        found.append(f"dropped {dropped.value:.0f}")
    return found


def _left_text(estimate: Estimate) -> str:
    """Return the time left in words; empty if no remaining phase has a timed step."""
    if estimate.is_complete:
        return f"{duration(estimate.seconds)} left" if estimate.seconds else "done"
    return f"more than {duration(estimate.seconds)} left" if estimate.seconds else ""
