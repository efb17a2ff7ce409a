"""Fused schedules: RLHFuse's eight published instances, their fronts, and small problems solved exactly.

    python benchmarks/streaming/fused.py                                                # prints the page
    python benchmarks/streaming/fused.py --write benchmarks/results/fused.md

Seconds are processor seconds of one process, so other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from rillflow_parts.fusion.scheduling.problem import FusedProblem, FusedSchedule, lower_bound  # noqa: E402
from rillflow_parts.fusion.scheduling.solve import schedule  # noqa: E402
from tests.parts.fusion.scheduling.check import check  # noqa: E402
from tests.parts.fusion.scheduling.exhaustive import Exhaustive, drawn  # noqa: E402
from tests.parts.fusion.scheduling.toys import even, front, within  # noqa: E402

SMALLEST = ["--instances 2 5 --seeds 1 --points 1 --front-budget 50 --least-budget 50 --problems 3"]
NEEDS = ["rillflow_planner"]
BUDGET = 80_000
"""Schedules timed at most for an instance: about a minute."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A published instance (github.com/FlexFusion/FlexFusion), with the authors' result."""

    stages: tuple[int, int]
    """Stages of the large and of the small model."""
    micro_batches: tuple[int, int]
    """Micro-batches of a replica of each."""
    forward: tuple[int, int]
    """Length of a forward pass of each; a backward pass takes two."""
    memory: tuple[float, float]
    """Memory of a micro-batch of each."""
    authors_latency: int
    """The authors' latency; it equals the bound."""
    authors_memory: float
    """The authors' peak memory."""

    def problem(self, memory: float = math.inf) -> FusedProblem:
        """The instance with a memory cap."""
        pipelines = [
            even(name, stages=stages, micro_batches=count, forward_s=forward, activation_bytes=kept)
            for name, stages, count, forward, kept in zip(
                ("large", "small"), self.stages, self.micro_batches, self.forward, self.memory, strict=True
            )
        ]
        return FusedProblem(
            devices=self.stages[0], ascending=pipelines[0], descending=pipelines[1], memory_bytes=memory
        )


def _instance(stages: str, batches: str, forward: str, memory: str, latency: int, peak: float) -> Instance:
    one, two = (float(word) for word in memory.split())
    counts = [tuple(map(int, text.split())) for text in (stages, batches, forward)]
    return Instance(
        stages=(counts[0][0], counts[0][1]),
        micro_batches=(counts[1][0], counts[1][1]),
        forward=(counts[2][0], counts[2][1]),
        memory=(one, two),
        authors_latency=latency,
        authors_memory=peak,
    )


INSTANCES = (
    _instance("8 4", "32 16", "5 4", "1.95 2", 708, 19.70),
    _instance("8 4", "16 8", "5 4", "1.95 2", 372, 15.75),
    _instance("8 4", "8 4", "5 4", "1.95 2", 225, 15.60),
    _instance("8 8", "32 32", "5 2", "1.95 1", 702, 20.50),
    _instance("8 8", "16 16", "5 2", "1.95 1", 366, 18.55),
    _instance("8 8", "8 8", "5 2", "1.95 1", 225, 15.60),
    _instance("16 8", "64 32", "2 2", "1.64 2", 618, 39.72),
    _instance("16 8", "32 16", "2 2", "1.64 2", 330, 29.88),
)


def timed(make: Callable[[], FusedSchedule]) -> tuple[FusedSchedule, float]:
    """A schedule and its processor seconds."""
    begin = time.process_time()
    found = make()
    return found, time.process_time() - begin


def verified(problem: FusedProblem, found: FusedSchedule) -> FusedSchedule:
    """The schedule, if the independent checker finds no fault."""
    faults = check(problem, found)
    if faults:
        raise SystemExit("\n".join(faults))
    return found


