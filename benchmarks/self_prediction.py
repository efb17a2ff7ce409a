"""How far predictions are off on this machine: calibrated on one run, other sizes, batches and placements.

    one run ─ rillflow calibrate ─> factors ─┬─ predicted step of another model, batch, placement ─┐
                                             └─ each of them run ──────── measured ────────────────┴─> error

    python benchmarks/self_prediction.py                        # 3 rounds of 6 short runs, some minutes
    python benchmarks/self_prediction.py --only one batch --rounds 1
    python benchmarks/self_prediction.py --write benchmarks/results/self_prediction.md

The recipe is recipes/arithmetic with 64 prompts, answers up to 16 tokens and a reward that tells every two
rows apart, on one thread. Seconds are medians of the steps after the second. A machine is not always equally
fast: the runs go round and round, and of each the round with the fastest steps counts, of the one that is
calibrated on too. How far its slowest round was off stands beside.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from rillflow.assembly.launch import launch
from rillflow.assembly.observed import observe, plan_of, this_machine
from rillflow.assembly.planning import state_problem
from rillflow.assembly.recipe import LoadedRecipe, load_recipe
from rillflow.planner.calibration import Calibration, Observation, calibrate
from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.evaluate import evaluate
from rillflow.planner.hardware import Hardware

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/arithmetic/run.toml"
REWARD = "def spread(completions, **_):\n    return [sum(text.encode()) % 97 / 97 for text in completions]\n"
SETTINGS = (
    "run.threads=1",
    "algorithm.steps=8",
    "algorithm.prompts_per_step=64",
    "rollout.max_tokens=16",
    "warm_start.steps=12",
    "warm_start.warmup_steps=0",
    "evaluate.problems=8",
)
CALIBRATED_ON = "one"
VARIANTS: Mapping[str, tuple[str, ...]] = {
    CALIBRATED_ON: (),
    "a wider model": ("policy.model.new.hidden=192",),
    "a deeper model": ("policy.model.new.layers=8",),
    "a smaller model": ("policy.model.new.hidden=64",),
    "batch": ("algorithm.prompts_per_step=128",),
    "two ranks": ("placement.pools.main=2",),
}
LIMIT = 0.15


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run, predicted and measured."""

    name: str
    """Which."""
    settings: str
    """What differs from the run that was calibrated on."""
    predicted_s: float
    """Of a step."""
    measured_s: float
    """Of a usual step in the fastest round."""
    slowest_s: float
    """The same in the slowest."""

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run of a variant."""

    loaded: LoadedRecipe
    """Its recipe."""
    phases: Sequence[Observation]
    """What was observed."""

    @property
    def step_s(self) -> float:
        """Seconds of a usual step of its last phase."""
        return self.phases[-1].step_s


def main() -> int:
    """Run, predict, print; 1 if a prediction of another run is off by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--write", type=Path, metavar="FILE", help="where to write the table")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each (3)")
    arguments = parser.parse_args()
    names = list(dict.fromkeys([CALIBRATED_ON, *arguments.only]))
    with tempfile.TemporaryDirectory() as folder:
        table = measured(names, Path(folder), arguments.rounds)
    print(table)
    if arguments.write is not None:
        arguments.write.write_text(table, "utf-8")
    return 0


def measured(names: Sequence[str], folder: Path, rounds: int) -> str:
    """The table of these runs."""
    (folder / "reward.py").write_text(REWARD)
    found: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            loaded = recipe_of(name, folder, number)
            launch(loaded.recipe, loaded.base, fresh=True, quiet=True)
            one = Round(loaded=loaded, phases=observe(Path(str(loaded.recipe.run.dir)), this_machine(2)))
            found[name].append(one)
            print(f"{name}, round {number + 1}: {one.step_s:.3g} s a step", file=sys.stderr)
    best = {name: min(each, key=lambda one: one.step_s) for name, each in found.items()}
    base = best[CALIBRATED_ON]
    fitted = calibrate(base.phases, CostModel)
    hardware = replace(this_machine(2), factors=fitted.factors)
    rows = [
        Row(
            name=name,
            settings=" ".join(VARIANTS[name]),
            predicted_s=predicted_s(one.loaded, hardware, Path(str(base.loaded.recipe.run.dir))),
            measured_s=one.step_s,
            slowest_s=max(each.step_s for each in found[name]),
        )
        for name, one in best.items()
    ]
    return page(rows, fitted, base.phases)


def recipe_of(name: str, folder: Path, number: int) -> LoadedRecipe:
    """The recipe of a variant, its run of a round in the folder."""
    place = folder / f"{name.replace(' ', '_')}-{number}"
    more = (f"run.dir={place}", f"reward.function={folder / 'reward.py'}:spread")
    return load_recipe(RECIPE, [*SETTINGS, *VARIANTS[name], *more])


def predicted_s(loaded: LoadedRecipe, hardware: Hardware, run: Path) -> float:
    """Seconds of a step, rows taken to be as the calibrated run had them."""
    problem = state_problem(loaded, hardware, run).problem
    plan = plan_of(loaded.recipe, problem.graph, hardware.fleets[0].name)
    return evaluate(problem, CostModel(problem), plan).step_s


def page(rows: Sequence[Row], fitted: Calibration, fitted_to: Sequence[Observation]) -> str:
    """The table as a page."""
    others = [abs(row.error) for row in rows if not row.name.startswith(CALIBRATED_ON)]
    within = sum(error <= LIMIT for error in others)
    factors = ", ".join(
        f"{name} {value:.3g}"
        for name, value in vars(fitted.factors).items()
        if value != vars(fitted_to[0].problem.hardware.factors)[name]
    )
    lines = [
        "# Predictions of this machine by itself",
        "",
        f"`python benchmarks/self_prediction.py --write benchmarks/results/self_prediction.md`, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}.",
        "",
        f"Fitted on the run `{CALIBRATED_ON}` alone: {factors}. {within} of {len(others)} others within "
        f"{LIMIT:.0%}.",
        "",
        "| run | differs by | predicted s | measured s, fastest round | error | slowest round |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.name} | {row.settings or '-'} | {row.predicted_s:.3f} | {row.measured_s:.3f} "
            f"| {row.error:+.1%} | {row.slowest_s:.3f} |"
            for row in rows
        ),
        "",
        "| stage of the calibrated run | phase | measured s | fitted s | error |",
        "|---|---|---|---|---|",
        *(
            f"| {one.stage} | {one.phase} | {one.measured_s:.4f} | {one.fitted_s:.4f} | {one.error:+.1%} |"
            for one in fitted.stages
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
