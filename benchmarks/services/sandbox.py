"""Cost of the sandbox: milliseconds for one scored row at every level that this machine supports.

    plain        a reward that compares two texts
    run_python   a reward that runs each completion by run_python
    subprocess   a reward that runs each completion by subprocess.run
    none         reward.sandbox = false: the row's own work; for subprocess it includes the start of a Python

    in each round, every reward at every level scores the same rows in turn, so that other work on the machine
    slows all of them

    python benchmarks/services/sandbox.py --write benchmarks/results/sandbox.md     # some minutes

CPU time is that of the whole process tree. Other work on the machine changes it less than wall-clock time.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from textwrap import fill

from rillflow.errors import RewardError
from rillflow.isolation.sandbox import Level
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import parse_function
from rillflow.rewards.workers import RewardWorkers

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SMALLEST = ["--rounds 1 --rows 2"]

ASKED_MS = 5.0
"""Largest allowed cost of a row at the default level in addition to its own work, in milliseconds."""
LEAST_ROWS = 16
"""Rows that suffice for a program that starts a whole sandbox."""
PROGRAM, PRINTED = "print(6 * 7)", "42\n"
SOURCE = f"""
import subprocess, sys
from rillflow.rewards.programs import run_python

def plain(completions):
    return [float(completion == {PROGRAM!r}) for completion in completions]

def by_run_python(completions):
    return [float(run_python(completion).stdout == {PRINTED!r}) for completion in completions]

def by_subprocess(completions):
    return [float(printed(completion) == {PRINTED!r}) for completion in completions]

def printed(program):
    command = [sys.executable, "-I", "-c", program]
    return subprocess.run(command, capture_output=True, text=True).stdout
"""
REWARDS = {
    "plain": "compares two texts",
    "by_run_python": "runs the completion by `run_python`",
    "by_subprocess": "runs the completion by `subprocess.run`",
}
OWN_WORK = {"plain": "plain", "by_run_python": "by_subprocess", "by_subprocess": "by_subprocess"}
"""The reward that does the same work as the key; without a sandbox it is a row's own work."""


@dataclass(kw_only=True)
class Case:
    """One reward at one level."""

    reward: str
    """Name of the function."""
    level: Level
    """The sandbox level."""
    num_workers: int
    """``reward.workers``."""
    workers: RewardWorkers
    """The workers that call the function."""
    wall_ms: list[float] = field(default_factory=list)
    """Milliseconds per row of each round."""
    processor_s: float = 0.0
    """CPU seconds of all rounds."""
    num_rows: int = 0
    """Rows of all rounds."""

    @property
    def processor_ms(self) -> float:
        """CPU milliseconds per row: a mean over all rows, because the kernel counts in steps of 10 ms."""
        return 1000 * self.processor_s / self.num_rows

    @property
    def is_own_sandbox(self) -> bool:
        """True if each program starts a whole sandbox; such a case is slow, so few rounds measure it."""
        return self.reward == "by_run_python" and self.level is Level.NONE

    def measure(self, num_rows: int) -> None:
        """Score one round and record its cost."""
        completions = [PROGRAM] * num_rows
        processor_s, began = processor_time(), time.perf_counter()
        scores = self.workers.score(["p"] * num_rows, completions, {})
        spent_s = time.perf_counter() - began
        assert [score.value for score in scores] == [1.0] * num_rows, scores
        self.wall_ms.append(1000 * spent_s / num_rows)
        self.processor_s += processor_time() - processor_s
        self.num_rows += num_rows


def processor_time() -> float:
    """Return the CPU seconds of this process and all its descendants, including ended ones."""
    parents, seconds = dict[int, int](), dict[int, float]()
    tick = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            known = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        parents[int(entry.name)] = int(known[1])
        seconds[int(entry.name)] = sum(map(int, known[11:15])) / tick
    own = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(seconds.get(process, 0.0) for process in own)


