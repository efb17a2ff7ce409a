"""Misfit: an error names recomputation first, then the next cheapest change, or the limit of the runtime."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rillflow.errors import PlanError
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.options import LAYOUTS, copy_sizes, grids
from rillflow_planner.given_layout import layout_of
from rillflow_planner.hardware import read_hardware
from rillflow_planner.problem import Problem
from rillflow_planner.request import cluster, graph_of, stack_graph
from rillflow_planner.search import ranked_as_placed, search
from rillflow_planner.workload import Lengths, Workload, lengths_of_mean

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "planner"))
from published.models import shape

RECOMPUTE = "recompute activations (policy.gradient_checkpointing = true)"


def problem(model: str, devices: int, *, algorithm: str = "grpo", limit: int = 8192, **more: Any) -> Problem:
    """A step of Rillflow on H100."""
    workload = Workload(
        prompts=64,
        samples=8,
        prompt=Lengths(kind="fixed", limit=256),
        response=lengths_of_mean(limit / 4, limit, 0.9),
    )
    graph = graph_of(algorithm)
    shapes = {role: shape(model) for role in graph.roles if role not in ("reward", "controller")}
    hardware = read_hardware(cluster(f"{devices}xH100", "gpu"), "here")
    return Problem(graph=graph, shapes=shapes, workload=workload, hardware=hardware, **more)


def refusal(step: Problem) -> PlanError:
    """The error of a search."""
    with pytest.raises(PlanError, match="no plan of") as error:
        search(step, CostModel)
    return error.value


def test_recomputation_is_named_first_and_is_enough() -> None:
    told = refusal(problem("Qwen2.5-7B", 8, limit=30_000, recomputes=False))
    assert str(told.fix).startswith(f"{RECOMPUTE}, and a plan fits")
    assert "runtime" not in str(told.why)
    assert search(problem("Qwen2.5-7B", 8, limit=30_000), CostModel).best


def test_recomputation_is_named_first_with_what_it_leaves() -> None:
    told = refusal(problem("Llama-3.1-70B", 8, recomputes=False))
    assert str(told.fix).startswith(f"{RECOMPUTE}, which leaves ")
    assert "instead of 8" in str(told.fix)


def test_smaller_micro_batches_are_the_next_cheapest_change() -> None:
    step = problem("Qwen2.5-7B", 2)
    told = refusal(step)
    assert str(told.fix).startswith("compute one row at a time (policy.tokens_per_micro_batch = 8448), and")
    assert search(replace(step, workload=replace(step.workload, tokens_per_micro_batch=8448)), CostModel).best


def test_the_named_number_of_devices_is_enough() -> None:
    least = int(str(refusal(problem("Qwen2.5-7B", 2, algorithm="ppo")).fix).split("at least ")[1].split()[0])
    assert search(problem("Qwen2.5-7B", least, algorithm="ppo"), CostModel).best


@pytest.mark.parametrize(
    ("model", "limit", "limits"),
    [
        ("Qwen3-235B-A22B", 8192, ("no experts", "key-value head")),
        ("DeepSeek-V3", 8192, ("no experts", "key-value head")),
        ("Llama-3.1-70B", 131_072, ("no context parallelism",)),
    ],
)
def test_the_limit_of_the_runtime_is_named(model: str, limit: int, limits: tuple[str, ...]) -> None:
    told = refusal(problem(model, 512, limit=limit))
    said = [one for one in ("no experts", "key-value head", "no context parallelism") if one in str(told.why)]
    assert tuple(said) == limits
    assert "predict a published stack" in str(told.fix)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("Qwen3-235B-A22B", "tp=4,pp=8,ep=16,generate=16"), ("DeepSeek-V3", "pp=16,ep=16,generate=32")],
)
@pytest.mark.parametrize("devices", [256, 512])
def test_a_published_stack_is_planned_with_a_layout_and_without(
    model: str, layout: str, devices: int
) -> None:
    hardware = read_hardware(cluster(f"{devices}xH100", "nemo-rl"), "here")
    step = problem(model, devices, layouts=LAYOUTS["megatron"])
    packed = replace(step.workload, tokens_per_micro_batch=8448)
    graph = stack_graph(hardware, "nemo-rl", "grpo", 1, is_apart=False)
    step = replace(step, hardware=hardware, graph=graph, workload=packed)
    placed = ranked_as_placed(step, CostModel, layout_of(layout, step, (0,))).best[0]
    assert search(step, CostModel).best[0].value <= placed.value


def test_a_mixture_is_not_cut_by_tensor_parallelism() -> None:
    mixture, own = shape("Qwen3-30B-A3B"), LAYOUTS["rillflow"]
    assert {grid.tp for grid in grids(mixture, 16, 8, own)} == {1}
    assert copy_sizes(mixture, 16, 8, own) == [1]
    assert copy_sizes(shape("Qwen3-32B"), 16, 8, own) == [1, 2, 4, 8]
    assert {grid.tp for grid in grids(mixture, 16, 8, LAYOUTS["megatron"])} == {1, 2, 4}


def test_a_given_layout_that_does_not_fit_names_recomputation_first() -> None:
    step = problem("Llama-3.1-70B", 64, recomputes=False)
    with pytest.raises(PlanError) as error:
        ranked_as_placed(step, CostModel, layout_of("tp=1", step, (0,)))
    assert str(error.value.fix).startswith(f"{RECOMPUTE}; or ")
    with pytest.raises(PlanError, match="choose a layout that cuts the model further"):
        ranked_as_placed(replace(step, recomputes=True), CostModel, layout_of("tp=1", step, (0,)))
