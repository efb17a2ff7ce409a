"""Prediction errors on this machine: calibrated on one run, tested on other sizes, batches and placements.

    one run ─ rillflow calibrate ─> factors ─┬─ predicted step of another model, batch, placement ─┐
                                             └─ a run of each of them ────────── measured ─────────┴─> error

    python benchmarks/planner/self_prediction.py                        # 3 x 5 pairs of short runs, 8 minutes
    python benchmarks/planner/self_prediction.py --only batch --rounds 1

The recipe is recipes/arithmetic with 64 prompts, answers of up to 16 tokens and a reward that gives different
rows different values, on one thread. Its learning rate is near zero, so that all steps are alike. Seconds are
medians of the steps after the second.

The speed of a machine drifts, so each variant runs between two runs of the recipe itself. Each of the two
gives a prediction; their geometric mean counts, and of several rounds the median. The lengths of a variant's
rows are given, because a model of another size ends its answers elsewhere.

The page also lists the cores that other programs used during those two runs, which leave all but one core
idle. If they used a core, two ranks did not have two cores, and no prediction accounts for that.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import geometric_mean, median

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow_planner.calibration import MODELLED, Calibration, Observation, calibrate
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import evaluate, stages_by_name
from rillflow_planner.hardware import Factors
from rillflow_planner.recipe_problem import observe, plan_of, state_problem, this_machine

SMALLEST = []
SLOW = ["--only batch --rounds 1"]  # runs the recipe three times at its sizes
NEEDS = ["rillflow_planner"]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/arithmetic/run.toml"
REWARD = "def spread(completions, **_):\n    return [sum(text.encode()) % 97 / 97 for text in completions]\n"
SETTINGS = (
    "run.threads=1",
    "policy.lr=1e-9",
    "algorithm.steps=10",
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
class Stage:
    """Prediction and measurement of one stage, or of the step, of a variant."""

    name: str
    """Name of the stage, or "step"."""
    predicted_s: float
    """Seconds by the cost model: geometric mean of the predictions from the runs before and after."""
    measured_s: float
    """Seconds of a typical step."""

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant in one round."""

    name: str
    """Name of the variant."""
    step: Stage
    """The whole step."""
    stages: tuple[Stage, ...]
    """The stages of the step that the cost model covers."""
    drift: float
    """Change of the machine's speed: step seconds of the recipe after / before - 1."""
    others: float
    """Cores that other programs used, the larger value of the runs before and after."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run of the recipe or of a variant."""

    loaded: Resolved
    """The recipe of the run."""
    phases: Sequence[Observation]
    """Observations of each phase."""
    others: float
    """Cores that other programs of this priority, or the host, used during the run; valid for one rank."""

    @property
    def step_s(self) -> float:
        """Seconds of a typical step of the last phase."""
        return self.phases[-1].step_s


