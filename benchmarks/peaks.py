"""Memory predicted by ``check`` against what runs hold: five shapes, each in a process of its own.

    predicted    ``rillflow check --memory``: a rank's bytes at most
    measured     the most that ``rillflow run`` was resident (VmHWM), less that of a tiny model; once with
                 the C library told to give back what is freed (MALLOC_MMAP_THRESHOLD_), once as it is

    python benchmarks/peaks.py                                      # some two minutes
    python benchmarks/peaks.py --write benchmarks/results/peaks.md

Four steps of each, the last and its checkpoint not looked at. Linux only.
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
from rillflow.app.peak_memory import peaks_of
from rillflow.app.recipe import load_recipe

SMALLEST = []
SLOW = ["weights"]  # starts four processes

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
steps = 4
{more}
[reward]
function = "reward.py:length"
[evaluate]
problems = 0
"""
REWARD = "def length(prompts, completions, **columns):\n    return [len(text) % 3 for text in completions]\n"
GRPO = "samples_per_prompt = 8\nloss.kl = 0.01\ngap_tolerance = 10.0"
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
}
BASE = USUAL | {"hidden": 64, "layers": 2, "heads": 4}
SHAPES = {
    "weights": USUAL,
    "bfloat16": USUAL | {"dtype": "bfloat16"},
    "long rows": USUAL
    | {"hidden": 512, "layers": 8, "heads": 8, "tokens": 48, "prompts": 16, "budget": 2048},
    "recomputed": USUAL
    | {
        "hidden": 512,
        "layers": 8,
        "heads": 8,
        "tokens": 48,
        "prompts": 16,
        "budget": 4096,
        "recomputes": "true",
    },
    "ppo": USUAL | {"hidden": 512, "layers": 8, "heads": 8, "algorithm": "ppo", "prompts": 64, "more": ""},
}


def predicted(file: Path) -> int:
    """What ``check --memory`` says of a rank."""
    loaded = load_recipe(file)
    return rank_bytes(peaks_of(RecipeFacts(recipe=loaded.recipe, base=loaded.base)), "main")


def most_resident(file: Path, folder: Path, gives_back: bool) -> int:
    """The most bytes that a run was resident."""
    more = {"MALLOC_MMAP_THRESHOLD_": str(2**18)} if gives_back else {}
    command = [sys.executable, "-m", "rillflow.cli.main", "run", str(file), "--dir", str(folder), "--quiet"]
    most = 0
    with subprocess.Popen(command, env=os.environ | more) as process:
        status = Path(f"/proc/{process.pid}/status")
        metrics = folder / "metrics.jsonl"
        while process.poll() is None and (not metrics.exists() or len(metrics.read_bytes().splitlines()) < 3):
            lines = [line.split() for line in status.read_text().splitlines() if line.startswith("VmHWM")]
            most = max([most, *(1024 * int(line[1]) for line in lines)])
            time.sleep(0.02)
        process.wait()
        if process.returncode:
            raise SystemExit(process.returncode)
    return most


def measured(sizes: dict[str, object]) -> tuple[int, int, int]:
    """Bytes predicted, most resident where what is freed is given back, and most resident as it is."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(RECIPE.format(**sizes))
        file.with_name("reward.py").write_text(REWARD)
        expected = predicted(file)
        found = [most_resident(file, Path(folder) / f"run{back}", bool(back)) for back in (1, 0)]
        return expected, found[0], found[1]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="also write the table here")
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all if left out")
    arguments = parser.parse_args()
    _, base, usual = measured(dict(BASE))
    lines = [
        "# Memory predicted and measured",
        "",
        f"Command: `python benchmarks/peaks.py`; {len(os.sched_getaffinity(0))} cores, torch "
        f"{version('torch')}. Bytes over those of a run of 0.1 million parameters, {base / MIB:.0f} MiB.",
        "*Measured* with MALLOC_MMAP_THRESHOLD_=262144: what is freed is given back; *as it is*, without.",
        "",
        "| shape | predicted, MiB | measured, MiB | predicted against measured | as it is, MiB |",
        "|---|---|---|---|---|",
    ]
    for name in arguments.shapes or SHAPES:
        sizes = SHAPES[name]
        expected, most, kept = measured(dict(sizes))
        grown, more = most - base, kept - usual
        against = f"{expected / grown - 1:+.0%}"
        lines.append(f"| {name} | {expected / MIB:.0f} | {grown / MIB:.0f} | {against} | {more / MIB:.0f} |")
        print(lines[-1], flush=True)
    text = "\n".join([*lines, ""])
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
