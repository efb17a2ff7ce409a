"""Replay: re-run recorded steps of a run in a temporary run directory, and compare every value.

    RUN ─ checkpoint before the step, settings of that time, kept sources ─> temporary run directory
            launch, as a resume does ─> steps ─ StepComparison ─> equal, or the first difference

Nothing is written into RUN: the replay links its checkpoint and copies its small files. Every placement gives
the same bits, so the replay runs in this process by default. A run whose settings changed between its starts
is replayed part by part, each with the settings of its time.

A run that takes the groups that are ready first repeats the decisions that it recorded, from its start.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rillflow.algorithms.algorithm import Algorithm
from rillflow.app.facts import RecipeFacts
from rillflow.app.launch import launch
from rillflow.app.recorded_recipe import resolve_config
from rillflow.app.resolved import Resolved
from rillflow.app.resume import drawn_from, run_config
from rillflow.app.standing import places_of
from rillflow.config.load import parse_override
from rillflow.controller.checkpoint import Checkpoint, latest_checkpoint
from rillflow.controller.decisions import RecordedDecisions
from rillflow.controller.interrupt import Interruption
from rillflow.errors import Interrupted, RillflowError, RunDirectoryError, TrainingError
from rillflow.records.metrics import Metrics
from rillflow.runs import layout
from rillflow.runs.integrity import Evidence
from rillflow.runs.json_lines import JSON, encode, read_json, read_lines
from rillflow.runs.reader import read_starts
from rillflow_parts.replay.compared_weights import compare_weights
from rillflow_parts.replay.comparison import ComparedStep, Difference, StepComparison
from rillflow_parts.replay.recorded_run import (
    RecordedRun,
    given_rewards,
    kept_functions,
    reasons,
    recorded_run,
    require_same_data,
    settings_by_step,
)

_UNWRITTEN: Mapping[str, JSON] = {"checkpoint_minutes": 0.0, "checkpoint_every": 0, "keep_checkpoints": 1}
"""Settings of a replay that writes few checkpoints; they change no value."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Result of a replay."""

    start: int
    """Step of the checkpoint that the replay started from; 0 for the start of the run."""
    steps: Sequence[ComparedStep]
    """Compared steps in order, up to the first difference."""
    reasons: Sequence[str]
    """Facts that may explain the difference."""

    @property
    def difference(self) -> Difference | None:
        """The first value that differs; None if all compared values are equal."""
        return next((each.difference for each in self.steps if each.difference is not None), None)


