"""Every algorithm learns: the rise of the reward on one-digit sums over seeds, under every placement.

    seeds        one process, every recipe with each seed: mean, least value and interval of the rise
    places       one seed, fewer steps, three placements:
                 inline      one process
                 together    Ray, all roles on one pool of two ranks
                 apart       Ray, each role on a pool of one rank; must agree with inline

    python benchmarks/algorithms/learning.py                                      # an hour on one core
    python benchmarks/algorithms/learning.py --only ppo --seeds 0 --steps 10
    python benchmarks/algorithms/learning.py --keep /tmp/learning.jsonl --write benchmarks/results/learning.md

Each finished run adds a line to the kept file. The same command continues after the last one, and two
commands with different ``--only`` may share the file. Apart has the data-parallel size of inline, so every
metric of every step must be bit-identical. The script fails if one differs, if a reward does not rise for
some seed, or if Safe RLHF's cost ends above its limit.
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
from statistics import mean, stdev
from typing import Any

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.formulas.interval import half_width

SMALLEST = []
SLOW = ["--only grpo --seeds 0 --places"]  # fails where the reward does not rise, which takes all steps

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = [
    name
    for name in ALGORITHMS
    if name == "grpo" or (name not in ("preference", "pairwise") and (RECIPES / name / "run.toml").is_file())
]
"""Algorithms that train on a reward; reward models and judges do not."""
PEERS = ("torch", "transformers")
FIRST, LAST = 4, 3
"""Steps in the means at the beginning and at the end."""
TESTED = (14, 24)
"""Steps of the everyday and the slow tests. They equal the first steps here: no learning rate falls."""
PAID = 10
"""Last steps over which a cost is averaged."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One run with a seed."""

    name: str
    """Name of the algorithm."""
    seed: int
    """Seed of the run."""
    rewards: list[float]
    """Mean reward of every step."""
    costs: list[float]
    """Mean cost of every step; empty without a cost."""

    def rise(self, steps: int | None = None) -> float:
        """Return the rise of the reward until this step, or until the end."""
        until = len(self.rewards) if steps is None else steps
        return mean(self.rewards[until - LAST : until]) - mean(self.rewards[:FIRST])


def main() -> None:
    """Run the algorithms and print the tables."""
    arguments = _arguments()
    courses, failures, places = [], [], []
    for seed in arguments.seeds:
        for name in arguments.only:
            courses.append(course(name, seed, steps_of(name, arguments.steps), arguments.keep))
            print(f"{name}, seed {seed}: {courses[-1].rise():+.3f}", flush=True)
    for name in arguments.places:
        row, failed = placed(name, arguments.places_steps)
        places.append(row)
        failures += failed
    failures += [f"{one.name}, seed {one.seed}: no rise" for one in courses if one.rise(arguments.steps) <= 0]
    failures += [
        f"{one.name}, seed {one.seed}: the cost ends above its limit" for one in courses if over(one)
    ]
    text = page(courses, places, arguments)
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text)
    if failures:
        raise SystemExit("\n".join(failures))


def course(name: str, seed: int, steps: int, keep: str | None) -> Course:
    """Return the course of one algorithm and seed: from the kept file if it is there, else by a run."""
    file = Path(keep) if keep else None
    kept = file.read_text().splitlines() if file is not None and file.is_file() else []
    for line in map(json.loads, kept):
        if (line["name"], line["seed"], line["steps"]) == (name, seed, steps):
            return Course(name=name, seed=seed, rewards=line["rewards"], costs=line["costs"])
    found = metrics_of(name, "inline", steps, seed)
    rewards = [step["reward/score/mean"]["mean"] for step in found]
    costs = [step["cost/value/mean"]["mean"] for step in found if "cost/value/mean" in step]
    if file is not None:
        line = {"name": name, "seed": seed, "steps": steps, "rewards": rewards, "costs": costs}
        with file.open("a") as kept_file:
            kept_file.write(json.dumps(line) + "\n")
    return Course(name=name, seed=seed, rewards=rewards, costs=costs)


def recipe_of(name: str) -> Path:
    """Return an algorithm's recipe; GRPO uses the one of Dr.GRPO, because its own is long."""
    return RECIPES / ("dr_grpo" if name == "grpo" else name) / "run.toml"


def steps_of(name: str, steps: int) -> int:
    """Return the steps of an algorithm; one with a cost limit runs the steps of its recipe."""
    own: int = load_recipe(recipe_of(name)).recipe.algorithm.steps
    return steps if limit_of(name) is None else own


