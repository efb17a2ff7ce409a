"""Steps as a run takes them: bound, parts and order of the recipe decide how they are simulated."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rillflow.app.recipe import load_recipe
from rillflow_planner.recipe_problem import state_problem
from rillflow_planner.simulator.result import Simulation
from rillflow_planner.workload import Lengths

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "streaming"))
from as_run import endless, simulate_as_run

RECIPE = """
[task]
source = "arithmetic"
digits = 1
size = 80
held_out = 10
[policy]
model.new = { hidden = 16, layers = 1, heads = 2, context = 16, alphabet = "0123456789+-*=" }
[rollout]
max_tokens = 8
[algorithm]
name = "grpo"
steps = 9
prompts_per_step = 4
samples_per_prompt = 2
minibatches = 4
shuffle = false
[placement]
pools = { main = 1, answers = 1 }
roles = { sampler = "answers", reward = "answers" }
"""
SECONDS = {"policy.update": 4.0, "reward.score": 0.4, "reference.logprobs": 0.0, "policy.logprobs": 0.0}
ROWS = (1, 1, 2, 2, 3, 3, 8, 8)
"""Tokens of a step's rows, a second each."""


def simulated(folder: Path, *settings: str) -> Simulation:
    (folder / "run.toml").write_text(RECIPE)
    loaded = load_recipe(folder / "run.toml", ["algorithm.old_logprobs=sampler", *settings])
    problem = state_problem(loaded, endless(2, decode_launch_s=1.0, decode_row_s=0.0)).problem
    lengths = Lengths(kind="measured", limit=8, values=ROWS, in_order=ROWS)
    problem = replace(problem, workload=replace(problem.workload, response=lengths))
    return simulate_as_run(loaded, loaded.phases[-1], problem, SECONDS, steps=9)


def test_whole_in_step_parts_and_ahead_take_what_they_take_by_hand(tmp_path: Path) -> None:
    """Rows of 1, 2, 3 and 8 s. A reward on the sampler's pool is asked between two of its parts, so each
    holds up the next by 0.1 s: the last part is scored after 8.4 s and trained for 1 s.
    """
    assert simulated(tmp_path).step_s == pytest.approx([8 + 0.4 + 4] * 9, rel=1e-3)
    parts = simulated(tmp_path, 'schedule={mode="streamed",stream_chunks=4}')
    assert parts.step_s == pytest.approx([8.4 + 1] * 9, rel=1e-3)
    ahead = simulated(tmp_path, 'schedule={mode="ahead",freshness=1}')
    assert ahead.step_s[3:] == pytest.approx([8.4] * 6, rel=1e-3), (
        "the pool that answers and scores never rests"
    )


def test_ready_first_a_long_row_holds_up_nobody_else(tmp_path: Path) -> None:
    """28 s of rows a step, several at once: training, 4 s, is what a step comes to, and no row is too old."""
    found = simulated(tmp_path, 'schedule={mode="ahead",freshness=4}', "schedule.mode=ready_first")
    assert (
        sum(found.step_s[4:]) / 5
        < 0.6 * sum(simulated(tmp_path, 'schedule={mode="ahead",freshness=4}').step_s[4:]) / 5
    )
    assert max(found.ages) <= 4
