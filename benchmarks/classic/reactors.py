"""Static executor: the six workloads of the reactor paper (arXiv 2312.04704) beside Ray and a plain loop.

    serial loop            all objects called one after the other, in this process ─┐
    static, N threads      a StaticPlan on N threads                                ├─ rounds in turn
    Ray, plain             one actor and one call for each object and round         │
    Ray, tuned             fragments of all rounds, arrays, objects put once       ─┘

    python benchmarks/classic/reactors.py --write benchmarks/results/classic_reactors.md
    python benchmarks/classic/reactors.py --cases traffic --rounds 20

All forms call the same methods of the same objects (``reactor_workloads.py``). "Plain" passes values as
arguments and results of calls: a broadcast object is an argument of every call, which Ray stores once a call;
Q-learning returns lists of tuples of tensors to this process and sends them on to a buffer and to a learner.
"Tuned" puts the object once, asks environments for fragments of all steps of a measurement, gets arrays
instead of tuples, learns here, and has the junction with all its agents in one actor. It does not do the same
as the others where it takes fragments: nobody could react to a single observation.

*broadcast*: the sender makes a new object each round; each actor reads it and sleeps (--pause; the paper's
sleep 500 ms). The sleep that a form cannot avoid is subtracted, so a cell is overhead. The paper's objects
reach 500 MB; these 300 MB, because plain Ray stores 16 copies. *gym*, *atari*: random actions; printed means
to /dev/null. *q*: the minibatch is the oldest transitions, as in the paper's programs. *traffic*: a junction
with an MLP of 3 layers for every agent.

Each round measures every form in turn, and the first form changes with every round. A cell is the mean of
the rounds with its 99% interval. A row with more reactors than cores is marked: threads and actors then share
cores. A ratio is that of the medians: Ray's time over that of the faster of static with 1 and 2 threads
(broadcast: with a thread for each actor).
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TextIO

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

import torch
from measured_at import below_title, line
from reactor_forms import (
    ONE,
    PLAIN,
    SERIAL,
    TUNED,
    TWO,
    WIDE,
    RayActors,
    Workload,
    broadcast,
    generation,
    inference,
    q_learning,
)
from reactor_workloads import ATARI, GYM

from rillflow.formulas.interval import student_t

SMALLEST = ["--without-ray --rounds 1 --share 0.02 --pause 0.001 --cases broadcast,q"]
SLOW = ["--rounds 1 --share 0.02 --pause 0.001 --sizes 1"]  # starts Ray
NEEDS = ["ray", "ale_py", "rillflow_classic"]
CASES = ("broadcast", "size", "gym", "atari", "q", "traffic")
FORMS = (SERIAL, ONE, TWO, WIDE, PLAIN, TUNED)
MB = 1_000_000


def workloads(
    arguments: argparse.Namespace, ray: RayActors | None, sink: TextIO, stack: ExitStack
) -> Iterator[Workload]:
    """Yield the workloads; the objects of one are made when the one before has been measured."""

    def steps(count: int) -> int:
        return max(1, round(count * arguments.share))

    chosen, pause_s = arguments.cases.split(","), arguments.pause
    for actors in (2, 4, 8, 16) if "broadcast" in chosen else ():
        yield broadcast(10 * MB, actors, pause_s, steps(3), ray, stack)
    for size in arguments.sizes if "size" in chosen else ():
        yield broadcast(size * MB, 16, pause_s, 1, ray, stack)
    for name, paper in zip(GYM, ("1.16x", "1.35x", "1.13x"), strict=True):
        for file in (None, sink) if "gym" in chosen else ():
            yield generation(name, GYM[name], file, steps(60), paper, ray, stack)
    for name, make in ATARI.items():
        if "atari" in chosen:
            paper = {"Pacman": "11.79x", "Pong": "11.57x", "SpaceInvaders": "11.50x"}[name.split()[0]]
            yield generation(name, make, None, steps(8), paper, ray, stack)
            if name.startswith("Pong"):
                yield generation(name, make, sink, steps(8), paper, ray, stack)
    for batch, paper in ((500, "1.45x"), (1000, "1.56x"), (2000, "2.00x")):
        if "q" in chosen:
            yield q_learning(batch, 1, paper, ray, stack)
    for agents, paper in ((4, "2.37x"), (10, "5.12x")):
        for file in (None, sink) if "traffic" in chosen else ():
            yield inference(agents, file, steps(60), paper, ray, stack)


def measure(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of a round of every form, without the sleep that it cannot avoid."""
    forms = list(workload.forms)
    found: dict[str, list[float]] = {form: [] for form in forms}
    for form in workload.forms.values():
        form(1)
    for turn in range(rounds):
        first = turn % len(forms)
        for form in forms[first:] + forms[:first]:
            began = time.perf_counter()
            workload.forms[form](workload.steps)
            took_s = (time.perf_counter() - began) / workload.steps
            found[form].append(1e3 * (took_s - workload.pauses_s(form)))
    return found


