"""Seeds: one number decides a run's settings, every delay and every fault; the oracle judges what comes out.

    seed ─> scenario, plan of faults ─> start, fault ─> start, fault ─> ... ─> a start without faults ─> oracle

A run that is killed, or that ends with an error, is started again, as its user would. Bits are compared with a
run of the same settings that nothing disturbed and that other chances scheduled.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random

from rillflow.controller.interrupt import RunStage
from rillflow.errors import Interrupted, RillflowError
from tests.simulation.backend import HEALTH_S
from tests.simulation.disk import FakeDisk
from tests.simulation.oracle import Result, differences, lost_steps, problems, result
from tests.simulation.timeline import DriverKilled, Timeline
from tests.simulation.world import DEADLINE_S, Scenario, World

Fault = Callable[[World], None]
DRIVER = ("kill", "power", "signal")
RANK = ("kill rank", "stop rank", "cut rank")
DISK = ("full disk", "disk error")
KINDS = {**dict.fromkeys(("kill",), 6), "power": 4, "signal": 2, "kill rank": 3, "stop rank": 2}
KINDS |= {"cut rank": 2, "full disk": 2, "disk error": 1}
"""Faults and how often each is chosen."""


@dataclass(kw_only=True)
class Start:
    """One start of a run."""

    trace: list[str]
    """Its events and faults."""
    end: str
    """How it ended."""


@dataclass(kw_only=True)
class Outcome:
    """What a seed came to."""

    seed: int
    scenario: Scenario
    starts: list[Start] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Empty for a correct run."""
    is_compared: bool = False
    """Whether its bits were compared with those of an undisturbed run."""

    @property
    def story(self) -> str:
        """Everything that happened, for the reader of a failure."""
        lines = [f"seed {self.seed}: {self.scenario}"]
        for number, start in enumerate(self.starts, 1):
            lines += [f"start {number}", *start.trace, f"end of start {number}: {start.end}"]
        return "\n".join([*lines, *(f"PROBLEM {each}" for each in self.problems)])


@dataclass(kw_only=True)
class _Ended:
    """What the faults of a start excuse."""

    may_fail: bool = False
    """Whether an error may end it."""
    may_stop: bool = False
    """Whether it may end on request."""
    is_power: bool = False
    """Whether the machine lost its power."""


def scenario_of(seed: int) -> Scenario:
    """Return the settings of a seed."""
    chance = Random(f"settings {seed}")
    kind = chance.choice(["in order", "in order", "ahead", "ahead", "ready first", "ready first", "drops"])
    is_ready = kind in ("ready first", "drops")
    times = chance.choice([1, 1, 2]) if is_ready else 1
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
    )


def ran(seed: int) -> Outcome:
    """Run a seed to its end and judge it."""
    scenario, chance = scenario_of(seed), Random(f"faults {seed}")
    outcome = Outcome(seed=seed, scenario=scenario)
    events, whole = undisturbed(_settled(scenario))
    with folder() as at:
        disk, is_fresher, excused = FakeDisk(at), False, False
        for number in range(chance.randint(1, 3) + 1):
            is_last = number > 0 and chance.random() < 0.4 or number == 3
            ended, faults = _Ended(), [] if is_last else _faults(chance, events)
            plan = {where: lambda _, kind=kind: _strike(world, kind, chance, ended) for where, kind in faults}
            timeline = Timeline(Random(f"{seed} {number}"), plan, f"faults: {faults}")
            world = World(scenario, disk, timeline)
            end = _started(world, outcome, ended, chance)
            outcome.starts.append(Start(trace=timeline.trace, end=end))
            is_fresher |= world.is_fresher
            if world.is_fresher and not excused:
                outcome.problems.append("rows sampled ahead were lost without a lost rank")
            excused |= ended.may_fail
            if end == "finished" or outcome.problems:
                break
        else:
            timeline = Timeline(Random(f"{seed} last"), {}, "no faults")
            world = World(scenario, disk, timeline)
            end = _started(world, outcome, _Ended(), chance)
            outcome.starts.append(Start(trace=timeline.trace, end=end))
            is_fresher |= world.is_fresher
        if not outcome.problems:
            outcome.problems += problems(
                at / "run", scenario, is_fresher=is_fresher, may_lose=excused
            )
        outcome.is_compared = not (scenario.is_ready_first or is_fresher or lost_steps(at / "run"))
        if not outcome.problems and outcome.is_compared:
            outcome.problems += differences(whole, result(at / "run"))
    return outcome