def replay(
    run: Path,
    step: int | None = None,
    *,
    settings: Sequence[str] = (),
    algorithms: Sequence[Algorithm] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Replayed:
    """Re-run steps of a run, and compare all recorded values with the new ones up to the first difference.

    Args:
        run: the run directory; it may be finished, in use by another process, or read-only.
        step: the last step to re-run, from the newest checkpoint before it; None: every step from the start.
        settings: ``KEY=VALUE`` texts that change settings for the replay.
        algorithms: custom algorithms that the run's recipe names.
        say: receives one line per compared step.

    Raises:
        RunDirectoryError: there is no such step, the run cannot be replayed, or one of its files is damaged.
        DataError: a row of its data has changed.
    """
    data = recorded_run(run)
    last = _last_step(data, step)
    by_readiness = (run / layout.DECISIONS).is_file()
    checkpoint = None if step is None or by_readiness else _checkpoint_before(run, last, say)
    start = checkpoint.step if checkpoint is not None else 0
    origin = "the start" if checkpoint is None else str(checkpoint.path)
    say(f"steps {start + 1} to {last}, from {origin}")
    with tempfile.TemporaryDirectory(prefix="rillflow-replay-") as folder:
        again = _TemporaryRun(data, Path(folder), start, last, say)
        with _explained(checkpoint):
            for config, end in settings_by_step(data, start, last):
                recipe = _recipe(data, config, again, settings, algorithms)
                again.run(recipe, config, checkpoint, end)
                if again.has_difference:
                    break
            again.finish()
        found = Replayed(start=start, steps=tuple(again.steps), reasons=())
        if found.difference is None:
            _require_reached(found, last)
            return found
        why = reasons(data, found.difference.step, read_starts(again.path), settings)
        return Replayed(start=start, steps=found.steps, reasons=why)


def _last_step(data: RecordedRun, step: int | None) -> int:
    """Return the last step to re-run."""
    made = data.last
    if step is not None and step not in data.steps:
        raise RunDirectoryError(
            f"{data.path} has no step {step}",
            why=f"its records end with step {made}" if step > made else "its records lack it",
            fix=f"give --step a number from 1 to {made}",
        )
    return made if step is None else step


def _require_reached(found: Replayed, last: int) -> None:
    reached = max((each.step for each in found.steps), default=found.start)
    if reached < last:
        raise RunDirectoryError(
            f"the replay ended after step {reached}, before step {last}",
            why="the settings of the replay make fewer steps; all compared values are equal",
            fix="leave out --set algorithm.steps, or give a smaller --step",
        )


def _checkpoint_before(run: Path, step: int, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint before a step; None if the run keeps none, or none is intact."""
    identity = str(read_json(run / layout.ENVIRONMENT).get("run", ""))
    try:
        return latest_checkpoint(run / layout.CHECKPOINTS, identity, before=step)
    except RunDirectoryError as error:
        say(f"note: {error.what}; the replay starts from the beginning")
        return None


@contextmanager
def _explained(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Name the cause if the run removed the checkpoint while the replay used it."""
    try:
        yield
    except RillflowError as error:
        if checkpoint is None or checkpoint.path.is_dir():
            raise
        raise RunDirectoryError(
            f"{checkpoint.path} was removed while the replay used it",
            why="the run goes on, and keeps only its newest checkpoints",
            fix="replay again; a larger run.keep_checkpoints keeps them longer",
        ) from error


def _recipe(
    data: RecordedRun,
    config: Mapping[str, JSON],
    again: _TemporaryRun,
    settings: Sequence[str],
    algorithms: Sequence[Algorithm],
) -> Resolved:
    """Return the recipe of a replay: the run's at that time, in this process, with the kept functions.

    Raises:
        RunDirectoryError: see ``kept_functions``.
    """
    overrides = [parse_override(text) for text in settings]
    resolved = resolve_config(data.path, config, data.base, overrides=overrides, algorithms=algorithms)
    changed: dict[str, Any] = {f"run.{name}": value for name, value in _UNWRITTEN.items()}
    changed |= {"run.dir": str(again.path), **places_of(data.path)}
    placement, engine = resolved.recipe.placement, resolved.recipe.rollout.engine
    is_chosen = any(text.startswith("placement.backend") for text in settings)
    if engine == "native" and not (is_chosen or placement.is_inline):
        changed |= {"placement.backend": "inline", "placement.address": None}
    resolved = resolved.changed(changed)
    return resolved.changed(kept_functions(resolved.recipe, data, config, again.functions))


class _Ended(Interrupted):
    """Ends a replay at its first difference, without a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class _Told:
    """A finished step of the replay."""

    phase: str
    step: int
    metrics: Metrics


class _TemporaryRun:
    """The temporary run, and its comparison with the recorded one.

    Args:
        data: the recorded run.
        folder: empty folder for the temporary run.
        start: step that the replay starts after.
        last: last step of the replay.
        say: receives one line per compared step.
    """

    def __init__(
        self, data: RecordedRun, folder: Path, start: int, last: int, say: Callable[[str], None]
    ) -> None:
        self.path = folder / "run"
        """Run directory of the replay."""
        self.functions = folder / "functions"
        """Folder of functions whose files have changed since."""
        self.steps: list[ComparedStep] = []
        """Compared steps."""
        self._data, self._start, self._last, self._say = data, start, last, say
        self._comparison = StepComparison(data.path, data.steps, self.path, last)
        self._pending: _Told | None = None
        self._error: RillflowError | None = None

    @property
    def has_difference(self) -> bool:
        """Whether the last compared step has a difference."""
        return bool(self.steps) and self.steps[-1].difference is not None

    def run(
        self, resolved: Resolved, config: Mapping[str, JSON], checkpoint: Checkpoint | None, last: int
    ) -> None:
        """Run the steps up to ``last``, from the newest checkpoint of the temporary run."""
        if checkpoint is not None and not self.path.exists():
            self._copy(checkpoint, resolved)
        given, drawn = given_rewards(self._data, config), drawn_from(self.path)
        facts = RecipeFacts(resolved=resolved, given=given, drawn=drawn, say=lambda _: None)
        require_same_data(facts, self._data, config)
        if self.path.exists():
            settings = run_config(resolved, facts.task)
            Evidence(self.path).write(layout.CONFIG, encode(settings, indent=2), settings)
        asked = Interruption(last=last)
        try:
            repeat = RecordedDecisions(run=self._data.path)
            launch(resolved, quiet=True, given=given, told=self._told, interruption=asked, repeat=repeat)
        except Interrupted:
            if self._error is not None:
                raise self._error from None
            if asked.requested:
                raise Interrupted(
                    "the replay was stopped, as requested",
                    why=f"its temporary files are removed; {self._data.path} is unchanged",
                    fix="run the same command to replay from the beginning",
                    number=asked.number or signal.SIGINT,
                ) from None
        except TrainingError:  # the run itself may have ended with this error after its last step
            if self._pending is None or self._pending.step != self._data.last:
                raise

    def _copy(self, checkpoint: Checkpoint, resolved: Resolved) -> None:
        """Make a run directory that a resume continues from a checkpoint of the recorded run."""
        run = self._data.path
        kept = self.path / layout.CHECKPOINTS / f"step-{checkpoint.step:06d}"
        kept.parent.mkdir(parents=True)
        kept.symlink_to(checkpoint.path.absolute(), target_is_directory=True)
        (self.path / layout.LOCK).touch()
        evidence = Evidence(self.path)
        identity: dict[str, JSON] = {**read_json(run / layout.ENVIRONMENT), "starts": []}
        evidence.write(layout.ENVIRONMENT, encode(identity, indent=2), identity)
        for name in (layout.DATA, layout.TOKENS):
            if (run / name).is_file():
                evidence.write(name, (run / name).read_bytes())
        for name in (layout.EVALUATIONS, layout.SKIPS):
            for line in read_lines(run / name).lines:
                step = line.data.get("step")
                if isinstance(step, int) and step <= checkpoint.step:
                    evidence.append(name, step, line.text)
        if checkpoint.state["phase"] == len(resolved.phases) - 1 and checkpoint.state["done"]:
            self._keep_reference(run)

    def _keep_reference(self, run: Path) -> None:
        """Give the temporary run the reference of its phase, which a resume reads and never writes."""
        if (run / layout.REFERENCE).is_dir():
            (self.path / layout.REFERENCE).symlink_to((run / layout.REFERENCE).absolute())
        for totals in run.glob("*_totals.jsonl"):
            shutil.copyfile(totals, self.path / totals.name)

    def _told(self, phase: str, step: int, metrics: Metrics) -> None:
        """Compare the step before, whose rows are on disk by now.

        Raises:
            _Ended: there is a difference, or a file of the recorded run is damaged.
        """
        try:
            self._compare()
        except RillflowError as error:
            self._error = error
            raise _Ended("a file of the run is damaged") from error
        if self.has_difference:
            raise _Ended("a value differs")
        self._pending = _Told(phase=phase, step=step, metrics=metrics)

    def finish(self) -> None:
        """Compare the last step, and its weights if the run has a checkpoint of it."""
        if self._pending is not None:
            told, self._pending = self._pending, None
            found = self._comparison.step(told.step, told.phase, told.metrics)
            self._add(found if found.difference is not None else self._with_weights(found))

    def _compare(self) -> None:
        """Compare the step that was told last; before the first one, the evaluation at the start."""
        if self._pending is None:
            if self._start == 0 and not self.steps:
                self._before_first()
            return
        told, self._pending = self._pending, None
        self._add(self._comparison.step(told.step, told.phase, told.metrics))

    def _before_first(self) -> None:
        compared, left = dict[str, int](), list[str]()
        found = self._comparison.evaluations(0, compared, left)
        if compared.get("evaluations") or found is not None:
            self._add(ComparedStep(step=0, compared=compared, left_out=left, difference=found))

    def _add(self, step: ComparedStep) -> None:
        self.steps.append(step)
        self._say(str(step))

    def _with_weights(self, found: ComparedStep) -> ComparedStep:
        name = f"{layout.CHECKPOINTS}/step-{found.step:06d}"
        recorded, replayed = self._data.path / name, self.path / name
        if not recorded.is_dir():
            return replace(
                found, left_out=[*found.left_out, "weights, the run has no checkpoint of the step"]
            )
        return compare_weights(found, recorded, replayed)
