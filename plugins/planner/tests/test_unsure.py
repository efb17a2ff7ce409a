"""What a plan says where its seconds were not measured: first, without a range, with what is near."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plugins.planner.tests.fakes import STREAMED, toy
from rillflow_planner.calibration import Calibration
from rillflow_planner.hardware import read_hardware, shipped_stacks
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.plan_report import calibration_lines
from rillflow_planner.problem import Problem, Statement

HYBRID = {"linear_layers": 1, "unattended_layers": 1, "keeps_attention": True}


def stated(device: str, stack: str, dtype: str = "bfloat16", **shape: object) -> Statement:
    """A step of a stack on eight devices, with the best layout of a search."""
    fleet = {"device": device, "devices": 8, "per_machine": 8}
    hardware = read_hardware({"like": stack, "machine_type": [fleet]}, "mine")
    problem: Problem = toy(STREAMED).problem
    shapes: dict[str, ModelShape] = {role: replace(one, **shape) for role, one in problem.shapes.items()}  # type: ignore[arg-type]
    workload = replace(problem.workload, dtype=dtype)  # type: ignore[arg-type]
    problem = replace(problem, shapes=shapes, workload=workload, hardware=hardware)
    return Statement(problem=problem, assumptions=(), stack=stack)


def test_a_range_is_shown_for_steps_of_the_kind_that_was_left_out_and_predicted() -> None:
    statement = stated("H100", "nemo-rl")
    assert statement.range_s(100.0) is not None
    assert not statement.caution and "unsure" not in statement.title


@pytest.mark.parametrize(
    ("device", "stack", "dtype", "shape", "why", "near"),
    [
        ("H200", "nemo-rl", "bfloat16", {}, "not of H200", "unfitted"),
        ("H100", "nemo-rl", "float8", {}, "of bfloat16, not of float8", "float8"),
        ("H100", "nemo-rl", "float32", {}, "of bfloat16, not of float32", ""),
        ("GB200", "nemo-rl", "bfloat16", HYBRID, "linear or chunked attention", "unfitted"),
        ("H100", "verl", "bfloat16", {}, "its range is of H20, not of H100", "unfitted"),
        ("H20", "verl", "bfloat16", {}, "no step of this stack was predicted with the best layout", ""),
        ("H100", "areal", "bfloat16", {}, "no step of areal was fitted", "unfitted"),
    ],
)
def test_the_first_line_says_what_is_unsure_and_what_was_measured_nearby(
    device: str, stack: str, dtype: str, shape: dict[str, object], why: str, near: str
) -> None:
    statement, known = stated(device, stack, dtype, **shape), shipped_stacks()[stack].published
    assert statement.range_s(100.0) is None and statement.corrected_s(100.0) == 100.0
    assert f"; unsure: {statement.caution}" in statement.title and why in statement.caution
    assert statement.caution in statement.accuracy
    measured = vars(known)[near] if near else None
    assert ("times the predicted seconds" in statement.title) is (measured is not None)
    assert measured is None or statement.title.endswith(measured.text)


def test_a_factor_far_from_its_guess_is_reported() -> None:
    factors = shipped_stacks()["rillflow"].factors
    told = Calibration(factors=factors, stages=(), at_limit=(), moved={"score_flops": 0.02})
    assert "note: score_flops was fitted to 0.0200 times its guess" in "\n".join(calibration_lines(told))
