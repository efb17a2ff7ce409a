"""Calibration: fit the cost model's factors to the stage times that a run measured.

measured stages of one run ──┐
cost model, factors as guess ┴─ least squares on log ratios, held near the guess ─> Factors, error by stage
rest of the steps ───────────────────────────────────────────────────────────────> step_s, step_row_s

Factors without data stay near the guess; a run on one device, for example, has no data about links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import PlanError
from rillflow.placement.plan import Plan, Predicted
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import StepEvaluation, evaluate, in_turn, last_s, stages_by_name, tasks_of
from rillflow_planner.hardware import Factors
from rillflow_planner.problem import Problem, Work

FITTED = ("train_flops", "score_flops", "decode_flops", "decode_bandwidth", "launch_s", "decode_launch_s")
"""Factors that the stages of any run determine."""
FITTED_TOGETHER = ("collective_s", "inside_links")
"""Factors that stages on several devices determine."""
MODELLED = (Work.GENERATE, Work.SCORE, Work.TRAIN)
"""Kinds of work whose seconds depend on the factors."""
PRIOR = 0.05
"""Weight of a factor's log distance from its guess, relative to 1 for a stage's log error: stages are
measured to within a twentieth, factors are known to within a factor of e.
"""
FAR = 3.0
"""A fitted factor this many times its guess, or a part of it, is reported."""
ROUNDS = 40
"""Largest number of fit steps."""
LEAST = math.log(1e-4)
"""Lower bound for the logarithm of a share."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One phase of a run: its problem and its measured times."""

    name: str
    """Name of the phase."""
    problem: Problem
    """The phase's step on the hardware, with guessed factors."""
    plan: Plan
    """Placement of the units."""
    stages_s: Mapping[str, float]
    """Seconds of a usual step's stages, by name."""
    step_s: float
    """Seconds of a usual step."""
    is_recorded: bool = True
    """Whether the run recorded the phase's rows, because it sampled them."""

    @cached_property
    def modelled(self) -> Mapping[str, float]:
        """Measured stages whose seconds depend on the factors."""
        graph = self.problem.graph
        names = {stage.name for stage in graph.stages if self.problem.work(stage) in MODELLED}
        return {name: spent for name, spent in self.stages_s.items() if name in names and spent > 0}

    def evaluated(self, factors: Factors) -> StepEvaluation:
        """Return the cost of the plan with other factors."""
        problem = replace(self.problem, hardware=replace(self.problem.hardware, factors=factors))
        return evaluate(problem, CostModel(problem), self.plan)

    def inside_s(self, factors: Factors) -> float:
        """Return the seconds of the stages of a step, as measured, else computed; measured ones include the
        transfers of their inputs.
        """
        timings, graph = self.evaluated(factors).timings, self.problem.graph
        names = [timing.name for timing in timings]
        shares = {name: spent / names.count(name) for name, spent in self.modelled.items()}
        seconds = [shares.get(timing.name, timing.seconds) for timing in timings]
        pools, moved = [timing.pool for timing in timings], [0.0] * len(graph.edges)
        return last_s(in_turn(tasks_of(graph, seconds=seconds, pools=pools, transfers=moved)))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted factors and the error of the fit."""

    factors: Factors
    """Fitted factors."""
    stages: tuple[Predicted, ...]
    """Measured and fitted seconds of every stage that depends on the factors."""
    at_limit: tuple[str, ...]
    """Shares fitted to 1: the device is faster than its description."""
    moved: Mapping[str, float]
    """Factors that left their guess by more than ``FAR`` times, with fitted over guess."""


def calibrate(observations: Sequence[Observation], names: Sequence[str] | None = None) -> Calibration:
    """Fit the factors to all phases of a run together.

    Minimise ``sum over stages (ln(fitted / measured))^2 + (PRIOR ln(factor / guess))^2`` by damped
    Gauss-Newton steps in the factors' logarithms (Levenberg, Quart. Appl. Math. 2, 1944). The guess is the
    factors of the observations' hardware.

    Args:
        observations: measured phases.
        names: factors to fit; None for those that the run determines.

    Raises:
        PlanError: no measured stage depends on the factors.
    """
    if not any(one.modelled for one in observations):
        raise PlanError(
            "the run has no times to calibrate with",
            why="no stage that generates, scores or trains was measured",
            fix="name a run with more than one step",
        )
    guess = observations[0].problem.hardware.factors
    together = any(pool.devices > 1 for one in observations for pool in one.plan.pools)
    names = names or FITTED + (FITTED_TOGETHER if together else ())
    start = np.log([vars(guess)[name] for name in names])
    shares = np.array([not name.endswith("_s") and name != "touches" for name in names])

    def factors_at(place: NDArray[np.float64]) -> Factors:
        return replace(guess, **dict(zip(names, np.exp(place).tolist(), strict=True)))

    def stages_at(factors: Factors) -> list[Predicted]:
        found: list[Predicted] = []
        for one in observations:
            fitted = stages_by_name(one.problem, one.evaluated(factors))
            found += [
                Predicted(phase=one.name, stage=name, measured_s=seconds, predicted_s=fitted[name])
                for name, seconds in one.modelled.items()
            ]
        return found

    def residuals(place: NDArray[np.float64]) -> NDArray[np.float64]:
        found = [math.log(stage.predicted_s / stage.measured_s) for stage in stages_at(factors_at(place))]
        return np.concatenate([found, PRIOR * (place - start)])

    high = np.where(shares, 0.0, np.log(1e6))
    factors = factors_at(least_squares(residuals, start, np.where(shares, LEAST, np.log(1e-9)), high))
    factors = replace(factors, **_overheads(observations, factors))
    shared = [name for name, share in zip(names, shares, strict=True) if share]
    limits = [name for name in shared if math.isclose(vars(factors)[name], 1.0)]
    times = {name: vars(factors)[name] / vars(guess)[name] for name in names}
    moved = {name: one for name, one in times.items() if max(one, 1 / one) > FAR}
    stages = tuple(stages_at(factors))
    return Calibration(factors=factors, stages=stages, at_limit=tuple(limits), moved=moved)


def least_squares(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    start: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    enough: float = 1e-5,
) -> NDArray[np.float64]:
    """Return the point of least squares within bounds, by damped Gauss-Newton steps (Levenberg, 1944)."""
    place, damping = np.clip(start, low, high), 1e-2
    found = residuals(place)
    for _ in range(ROUNDS):
        columns = []
        for index in range(len(place)):
            ahead = 1e-4 if place[index] + 1e-4 <= high[index] else -1e-4
            moved = place.copy()
            moved[index] += ahead
            columns.append((residuals(moved) - found) / ahead)
        slopes = np.stack(columns, axis=1)
        while damping < 1e6:
            step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(place)), -slopes.T @ found)
            trial = np.clip(place + np.clip(step, -2.0, 2.0), low, high)
            there = residuals(trial)
            if there @ there < found @ found:
                break
            damping *= 4
        else:
            return place
        done = float(np.abs(trial - place).max()) < 1e-6 or there @ there > (1 - enough) * (found @ found)
        place, found, damping = trial, there, max(damping / 3, 1e-9)
        if done:
            break
    return place


def _overheads(observations: Sequence[Observation], factors: Factors) -> Mapping[str, float]:
    """Return the seconds outside stages: per step from phases without recorded rows, the rest per row."""
    rests = [(one, max(one.step_s - one.inside_s(factors), 0.0)) for one in observations]
    step_s = min((rest_s for one, rest_s in rests if not one.is_recorded), default=0.0)
    rows = [max(rest_s - step_s, 0.0) / one.problem.workload.rows for one, rest_s in rests if one.is_recorded]
    return {"step_s": step_s, "step_row_s": max(rows, default=0.0)}