def main() -> int:
    """Run, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where to write the table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = measured(arguments.only, arguments.rounds, Path(folder))
    print(table)
    if arguments.write is not None:
        arguments.write.write_text(table, "utf-8")
    return 0


def measured(names: Sequence[str], rounds: int, folder: Path) -> str:
    """Return the page for these variants."""
    (folder / "reward.py").write_text(REWARD)
    rows: list[Row] = []
    before = ran(CALIBRATED_ON, (), folder)
    first, fitted = before, calibrate(before.phases)
    for name in [name for _ in range(rounds) for name in names]:
        one = ran(name, VARIANTS[name], folder)
        after = ran(CALIBRATED_ON, (), folder)
        sides = [calibrate(side.phases).factors for side in (before, after)]
        others = max(before.others, after.others)
        row = compared(name, one, sides, drift=after.step_s / before.step_s - 1, others=others)
        rows.append(row)
        stages = ", ".join(f"{stage.name} {stage.error:+.0%}" for stage in row.stages)
        print(
            f"{name}: {row.step.error:+.1%} ({stages}), drift {row.drift:+.1%}, others {others:.2f}",
            file=sys.stderr,
        )
        before = after
    return page(names, rows, fitted, first.phases)


def compared(name: str, one: Round, sides: Sequence[Factors], *, drift: float, others: float) -> Row:
    """Return a run with its prediction by the factors of either side; the lengths of its rows are given."""
    loaded = one.loaded
    problem = state_problem(loaded, this_machine(2), Path(str(loaded.recipe.run.dir))).problem
    plan = plan_of(loaded, problem.graph, problem.hardware.fleets[0])
    problems = [replace(problem, hardware=replace(problem.hardware, factors=side)) for side in sides]
    found = [evaluate(side, CostModel(side), plan) for side in problems]
    seconds = [stages_by_name(side, paper) for side, paper in zip(problems, found, strict=True)]
    works = {stage.name: problem.work(stage) for stage in problem.graph.stages}
    taken = one.phases[-1].stages_s
    stages = tuple(
        Stage(
            name=stage,
            predicted_s=geometric_mean([side[stage] for side in seconds]),
            measured_s=taken[stage],
        )
        for stage, work in works.items()
        if work in MODELLED and stage in taken
    )
    expected = geometric_mean([paper.step_s for paper in found])
    return Row(
        name=name,
        step=Stage(name="step", predicted_s=expected, measured_s=one.step_s),
        stages=stages,
        drift=drift,
        others=others,
    )


def ran(name: str, settings: tuple[str, ...], folder: Path) -> Round:
    """Run the recipe with these settings in a new directory."""
    place = folder / f"{name.replace(' ', '_')}-{len(list(folder.iterdir()))}"
    more = (f"run.dir={place}", f"reward.function={folder / 'reward.py'}:spread")
    loaded = load_recipe(RECIPE, [*SETTINGS, *more, *settings])
    began, before = time.monotonic(), others_s()
    launch(loaded, fresh=True, quiet=True)
    others = max(others_s() - before, 0.0) / (time.monotonic() - began)
    return Round(
        loaded=loaded, phases=observe(Path(str(loaded.recipe.run.dir)), this_machine(2)), others=others
    )


def others_s() -> float:
    """Return busy core seconds so far, without this process, its ended children and low priority programs."""
    user, _, system, _, _, *beside = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = (user + system + sum(beside)) / os.sysconf("SC_CLK_TCK")
    return busy - sum(each.ru_utime + each.ru_stime for each in own)


def page(
    names: Sequence[str], rows: Sequence[Row], fitted: Calibration, fitted_to: Sequence[Observation]
) -> str:
    """Return the page with its tables."""
    of = {name: [row for row in rows if row.name == name] for name in names}
    errors = {name: median(row.step.error for row in of[name]) for name in names}
    guess = vars(fitted_to[0].problem.hardware.factors)
    factors = ", ".join(
        f"{name} {value:.3g}" for name, value in vars(fitted.factors).items() if value != guess[name]
    )
    within = sum(abs(error) <= LIMIT for error in errors.values())
    lines = [
        "# Predictions of this machine by itself",
        "",
        f"`python benchmarks/planner/self_prediction.py --write benchmarks/results/self_prediction.md`, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}.",
        "",
        f"Each variant is predicted from one run of the recipe right before it and from one right after it, "
        f"{len(rows) // len(names)} times; the mean of both counts, and of the times the median. {within} of "
        f"{len(names)} within {LIMIT:.0%}. Drift: a step of the recipe itself right after, against right "
        "before. Others: cores that other programs took during those two runs.",
        "",
        "| run | differs by | predicted s | measured s | error | each round's | drift | others | stages |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_line(name, of[name]) for name in names),
        "",
        f"Fitted on the first of them: {factors}.",
        "",
        "| stage of the calibrated run | phase | measured s | fitted s | error |",
        "|---|---|---|---|---|",
        *(
            f"| {one.stage} | {one.phase} | {one.measured_s:.4f} | {one.predicted_s:.4f} | {one.error:+.1%} |"
            for one in fitted.stages
        ),
        "",
    ]
    return "\n".join(lines)


def _line(name: str, rows: Sequence[Row]) -> str:
    stages = [
        f"{stage.name.split('.')[-1]} {median(row.stages[place].error for row in rows):+.0%}"
        for place, stage in enumerate(rows[0].stages)
    ]
    cells = [
        name,
        " ".join(VARIANTS[name]),
        f"{median(row.step.predicted_s for row in rows):.3f}",
        f"{median(row.step.measured_s for row in rows):.3f}",
        f"{median(row.step.error for row in rows):+.1%}",
        ", ".join(f"{row.step.error:+.0%}" for row in rows),
        ", ".join(f"{row.drift:+.0%}" for row in rows),
        ", ".join(f"{row.others:.2f}" for row in rows),
        ", ".join(stages),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