def with_interval(values: list[float], sign: str = "") -> str:
    """Return the mean and half of its 99% interval."""
    shown = f"{fmean(values):{sign}.2f}"
    if len(values) < 2:
        return shown
    half = student_t(len(values) - 1, 0.99) * stdev(values) / math.sqrt(len(values))
    return f"{shown} ± {half:.2f}"


def row(workload: Workload, found: dict[str, list[float]]) -> str:
    """Return a row of the table of times and ratios."""
    best = median(found[WIDE]) if WIDE in found else min(median(found[form]) for form in (ONE, TWO))
    cells = [with_interval(found[form]) if form in found else "" for form in FORMS]
    cells += [
        f"{median(found[form]) / best:.2f}x" if form in found else "" for form in (PLAIN, TUNED, SERIAL)
    ]
    cores = os.cpu_count() or 1
    mark = f" ({workload.reactors} on {cores} cores)" if workload.reactors > cores else ""
    return f"| {workload.name}{mark} | {' | '.join(cells)} | {workload.paper} |"


def overhead_row(workload: Workload, found: dict[str, list[float]]) -> str:
    """Return a row of the table of milliseconds over the serial loop of the same round."""
    cells = [
        with_interval([one - floor for one, floor in zip(found[form], found[SERIAL], strict=True)], "+")
        if form in found
        else ""
        for form in (ONE, TWO, PLAIN, TUNED)
    ]
    best = 1e3 * workload.units / min(median(found[form]) for form in (ONE, TWO))
    return f"| {workload.name} | {' | '.join(cells)} | {best:,.0f} |"


def tables(arguments: argparse.Namespace) -> str:
    """Measure all workloads, and return both tables."""
    titles = [*FORMS, "Ray, plain / static", "Ray, tuned / static", "serial / static", "paper, Ray / LF"]
    times = [f"| ms of a round | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    over = [
        f"| ms over the serial loop | {' | '.join((ONE, TWO, PLAIN, TUNED))} | units/s, static |",
        "|---" * 6 + "|",
    ]
    with ExitStack() as outer:
        ray = None if arguments.without_ray else RayActors(18, outer)
        with Path(os.devnull).open("w") as sink, ExitStack() as stack:
            for workload in workloads(arguments, ray, sink, stack):
                found = measure(workload, arguments.rounds)
                times.append(row(workload, found))
                print(times[-1], flush=True)
                if not workload.pause_s:
                    over.append(overhead_row(workload, found))
                stack.pop_all().close()
    return "\n".join([*times, "", *over])


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="workloads, of " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each workload")
    parser.add_argument("--share", type=float, default=1.0, help="share of the steps of a measurement")
    parser.add_argument("--pause", type=float, default=0.02, help="sleep of a broadcast's actors in seconds")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 300], help="sizes of objects in MB")
    parser.add_argument("--without-ray", action="store_true", help="leave the forms on Ray out")
    parser.add_argument("--write", metavar="FILE", help="where the page goes, besides the screen")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began_s, load = time.monotonic(), os.getloadavg()[0]
    table = tables(arguments)
    command = " ".join(["python benchmarks/classic/reactors.py", *sys.argv[1:]])
    ray_version = "without Ray" if arguments.without_ray else f"ray {version('ray')}"
    text = (
        f"# Static executor against Ray actors\n\n`{command}`, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {ray_version}, gymnasium {version('gymnasium')}, ale-py "
        f"{version('ale_py')}, torch {version('torch')}; load average {load:.0f} at the start and "
        f"{os.getloadavg()[0]:.0f} at the end, {time.monotonic() - began_s:.0f} s.\n\n{table}\n"
    )
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(below_title(text, line()))


if __name__ == "__main__":
    main()