def metrics_of(name: str, where: str, steps: int, seed: int) -> list[dict[str, Any]]:
    """Return the metrics of every step that sampled, without times."""
    path = recipe_of(name)
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"algorithm.name={name}", f"algorithm.steps={steps}", f"run.seed={seed}"]
        settings += [f"run.dir={folder}/run", "run.checkpoint_minutes=0"]
        roles = load_recipe(path, settings).called
        loaded = load_recipe(path, [*settings, *placement(where, roles)])
        launch(loaded, quiet=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    for step in metrics:
        del step["run/step_seconds/mean"]
    return [step for step in metrics if "reward/score/mean" in step]


def placement(where: str, roles: Sequence[str]) -> list[str]:
    """Return the settings of a placement."""
    if where == "inline":
        return []
    if where == "together":
        return ["placement.backend=ray", "placement.pools.main=2"]
    pools = [f"placement.pools.of_{role}=1" for role in roles]
    return ["placement.backend=ray", *pools, *(f"placement.roles.{role}=of_{role}" for role in roles)]


def placed(name: str, steps: int) -> tuple[str, list[str]]:
    """Return a row of the table of placements, and the failures."""
    found = {where: metrics_of(name, where, steps, 0) for where in ("inline", "together", "apart")}
    identical = found["apart"] == found["inline"]
    ends = [mean(step["reward/score/mean"]["mean"] for step in each[-LAST:]) for each in found.values()]
    row = f"| {name} | {' | '.join(f'{end:.3f}' for end in ends)} | {'yes' if identical else 'no'} |"
    print(row, flush=True)
    return row, [] if identical else [f"{name}: apart has other numbers than inline"]


def limit_of(name: str) -> float | None:
    """Return the recipe's cost limit, or None."""
    settings: dict[str, Any] = load_recipe(recipe_of(name)).recipe.model_dump()["algorithm"]
    return settings.get("cost_limit")


def over(one: Course) -> bool:
    """Return whether a run ends above its recipe's cost limit."""
    limit = limit_of(one.name)
    return limit is not None and mean(one.costs[-PAID:]) > limit


def spread(rises: Sequence[float]) -> str:
    """Return mean, standard deviation, least value and interval of the mean as cells."""
    middle = mean(rises)
    if len(rises) < 2:
        return f"{middle:+.3f} | | {middle:+.3f} | "
    reach = half_width(rises)
    cells = (f"{middle:+.3f}", f"{stdev(rises):.3f}", f"{min(rises):+.3f}")
    return f"{' | '.join(cells)} | {middle - reach:+.3f} .. {middle + reach:+.3f}"


def page(courses: Sequence[Course], places: Sequence[str], arguments: argparse.Namespace) -> str:
    """Return the page."""
    cores, versions = len(os.sched_getaffinity(0)), [f"{name} {version(name)}" for name in PEERS]
    seeds, steps = " ".join(map(str, arguments.seeds)), arguments.steps
    lines = [
        "# Every algorithm learns, from every seed, wherever its roles are",
        "",
        f"Command: `python benchmarks/algorithms/learning.py --seeds {seeds} --steps {steps}`; "
        f"{cores} cores, "
        f"Python {platform.python_version()}, {', '.join(versions)}.",
        "",
        f"The recipes (one-digit sums), {steps} steps after the warm start, one process. The rise is the",
        f"mean reward of the last {LAST} steps less that of the first {FIRST}; the interval is that of the",
        "mean rise over seeds (Student's t, 95%). The first steps of a run are those of a shorter one.",
    ]
    for until in [*(each for each in TESTED if each < steps), steps]:
        lines += ["", f"## After {until} steps", ""]
        lines += ["| algorithm | rise, each seed | mean | deviation | least | interval |"]
        lines += ["|---|---|---|---|---|---|"]
        for name in dict.fromkeys(one.name for one in courses):
            rises = [one.rise(min(until, len(one.rewards))) for one in courses if one.name == name]
            shown = " ".join(f"{rise:+.3f}" for rise in rises)
            lines.append(f"| {name} | {shown} | {spread(rises)} |")
    for name in dict.fromkeys(one.name for one in courses if one.costs):
        paid = " ".join(f"{mean(one.costs[-PAID:]):.3f}" for one in courses if one.name == name)
        lines += [
            "",
            f"Cost of {name}, mean of the last {PAID} steps, each seed: {paid}; limit {limit_of(name)}.",
        ]
    if places:
        lines += [
            "",
            f"## Places: seed 0, {arguments.places_steps} steps, mean reward of the last {LAST}",
            "",
        ]
        lines += [
            "Together: Ray, all roles on one pool of two ranks. Apart: Ray, a pool of one rank for each."
        ]
        lines += ["Identical: every metric of every step of apart has the bits of inline.", ""]
        lines += ["| algorithm | inline | together | apart | identical |", "|---|---|---|---|---|", *places]
    return "\n".join([*lines, ""])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of the runs (0 to 4)")
    parser.add_argument("--steps", type=int, default=26, help="steps of the algorithm (26)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these algorithms alone")
    parser.add_argument("--keep", metavar="FILE", help="JSON lines of runs that are done, read and added to")
    parser.add_argument(
        "--places", nargs="*", choices=NAMES, default=[], help="compare the three places for these"
    )
    parser.add_argument("--places-steps", type=int, default=8, help="steps of that comparison (8)")
    parser.add_argument("--write", metavar="FILE", help="where the tables go, besides the screen")
    return parser.parse_args()


if __name__ == "__main__":
    main()