def cases(folder: Path, num_workers: int, stack: ExitStack) -> Iterator[Case]:
    """Yield every reward at every level that this machine supports."""
    (folder / "rewards.py").write_text(SOURCE)
    for reward in REWARDS:
        seen: set[Level] = set()
        for level in (Level.FULL, Level.SHARED_USER, Level.NONE):
            config = RewardConfig(timeout_s=600, workers=num_workers, sandbox=level.is_sandbox)
            function = parse_function(f"rewards.py:{reward}", folder)
            workers = stack.enter_context(RewardWorkers(function, config, level=level))
            try:
                workers.score(["p"], [PROGRAM], {})
            except RewardError as error:
                print(f"{level}: {error}", flush=True)
                continue
            if workers.level not in seen:
                seen.add(workers.level)
                yield Case(reward=reward, level=workers.level, num_workers=num_workers, workers=workers)


def page(found: Sequence[Case], arguments: argparse.Namespace, load: float) -> str:
    """Return the page: the table and the verdict on the allowed cost."""
    workers = " ".join(map(str, arguments.workers))
    lines = [
        "# The sandbox: cost of a scored row",
        "",
        measured_at.line(),
        "",
        f"`python benchmarks/services/sandbox.py --rows {arguments.rows} --rounds {arguments.rounds} "
        f"--workers {workers}`, {os.cpu_count()} cores with a load of {load:.1f} from other work, "
        f"Python {platform.python_version()}, Linux {platform.release()}.",
        "",
        f"Each of {arguments.rounds} rounds scores {arguments.rows} rows at every level in turn. A cell has "
        "the median round and, in brackets, the fastest. *Beyond* compares with the row's own work: the same "
        "reward without a sandbox, and for a program `subprocess.run` without a sandbox.",
        "",
        "| reward | workers | level | ms a row | processor ms a row | beyond: ms, processor ms |",
        "|---|---|---|---|---|---|",
    ]
    for case in found:
        shown = (_shown(case.wall_ms), f"{case.processor_ms:.1f}", beyond(case, found))
        cells = (REWARDS[case.reward], str(case.num_workers), f"`{case.level}`", *shown)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *verdict(found)]
    return "\n".join(line if line.startswith("|") else fill(line, 110) for line in lines)


def _shown(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f})"


def own_work(case: Case, found: Sequence[Case]) -> Case:
    """Return the case without a sandbox that does the same work."""
    (own,) = (
        each
        for each in found
        if each.reward == OWN_WORK[case.reward]
        and each.level is Level.NONE
        and each.num_workers == case.num_workers
    )
    return own


def beyond(case: Case, found: Sequence[Case]) -> str:
    """Format the cost of a level in addition to the row's own work."""
    own = own_work(case, found)
    if case is own:
        return ""
    mine, its = case.wall_ms, own.wall_ms
    processor_ms = case.processor_ms - own.processor_ms
    return f"{median(mine) - median(its):+.2f} ({min(mine) - min(its):+.2f}), {processor_ms:+.1f}"


def verdict(found: Sequence[Case]) -> list[str]:
    """Return for each reward whether its fastest round stays within the allowed cost."""
    lines = [
        f"Asked: at most {ASKED_MS:g} ms a row beyond its own work at the machine's strongest level.",
        "",
    ]
    for reward, what in REWARDS.items():
        strong = [each for each in found if each.reward == reward and each.level is not Level.NONE]
        for case in [each for each in strong if each.level is strong[0].level]:
            own = own_work(case, found)
            added = min(case.wall_ms) - min(own.wall_ms)
            processor_ms = case.processor_ms - own.processor_ms
            held = "kept" if added <= ASKED_MS else "missed"
            said = f"{added:+.2f} ms, {held}; {processor_ms:+.1f} ms of processor time"
            lines.append(f"- A reward that {what}, {case.num_workers} at once, at `{case.level}`: {said}.")
    return lines


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16, help="rows of a call")
    parser.add_argument("--rounds", type=int, default=40, help="calls of each case")
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="children that score at once")
    parser.add_argument("--write", type=Path, help="where the page is written")
    arguments = parser.parse_args()
    load, found = os.getloadavg()[0], list[Case]()
    for num_workers in arguments.workers:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            open_cases = list(cases(Path(folder), num_workers, stack))
            for _ in range(arguments.rounds):
                for case in open_cases:
                    if case.is_own_sandbox and case.num_rows >= LEAST_ROWS:
                        continue
                    case.measure(arguments.rows)
            found += open_cases
    text = page(found, arguments, load)
    print(text)
    if arguments.write is not None:
        arguments.write.write_text(text + "\n")


if __name__ == "__main__":
    main()
