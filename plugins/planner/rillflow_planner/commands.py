"""Planning: the commands that predict what a step will cost; arguments in, exit code out.

plan       recipe, cluster ─ search ─> tables, plan.toml, a picture
simulate   recipe, plan, cluster ─ events ─> tables, a timeline
calibrate  run directory ─ fit ─> a cluster file with its factors

As in ``commands``, every import is in the function that needs it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.cli.commands import load
from rillflow.cli.failure import DONE
from rillflow.cli.main import recipe_arguments

if TYPE_CHECKING:
    from rillflow.app.recipe import LoadedRecipe
    from rillflow.placement.plan import Plan
    from rillflow_planner.gathering import GatherProposal
    from rillflow_planner.problem import Problem, Statement
    from rillflow_planner.ranking import Ranking, SearchObjective
    from rillflow_planner.simulator.result import Simulation

SIZES = (Fraction(1, 4), Fraction(1, 2), 1, 2)
"""Sizes of the clusters that throughput is shown for, relative to the given one."""
SIMULATED, VARIED = 3, 5
"""Numbers of best plans that are simulated, and that are evaluated with other lengths."""
RECOMPUTED = "policy.gradient_checkpointing"
SHORT = ("model", "gpus", "algorithm", "response")
"""Options that a plan without a recipe requires."""
Words = dict[str, dict[str, Any]]
"""Arguments of ``add_argument`` for each option."""


def plan(arguments: argparse.Namespace) -> int:
    """``rillflow plan``: find the best placements of a recipe on a cluster, and rank the others."""
    from dataclasses import replace

    from rillflow.placement.plan import plan_text
    from rillflow_planner.cost_model.costs import CostModel
    from rillflow_planner.gathering import proposed
    from rillflow_planner.plan_report import Decision, decision_data, decision_lines, plan_page, shown_s
    from rillflow_planner.ranking import Goal, SearchObjective, order_as_shown
    from rillflow_planner.search import variations

    objective = SearchObjective(goal=Goal(arguments.objective), deadline_s=arguments.deadline)
    statement, ranking = _ranked(_stated(arguments), objective, arguments)
    problem = statement.problem
    simulated = [_simulated(problem, one.plan) for one in ranking.best[:SIMULATED]]
    if objective.goal is Goal.STEP:
        shown = [shown_s(statement, *pair) for pair in zip(ranking.best, simulated, strict=False)]
        ranking, order = order_as_shown(ranking, shown)
        simulated = [simulated[place] for place in order]
        if ranking.fusion and not ranking.fusion.why and not ranking.best[0].plan.fused:
            ranking = replace(ranking, fusion=replace(ranking.fusion, why="its simulated step is longer"))
    gathering = proposed(problem, ranking.best[0].evaluation) if not statement.stack else None
    ranking = _with_gathering(ranking, gathering)
    plans = [one.plan for one in ranking.best]
    found = Decision(
        statement=statement,
        objective=objective,
        ranking=ranking,
        gathering=gathering,
        simulated=simulated,
        variations=variations(problem, CostModel, plans[:VARIED], ranking.sizes),
    )
    lines = decision_lines(found)
    title = statement.title
    if arguments.out is not None:
        _write(arguments.out, plan_text(plans[0]))
    if arguments.plot is not None:
        page = plan_page(f"{title}, freshness {plans[0].freshness}", simulated[0], lines)
        _write(arguments.plot, page)
    _print(arguments, [title, *lines], decision_data(found))
    return DONE


def _with_gathering(ranking: Ranking, gathering: GatherProposal | None) -> Ranking:
    """Return the ranking whose best plan gathers rows as proposed, if lengths of answers were seen."""
    from dataclasses import replace

    if gathering is None or gathering.is_assumed:
        return ranking
    rows, replicas, by = gathering.rows, gathering.replicas, gathering.by
    first, *others = ranking.best
    plan = replace(first.plan, gather_rows=rows, gather_replicas=replicas, gather_by=by)
    return replace(ranking, best=(replace(first, plan=plan), *others))


def _ranked(
    statement: Statement, objective: SearchObjective, arguments: argparse.Namespace
) -> tuple[Statement, Ranking]:
    """Rank the plans; if the statement leaves it open, both with and without recomputed activations.

    Several models with several freshness bounds are only planned with recomputation, to answer in time.
    """
    from dataclasses import replace

    from rillflow.errors import PlanError
    from rillflow_planner.cost_model.costs import CostModel
    from rillflow_planner.fusion import with_fusion
    from rillflow_planner.search import ranked_as_placed, search

    found: list[tuple[Statement, Ranking]] = []
    is_small = len(statement.problem.shapes) == 1 or len(arguments.freshness) == 1
    choices = (False, True) if statement.may_recompute and is_small else (statement.problem.recomputes,)
    for recomputes in choices:
        problem = replace(statement.problem, recomputes=recomputes)
        try:
            ranking = (
                search(
                    problem,
                    CostModel,
                    objective=objective,
                    freshness=arguments.freshness,
                    separate_in_step=arguments.separate_in_step,
                    times=SIZES,
                )
                if statement.placed is None
                else ranked_as_placed(problem, CostModel, statement.placed, SIZES)
            )
        except PlanError:
            if recomputes is choices[-1] and not found:
                raise
        else:
            told = f"activations are {'' if recomputes else 'not '}recomputed"
            change = f"--set {RECOMPUTED}={str(not recomputes).lower()} to change it"
            said = (f"{told}; {change}",) if statement.may_recompute else ()
            stated = replace(statement, problem=problem, assumptions=(*statement.assumptions, *said))
            found.append((stated, ranking))
    place = min(range(len(found)), key=lambda one: found[one][1].best[0].value)
    plain = found[place][1].best[0]
    fused = [(stated, with_fusion(stated.problem, one, objective, plain)) for stated, one in found]
    best = min(fused, key=lambda one: one[1].fusion.value if one[1].fusion else math.inf)
    if best[1].fusion is None or not best[1].fusion.why:
        return best if best[1].fusion else found[place]
    return found[place][0], replace(found[place][1], fusion=best[1].fusion)


def _stated(arguments: argparse.Namespace) -> Statement:
    """Return the problem of a recipe on a cluster, or of the short form."""
    from rillflow.errors import PlanError

    words, cluster = vars(arguments), arguments.cluster
    given = [name for name in SHORT if words[name] is not None]
    if arguments.recipe is not None and cluster is not None and not given:
        return _stated_recipe(load(arguments), arguments)
    if arguments.recipe is not None or cluster is not None or len(given) < len(SHORT):
        kinds = {"a recipe": arguments.recipe, "--cluster": cluster, **{f"--{name}": name for name in given}}
        raise PlanError(
            "the command has "
            f"{' and '.join(kind for kind, one in kinds.items() if one is not None) or 'nothing'}",
            why="it needs a recipe and --cluster, or --model, --gpus, --algorithm and --response",
            fix="run rillflow plan RECIPE --cluster FILE, or rillflow plan --model config.json "
            "--gpus 64xH100 --algorithm NAME --response mean=2000,max=8192",
        )
    from rillflow_planner.request import state_request

    names = [word[2:].replace("-", "_") for word in WORDS]
    bound = max(arguments.freshness)
    return state_request(**{name: words[name] for name in names}, settings=words["set"], freshness=bound)


def _stated_recipe(loaded: LoadedRecipe, arguments: argparse.Namespace) -> Statement:
    from dataclasses import replace

    from rillflow.app.device_defaults import on_cuda
    from rillflow_planner.recipe_problem import open_cluster, state_problem

    cluster = open_cluster(arguments.cluster)
    if loaded.recipe.run.device != "cpu" and all(fleet.device.name != "cpu" for fleet in cluster.fleets):
        loaded = replace(loaded, recipe=on_cuda(loaded.recipe, loaded.base))
    return state_problem(loaded, cluster, arguments.lengths)


def _simulated(problem: Problem, plan: Plan, steps: int = 0, **how: Any) -> Simulation:
    """Simulate a number of steps; 0 takes as many as are enough to know one."""
    from rillflow_planner.cost_model.costs import CostModel
    from rillflow_planner.simulator import simulate as simulator

    planned = problem.of_plan(plan)
    steps = steps or simulator.enough_steps(planned, plan)
    return simulator.simulate(planned, CostModel(planned), plan, steps=steps, **how)


def simulate(arguments: argparse.Namespace) -> int:
    """``rillflow simulate``: simulate a plan, event by event."""
    from dataclasses import replace

    from rillflow.placement.plan import open_plan, require_possible
    from rillflow_planner.plan_report import plan_page, simulation_data, simulation_lines
    from rillflow_planner.simulator.layout import Settings

    plan = open_plan(arguments.plan)
    prompts, samples = arguments.oversample or (plan.oversample_prompts, plan.oversample_samples)
    freshness = plan.freshness if arguments.freshness is None else arguments.freshness
    plan = replace(plan, freshness=freshness, oversample_prompts=prompts, oversample_samples=samples)
    require_possible(plan)
    statement = _stated_recipe(load(arguments), arguments)
    steps, seed, settings = arguments.steps, arguments.seed, Settings(parts=arguments.parts)
    found = _simulated(statement.problem, plan, steps, seed=seed, settings=settings)
    title = f"{plan.name} on {statement.problem.hardware.name}, freshness {plan.freshness:g}, seed {seed}"
    lines = simulation_lines(plan, found, statement)
    if arguments.plot is not None:
        _write(arguments.plot, plan_page(title, found, lines))
    _print(arguments, [f"{title}: {steps} steps simulated", *lines], simulation_data(plan, found, statement))
    return DONE


def calibrate(arguments: argparse.Namespace) -> int:
    """``rillflow calibrate``: fit the factors with which predictions match a run."""
    from rillflow_planner.calibration import calibrate as fit
    from rillflow_planner.plan_report import calibration_data, calibration_lines
    from rillflow_planner.recipe_problem import cluster_text, observe, open_cluster

    hardware = None if arguments.cluster is None else open_cluster(arguments.cluster)
    observations = observe(arguments.run, hardware, arguments.algorithms)
    found = fit(observations)
    if arguments.out is not None:
        text = cluster_text(found.factors, observations, arguments.cluster, arguments.run)
        _write(arguments.out, text)
    _print(arguments, calibration_lines(found), calibration_data(found))
    return DONE


class _Once(argparse.Action):
    """Option that may be given once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        """Store the value; refuse a second one."""
        said = vars(namespace).setdefault("said", {})
        if self.dest in said:
            parser.error(f"{option} is given twice: {said[self.dest]} and {values}")
        said[self.dest] = values
        setattr(namespace, self.dest, values)


