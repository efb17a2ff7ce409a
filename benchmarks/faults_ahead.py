"""Faults ahead: steps per minute of a ready-first run while a reward hangs, and while a sampler replica dies.

    python benchmarks/faults_ahead.py --write benchmarks/results/faults_ahead.md

HANGS   one of 160 prompts has a reward that never returns; its time limit is 20 times the length of a step
DIES    one of two sampler replicas on Ray is killed; a new process takes its place while training goes on

Each run trains the same recipe: a small model, additions, 16 prompts with 8 answers a step, two versions
ahead, two reward processes. Steps are counted after the tenth, from the times in metrics.jsonl.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rillflow.rollout.native.engine import NativeEngine

SMALLEST = []
SLOW = ["--steps 14 --rounds 1 --only hangs", "--steps 30 --rounds 1 --only dies"]  # minutes; Ray

SKIPPED = 10
"""Steps at the start that do not count."""
LIMIT = 20
"""Time limit of the reward, in steps."""
RECIPE = """
[run]
seed = 1
threads = 1
[task]
source = "arithmetic"
digits = 2
operators = "+"
size = 160
held_out = 0
[policy]
lr = 1e-4
model.new = { hidden = 192, layers = 6, heads = 6, kv_heads = 2, context = 80, alphabet = "0123456789+=" }
[rollout]
max_rows = 128
max_tokens = 64
[algorithm]
name = "grpo"
prompts_per_step = 16
samples_per_prompt = 8
minibatches = 2
freshness = 2
async_mode = "ready_first"
[reward]
function = "reward.py:reward"
workers = 2
"""
REWARD = """
import pathlib, time

def reward(prompts, completions, **columns):
    hung = pathlib.Path(__file__).with_name("hung")
    if hung.exists() and len(prompts) == 8:
        if not hung.read_text():
            hung.write_text(prompts[0])
        if hung.read_text() in prompts:
            time.sleep(3600)
    return [sum(letter < "5" for letter in text) / 32 for text in completions]
"""


class Dying(NativeEngine):
    """The native engine; the first process that comes to a number of passes kills itself."""

    passes = 0

    def step(self) -> Any:
        """See Engine."""
        self.passes += 1
        if self.passes == int(os.environ["DIES_AT"]):
            try:
                with Path(os.environ["DIED"]).open("x") as file:
                    file.write(str(time.time()))
            except FileExistsError:
                return super().step()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


def ran(folder: Path, steps: int, *settings: str, hangs: bool = False) -> list[float]:
    """Run the recipe; return the times of its steps, in seconds since its start."""
    from rillflow.app.launch import launch
    from rillflow.app.recipe import load_recipe
    from rillflow.runs.reader import read_metrics

    folder.mkdir()
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    if hangs:
        (folder / "hung").touch()
    own = [f'run.dir="{folder / "run"}"', f"algorithm.steps={steps}", *settings]
    loaded = load_recipe(folder / "run.toml", own)
    launch(loaded.recipe, loaded.base, quiet=True)
    return [each.time_s for each in read_metrics(folder / "run")]


def rate(times: list[float], first: float = 0.0, last: float = float("inf")) -> float:
    """Return steps per minute, after the first ones, between two times."""
    kept = [each for each in times[SKIPPED:] if first <= each <= last]
    return 60 * (len(kept) - 1) / (kept[-1] - kept[0]) if len(kept) > 1 else float("nan")


def hanging(folder: Path, steps: int, rounds: int) -> list[str]:
    """Return the lines of the table of hanging rewards."""
    found: dict[str, list[float]] = {"wait": [], "drop": []}
    plain: dict[str, list[float]] = {"wait": [], "drop": []}
    inline = 'placement.backend="inline"'
    for number in range(rounds):
        for late in found:
            how = (inline, f'algorithm.on_stale="{late}"')
            times = ran(folder / f"{late}-{number}", steps, *how)
            plain[late].append(rate(times))
            limit = f"reward.timeout_s={LIMIT * 60 / rate(times):.2f}"
            hung = ran(folder / f"{late}-{number}-hangs", steps, *how, limit, hangs=True)
            found[late].append(rate(hung))
    lines = ["| on_stale | steps a minute | with a hanging reward | ratio |", "|---|---:|---:|---:|"]
    for late, rates in found.items():
        ratios = [hung / whole for hung, whole in zip(rates, plain[late], strict=True)]
        told = (statistics.median(plain[late]), statistics.median(rates), statistics.median(ratios))
        lines.append(f"| {late} | {told[0]:.0f} | {told[1]:.0f} | {told[2]:.2f} |")
    return lines


def dying(folder: Path, steps: int, rounds: int) -> list[str]:
    """Return the lines of the table of replicas that die."""
    pools = ('placement.backend="ray"', "placement.pools={ main = 1, answers = 2, scores = 1 }")
    roles = 'placement.roles={ sampler = "answers", reward = "scores" }'
    lines = [
        "| round | before | 10 s from the death on | later | rows lost or doubled |",
        "|---|---:|---:|---:|---:|",
    ]
    for number in range(rounds):
        at = folder / f"dies-{number}"
        os.environ |= {"DIES_AT": str(20 * steps), "DIED": str(folder / f"died-{number}")}
        engine = f'rollout.engine="{Path(__file__).stem}:Dying"'
        times = ran(at, steps, *pools, roles, engine)
        died = Path(os.environ["DIED"])
        if not died.exists():
            lines.append(f"| {number + 1} | {rate(times):.0f} | no death | | |")
            continue
        began = (at / "run" / "metrics.jsonl").stat().st_mtime - times[-1]
        moment = float(died.read_text()) - began
        parts = (rate(times, 0, moment), rate(times, moment, moment + 10), rate(times, moment + 10))
        lines.append(
            f"| {number + 1} | {parts[0]:.0f} | {parts[1]:.0f} | {parts[2]:.0f} | {wrong(at / 'run')} |"
        )
    return lines


def wrong(run: Path) -> int:
    """Return the number of rows that are trained twice, or are missing in a group."""
    from collections import Counter

    from rillflow.runs import layout
    from rillflow.runs.reader import read_rollouts

    rows = Counter(tuple(row.row) for step in layout.rollout_files(run) for row in read_rollouts(run, step))
    groups = Counter(row[:2] for row in rows)
    return sum(count - 1 for count in rows.values()) + sum(8 - count for count in groups.values())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["hangs", "dies"])
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # ranks import the engine by name
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        if given.only != "dies":
            parts += ["## A reward that hangs", "", *hanging(Path(folder), given.steps, given.rounds), ""]
        if given.only != "hangs":
            parts += ["## A replica that dies", "", *dying(Path(folder), given.steps, given.rounds), ""]
    sys.stdout.write("\n".join(parts) + "\n")
    if given.write is not None:
        from measured_at import below_title, line

        head = (
            "# Faults ahead\n\n`python benchmarks/faults_ahead.py --write "
            "benchmarks/results/faults_ahead.md`,\n"
            f"{given.rounds} rounds of {given.steps} steps, medians, {os.cpu_count()} cores, Python "
            f"{platform.python_version()}, torch {version('torch')}.\nThe head of the script describes the "
            "faults. Rates are steps per minute.\n\n"
        )
        given.write.write_text(below_title(head + "\n".join(parts).rstrip("\n") + "\n", line()), "utf-8")


if __name__ == "__main__":
    main()
