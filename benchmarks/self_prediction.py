"""How far predictions are off on this machine: calibrated on one run, other sizes, batches and placements.

    one run ─ rillflow calibrate ─> factors ─┬─ predicted step of another model, batch, placement ─┐
                                             └─ each of them run ──────── measured ────────────────┴─> error

    python benchmarks/self_prediction.py                        # 5 pairs of short runs, some minutes
    python benchmarks/self_prediction.py --only batch

The recipe is recipes/arithmetic with 64 prompts, answers up to 16 tokens and a reward that tells every two
rows apart, on one thread. Seconds are medians of the steps after the second. A machine is not always equally
fast, so each variant is predicted from a run of the recipe itself right before it, the only one that is
calibrated on; the same run right after it says how much faster or slower the machine has become. How long
a variant's rows are is given: a model of another size ends its answers elsewhere.
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
    """Of a usual step."""
    before_s: float
    """Of a usual step of the run that was calibrated on."""
    after_s: float
    """Of the same run afterwards."""

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def drift(self) -> float:
        """after / before - 1: by how much the machine itself changed."""
        return self.after_s / self.before_s - 1

    @property
    def level(self) -> float:
        """The error against a machine halfway between before and after."""
        return (1 + self.error) * (1 + self.drift / 2) - 1


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
    """Run, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--write", type=Path, metavar="FILE", help="where to write the table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = measured(arguments.only, Path(folder))
    print(table)
    if arguments.write is not None:
        arguments.write.write_text(table, "utf-8")
    return 0


def measured(names: Sequence[str], folder: Path) -> str:
    """The table of these variants."""
    (folder / "reward.py").write_text(REWARD)
    rows: list[Row] = []
    before = ran(CALIBRATED_ON, (), folder)
    first, fitted = before, calibrate(before.phases, CostModel)
    for name in names:
        one = ran(name, VARIANTS[name], folder)
        after = ran(CALIBRATED_ON, (), folder)
        now = calibrate(before.phases, CostModel)
        hardware = replace(this_machine(2), factors=now.factors)
        row = Row(
            name=name,
            settings=" ".join(VARIANTS[name]),
            predicted_s=predicted_s(one.loaded, hardware),
            measured_s=one.step_s,
            before_s=before.step_s,
            after_s=after.step_s,
        )
        rows.append(row)
        print(f"{name}: {row.error:+.1%}, the machine itself {row.drift:+.1%}", file=sys.stderr)
        before = after
    return page(rows, fitted, first.phases)


def ran(name: str, settings: tuple[str, ...], folder: Path) -> Round:
    """Run the recipe with these settings, in a directory of its own."""
    place = folder / f"{name.replace(' ', '_')}-{len(list(folder.iterdir()))}"
    more = (f"run.dir={place}", f"reward.function={folder / 'reward.py'}:spread")
    loaded = load_recipe(RECIPE, [*SETTINGS, *more, *settings])
    launch(loaded.recipe, loaded.base, fresh=True, quiet=True)
    return Round(loaded=loaded, phases=observe(Path(str(loaded.recipe.run.dir)), this_machine(2)))


def predicted_s(loaded: LoadedRecipe, hardware: Hardware) -> float:
    """Seconds of a step; how long its rows are is given, as ``--lengths`` of the run gives it."""
    problem = state_problem(loaded, hardware, Path(str(loaded.recipe.run.dir))).problem
    plan = plan_of(loaded.recipe, problem.graph, hardware.fleets[0].name)
    return evaluate(problem, CostModel(problem), plan).step_s


def page(rows: Sequence[Row], fitted: Calibration, fitted_to: Sequence[Observation]) -> str:
    """The table as a page."""
    within = sum(abs(row.error) <= LIMIT for row in rows)
    level = sum(abs(row.level) <= LIMIT for row in rows)
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
        f"Each variant is predicted from one run of the recipe right before it. {within} of {len(rows)} "
        f"within {LIMIT:.0%}; with half of the machine's own drift taken out, {level}. Drift: a step of the "
        "same run right after, against right before.",
        "",
        "| run | differs by | predicted s | measured s | error | drift | error less half the drift |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row.name} | {row.settings or '-'} | {row.predicted_s:.3f} | {row.measured_s:.3f} "
            f"| {row.error:+.1%} | {row.drift:+.1%} | {row.level:+.1%} |"
            for row in rows
        ),
        "",
        f"Fitted on the first of them: {factors}.",
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
