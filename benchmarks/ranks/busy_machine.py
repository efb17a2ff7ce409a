"""Busy machine: ten GRPO steps of the quickstart alone, and beside programs that compute without end.

    python benchmarks/ranks/busy_machine.py --rounds 5
    python benchmarks/ranks/busy_machine.py --rounds 5 --before ../older/.venv/bin/python

Every variant runs in turn in every round, alone and beside the loops: the code as it is, the same with
OMP_WAIT_POLICY=PASSIVE, and with --before that of another checkout. Each is one `rillflow run`, whose metrics
time its steps. Prints a markdown table of medians; --write also writes it to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

# trains in separate processes, which import everything
SMALLEST = []
SLOW = ["--rounds 1 --steps 1 --loops 1"]

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic" / "run.toml"
SETTINGS = {"warm_start.steps": 1, "evaluate.every": 1000, "evaluate.problems": 16, "policy.warmup_steps": 0}
FIRST = 2
"""Steps that are not timed: they make caches and optimiser state."""


@contextmanager
def beside(loops: int) -> Iterator[None]:
    """Run programs that compute without end."""
    programs = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def steps_s(python: str, variables: Mapping[str, str], steps: int) -> float:
    """Return the seconds of the timed steps of one run."""
    settings = SETTINGS | {"algorithm.steps": FIRST + steps}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            python,
            "-m",
            "rillflow.cli.main",
            "run",
            str(RECIPE),
            "--dir",
            str(run),
            "--quiet",
            *words,
        ]
        subprocess.run(command, check=True, env={**os.environ, **variables}, cwd=folder)
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        times = [
            line["metrics"]["run/step_seconds/mean"]["mean"] for line in lines if line["phase"] == "grpo"
        ]
    return sum(times[FIRST:])


def main() -> None:
    """Time every variant in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="runs of every variant, alone and beside loops")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a run")
    parser.add_argument("--loops", type=int, default=3, help="programs that compute without end")
    parser.add_argument("--before", help="Python of another checkout's environment")
    parser.add_argument("--write", type=Path, help="also write the page to this file")
    given = parser.parse_args()
    variants: dict[str, tuple[str, dict[str, str]]] = {
        "as it is": (sys.executable, {}),
        "OMP_WAIT_POLICY=PASSIVE": (sys.executable, {"OMP_WAIT_POLICY": "PASSIVE"}),
    }
    if given.before:
        variants["before"] = (str(Path(given.before).absolute()), {})
    times = defaultdict[tuple[str, int], list[float]](list)
    for number in range(given.rounds):
        for loops in (0, given.loops):
            for name, (python, variables) in variants.items():
                with beside(loops):
                    times[name, loops].append(steps_s(python, variables, given.steps))
                print(
                    f"round {number + 1}: {name}, {loops} loops: {times[name, loops][-1]:.2f} s", flush=True
                )
    text = page(times, [*variants], given)
    print(text)
    if given.write:
        given.write.write_text(measured_at.below_title(text, measured_at.line()))


def page(times: Mapping[tuple[str, int], list[float]], names: list[str], given: argparse.Namespace) -> str:
    """Return the page of a measurement."""
    words = f"--rounds {given.rounds} --steps {given.steps} --loops {given.loops}"
    lines = [
        "# A busy machine",
        "",
        f"`python benchmarks/ranks/busy_machine.py {words}`: seconds of {given.steps} GRPO steps of the "
        f"quickstart, alone and beside {given.loops} programs that compute without end; medians and ranges "
        f"of {given.rounds} runs in turn, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"torch {version('torch')}.",
        "",
        f"| variant | alone | beside {given.loops} loops | ratio |",
        "|---|---|---|---|",
    ]
    for name in names:
        alone, busy = times[name, 0], times[name, given.loops]
        ratio = median(busy) / median(alone)
        lines.append(f"| {name} | {spread(alone)} | {spread(busy)} | {ratio:.2f} |")
    return "\n".join([*lines, ""])


def spread(values: list[float]) -> str:
    """Return median and range."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
