"""Seeds: one number decides a run's settings, every delay and every fault; the oracle judges the result.

    seed ─> scenario, plan of faults ─> start, fault ─> ... ─> start without faults ─> oracle

A run that is killed or ends with an error is restarted, as its user would do. Its bits are compared with an
undisturbed run of the same settings under another schedule.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from signal import SIGTERM
from typing import Any

from rillflow.controller.decisions import Event, decisions_of
from rillflow.errors import Interrupted, RillflowError, Signalled
from rillflow.workers.backend import Place, RankDied
from tests.simulation.backend import HEALTH_S, SimulatedBackend
from tests.simulation.disk import FakeDisk
from tests.simulation.oracle import Result, differences, lines_of, lost_steps, measured, problems, result
from tests.simulation.timeline import DriverKilled, Timeline
from tests.simulation.world import DEADLINE_S, Scenario, World

KINDS = {
    "kill": 6,
    "power": 4,
    "signal": 2,
    "kill rank": 3,
    "stop rank": 2,
    "cut rank": 2,
    "full disk": 2,
    "disk error": 1,
}
"""Faults with their relative frequency; faults without a rank or disk in their name hit the driver."""
DISK_ERRORS = [os.strerror(code) for code in (errno.ENOSPC, errno.EIO)]
LATE = ("has not answered", "did not finish")
"""Words of the errors of a wait that ended at its deadline."""
FINISHED = "finished"
KILLED = "the driver was killed"
AT_ONCE = "the second signal ended it at once"
ERROR = "error: "


@dataclass(kw_only=True)
class Start:
    """One start of a run."""

    trace: list[str]
    """Events and faults of the start."""
    end: str
    """The way it ended."""
    errors: int
    """Errors that ended it, or made it restart all ranks."""


@dataclass(kw_only=True)
class Outcome:
    """Results of a seed."""

    seed: int
    scenario: Scenario
    starts: list[Start] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Problems; empty for a correct run."""
    left: list[str] = field(default_factory=list)
    """Reasons why starts did not repeat the decisions of the start before."""
    is_replayed: bool = False
    """True if its decisions were replayed without faults, with equal bits."""
    is_compared: bool = False
    """True if its bits were compared with those of an undisturbed run."""

    @property
    def story(self) -> str:
        """All events, for the reader of a failure."""
        lines = [f"seed {self.seed}: {self.scenario}"]
        for number, start in enumerate(self.starts, 1):
            lines += [f"start {number}", *start.trace, f"end of start {number}: {start.end}"]
        return "\n".join([*lines, *(f"PROBLEM {each}" for each in self.problems)])


@dataclass(kw_only=True)
class Excuses:
    """Outcomes of a start that its faults excuse."""

    disk_fails: bool = False
    """True if a write may have failed."""
    losses: list[Place] = field(default_factory=list)
    """Ranks that were killed, or were cut off for so long that they count as dead."""
    is_late: bool = False
    """True if a rank may have kept another one waiting beyond the deadline."""
    may_stop: bool = False
    """True if the start may end on request."""
    is_power: bool = False
    """True if the machine lost its power."""

    @property
    def may_lose(self) -> bool:
        """Whether rows, rollouts or an evaluation may be lost, as the start may have met an error."""
        return self.disk_fails or bool(self.losses) or self.is_late

    def explains(self, error: RillflowError, scenario: Scenario) -> bool:
        """Return whether a fault explains that this error ended the start.

        A dead rank explains only a ``RankDied``, and only if more ranks died than ``run.restarts``.
        """
        if any(code in str(error) for code in DISK_ERRORS):
            return self.disk_fails
        if isinstance(error, RankDied):
            return self.may_stop or len(self.losses) > scenario.restarts
        return self.is_late and any(words in error.what for words in LATE)


def scenario_of(seed: int) -> Scenario:
    """Return the settings of a seed."""
    chance = Random(f"settings {seed}")
    kind = chance.choice(["in order", "in order", "ahead", "ahead", "ready first", "ready first", "drops"])
    is_ready = kind in ("ready first", "drops")
    times = chance.choice([1, 1, 2]) if is_ready else 1
    more = Random(f"more settings {seed}")
    return Scenario(
        freshness={"in order": 0, "ahead": chance.randint(1, 2)}.get(kind, chance.randint(1, 3) * times),
        is_ready_first=is_ready,
        drops=kind == "drops",
        publishes=times,
        chunks=1 if is_ready else chance.choice([1, 2]),
        replicas=chance.randint(1, 3) if is_ready else chance.randint(1, 2),
        groups=2,
        steps=6,
        checkpoint_every=chance.choice([0, 1, 2, 2, 4]),
        checkpoint_s=chance.choice([0.0, 0.0, 5.0, 20.0]),
        evaluate_every=chance.choice([0, 2, 3]),
        rows=chance.choice([2, 6, 40]),
        has_scorer=chance.random() < 0.7,
        has_reference=more.random() < 0.25,
        oversampling=1.5 if more.random() < 0.5 and kind == "in order" else 1.0,
        restarts=more.choice([0, 1, 1, 2]),
    )