def _word(metavar: str | tuple[str, ...] | None, told: str, kind: Any = Path, **more: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": told, "type": kind, **more}


def _page(text: str) -> Path:
    """Return the path of a picture's file. Example: ``_page("plan.html") == Path("plan.html")``."""
    if Path(text).suffix != ".html":
        raise argparse.ArgumentTypeError(f"{text} does not end in .html, the only format of charts")
    return Path(text)


CLUSTER = {"--cluster": _word("FILE", "cluster file (TOML)")}
LENGTHS = {"--lengths": _word("RUN", "run to measure row lengths from; without it, lengths are assumed")}
PLAN = {"--plan": _word("FILE", "plan file, written by rillflow plan --out")}
OUT = {"--out": _word("FILE", "file for the result: the best plan, or the fitted cluster file")}
FORMAT: Words = {"--format": {"choices": ("text", "json"), "default": "text", "help": "output format (text)"}}
PLOT = {"--plot": _word("FILE", "write a chart to this .html file", _page)}
WORDS: Words = {
    "--model": _word("FILE", "the model's config.json"),
    "--gpus": _word("NxKIND", "number and type of devices, such as 64xH100", str),
    "--algorithm": _word("NAME", "name of a shipped algorithm, as in recipes", str),
    "--response": _word(
        "LENGTHS", "response lengths: mean=2000,max=8192 (also median, sigma, p90), or a file", str
    ),
    "--prompt": _word("LENGTHS", "prompt lengths in the same form, or one number (256)", str, default="256"),
    "--prompts": _word("N", "prompts per step (512)", int, default=512),
    "--samples": _word("N", "completions per prompt (8)", int, default=8),
    "--minibatches": _word("N", "minibatches per step (1)", int, default=1),
    "--like": _word(
        "STACK", "predict what this published stack would take: nemo-rl, verl, ...", str, default=""
    ),
    "--layout": _word("AXES", "a given layout instead of the best: tp=4,pp=2,generate=4", str, default=""),
    "--between": _word("RATE", "bandwidth between machines, per device (50 GB/s)", str, default=""),
    "--price": _word("PRICE", 'price of a device, such as "2.5 $/h"', str, default=""),
    "--reward-seconds": _word("S", "seconds of the reward function per row (0)", float, default=0.0),
    "--steps": _word("N", "steps of the run, to predict its hours and price", int, default=0),
}
"""Options of a plan without a recipe."""


def simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``simulate``."""
    recipe_arguments(parser)
    _add(parser, PLAN | CLUSTER, required=True)
    more = "begin this many times the prompts and the samples, and leave the longest for later"
    words: Words = {
        "--steps": _word("N", "steps to simulate (20)", int, default=20),
        "--seed": _word("N", "seed of row lengths (0)", int, default=0),
        "--freshness": _word("K", "largest age of a trained token in versions, instead of the plan's", float),
        "--parts": _word("N", "pass a step's rows on in N parts, in order, as a run does", int, default=0),
        "--oversample": _word(("PROMPTS", "SAMPLES"), more, float, nargs=2),
    }
    _add(parser, LENGTHS | words | FORMAT | PLOT)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``."""
    recipe_arguments(parser, is_optional=True)
    _add(parser.add_argument_group("without a recipe"), WORDS, action=_Once)
    goals = (
        "quantity to minimise: seconds of a step (step), device-hours of a step, devices under a "
        "deadline, or the cost of a step at the cluster's prices"
    )
    choices = ("step", "device-hours", "devices", "cost")
    bounds = "freshness bounds to try (0); a bound above 0 generates on separate devices"
    words: Words = {
        "--objective": {"choices": choices, "default": "step", "help": goals},
        "--deadline": _word("S", "largest allowed seconds of a step", float, default=math.inf),
        "--freshness": _word("K,K", bounds, _freshness_bounds, default=(0,)),
        "--separate-in-step": {
            "action": "store_true",
            "help": "also try bound 0 with separate devices for generation, idle while the policy trains",
        },
    }
    _add(parser, CLUSTER | LENGTHS | words | OUT | FORMAT | PLOT)


def calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``calibrate``."""
    machine = _word("FILE", "cluster file of the run; without it, this machine's cores")
    _add(parser, {"run": _word("RUN", "a run directory"), "--cluster": machine} | OUT | FORMAT)


def _add(parser: Any, words: Words, **alike: Any) -> None:
    for name, how in words.items():
        parser.add_argument(name, **how, **alike)


def _freshness_bounds(text: str) -> tuple[float, ...]:
    """Return freshness bounds. Example: ``_freshness_bounds("0,0.5,4") == (0, 0.5, 4)``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.replace(".", "", 1).isdecimal() and part.isascii() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 0 up, such as 0,1,4 or 0.5")
    return tuple(float(part) if "." in part else int(part) for part in parts)


def _write(file: Path, text: str) -> None:
    from rillflow.runs.durable import replace

    replace(file, [text.encode("utf-8", "replace")])
    # To stderr, because the output may be JSON for a machine.
    print(f"wrote {file}", file=sys.stderr)


def _print(arguments: argparse.Namespace, lines: Sequence[str], data: object) -> None:
    print(json.dumps(data, indent=1) if arguments.format == "json" else "\n".join(lines))
