"""Quickstart: time and held-out accuracy of the shipped recipe, on several seeds.

    python benchmarks/algorithms/quickstart.py --seeds 0 1 2
    python benchmarks/algorithms/quickstart.py --seeds 0 --set warm_start.steps=175 --set algorithm.steps=110

Each seed is one `rillflow run` in its own process. Prints a markdown table; --write also writes it to a file.
CPU seconds, including children, allow a comparison of settings on a busy machine.

The cost of checkpoints comes from the run's records. It is the mean time between a step with a checkpoint and
the next step, minus the median of that time after steps without one. Steps with an evaluation do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from rillflow.app.recipe import load_recipe

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

# trains in a separate process, which imports everything
SMALLEST = []
SLOW = ["--seeds 0 --set warm_start.steps=1 --set algorithm.steps=1 --set policy.warmup_steps=0"]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "arithmetic" / "run.toml"


def run_seed(seed: int, folder: Path, settings: list[str]) -> str:
    """Run one seed and return its row of the table."""
    run = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "rillflow.cli.main", "run", str(RECIPE), "--dir", str(run), "--quiet"]
    settings = [f"run.seed={seed}", *settings]
    began, cpu, stolen = time.monotonic(), children_cpu_s(), stolen_s()
    subprocess.run([*command, *(word for each in settings for word in ("--set", each))], check=True)
    seconds, cpu = time.monotonic() - began, children_cpu_s() - cpu
    stolen = (stolen_s() - stolen) / ((os.cpu_count() or 1) * seconds)
    looks = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    cells = [
        f"{look['correct'] / look['count']:.3f} [{look['interval'][0]:.3f}, {look['interval'][1]:.3f}]"
        for look in (looks[0], looks[-1])
    ]
    saved = checkpoints_s(run, [look["step"] for look in looks], settings)
    shown = f"{saved:.2f} ({saved / seconds:.1%})"
    return f"| {seed} | {seconds:.0f} | {cpu:.0f} | {stolen:.0%} | {cells[0]} | {cells[1]} | {shown} |"


def children_cpu_s() -> float:
    """Return the CPU seconds of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stolen_s() -> float:
    """Return the seconds, over all cores, that the host gave to other virtual machines; 0 if unknown."""
    counts = Path("/proc/stat")
    if not counts.exists():
        return 0.0
    return int(counts.read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def checkpoints_s(run: Path, evaluated: list[int], settings: list[str]) -> float:
    """Return the seconds of the run's checkpoints."""
    every = load_recipe(RECIPE, settings).recipe.run.checkpoint_every
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with_one, without = [], []
    for before, after in pairwise(lines):
        between = after["time_s"] - before["time_s"] - after["metrics"]["run/step_seconds/mean"]["mean"]
        if before["step"] in evaluated or before["phase"] != after["phase"]:
            continue
        (with_one if every and before["step"] % every == 0 else without).append(between)
    if not with_one:
        return 0.0
    number = -(-lines[-1]["step"] // every)  # the last step has one too
    return number * (mean(with_one) - median(without))


def main() -> None:
    """Run the seeds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting")
    parser.add_argument("--write", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [run_seed(seed, Path(folder), arguments.set) for seed in arguments.seeds]
    text = "\n".join(
        [
            "# Quickstart: `recipes/arithmetic/run.toml`",
            "",
            f"Command: `python {' '.join(sys.argv)}`; "
            f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
            f"torch {version('torch')}, transformers {version('transformers')}.",
            "",
            "Seconds are of the whole process, imports, report and evaluations included. Accuracy is greedy,",
            "on 500 held-out problems, with its 95% interval: after the warm start, and after GRPO.",
            "Stolen: the share of the processors' time that the machine's host gave to others. Checkpoints:",
            "seconds spent on them, and the share of the run.",
            "",
            "| seed | seconds | processor seconds | stolen | before GRPO | after | checkpoints |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    print(text)
    if arguments.write:
        arguments.write.write_text(measured_at.below_title(text, measured_at.line()))


if __name__ == "__main__":
    main()