def ran(seed: int, scenario: Scenario | None = None) -> Outcome:
    """Run a seed to its end, with its own settings or given ones, and judge it."""
    scenario, chance = scenario or scenario_of(seed), Random(f"faults {seed}")
    events, whole = undisturbed(settled(scenario))
    plans = [_faults(chance, events) for _ in range(chance.randint(1, 3))]
    with folder() as at:
        play = Play(seed, scenario, at, chance)
        for plan in [*plans, []]:
            if not play.is_over:
                play.start(plan)
        play.judge(whole)
    return play.outcome


class Play:
    """The starts of one run, until it is finished.

    Args:
        seed: decides delays and durations.
        scenario: the run's settings.
        at: folder of the run.
        chance: decides details of faults.
    """

    def __init__(self, seed: int, scenario: Scenario, at: Path, chance: Random) -> None:
        self.outcome = Outcome(seed=seed, scenario=scenario)
        self.is_over = False
        """True if the run has finished, or something is wrong."""
        self._disk, self._chance = FakeDisk(at), chance
        self._is_fresher, self._is_excused = False, False
        self._shown: dict[int, Mapping[str, Any]] = {}

    def start(self, plan: Sequence[tuple[int, str]]) -> None:
        """Start the run once more with faults at some events; record an end that no fault explains."""
        outcome, excuses = self.outcome, Excuses()
        striking = {at: partial(self._strike, kind, excuses) for at, kind in plan}
        chance = Random(f"{outcome.seed} {len(outcome.starts)}")
        timeline = Timeline(chance, striking, f"faults: {plan}")
        self._world = world = World(outcome.scenario, self._disk, timeline)
        end = self._ended(world, excuses)
        if end == KILLED and not excuses.is_power:
            with self._disk.watched(timeline):
                world.backend.drain(self._chance.choice([0, 3, 30]))
        world.backend.close()
        if any("does not repeat all decisions" in line for line in world.said):
            outcome.left.append(world.said[-1])
            self._shown.clear()
        outcome.problems += self._changed()
        if excuses.is_power:  # the disk may lose the last decisions
            self._shown.clear()
        self._disk.restart(self._chance, power=excuses.is_power)
        errors = max(world.attempts - 1, 0) + end.startswith(ERROR)
        outcome.starts.append(Start(trace=timeline.trace, end=end, errors=errors))
        if world.is_fresher and not self._is_excused and world.attempts == 1:
            outcome.problems.append("rows sampled ahead were lost without a lost rank")
        self._is_fresher |= world.is_fresher
        self._is_excused |= excuses.may_lose
        self.is_over = end == FINISHED or bool(outcome.problems)

    def judge(self, whole: Result) -> None:
        """Judge the finished run with the oracle, and compare it with an undisturbed one."""
        outcome, run = self.outcome, self._disk.folder / "run"
        if not outcome.problems:
            outcome.problems += problems(
                run,
                outcome.scenario,
                is_fresher=self._is_fresher,
                may_lose=self._is_excused,
                errors=sum(start.errors for start in outcome.starts),
            )
        is_timed = outcome.scenario.is_ready_first
        outcome.is_compared = not (outcome.problems or is_timed or self._is_fresher or lost_steps(run))
        if outcome.is_compared:
            outcome.problems += differences(whole, result(run))
        if is_timed and not (outcome.problems or lost_steps(run)):
            outcome.is_replayed = True
            found = result(run)
            again = replayed(outcome.scenario, decisions_of(run))
            if self._is_excused:  # the run may lack the evaluation of a saved step
                looked = {each["step"] for each in found.evaluations}
                again = replace(again, evaluations=[e for e in again.evaluations if e["step"] in looked])
            outcome.problems += differences(again, found)

    def _changed(self) -> list[str]:
        """Return the steps whose metrics differ from those of an earlier start."""
        now = {line["step"]: measured(line) for line in lines_of(self._disk.folder / "run", "metrics.jsonl")}
        changed = [
            step
            for step, metrics in self._shown.items()
            for name in sorted(
                metrics.keys() & now.get(step, {}).keys()
            )  # a saved step lacks the metrics of dead ranks
            if now[step][name] != metrics[name]
        ]
        self._shown |= now
        if not self.outcome.scenario.is_ready_first:
            return []
        return [f"a start shows other metrics of step {step} than the one before" for step in changed]

    def _ended(self, world: World, excuses: Excuses) -> str:
        """Run one start; return how it ended."""
        found = self.outcome.problems
        try:
            world.run()
        except DriverKilled:
            return KILLED
        except Signalled:
            if not excuses.may_stop:
                found.append("a start ended at once without a signal")
            return AT_ONCE
        except Interrupted as error:
            if not excuses.may_stop:
                found.append(f"a start stopped without a signal: {error}")
            return f"stopped: {error}"
        except RillflowError as error:
            if not excuses.explains(error, world.scenario):
                found.append(f"a start ended without a fault that explains it: {error}")
            return f"{ERROR}{error}"
        except Exception as error:  # noqa: BLE001  any other error is a fault of the code under test
            found.append(f"a start ended with a bare {type(error).__name__}: {error}")
            return f"bare error: {error!r}"
        return FINISHED

    def _strike(self, kind: str, excuses: Excuses, timeline: Timeline) -> None:
        """Execute a fault."""
        world = self._world
        if kind in ("kill", "power"):
            timeline.fault(f"{kind} the driver")
            excuses.is_power = kind == "power"
            timeline.die()
        elif kind == "signal" and timeline.inside is not None:  # the driver also runs in this thread
            timeline.postpone(partial(self._strike, kind, excuses))
        elif kind == "signal":
            timeline.fault(f"SIGTERM {world.interruption.stage.name}")
            excuses.may_stop = True
            world.interruption.receive(SIGTERM)
        elif kind in ("full disk", "disk error"):
            timeline.fault(kind)
            excuses.disk_fails = True
            world.disk.is_full |= kind == "full disk"
            world.disk.fails_once |= kind == "disk error"
        elif world.backend.places:
            self._strike_rank(kind, excuses, world.backend, timeline)

    def _strike_rank(
        self, kind: str, excuses: Excuses, backend: SimulatedBackend, timeline: Timeline
    ) -> None:
        place = self._chance.choice(backend.places)
        seconds = self._chance.choice([0.05, 1.0, 20.0, 100.0, 2 * DEADLINE_S])
        timeline.fault(f"{kind} {place}" + ("" if kind == "kill rank" else f" for {seconds} s"))
        if kind == "kill rank":
            excuses.losses.append(place)
            backend.kill(place)
        elif kind == "stop rank":
            excuses.is_late |= seconds > DEADLINE_S
            backend.stop(place, seconds)
        else:
            excuses.is_late |= seconds > DEADLINE_S
            if seconds > HEALTH_S:
                excuses.losses.append(place)
            backend.cut(place, seconds)


