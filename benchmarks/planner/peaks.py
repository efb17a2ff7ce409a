"""Memory predicted by ``check`` and ``plan`` against what runs hold, each run in a process of its own.

    counted      ``rillflow check --memory``: a rank's bytes at most
    planned      ``rillflow plan`` and ``simulate``: peak memory per device
    measured     the most that two steps of ``rillflow run`` were resident (VmHWM), less that of a tiny
                 model, with the C library told to give back what is freed (MALLOC_MMAP_THRESHOLD_)

    python benchmarks/planner/peaks.py                                      # some ten minutes
    python benchmarks/planner/peaks.py --write benchmarks/results/peaks.md

A run is stopped after its second step, before it writes a checkpoint. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from rillflow.app.facts import RecipeFacts
from rillflow.app.memory import rank_bytes
from rillflow.app.recipe import load_recipe
from rillflow_parts.memory.peaks import peaks_of
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.hardware import read_hardware
from rillflow_planner.recipe_problem import plan_of, state_problem
from rillflow_planner.simulator.simulate import simulate

SMALLEST = []
SLOW = ["weights"]  # starts four processes
NEEDS = ["rillflow_planner"]

MIB = 2**20
RECIPE = """
[task]
source = "arithmetic"
digits = 1
held_out = 20
size = 120
[policy]
lr = 1e-4
tokens_per_micro_batch = {budget}
gradient_checkpointing = {recomputes}
model.dtype = "{dtype}"
model.new = {{ hidden = {hidden}, layers = {layers}, heads = {heads}, kv_heads = {heads}, context = 72 }}
[rollout]
max_tokens = {tokens}
[algorithm]
name = "{algorithm}"
prompts_per_step = {prompts}
steps = 3
{more}
{reward}
[evaluate]
problems = 0
"""
REWARD = "def length(prompts, completions, **columns):\n    return [len(text) % 3 for text in completions]\n"
REWARDED = '[reward]\nfunction = "reward.py:length"'
SAMPLES = "samples_per_prompt = 8\ngap_tolerance = 10.0"
GRPO = f"{SAMPLES}\nloss.kl = 0.01"
USUAL = {
    "budget": 512,
    "recomputes": "false",
    "dtype": "float32",
    "hidden": 768,
    "layers": 6,
    "heads": 12,
    "tokens": 8,
    "algorithm": "grpo",
    "prompts": 8,
    "more": GRPO,
    "reward": REWARDED,
}
DEEP = USUAL | {"hidden": 512, "layers": 8, "heads": 8}
LONG = DEEP | {"tokens": 48, "prompts": 16, "budget": 2048}
PPO = {"algorithm": "ppo", "more": "gap_tolerance = 10.0"}
RLOO = {"algorithm": "rloo", "more": SAMPLES}
SFT = {"algorithm": "sft", "more": "", "reward": "", "prompts": 64}
BASE = USUAL | {"hidden": 64, "layers": 2, "heads": 4}
SHAPES = {
    "grpo": USUAL,
    "grpo, bfloat16": USUAL | {"dtype": "bfloat16"},
    "grpo, long rows": LONG,
    "rloo": USUAL | RLOO,
    "rloo, deep": DEEP | RLOO,
    "ppo": USUAL | PPO,
    "ppo, deep": DEEP | PPO,
    "sft": USUAL | SFT,
    "sft, deep": DEEP | SFT | {"budget": 2048},
    "grpo, long rows, recomputed": LONG | {"budget": 4096, "recomputes": "true"},
}
DEVICE = {
    "memory": "64 GB",
    "flops": {"float32": "50 GFLOP/s", "bfloat16": "50 GFLOP/s"},
    **dict.fromkeys(("memory_bandwidth", "inside", "host"), "10 GB/s"),
}


def planned(file: Path) -> float:
    """Return the peak bytes of a rank that ``rillflow plan`` predicts."""
    loaded = load_recipe(file)
    machine = {"name": "cores", "device": "core", "devices": 1, "per_machine": 1}
    hardware = read_hardware({"device": {"core": DEVICE}, "machine_type": [machine]}, "a core")
    stated = state_problem(loaded, hardware).problem
    plan = plan_of(loaded, stated.graph, hardware.fleets[0])
    problem = stated.of_plan(plan)
    return simulate(problem, CostModel(problem), plan, steps=4).pools[0].peak_bytes


def predicted(file: Path) -> int:
    """Return the peak bytes of a rank that ``rillflow check --memory`` predicts."""
    loaded = load_recipe(file)
    return rank_bytes(peaks_of(RecipeFacts(resolved=loaded)), "main")


def most_resident(file: Path, folder: Path) -> int:
    """The most bytes that two steps of a run were resident; what is freed is given back."""
    command = [sys.executable, "-m", "rillflow.cli.main", "run", str(file), "--dir", str(folder), "--quiet"]
    most = 0
    with subprocess.Popen(command, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**18)}) as process:
        status = Path(f"/proc/{process.pid}/status")
        metrics = folder / "metrics.jsonl"
        while process.poll() is None and (not metrics.exists() or len(metrics.read_bytes().splitlines()) < 2):
            lines = [line.split() for line in status.read_text().splitlines() if line.startswith("VmHWM")]
            most = max([most, *(1024 * int(line[1]) for line in lines)])
            time.sleep(0.02)
        if process.poll():
            raise SystemExit(process.returncode)
        process.kill()
    return most


def measured(sizes: dict[str, object]) -> tuple[float, int, int]:
    """Bytes planned, counted and measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(RECIPE.format(**sizes))
        file.with_name("reward.py").write_text(REWARD)
        return planned(file), predicted(file), most_resident(file, Path(folder) / "run")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="also write the table here")
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all if left out")
    arguments = parser.parse_args()
    *_, base = measured(dict(BASE))
    lines = [
        "# Memory predicted and measured",
        "",
        f"Command: `python benchmarks/planner/peaks.py`; {len(os.sched_getaffinity(0))} cores, torch "
        f"{version('torch')}. Bytes over those of a run of 0.1 million parameters, {base / MIB:.0f} MiB.",
        "Two steps with MALLOC_MMAP_THRESHOLD_=262144, so that the C library gives back freed memory.",
        "",
        "| run | measured, MiB | `plan`, MiB | | `check --memory`, MiB | |",
        "|---|---|---|---|---|---|",
    ]
    for name in arguments.shapes or SHAPES:
        sizes = SHAPES[name]
        plan, check, most = measured(dict(sizes))
        grown = most - base
        cells = (f"{one / MIB:.0f} | {one / grown - 1:+.0%}" for one in (plan, check))
        lines.append(f"| {name} | {grown / MIB:.0f} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    text = "\n".join([*lines, ""])
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
