"""Planning: the commands that say what a step will cost: arguments in, exit code out.

run        recipe, cluster ─ its own placement ─> what is expected of it
plan       recipe, cluster ─ search ─> tables, plan.toml, a picture
simulate   recipe, plan, cluster ─ events ─> tables, a timeline
calibrate  run directory ─ fit ─> a cluster file with its factors

As in ``commands``, every import stands in the function that needs it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.cli.commands import load
from rillflow.cli.failure import DONE

if TYPE_CHECKING:
    from rillflow.assembly.recipe import LoadedRecipe
    from rillflow.planner.plan import Plan
    from rillflow.planner.problem import Problem
    from rillflow.planner.search import ClusterSize
    from rillflow.planner.statement import Statement
    from rillflow.view.chart import Series
    from rillflow.view.timeline import Bar

SIZES = (Fraction(1, 4), Fraction(1, 2), 1, 2)
"""How much larger than the given one the clusters are that throughput is shown for."""
SIMULATED, VARIED = 3, 5
"""The best plans that are simulated, and evaluated with other lengths."""
SIMULATED_ROWS = 4096
"""Rows that are simulated of each, in one step or more; twice as many where rows flow, once they do."""
SHOWN_STEPS = 4
"""Simulated steps that a timeline shows."""


def plan(arguments: argparse.Namespace) -> int:
    """``rillflow plan``: the best placements of a recipe on a cluster, and what each other is behind by."""
    from rillflow.planner.cost_model.costs import CostModel
    from rillflow.planner.objective import Goal, Objective
    from rillflow.planner.search import explore
    from rillflow.planner.sensitivity import prompts_that_pay, variations
    from rillflow.view.plans import Decision, decision_data, decision_lines

    _require_picture(arguments.plot)
    statement = _stated(arguments)
    problem = statement.problem
    objective = Objective(goal=Goal(arguments.objective), deadline_s=arguments.deadline)
    bounds, apart = arguments.freshness, arguments.apart_in_step
    explored = explore(
        problem, CostModel, objective=objective, freshness=bounds, apart_in_step=apart, times=SIZES
    )
    ranking, sizes = explored.ranking, explored.sizes
    plans = [one.plan for one in ranking.best]
    found = Decision(
        statement=statement,
        objective=objective,
        ranking=ranking,
        sizes=sizes,
        simulated_s=[_simulated_s(problem, one) for one in plans[:SIMULATED]],
        variations=variations(problem, CostModel, plans[:VARIED], sizes),
        pays_with=prompts_that_pay(problem, CostModel, sizes),
    )
    if arguments.format == "json":
        _print_json(decision_data(found))
    else:
        print(f"{plans[0].name} on {problem.hardware.name}")
        _print_lines(decision_lines(found))
    if arguments.out is not None:
        from rillflow.planner.plan_file import plan_text

        _write(arguments.out, plan_text(plans[0]))
    if arguments.plot is not None:
        _plot_plan(arguments.plot, problem, plans[0], sizes, decision_lines(found))
    return DONE


def _stated(arguments: argparse.Namespace) -> Statement:
    """The problem of a recipe on a cluster, or of the short form."""
    from rillflow.errors import PlanError

    short = ("model", "gpus", "algorithm", "response")
    given = [name for name in short if getattr(arguments, name) is not None]
    if arguments.recipe is not None:
        if given or arguments.cluster is None:
            raise PlanError(
                f"a recipe and --{given[0]}" if given else "a recipe and no cluster",
                why="a recipe has its own models and rows, and a cluster's file says what it runs on",
                fix="rillflow plan RECIPE --cluster FILE, or the short form without a recipe",
            )
        from rillflow.assembly.planning import open_cluster, state_problem

        return state_problem(load(arguments), open_cluster(arguments.cluster), arguments.lengths)
    missing = next((name for name in short if name not in given), None)
    if missing is not None or arguments.cluster is not None:
        raise PlanError(
            f"there is no --{missing}" if missing else "--cluster beside --gpus",
            why="without a recipe the model, the devices, the algorithm and the lengths are words",
            fix="--model config.json --gpus 64xH100 --algorithm NAME --response mean=2000,max=8192",
        )
    from rillflow.planner.request import Request, state_request

    return state_request(
        Request(
            model=arguments.model,
            gpus=arguments.gpus,
            algorithm=arguments.algorithm,
            response=arguments.response,
            prompt=arguments.prompt,
            prompts=arguments.prompts,
            samples=arguments.samples,
            minibatches=arguments.minibatches,
            like=arguments.like,
            between=arguments.between,
            price=arguments.price,
            reward_s=arguments.reward_seconds,
            steps=arguments.steps,
        )
    )


def _simulated_s(problem: Problem, plan: Plan) -> float:
    """Seconds of a simulated step: the mean of some in step, what it comes to where rows flow."""
    from rillflow.planner.cost_model.costs import CostModel
    from rillflow.planner.simulator.simulate import simulate as run

    step, rows = problem.of_plan(plan), (2 if plan.freshness else 1) * SIMULATED_ROWS
    steps = max(1, min(4, rows // problem.workload.rows))
    steps += 2 * (plan.freshness + 1) if plan.freshness else 0
    found = run(step, CostModel(step), plan, steps=steps)
    return found.settled_step_s if plan.freshness else found.mean_step_s


def simulate(arguments: argparse.Namespace) -> int:
    """``rillflow simulate``: a plan, event by event."""
    from rillflow.assembly.planned import open_plan
    from rillflow.assembly.planning import open_cluster, state_problem
    from rillflow.planner.cost_model.costs import CostModel
    from rillflow.planner.simulator.settings import Settings
    from rillflow.planner.simulator.simulate import simulate as run
    from rillflow.view.simulated import simulated_bars, simulation_data, simulation_lines

    _require_picture(arguments.plot)
    plan = _changed(open_plan(arguments.plan), arguments)
    statement = state_problem(load(arguments), open_cluster(arguments.cluster), arguments.lengths)
    problem = statement.problem.of_plan(plan)
    slow = arguments.stragglers or (0.0, 1.0)
    settings = Settings(straggler_share=slow[0], straggler_factor=slow[1], interrupts=arguments.interrupts)
    found = run(
        problem, CostModel(problem), plan, steps=arguments.steps, seed=arguments.seed, settings=settings
    )
    title = f"{plan.name} on {problem.hardware.name}, freshness {plan.freshness}, seed {arguments.seed}"
    if arguments.format == "json":
        _print_json({**simulation_data(plan, found), **_said_of(statement)})
    else:
        print(f"{title}: {arguments.steps} steps simulated")
        _print_lines([*simulation_lines(plan, found), *_assumed(statement)])
    if arguments.plot is not None:
        bars = simulated_bars(found, min(SHOWN_STEPS, arguments.steps))
        _plot(arguments.plot, title, bars, [], "", simulation_lines(plan, found))
    return DONE


def calibrate(arguments: argparse.Namespace) -> int:
    """``rillflow calibrate``: the factors with which predictions meet a run."""
    from rillflow.assembly.observed import cluster_text, observe
    from rillflow.assembly.planning import open_cluster
    from rillflow.planner.calibration import calibrate as fit
    from rillflow.planner.cost_model.costs import CostModel
    from rillflow.view.calibrated import calibration_data, calibration_lines

    hardware = None if arguments.cluster is None else open_cluster(arguments.cluster)
    observations = observe(arguments.run, hardware, arguments.algorithms)
    found = fit(observations, CostModel)
    if arguments.format == "json":
        _print_json(calibration_data(found))
    else:
        _print_lines(calibration_lines(found))
    if arguments.out is not None:
        text = cluster_text(found.factors, observations, arguments.cluster, arguments.run)
        _write(arguments.out, text)
    return DONE


def expected(loaded: LoadedRecipe, arguments: argparse.Namespace) -> Plan:
    """What a cluster's file says of the recipe as it is placed, for ``rillflow run --cluster``."""
    from rillflow.assembly.as_placed import plan_as_placed
    from rillflow.assembly.planned import require_for
    from rillflow.assembly.planning import open_cluster, state_problem

    statement = state_problem(loaded, open_cluster(arguments.cluster), arguments.lengths)
    plan = plan_as_placed(loaded.recipe, statement)
    require_for(plan, loaded)
    if not arguments.quiet:
        _print_lines(_assumed(statement)[1:])
    return plan