def _faults(chance: Random, events: int) -> list[tuple[int, str]]:
    """Return the faults of one start with their events."""
    kinds = chance.choices([*KINDS], [*KINDS.values()], k=chance.choice([1, 1, 2, 3]))
    return sorted((chance.randint(1, events), kind) for kind in kinds)


def settled(scenario: Scenario) -> Scenario:
    """Return the settings of the run for comparison; settings that may not change bits get fixed values."""
    return replace(scenario, checkpoint_every=2, checkpoint_s=0.0, has_scorer=True, restarts=0)


@cache
def undisturbed(scenario: Scenario) -> tuple[int, Result]:
    """Return the events and the result of a run without faults."""
    timeline = Timeline(Random("undisturbed"), {}, "undisturbed")
    with folder() as at:
        World(scenario, FakeDisk(at), timeline).run()
        wrong = problems(at / "run", scenario)
        assert not wrong, f"an undisturbed run of {scenario}: {wrong}"
        return timeline.number, result(at / "run")


def replayed(scenario: Scenario, events: Sequence[Event]) -> Result:
    """Return the result of a run without faults that repeats the decisions of another one."""
    timeline = Timeline(Random("replayed"), {}, "replayed")
    with folder() as at:
        World(scenario, FakeDisk(at), timeline, events).run()
        return result(at / "run")


@contextmanager
def folder() -> Iterator[Path]:
    """Create a folder in memory, if there is such a file system, and remove it at the end."""
    memory = Path("/dev/shm")
    at = Path(tempfile.mkdtemp(prefix="rf-sim-", dir=memory if memory.is_dir() else None)).resolve()
    try:
        yield at
    finally:
        shutil.rmtree(at, ignore_errors=True)