def _started(world: World, outcome: Outcome, ended: _Ended, chance: Random) -> str:
    """Run one start; return how it ended, and note an end that no fault excuses."""
    try:
        world.run()
        end = "finished"
    except DriverKilled:
        end = "the driver was killed"
    except Interrupted as error:
        end = f"stopped: {error}"
        if not ended.may_stop:
            outcome.problems.append(f"a start stopped without a signal: {error}")
    except RillflowError as error:
        end = f"error: {error}"
        if not ended.may_fail:
            outcome.problems.append(f"a start ended without a fault that explains it: {error}")
    except Exception as error:  # noqa: BLE001  any other error is a fault of the code under test
        end = f"{type(error).__name__}: {error}"
        outcome.problems.append(f"a start ended with a bare {end}")
    if end == "the driver was killed" and not ended.is_power:
        with world.disk.watched(world.timeline):
            world.backend.drain(chance.choice([0, 3, 30]))
    world.backend.close()
    world.disk.restart(chance, power=ended.is_power)
    return end


def _faults(chance: Random, events: int) -> list[tuple[int, str]]:
    """Return when which faults strike in one start."""
    count = chance.choice([1, 1, 2, 3])
    kinds = chance.choices([*KINDS], [*KINDS.values()], k=count)
    return sorted((chance.randint(1, events), kind) for kind in kinds)


def _strike(world: World, kind: str, chance: Random, ended: _Ended) -> None:
    """Let a fault happen."""
    timeline, backend = world.timeline, world.backend
    if kind in RANK and not backend.places:
        return  # no rank has started
    if kind == "signal" and world.interruption.stage is not RunStage.TRAINING:
        return  # before the first step a signal ends the start at once, which is another driver's death
    if kind in ("kill", "power"):
        timeline.fault(f"{kind} the driver")
        ended.is_power = kind == "power"
        timeline.die()
    elif kind == "signal":
        timeline.fault("SIGTERM")
        world.interruption.requested = ended.may_stop = True
    elif kind in DISK:
        timeline.fault(kind)
        ended.may_fail = True
        world.disk.is_full |= kind == "full disk"
        world.disk.fails_once |= kind == "disk error"
    else:
        place = chance.choice(backend.places)
        seconds = chance.choice([0.05, 1.0, 20.0, 100.0, 2 * DEADLINE_S])
        timeline.fault(f"{kind} {place}" + ("" if kind == "kill rank" else f" for {seconds} s"))
        if kind == "kill rank":
            ended.may_fail = True
            backend.kill(place)
        elif kind == "stop rank":
            ended.may_fail |= seconds >= DEADLINE_S / 3  # several waits in a row reach the deadline
            backend.stop(place, seconds)
        else:
            ended.may_fail |= seconds > HEALTH_S
            backend.cut(place, seconds)


def _settled(scenario: Scenario) -> Scenario:
    """Return the settings of the run to compare with: those that may not change its bits are all alike."""
    return replace(scenario, checkpoint_every=2, checkpoint_s=0.0, has_scorer=True)


@cache
def undisturbed(scenario: Scenario) -> tuple[int, Result]:
    """Return the events and the result of a run without faults."""
    timeline = Timeline(Random("undisturbed"), {}, "undisturbed")
    with folder() as at:
        World(scenario, FakeDisk(at), timeline).run()
        wrong = problems(at / "run", scenario)
        assert not wrong, f"an undisturbed run of {scenario}: {wrong}"
        return timeline.number, result(at / "run")


@contextmanager
def folder() -> Iterator[Path]:
    """Make a folder in memory, if there is such a file system, and remove it."""
    memory = Path("/dev/shm")
    at = Path(tempfile.mkdtemp(prefix="rf-sim-", dir=memory if memory.is_dir() else None)).resolve()
    try:
        yield at
    finally:
        shutil.rmtree(at, ignore_errors=True)
