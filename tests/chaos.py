"""Chaos: real runs on Ray whose processes are killed and stopped at random moments, and checks afterwards.

    python -m tests.chaos --minutes 30 [--seed N]          (make chaos)

    case ─> start ─ a signal to driver, rank or reward child ─> exit ─ same command ─> ... ─> checks

A case is a recipe of seconds: in order, one version ahead, or ready first. Its seed decides moments and
signals. ``GONE_S`` after every exit, no process of the run may be left. A finished run has every step and
every row once, and no token older than its bound. It has the bits of an undisturbed run, unless a fault may
change its rows. A failing case keeps its folder, with the output of every start.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rillflow.runs import layout
from rillflow.runs.reader import rollout_columns
from tests.flows.conftest import SAMPLER_ON_RAY, SUMS, Tiny
from tests.flows.warm import Command

GONE_S = 5.0
"""Seconds after an exit in which the other processes of a run end."""
LONG_S = 600.0
"""Longest time of one start."""
STEPS = 20
REST = f"""
steps = {STEPS}
{SUMS}[evaluate]
problems = 4
every = 5
{SAMPLER_ON_RAY}deadline_s = 120
"""
KINDS = {
    "in order": (),
    "ahead": ('schedule={mode="ahead",freshness=1}',),
    "ready first": ('schedule={mode="ahead",freshness=2}', 'schedule.mode="ready_first"'),
}
"""Settings of each kind of case."""
BOUNDS = {"in order": 0, "ahead": 1, "ready first": 2}
OFTEN = "run.checkpoint_every=3"
INLINE = "placement.backend=inline"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A signal to a process of a run."""

    victim: str
    """"driver", "rank" or "reward"."""
    number: signal.Signals
    pause_s: float = 0.0
    """Seconds until SIGCONT, after SIGSTOP."""
    after_steps: int | None
    """Finished steps before the fault; None: only the delay counts, so the run may still be starting."""
    delay_s: float
    """Seconds from that moment to the fault."""

    @classmethod
    def drawn(cls, chance: random.Random) -> Fault:
        """Return a random fault."""
        victim = chance.choice(["driver", "driver", "rank", "rank", "reward"])
        numbers = {
            "driver": [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM],
            "rank": [signal.SIGKILL, signal.SIGSTOP],
            "reward": [signal.SIGKILL],
        }
        number = chance.choice(numbers[victim])
        at = None if chance.random() < 0.2 else chance.randrange(1, STEPS)
        return cls(
            victim=victim,
            number=number,
            pause_s=chance.uniform(0.5, 4.0) if number == signal.SIGSTOP else 0.0,
            after_steps=at,
            delay_s=chance.uniform(1.0, 12.0) if at is None else chance.uniform(0.0, 0.3),
        )


