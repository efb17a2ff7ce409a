"""Every algorithm learns, wherever its roles are: the reward on one-digit sums, first steps against last.

    inline       one process
    together     Ray, all roles on one pool of two ranks
    apart        Ray, each role on a pool of its own, of one rank

    python benchmarks/learning.py                                      # about half an hour on two cores
    python benchmarks/learning.py --only ppo --steps 10
    python benchmarks/learning.py --write benchmarks/results/learning.md

Apart has the data-parallel size of inline, so every metric of every step has to have the same bits; the
script fails where one has not, and where a reward does not rise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.assembly.launch import launch
from rillflow.assembly.recipe import load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
NAMES = [name for name in ALGORITHMS if (RECIPES / name / "run.toml").is_file() or name == "grpo"]
PEERS = ("torch", "transformers", "ray")
FIRST, LAST = 4, 3
"""Steps that are averaged, at the beginning and at the end."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One run."""

    metrics: list[dict[str, Any]]
    """Of every step that sampled, times left out."""

    @property
    def rewards(self) -> list[float]:
        """The mean reward of every step."""
        return [step["reward/score/mean"]["mean"] for step in self.metrics]

    @property
    def first(self) -> float:
        """Before much was learned."""
        return mean(self.rewards[:FIRST])

    @property
    def last(self) -> float:
        """At the end."""
        return mean(self.rewards[-LAST:])


def main() -> None:
    """Run the algorithms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20, help="steps of the algorithm (20)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these algorithms alone")
    parser.add_argument("--write", metavar="FILE", help="where the table goes, besides the screen")
    arguments = parser.parse_args()
    rows, failures = [], []
    for name in arguments.only:
        courses = {where: course(name, where, arguments.steps) for where in ("inline", "together", "apart")}
        identical = courses["apart"].metrics == courses["inline"].metrics
        failures += [] if identical else [f"{name}: apart has other numbers than inline"]
        failures += [f"{name} {where}: no rise" for where, it in courses.items() if it.last <= it.first]
        cells = [f"{courses['inline'].first:.3f}", *(f"{it.last:.3f}" for it in courses.values())]
        rows.append(f"| {name} | {' | '.join(cells)} | {'yes' if identical else 'no'} |")
        print(rows[-1], flush=True)
    text = table(rows, arguments.steps)
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text)
    if failures:
        raise SystemExit("\n".join(failures))


def course(name: str, where: str, steps: int) -> Course:
    """Run an algorithm's recipe. GRPO's own is a long one; it runs Dr.GRPO's with its own defaults."""
    path = RECIPES / ("dr_grpo" if name == "grpo" else name) / "run.toml"
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"algorithm.name={name}", f"algorithm.steps={steps}", f"run.dir={folder}/run"]
        algorithm = load_recipe(path, settings).recipe.algorithm
        roles = dict.fromkeys(("policy", *ALGORITHMS[name].roles(algorithm)))
        loaded = load_recipe(path, [*settings, *placement(where, [*roles])])
        launch(loaded.recipe, loaded.base, quiet=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    for step in metrics:
        del step["run/step_seconds/mean"]
    return Course(metrics=[step for step in metrics if "reward/score/mean" in step])


def placement(where: str, roles: Sequence[str]) -> list[str]:
    """The settings that put the roles there."""
    if where == "inline":
        return []
    if where == "together":
        return ["placement.backend=ray", "placement.pools.main=2"]
    pools = [f"placement.pools.of_{role}=1" for role in roles]
    return ["placement.backend=ray", *pools, *(f"placement.roles.{role}=of_{role}" for role in roles)]


def table(rows: Sequence[str], steps: int) -> str:
    """The page."""
    cores, found = len(os.sched_getaffinity(0)), [f"{name} {version(name)}" for name in PEERS]
    return "\n".join(
        [
            "# Every algorithm learns, wherever its roles are",
            "",
            f"Command: `python benchmarks/learning.py --steps {steps}`; {cores} cores, "
            f"Python {platform.python_version()}, {', '.join(found)}.",
            "",
            f"The recipes (one-digit sums, 80 prompts a step), {steps} steps after the warm start, seed 0.",
            f"Rewards are means of the first {FIRST} steps and the last {LAST}. Inline: one process.",
            "Together: Ray, all roles on one pool of two ranks. Apart: Ray, a pool of one rank for each.",
            "Identical: every metric of every step of apart has the bits of inline.",
            "",
            "| algorithm | first | last, inline | last, together | last, apart | identical |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
