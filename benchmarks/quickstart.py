"""Quickstart: time and held-out accuracy of the shipped recipe, on several seeds.

    python benchmarks/quickstart.py --seeds 0 1 2

Each seed is one `rillflow run` of its own process. Prints a markdown table; --out writes it to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "arithmetic" / "run.toml"


def run_seed(seed: int, folder: Path) -> str:
    """One run; a row of the table."""
    run = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "rillflow.cli.main", "run", str(RECIPE), "--dir", str(run), "--quiet"]
    began = time.monotonic()
    subprocess.run([*command, "--set", f"run.seed={seed}"], check=True)
    seconds = time.monotonic() - began
    looks = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    cells = [
        f"{look['correct'] / look['count']:.3f} [{look['interval'][0]:.3f}, {look['interval'][1]:.3f}]"
        for look in (looks[0], looks[-1])
    ]
    return f"| {seed} | {seconds:.0f} | {cells[0]} | {cells[1]} |"


def main() -> None:
    """Run the seeds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [run_seed(seed, Path(folder)) for seed in arguments.seeds]
    text = "\n".join(
        [
            "# Quickstart: `recipes/arithmetic/run.toml`",
            "",
            f"Command: `python benchmarks/quickstart.py --seeds {' '.join(map(str, arguments.seeds))}`; "
            f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
            f"torch {version('torch')}, transformers {version('transformers')}.",
            "",
            "Seconds are of the whole process, imports, report and evaluations included. Accuracy is greedy,",
            "on 500 held-out problems, with its 95% interval: after the warm start, and after GRPO.",
            "",
            "| seed | seconds | before GRPO | after |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