class Case(Tiny):
    """One run that is disturbed and restarted until it is finished.

    Args:
        folder: an empty folder.
        kind: one of ``KINDS``.
        seed: decides the faults.
        more: further settings of every start.
    """

    def __init__(self, folder: Path, kind: str, seed: int, more: Sequence[str] = ()) -> None:
        super().__init__(folder)
        self.kind, self.seed = kind, seed
        self._settings = (OFTEN, *KINDS[kind], *more)
        self.told: list[str] = []
        """The events of the case, one line per start."""
        self._chance = random.Random(f"{kind} {seed}")
        self._killed_rank = False
        self.write(REST)

    def play(self, faults: int) -> None:
        """Run the case with some disturbed starts, and check the results.

        Raises:
            AssertionError: a check failed; the message has all events.
        """
        for number in range(faults + 1):
            fault = Fault.drawn(self._chance) if number < faults else None
            code = self._start(number, fault)
            asked = 128 + signal.SIGTERM
            expected = {"driver": (-9, asked), "rank": (1, 2), "reward": (1, 2)}  # 2: during the start
            known = (0, *(expected[fault.victim] if fault else ()))
            assert code in known, self._story(f"exit code {code}, possible were {known}")
            if code == 0:
                break
        self._check()

    def _start(self, number: int, fault: Fault | None) -> int:
        """Start the run, disturb it, wait for its end; return its exit code."""
        words = [word for each in self._settings for word in ("--set", each)]
        said = self.folder / f"start-{number}.txt"
        command = Command(["run", str(self.recipe), "--dir", str(self.folder / "run"), *words], said)
        driver = psutil.Process(command.pid)
        seen: set[psutil.Process] = {driver}
        struck, end = "nothing", time.monotonic() + LONG_S
        due = self._moment(fault)
        try:
            while command.poll() is None:
                assert time.monotonic() < end, self._story(f"start {number} did not end in {LONG_S:g} s")
                with suppress(psutil.NoSuchProcess):
                    seen.update(driver.children(recursive=True))
                if fault is not None and next(due):
                    struck = self._strike(fault, driver)
                    fault = None if struck else fault
                time.sleep(0.05)
        finally:
            if command.poll() is None:
                command.kill()
        code = command.wait(GONE_S)
        self.told.append(f"start {number}: {struck or 'no victim'}, exit code {code}")
        self._require_gone(seen)
        return code

    def _moment(self, fault: Fault | None) -> Iterator[bool]:
        """Yield repeatedly whether the fault is due."""
        since = time.monotonic() if fault is None or fault.after_steps is None else None
        while True:
            if fault is not None and since is None and self._steps() >= (fault.after_steps or 0):
                since = time.monotonic()
            yield fault is not None and since is not None and time.monotonic() - since >= fault.delay_s

    def _steps(self) -> int:
        file = self.folder / "run" / layout.METRICS
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _strike(self, fault: Fault, driver: psutil.Process) -> str:
        """Send the signal; return a description, empty if there is no victim yet."""
        victims = [driver]
        with suppress(psutil.NoSuchProcess):
            ranks = [each for each in driver.children(recursive=True) if _title(each).startswith("ray::Rank")]
            if fault.victim == "rank":
                victims = ranks
            if fault.victim == "reward":
                victims = [child for each in ranks for child in each.children()]
        if not victims:
            return ""
        victim = self._chance.choice(sorted(victims, key=lambda each: each.pid))
        self._killed_rank |= fault.victim != "driver" and fault.number == signal.SIGKILL
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(fault.number)
            if fault.pause_s:
                time.sleep(fault.pause_s)
                victim.send_signal(signal.SIGCONT)
        return f"{fault.number.name} to {fault.victim} after {self._steps()} steps"

    def _require_gone(self, seen: set[psutil.Process]) -> None:
        end = time.monotonic() + GONE_S
        while (left := [each for each in seen if _runs(each)]) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, self._story(f"left {GONE_S:g} s after the end: {left}")

    def _check(self) -> None:
        """Check the finished run."""
        run = self.folder / "run"
        steps = [line["step"] for line in self.lines("run")]
        assert (run / layout.FINISHED).is_file(), self._story("the run is not finished")
        assert steps == [*range(1, STEPS + 1)], self._story(f"metrics of the steps {steps}")
        entries = self.lines("run", layout.DIGESTS)
        lost = {line["step"] for line in entries if line.get("lost")}
        assert not lost or self._killed_rank, self._story(f"the rollouts of the steps {lost} are lost")
        files, rows = layout.rollout_files(run), Counter[tuple[int, int, int]]()
        assert {*files} | lost == {*steps}, self._story(f"rollouts of the steps {[*files]}")
        for step in {*files} - lost:
            columns = rollout_columns(run, step)
            ids = [*zip(columns["epoch"], columns["prompt_id"], columns["sample"], strict=True)]
            assert len(ids) == 8, self._story(f"step {step} has {len(ids)} rows")
            rows.update(ids)
            sampled = [version for row in columns["versions"] for version in row if version >= 0]
            oldest = step - 1 - BOUNDS[self.kind]
            assert oldest <= min(sampled) and max(sampled) < step, self._story(f"step {step} has {sampled}")
        assert {*rows.values()} == {1}, self._story(f"rows trained twice: {rows.most_common(3)}")
        if not self._may_differ():
            with redirect_stdout(io.StringIO()):
                assert self.run("whole", *self._settings, INLINE) == 0
            try:
                self.assert_same_weights("whole", "run")
                if not self._killed_rank:  # the metrics of a dead rank are lost
                    assert self.numbers("whole") == self.numbers("run")
            except AssertionError as error:
                raise AssertionError(self._story("other bits than the undisturbed run")) from error
            self.told.append("the bits of an undisturbed run")

    def _may_differ(self) -> bool:
        """Return whether bits may differ: by timing, by rows that a dead rank lost, or by a lost score."""
        said = " ".join(file.read_text() for file in self.folder.glob("start-*.txt"))
        is_fresher = "sampled by the weights after step" in " ".join(said.split())
        errors = [line["metrics"].get("reward/error/share", {}).get("mean", 0) for line in self.lines("run")]
        return self.kind == "ready first" or (is_fresher and self._killed_rank) or any(errors)

    def _story(self, what: str) -> str:
        return "\n".join([f"{self.kind}, seed {self.seed}, in {self.folder}: {what}", *self.told])


def _title(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Play cases until the time is over; return 1 at the first failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long cases begin (30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case (0)")
    asked = parser.parse_args(arguments)
    end, seed, starts = time.monotonic() + 60 * asked.minutes, asked.seed, 0
    while time.monotonic() < end:
        kind = [*KINDS][seed % len(KINDS)]
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
        case = Case(folder, kind, seed)
        try:
            case.play(faults=1 + seed % 4)
        except AssertionError as error:
            print(f"FAILED {error}\nagain: python -m tests.chaos --minutes 0.01 --seed {seed}")
            return 1
        print(json.dumps({"seed": seed, "kind": kind, "starts": case.told}), flush=True)
        starts += sum(each.startswith("start") for each in case.told)
        shutil.rmtree(folder)
        seed += 1
    print(f"{seed - asked.seed} cases, {starts} starts: 0 lost, 0 doubled, 0 over the bound, no process left")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