def run_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``run`` by which predicted seconds stand beside those measured."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--plan", type=Path, metavar="FILE", help="place roles as a plan of rillflow plan does"
    )
    either.add_argument(
        "--cluster", type=Path, metavar="FILE", help="predict the recipe's own placement by a cluster's file"
    )
    _lengths_argument(parser)


def simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``simulate``."""
    parser.add_argument("--plan", type=Path, required=True, metavar="FILE", help="a plan of rillflow plan")
    _cluster_arguments(parser)
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps to simulate (20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths and slow devices (0)")
    parser.add_argument(
        "--freshness",
        type=int,
        metavar="K",
        help="versions a trained token may be old, instead of the plan's",
    )
    parser.add_argument(
        "--oversample",
        type=float,
        nargs=2,
        metavar=("PROMPTS", "SAMPLES"),
        help="begin so many times the prompts and the samples, and leave the longest for later",
    )
    parser.add_argument(
        "--stragglers",
        type=float,
        nargs=2,
        metavar=("SHARE", "FACTOR"),
        help="this share of the devices takes so many times as long",
    )
    parser.add_argument(
        "--interrupts",
        action=argparse.BooleanOptionalAction,
        help="new weights interrupt rows, which go on under them; as the cluster's engine does if left out",
    )
    _output_arguments(parser)


class _Once(argparse.Action):
    """A number that is said once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        """Keep it, unless there is one."""
        said = vars(namespace).setdefault("said", {})
        if self.dest in said:
            parser.error(f"{option} is given twice: {said[self.dest]} and {values}")
        said[self.dest] = values
        setattr(namespace, self.dest, values)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``plan``."""
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="a cluster's TOML file")
    _lengths_argument(parser)
    short = parser.add_argument_group("without a recipe")
    words: tuple[tuple[str, str, Any, Any, str], ...] = (
        ("--model", "FILE", Path, None, "a config.json"),
        ("--gpus", "NxKIND", str, None, "such as 64xH100"),
        ("--algorithm", "NAME", str, None, "whose step: one that recipes/ has"),
        ("--response", "LENGTHS", str, None, "mean=2000,max=8192; median, sigma, p90 too; or a file"),
        ("--prompt", "LENGTHS", str, "256", "the same of prompts, or one number (256)"),
        ("--prompts", "N", int, 512, "prompts of a step (512)"),
        ("--samples", "N", int, 8, "rows of a prompt (8)"),
        ("--minibatches", "N", int, 1, "optimiser steps of a step (1)"),
        ("--like", "STACK", str, "nemo-rl", "whose factors: nemo-rl, verl, ... (nemo-rl)"),
        ("--between", "RATE", str, "", "one device's share of the network (50 GB/s)"),
        ("--price", "PRICE", str, "", 'of a device, such as "2.5 $/h"'),
        ("--reward-seconds", "S", float, 0.0, "of the reward's function for a row (0)"),
        ("--steps", "N", int, 0, "of the whole run, for its hours and price"),
    )
    for name, shown, kind, default, told in words:
        short.add_argument(name, metavar=shown, type=kind, default=default, action=_Once, help=told)
    parser.add_argument(
        "--objective",
        choices=("step", "device-hours", "devices", "cost"),
        default="step",
        help="what is to be least: seconds of a step (step), device-hours of a step, devices under a "
        "deadline, or the cost of a step at the cluster's prices",
    )
    parser.add_argument(
        "--deadline", type=float, default=math.inf, metavar="S", help="most seconds a step may take"
    )
    parser.add_argument(
        "--freshness",
        type=_freshness_bounds,
        default=(0,),
        metavar="K,K",
        help="freshness bounds to try: 0 in step (0), more with generation on devices of its own",
    )
    parser.add_argument(
        "--apart-in-step",
        action="store_true",
        help="try bound 0 with generation on devices of its own too, which wait while the policy trains",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the best plan")
    _output_arguments(parser)


def calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``calibrate``."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE", help="what it ran on; this machine's cores if left out"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it with the factors")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what is printed (text)")


def _cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE", help="a cluster's TOML file")
    _lengths_argument(parser)


def _lengths_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=Path, metavar="RUN", help="a run whose rows say how long rows are; else assumed"
    )


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what is printed (text)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .html")


def _freshness_bounds(text: str) -> tuple[int, ...]:
    """Freshness bounds. Example: ``_freshness_bounds("0,1,4") == (0, 1, 4)``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers from 0 on, such as 0,1,4")
    return tuple(map(int, parts))