def instance_rows(numbers: list[int], seeds: int, known: dict[int, FusedSchedule]) -> list[str]:
    """Latency within the authors' memory, over seeds; ``known`` receives the shortest."""
    rows = [
        "| instance | in sequence | bound | latency, by seed | peak | authors' peak | processor seconds |",
        "|---|---:|---:|---|---:|---:|---|",
    ]
    for number in numbers:
        instance = INSTANCES[number]
        problem = instance.problem(instance.authors_memory)
        results = []
        for seed in range(seeds):
            found, spent = timed(lambda p=problem, s=seed: schedule(p, budget=BUDGET, seed=s))
            results.append((verified(problem, found), spent))
        peaks = max(max(found.peak_bytes) for found, _ in results)
        known[number] = min((found for found, _ in results), key=lambda each: each.latency_s)
        sequence = sum(each.bound_s for each in problem.pipelines)
        rows.append(
            f"| {number} | {sequence:g} | {lower_bound(problem):g} | "
            f"{', '.join(f'{found.latency_s:g}' for found, _ in results)} | {peaks:.2f} | "
            f"{instance.authors_memory:.2f} | {', '.join(f'{spent:.1f}' for _, spent in results)} |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def front_rows(numbers: list[int], points: int, budget: int, known: dict[int, FusedSchedule]) -> list[str]:
    """The front of every instance, from the authors' memory down."""
    rows = ["| instance | (latency, peak memory) | processor seconds |", "|---|---|---:|"]
    for number in numbers:
        instance = INSTANCES[number]
        problem = instance.problem(instance.authors_memory)
        begin = time.process_time()
        found = front(problem, points=points, budget=budget, begin=known[number])
        spent = time.process_time() - begin
        said = ", ".join(f"({each.latency_s:g}, {max(each.peak_bytes):.2f})" for each in found)
        for each in found:
            verified(problem, each)
        rows.append(f"| {number} | {said} | {spent:.0f} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def least_rows(numbers: list[int], budget: int, known: dict[int, FusedSchedule]) -> list[str]:
    """The least peak memory found at the bound; the cap falls until both searches of a cap fail."""
    rows = [
        "| instance | latency | authors' peak | least peak found | processor seconds |",
        "|---|---:|---:|---:|---:|",
    ]
    for number in numbers:
        instance, found = INSTANCES[number], known[number]
        problem, begin = instance.problem(instance.authors_memory), time.process_time()
        least = found
        while found.latency_s <= lower_bound(problem) and max(found.peak_bytes) > max(instance.memory):
            least = found
            capped = within(problem, max(found.peak_bytes) - min(instance.memory) / 2)
            for seed in range(2):
                found = verified(capped, schedule(capped, budget=budget, seed=seed))
                if found.latency_s <= lower_bound(problem):
                    break
        rows.append(
            f"| {number} | {least.latency_s:g} | {instance.authors_memory:.2f} | "
            f"{max(least.peak_bytes):.2f} | {time.process_time() - begin:.0f} |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def exact(problems: int) -> str:
    """A sentence about random small problems against exhaustive search."""
    equal, worst, ours, theirs = 0, 1.0, 0.0, 0.0
    for seed in range(problems):
        problem = drawn(seed)
        found, spent = timed(lambda p=problem: schedule(p))
        ours += spent
        verified(problem, found)
        begin = time.process_time()
        least = Exhaustive(problem, found.latency_s).shortest_s()
        theirs += time.process_time() - begin
        if least is None:
            raise SystemExit(f"problem {seed}: exhaustive search finds no schedule as short as the found one")
        equal += least >= found.latency_s
        worst = max(worst, found.latency_s / least)
    return (
        f"{equal} of {problems} random problems have the latency of exhaustive search; the worst is "
        f"{100 * (worst - 1):.1f}% longer. The planner's search took {ours:.0f} processor seconds for all, "
        f"the exhaustive one {theirs:.0f}."
    )


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--instances", type=int, nargs="*", default=list(range(len(INSTANCES))))
    parser.add_argument("--seeds", type=int, default=2, help="searches of each instance")
    parser.add_argument("--points", type=int, default=4, help="memory caps of each front")
    parser.add_argument("--front-budget", type=int, default=2000, help="schedules timed for each cap")
    parser.add_argument("--least-budget", type=int, default=8000, help="schedules timed for each lower cap")
    parser.add_argument("--problems", type=int, default=200, help="random small problems")
    parser.add_argument("--write", type=Path, help="page of results to write")
    arguments = parser.parse_args()
    known: dict[int, FusedSchedule] = {}
    page = "\n".join(
        (
            "# Fused schedules",
            "",
            measured_at.line(),
            "",
            "```",
            " ".join(["python", "benchmarks/streaming/fused.py", *sys.argv[1:]]),
            "```",
            "",
            f"Python {platform.python_version()}, one process on a machine of {os.cpu_count()} cores, which "
            "other processes used too. Every schedule passed `fused.check`.",
            "",
            "## Published instances",
            "",
            "RLHFuse's eight instances (arXiv 2409.13221), with the authors' peak memory as the cap. The "
            "authors' latency is the bound in all eight.",
            "",
            *instance_rows(arguments.instances, arguments.seeds, known),
            "",
            "## Least memory at the bound",
            "",
            f"{arguments.least_budget} schedules timed at most for each cap and each of two seeds.",
            "",
            *least_rows(arguments.instances, arguments.least_budget, known),
            "",
            "## Fronts",
            "",
            f"Each front begins at the shortest schedule above. {arguments.points} lower caps at most, "
            f"{arguments.front_budget} schedules timed for each.",
            "",
            *front_rows(arguments.instances, arguments.points, arguments.front_budget, known),
            "",
            "## Small problems",
            "",
            "At most 3 devices, 3 stages and 3 micro-batches a pipeline, uneven stages, sends, a memory cap.",
            "",
            exact(arguments.problems),
            "",
        )
    )
    if arguments.write:
        arguments.write.write_text(page, encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
