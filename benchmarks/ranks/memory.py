"""Memory: resident memory of a run over many steps.

    python benchmarks/ranks/memory.py --steps 290

Runs GRPO on a tiny model in a process of its own and reads its resident size after every step; prints
the growth from the 80th step to the last, as medians of ten steps. By then everything that happens once
has happened: the engine records its passes after 64 of a kind, which takes some 20 MB. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

SMALLEST = []
SLOW = ["--steps 100"]  # its table begins after 80 steps

WARM = 80
"""Steps after which nothing new happens."""

RECIPE = """
[run]
checkpoint_every = 50
[task]
source = "arithmetic"
digits = 1
held_out = 20
size = 120
[policy]
lr = 1e-4
model.new = { hidden = 64, layers = 2, heads = 4, kv_heads = 2, context = 24, alphabet = "0123456789+-=" }
[rollout]
max_tokens = 8
[algorithm]
name = "grpo"
prompts_per_step = 16
samples_per_prompt = 8
epochs = 2
steps = %d
loss.kl = 0.01
[evaluate]
every = 20
"""


def resident_bytes(process: int) -> int:
    """The resident size of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(steps: int, folder: Path) -> list[int]:
    """Resident bytes after every step."""
    (folder / "run.toml").write_text(RECIPE % steps)
    run = folder / "run"
    command = [sys.executable, "-m", "rillflow.cli.main", "run", str(folder / "run.toml"), "--dir", str(run)]
    sizes: list[int] = []
    metrics = run / "metrics.jsonl"
    with subprocess.Popen([*command, "--quiet"]) as process:
        while process.poll() is None:
            done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if done > len(sizes):
                sizes += [resident_bytes(process.pid)] * (done - len(sizes))
            time.sleep(0.01)
        if process.returncode:
            raise SystemExit(process.returncode)
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    if last != steps:
        raise SystemExit(f"the run ended at step {last} of {steps}")
    return sizes


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=290)
    parser.add_argument("--out", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = measure(arguments.steps, Path(folder))
    marks = [20, *range(WARM, arguments.steps - 9, 50), arguments.steps - 10]
    first = statistics.median(sizes[WARM : WARM + 10])
    rows = []
    for mark in marks:
        size = statistics.median(sizes[mark : mark + 10])
        rows.append(f"| {mark} to {mark + 9} | {size / 1e6:.1f} | {(size / first - 1) * 100:+.2f}% |")
    text = "\n".join(
        [
            "# Resident memory over a run",
            "",
            f"Command: `python benchmarks/ranks/memory.py --steps {arguments.steps}`; "
            f"{len(os.sched_getaffinity(0))} cores, torch {version('torch')}. "
            "GRPO with a reference, two epochs,",
            "an evaluation every 20 steps, a checkpoint every 50; medians of ten steps.",
            "",
            f"| steps | resident MB | against steps {WARM} to {WARM + 9} |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