def _plot_plan(
    file: Path, problem: Problem, best: Plan, sizes: Sequence[ClusterSize], lines: Sequence[str]
) -> None:
    """The best plan's first steps, simulated, and what other cluster sizes would come to."""
    from rillflow.planner.cost_model.costs import CostModel
    from rillflow.planner.simulator.simulate import simulate as run
    from rillflow.view.plans import AXES, growth_curves
    from rillflow.view.simulated import simulated_bars

    planned = problem.of_plan(best)
    found = run(planned, CostModel(planned), best, steps=SHOWN_STEPS)
    title = f"{best.name} on {problem.hardware.name}, freshness {best.freshness}"
    _plot(file, title, simulated_bars(found, SHOWN_STEPS), growth_curves(sizes), AXES, lines)


def _changed(plan: Plan, arguments: argparse.Namespace) -> Plan:
    """The plan with what the words say instead."""
    from dataclasses import replace

    from rillflow.planner.plan_file import require_possible

    if arguments.freshness is not None:
        plan = replace(plan, freshness=arguments.freshness)
    if arguments.oversample is not None:
        prompts, samples = arguments.oversample
        plan = replace(plan, oversample_prompts=prompts, oversample_samples=samples)
    require_possible(plan)
    return plan


def _plot(
    file: Path, title: str, bars: Sequence[Bar], curves: Sequence[Series], axes: str, lines: Sequence[str]
) -> None:
    from rillflow.view.plan_page import plan_page

    _write(file, plan_page(title, bars, curves, axes, lines))


def _require_picture(file: Path | None) -> None:
    """Find a wrong name before anything is searched."""
    if file is not None:
        from rillflow.view.plan_page import require_kind

        require_kind(file)


def _write(file: Path, text: str) -> None:
    from rillflow.observe.durable import replace

    replace(file, [text.encode("utf-8", "replace")])
    _wrote(file)


def _wrote(file: Path) -> None:
    # Beside the output, which may be JSON for a machine.
    print(f"wrote {file}", file=sys.stderr)


def _assumed(statement: Statement) -> list[str]:
    sentences = (f"assumed: {sentence}" for sentence in statement.assumptions)
    return ["", f"how exact: {statement.accuracy}", *sentences]


def _said_of(statement: Statement) -> dict[str, object]:
    return {"accuracy": statement.accuracy, "assumptions": list(statement.assumptions)}


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(line)


def _print_json(data: object) -> None:
    import json

    print(json.dumps(data, indent=1))
