"""Figures of two small models are the committed ones: laws alone leave factors open.

Who changes a formula on purpose writes the file anew and reads the difference:

    python -m plugins.planner.tests.test_figures
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plugins.planner.tests.cost_model.settings import FLEET, MIXTURE, WORKLOAD, problem, seat, setting
from rillflow.placement.grid import Grid
from rillflow_planner.cost_model import compute, memory, transfers
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.generation import decoder_of
from rillflow_planner.cost_model.links import all_gather_s, all_reduce_s, all_to_all_s, send_s
from rillflow_planner.cost_model.options import LAYOUTS, grids_of
from rillflow_planner.hardware import Factors
from rillflow_planner.problem import Problem
from rillflow_planner.search import search
from rillflow_planner.simulator.simulate import simulate
from rillflow_planner.workload import Lengths

FIGURES = Path(__file__).with_name("figures.json")
REFITS = setting(factors=Factors(refit=2e9, refit_separate=1e9))
SETTINGS = {
    "small": setting(),
    "mixture": setting(shape=MIXTURE),
    "keeps activations": setting(recomputes=False),
    "refits": replace(REFITS, problem=replace(REFITS.problem, layouts=LAYOUTS["megatron"])),
    "float32": setting(workload=replace(WORKLOAD, dtype="float32")),
}
GRIDS = grids_of(
    Grid(dp=8),
    Grid(dp=2, pp=2, tp=2),
    Grid(dp=4, tp=2),
    Grid(dp=16, is_sharded=True),
    Grid(dp=2, tp=4, cp=2),
    Grid(dp=8, tp=2, ep=4),
)
FIXED = Lengths(kind="fixed", limit=300)
PROBLEMS: dict[str, tuple[Problem, tuple[int, ...]]] = {
    "in step": (problem(), (0,)),
    "apart": (problem(), (0, 1)),
    "mixture": (problem(shape=MIXTURE), (0,)),
    "offloads": (problem(offloads=True), (0,)),
    "fixed lengths": (problem(workload=replace(WORKLOAD, response=FIXED)), (0, 2)),
    "one machine": (problem(fleet=replace(FLEET, devices=8)), (0,)),
}


def formulas(name: str) -> dict[str, Any]:
    """Return the seconds and bytes of one model on several grids."""
    one = SETTINGS[name]
    load = compute.load_of(one.workload, GRIDS.dp, one.workload.minibatches, cp=GRIDS.cp)
    by_load = (compute.blocks_s, compute.tensor_s, compute.context_s, compute.experts_s)
    found: dict[str, Any] = {each.__name__: each(one, load, GRIDS) for each in by_load}
    found |= {each.__name__: each(one, load, GRIDS, 3.0) for each in (compute.pipeline_s, compute.gathers_s)}
    found["work_of"] = vars(compute.work_of(one, load, GRIDS, 3.0, 0.4))
    by_grid = (compute.gradients_s, compute.optimizer_s, compute.score_s, compute.train_s)
    by_grid += (memory.weight_bytes, memory.optimizer_bytes, memory.training_bytes, memory.scoring_bytes)
    found |= {each.__name__: each(one, GRIDS) for each in by_grid}
    found["in_place_s"] = [transfers.in_place_s(one, GRIDS, np.minimum(GRIDS.tp, tp)) for tp in (1, 2)]
    ends = [seat("a", 8, Grid(dp=8)), seat("b", 16, Grid(dp=2, pp=2, tp=4)), seat("c", 4, Grid(dp=4), 2)]
    found["apart_s"] = [transfers.apart_s(one, one.links, here, there) for here in ends for there in ends]
    found["rows_s"] = [
        transfers.rows_s(one.workload, ("tokens", "logprobs", "rewards"), here, there, 5e9)
        for here in ends
        for there in ends
    ]
    found["decoder"] = [decoder_of(one, tp, devices, 8e9) for tp, devices in ((1, 8), (2, 8), (4, 1))]
    found["links"] = [
        each(one.links, 1e8, group, stride)
        for each in (all_gather_s, all_reduce_s, all_to_all_s, send_s)
        for group, stride in ((1, 1), (4, 1), (8, 1), (8, 2), (16, 1), (4, 8))
    ]
    return found


def plans(name: str) -> dict[str, Any]:
    """Return the best placements of a problem, and some simulated steps of the first."""
    one, freshness = PROBLEMS[name]
    ranking = search(one, CostModel, freshness=freshness, kept=3, times=(2,))
    best = ranking.best[0]
    bound = replace(one, freshness=best.plan.freshness, samples_apart=best.plan.freshness > 0)
    run = simulate(bound, CostModel(bound), best.plan, steps=3, seed=1)
    return {
        "plans": [
            {
                "value": each.value,
                "plan": each.plan,
                "why": each.why,
                "step_s": each.evaluation.step_s,
                "seconds": each.evaluation.seconds,
                "transfers_s": each.evaluation.transfers_s,
                "pools": each.evaluation.pools,
                "idle_share": each.evaluation.idle_share,
                "crossing_s": each.evaluation.crossing_s,
            }
            for each in ranking.best
        ],
        "sizes": [[each.devices, each.rows_per_s, each.gain] for each in ranking.sizes],
        "simulated": {
            "step_s": run.step_s,
            "tokens": run.tokens,
            "generation_s": run.generation_s,
            "pools": run.pools,
            "ages": run.ages,
            "rows": [run.begun, run.trained, run.unfinished, run.dropped],
        },
    }


def plain(value: Any) -> Any:
    """Return JSON of records, arrays and mappings, numbers with nine digits."""
    match value:
        case Enum():
            return str(value.value)
        case np.ndarray():
            return plain(value.tolist())
        case bool() | str() | None:
            return value
        case int() | float() | np.number():
            return float(f"{float(value):.9g}")
        case Mapping():
            return {str(plain(key)): plain(each) for key, each in value.items()}
        case tuple() | list():
            return [plain(each) for each in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return plain(asdict(value))
    raise TypeError(f"{value!r} is no figure")


def close(found: Any, expected: Any, where: str) -> None:
    """Assert that figures are equal but for the last digits of a machine's arithmetic."""
    if isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys(), where
        for key in expected:
            close(found[key], expected[key], f"{where} {key}")
    elif isinstance(expected, list):
        assert isinstance(found, list) and len(found) == len(expected), where
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            close(one, other, f"{where} {place}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-15), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("name", SETTINGS)
def test_seconds_and_bytes_are_the_committed_ones(name: str) -> None:
    close(plain(formulas(name)), json.loads(FIGURES.read_text())["formulas"][name], name)


@pytest.mark.parametrize("name", PROBLEMS)
def test_plans_and_their_simulation_are_the_committed_ones(name: str) -> None:
    close(plain(plans(name)), json.loads(FIGURES.read_text())["plans"][name], name)


@pytest.mark.parametrize("other", [{"a": 1.1}, {"a": [1.0]}, {"b": 1.0}, {"a": None}])
def test_another_figure_is_seen(other: dict[str, Any]) -> None:
    close({"a": 1.0}, {"a": 1.0}, "")
    with pytest.raises(AssertionError):
        close(other, {"a": 1.0}, "")


if __name__ == "__main__":
    found = {
        "formulas": {name: plain(formulas(name)) for name in SETTINGS},
        "plans": {name: plain(plans(name)) for name in PROBLEMS},
    }
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")
