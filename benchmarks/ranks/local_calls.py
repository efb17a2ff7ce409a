"""Calls of local processes against Ray actors: a small call, arrays there and back, arrays between ranks.

    python benchmarks/ranks/local_calls.py
    python benchmarks/ranks/local_calls.py --rounds 7 --write benchmarks/results/local_calls.md

Both backends run two ranks at the same time in one process, and take turns: a round measures every row on one
backend and then on the other. A cell is the mean over rounds of the median of a round, with its 95% interval.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from rillflow.workers.backend import Backend, Place, Pool, Site
from rillflow.workers.inline import InlineBackend
from rillflow.workers.processes import ProcessBackend
from rillflow.workers.start import ray_backend

sys.path.append(str(Path(__file__).parents[1]))
import measured_at
from intervals import interval

SMALLEST = ["--rounds 1 --calls 5 --backends processes"]
SLOW = ["--rounds 1 --calls 5"]  # starts Ray

WAIT_S = 600.0
FIRST, SECOND = Place("ranks", 0), Place("ranks", 1)
BACKENDS: dict[str, Callable[[], Backend]] = {
    "threads": lambda: InlineBackend(WAIT_S),
    "processes": lambda: ProcessBackend(WAIT_S),
    "Ray": lambda: ray_backend(WAIT_S),
}


def same(_: Site, value: Any) -> Any:
    return value


def make(_: Site, size: int) -> Any:
    return np.ones(size, np.uint8)


def size_of(site: Site, reference: Any) -> int:
    (array,) = site.fetch([reference])
    return int(array[-1]) * len(array)


def there_and_back(backend: Backend, value: Any, calls: int) -> float:
    """Return the median seconds of a call that returns its argument."""
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        backend.read_all(backend.submit(FIRST, same, value), WAIT_S)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def queued(backend: Backend, calls: int) -> float:
    """Return the seconds of each of many small calls that are submitted before the first one is read."""
    began = time.perf_counter()
    backend.read_all([backend.submit(FIRST, same, 1)[0] for _ in range(calls)], WAIT_S)
    return (time.perf_counter() - began) / calls


def between(backend: Backend, size: int, calls: int) -> float:
    """Return the median seconds in which a rank makes an array and another one reads it."""
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        made = backend.submit(FIRST, make, size)[0]
        (found,) = backend.read_all(backend.submit(SECOND, size_of, made), WAIT_S)
        assert found == size
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def rows(calls: int) -> Mapping[str, Callable[[Backend], float]]:
    """Return what is measured, by name."""
    few = max(1, calls // 10)
    arrays = {"16 KiB": 2**14, "256 KiB": 2**18, "4 MiB": 2**22}
    return {
        "small call and reply": lambda backend: there_and_back(backend, 1, calls),
        "small call, many in flight": lambda backend: queued(backend, calls),
        **{
            f"array of {name} there and back": lambda backend, size=size: there_and_back(
                backend, np.ones(size, np.uint8), few
            )
            for name, size in arrays.items()
        },
        "array of 4 MiB from rank to rank": lambda backend: between(backend, 2**22, few),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--write", help="a file for the table")
    arguments = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = {}
    starts = {}
    with ExitStack() as stack:
        opened = {}
        for name in arguments.backends:
            opened[name] = BACKENDS[name]()
            stack.callback(opened[name].close)
            began = time.perf_counter()
            opened[name].open([Pool(name="ranks", size=2, world=1)])
            starts[name] = time.perf_counter() - began
        for count in range(arguments.rounds + 1):
            for name, backend in opened.items():
                for row, measure in rows(arguments.calls).items():
                    seconds = measure(backend)
                    if count:  # the first round warms up
                        found.setdefault((row, name), []).append(seconds * 1e6)
    versions = f"torch {version('torch')}" + (f", ray {version('ray')}" if "Ray" in starts else "")
    lines = [
        "# Calls of local processes",
        "",
        measured_at.line(),
        "",
        "<!-- not run: a quiet machine -->",
        "```console",
        f"$ python benchmarks/ranks/local_calls.py --rounds {arguments.rounds} --calls {arguments.calls} "
        "--write benchmarks/results/local_calls.md",
        "```",
        "",
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, {versions}. Microseconds: means of "
        f"{arguments.rounds} rounds with 95% intervals; a round is a median of {arguments.calls} calls (of a "
        "tenth of them with arrays).",
        "",
        f"| | {' | '.join(opened)} |",
        f"|---|{'---|' * len(opened)}",
    ]
    lines += [f"| {row} | {' | '.join(cell(found[row, name]) for name in opened)} |" for row in rows(1)]
    lines.append(f"| start of two ranks, s | {' | '.join(f'{starts[name]:.1f}' for name in opened)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text, encoding="utf-8")


def cell(values: list[float]) -> str:
    """Return microseconds with their interval, rounded."""
    mean, _, half = interval(values).partition(" ± ")
    return f"{float(mean):,.0f}" + (f" ± {float(half):,.0f}" if half else "")


if __name__ == "__main__":
    main()
