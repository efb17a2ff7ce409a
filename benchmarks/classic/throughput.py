"""Throughput of PPO: frames per second of Rillflow and of its peers, sampling and training apart.

    python benchmarks/classic/throughput.py --rounds 5 --write benchmarks/results/classic_throughput.md \\
        --sb3 .sb3/bin/python --rllib .rllib/bin/python --sample-factory .sf/bin/python

Every system plays the same environments (8 of them, 128 steps for a fragment, or 64 and 16) with the same
network, frames, epochs (4) and minibatches (4), on the CPU. A round runs every system once, one after the
other, each in a process of its own, without its first fragments. Peers have environments of their own:

    python -m venv .sb3 && .sb3/bin/pip install stable-baselines3==2.9.2 'gymnasium[mujoco]' ale-py envpool
    python -m venv .rllib && .rllib/bin/pip install 'ray[rllib]==2.60.0' torch 'gymnasium[mujoco]' ale-py
    python -m venv .sf && .sf/bin/pip install sample-factory==2.1.1

The serial loop is one script with EnvPool and PyTorch, in CleanRL's manner. Sampling is the time in which
actors act, learning the time of the updates, training both. Ratios are of each round, so that a busy machine
matters less. Frames per CPU second count the CPU time of all processes of a system: the work without waits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import measured_at
from intervals import interval, whole

PEERS = Path(__file__).parent / "peers"
SMALLEST = []
SLOW = ["--rounds 1 --tasks cartpole --updates 2"]  # starts processes that import everything anew
NEEDS = ["envpool", "rillflow_classic"]
TASKS: dict[str, dict[str, Any]] = {
    "cartpole": {"environment": "CartPole-v1", "updates": 60},
    "cartpole, 64 environments": {"environment": "CartPole-v1", "slots": 64, "steps": 16, "updates": 60},
    "pong": {"environment": "Pong", "updates": 4, "warm": 1},
    "halfcheetah": {"environment": "HalfCheetah-v5", "updates": 30},
}
OURS = "Rillflow"


@dataclass(frozen=True, kw_only=True)
class System:
    """A system of the table."""

    name: str
    """Name in the table."""
    python: str
    """Interpreter."""
    script: str
    """File in peers/."""
    form: str = ""
    """How it steps environments."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """Tasks that it runs."""
    own_path: bool = False
    """Whether it imports this project."""


def systems(options: argparse.Namespace) -> list[System]:
    """Return the systems whose interpreters are given."""
    here = sys.executable
    found = [
        System(name=OURS, python=here, script="rillflow_ppo.py", own_path=True),
        System(
            name=f"{OURS}, bfloat16",
            python=here,
            script="rillflow_ppo.py",
            form="bfloat16",
            tasks=("pong",),
            own_path=True,
        ),
        System(name="serial loop, EnvPool", python=here, script="serial_envpool.py"),
    ]
    if options.sb3:
        for form in ("dummy", "subproc"):
            name = f"Stable-Baselines3, {form}"
            found.append(System(name=name, python=options.sb3, script="sb3_ppo.py", form=form))
    if options.rllib:
        for form, runners in (("0", "local runner"), ("2", "2 runners")):
            name = f"RLlib, {runners}"
            found.append(System(name=name, python=options.rllib, script="rllib_ppo.py", form=form))
    if options.sample_factory:
        for form, mode in (("1", "serial"), ("2", "2 workers")):
            name, python = f"Sample Factory, {mode}", options.sample_factory
            script = "sample_factory_ppo.py"
            found.append(
                System(
                    name=name,
                    python=python,
                    script=script,
                    form=form,
                    tasks=("cartpole", "cartpole, 64 environments"),
                )
            )
    return found


def measure(system: System, task: dict[str, Any], seed: int) -> dict[str, float]:
    """Run a system once; return frames per second and per CPU second.

    Raises:
        RuntimeError: it failed.
    """
    asked = json.dumps({**task, "form": system.form, "seed": seed})
    environment = {**os.environ, "OMP_NUM_THREADS": str(task.get("threads", 1))}
    if not system.own_path:
        environment.pop("PYTHONPATH", None)
    command = [system.python, str(PEERS / system.script), asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"frames"')]
    if not lines:
        raise RuntimeError(f"{system.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    result = json.loads(lines[-1])
    frames, phases = result["frames"], result["phases_s"]
    found = {"training": frames / result["total_s"], "cpu": frames / result["cpu_s"]}
    if phases:
        found |= {"sampling": frames / phases["sampling"], "learning": frames / phases["learning"]}
    return found


def rows(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the lines of a task's table."""
    ours = results[OURS]
    lines = []
    for name, rounds in results.items():
        cells = [name]
        for kind in ("training", "sampling", "learning", "cpu"):
            values = [each[kind] for each in rounds if kind in each]
            cells.append(f"{median(values):,.0f} ({whole(values)})" if values else "overlaps")
        for kind in ("training", "cpu"):
            ratios = [mine[kind] / each[kind] for mine, each in zip(ours, rounds, strict=True)]
            cells.append(f"{median(ratios):.2f} ({interval(ratios)})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure, and write a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of the systems to run")
    parser.add_argument("--updates", type=int, help="measured fragments, instead of the task's own number")
    parser.add_argument("--sb3", help="interpreter with Stable-Baselines3")
    parser.add_argument("--rllib", help="interpreter with RLlib")
    parser.add_argument("--sample-factory", help="interpreter with Sample Factory")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    text = [
        "# Throughput of PPO",
        "",
        f"{options.rounds} rounds on {os.cpu_count()} cores, Python {platform.python_version()}: median, "
        "then mean and 95% interval. Frames per second; ratios are Rillflow's divided by the system's. How: "
        "`benchmarks/classic/throughput.py`.",
    ]
    for name in options.tasks:
        task = {**TASKS[name], **({"updates": options.updates} if options.updates else {})}
        results: dict[str, list[dict[str, float]]] = defaultdict(list)
        for seed in range(options.rounds):
            for system in systems(options):
                if name in system.tasks and any(part in system.name for part in options.only):
                    found = measure(system, task, seed)
                    results[system.name].append(found)
                    said = ", ".join(f"{kind} {value:,.0f}/s" for kind, value in found.items())
                    print(f"{name} round {seed} {system.name}: {said}", file=sys.stderr, flush=True)
        text += ["", f"## {name}: {json.dumps(task)}", ""]
        text += ["| system | training | sampling | learning | frames per CPU second | ratio | ratio of CPU |"]
        text += ["|---|---|---|---|---|---|---|", *rows(results)]
    page = "\n".join(text) + "\n"
    print(page)
    if options.write:
        options.write.write_text(measured_at.below_title(page, measured_at.line()))


if __name__ == "__main__":
    main()
