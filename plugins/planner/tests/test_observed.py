"""A run directory as observations: its phases, their medians, and the cluster file made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rillflow.app.facts import RecipeFacts
from rillflow.app.recipe import load_recipe
from rillflow.app.recorded_recipe import recipe_of
from rillflow.app.resume import run_config
from rillflow.app.sections import Recipe
from rillflow.cli.main import main
from rillflow.errors import PlanError
from rillflow.records.metrics import Mean
from rillflow.runs import layout
from rillflow.runs.reader import SpanRecord
from rillflow.runs.run_data import load
from rillflow.runs.run_directory import RunDirectory
from rillflow_planner.calibration import calibrate
from rillflow_planner.recipe_problem import cluster_text, observe, open_cluster, this_machine
from tests.unit.written_rollouts import write_rollouts

ROOT = Path(__file__).parents[3]
RECIPE = """
[run]
threads = 1
[task]
size = 300
held_out = 20
[policy]
model.new = { hidden = 64, layers = 2, heads = 4, kv_heads = 2, context = 32 }
[rollout]
max_tokens = 8
[warm_start]
steps = 6
prompts_per_step = 16
[algorithm]
name = "grpo"
steps = 6
prompts_per_step = 4
samples_per_prompt = 2
"""
STAGES = {"policy.generate": 0.5, "reward.score": 0.08, "policy.update": 0.3}


class Clock:
    """A clock that stands until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "run.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "run.toml")

    def make(steps: int = 12, device: str = "cpu", moved_after: int = 0) -> Path:
        """A run of so many steps; ``moved_after`` so many it was started again, and lay elsewhere."""
        clock, path = Clock(), tmp_path / f"of {steps} on {device} moved after {moved_after}"
        config = run_config(recipe, RecipeFacts(resolved=recipe).task)
        with RunDirectory.open(path, config, clock=clock) as run:
            run.log_start({"device": device, "base": str(tmp_path), "placement": "there"})
            for step in range(1, steps + 1):
                _step(run, clock, step)
                if step == moved_after:
                    again = {"device": device, "base": str(tmp_path), "placement": "here"}
                    run.log_start({**again, "after_step": step})
        return path

    return make


def _step(run: RunDirectory, clock: Clock, step: int) -> None:
    """The first steps of each phase take ten times as long."""
    slow = 10 if step in (1, 2, 7, 8) else 1
    for stage, seconds in (STAGES if step > 6 else {"policy.update": 0.2}).items():
        began, took = run.elapsed_s(), slow * seconds
        run.log_span(SpanRecord(step=step, stage=stage, start_s=began, duration_s=took, rows=8, tokens=0))
        clock.now += took
    taken = slow * (1.0 if step > 6 else 0.25)
    phase = "grpo" if step > 6 else "warm_start"
    run.log_metrics(step, phase, {"run/step_seconds/mean": Mean(total=taken, count=1)})
    if step > 6:
        write_rollouts(run.path, step, [_row(prompt, sample) for prompt in range(4) for sample in (0, 1)])


def _row(prompt: int, sample: int) -> dict[str, object]:
    return {
        "epoch": 0,
        "prompt_id": prompt,
        "sample": sample,
        "prompt": "1+1=",
        "columns": {},
        "tokens": [1, prompt, 3, 5 + sample, 9],
        "logprobs": [0.0] * 5,
        "versions": [-1, -1, -1, 0, 0],
        "finish": "stop",
        "reward": 1.0,
        "outcome": "score",
        "advantage": 1.0,
    }


def test_steps_of_an_earlier_placement_are_not_looked_at(make_run: Callable[..., Path]) -> None:
    found = observe(make_run(steps=14, moved_after=9))
    assert [one.name for one in found] == ["grpo"], "the warm start lay elsewhere"
    with pytest.raises(PlanError, match="more than 2 steps"):
        observe(make_run(steps=12, moved_after=11))


def test_each_phase_is_observed_by_its_later_steps(make_run: Callable[..., Path]) -> None:
    learn, improve = observe(make_run())
    assert (learn.name, improve.name) == ("warm_start", "grpo")
    assert learn.stages_s == {"policy.update": pytest.approx(0.2)}
    assert improve.stages_s == {name: pytest.approx(seconds) for name, seconds in STAGES.items()}
    assert (learn.step_s, improve.step_s) == (0.25, 1.0)
    assert (learn.is_recorded, improve.is_recorded) == (False, True)
    assert (learn.problem.workload.rows, improve.problem.workload.rows) == (16, 8)
    assert (improve.problem.workload.prompt.mean, improve.problem.workload.response.mean) == (3, 2)
    assert improve.problem.workload.function_s == pytest.approx(0.01)
    assert 4 <= learn.problem.workload.prompt.mean <= 6
    assert improve.plan.units["policy"].generate_tp == 1


def test_a_kept_recipe_is_the_recipe(make_run: Callable[..., Path], tmp_path: Path) -> None:
    kept = recipe_of(load(make_run()))
    assert isinstance(kept.recipe, Recipe) and kept.recipe == load_recipe(tmp_path / "run.toml").recipe
    assert kept.base == tmp_path


def test_a_run_of_too_few_steps_is_refused(make_run: Callable[..., Path]) -> None:
    with pytest.raises(PlanError, match="no phase of more than 2 steps"):
        observe(make_run(steps=2))


def test_a_run_with_fused_updates_is_refused(make_run: Callable[..., Path]) -> None:
    settings = ["policy.model.new.layers=2", "placement.pools.main=2", "placement.train_parallel.main.pp=2"]
    recipe = Path(__file__).parents[3] / "recipes" / "ppo" / "run.toml"
    fused = load_recipe(recipe, [*settings, 'placement.fused=["policy", "critic"]']).recipe
    run = make_run()
    (run / layout.CONFIG).write_text(fused.model_dump_json())
    with pytest.raises(PlanError, match="fused the updates of policy and critic"):
        observe(run)


def test_of_another_device_the_cluster_has_to_be_given(make_run: Callable[..., Path]) -> None:
    run = make_run(device="cuda:0")
    with pytest.raises(PlanError, match="ran on cuda:0"):
        observe(run)
    assert observe(run, this_machine(1))


def test_the_cluster_file_has_the_factors(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run()
    observations = observe(run)
    factors = calibrate(observations).factors
    file = tmp_path / "calibrated.toml"
    file.write_text(cluster_text(factors, observations, None, run))
    found = open_cluster(file)
    assert found.calibrated == f"{run} by rillflow calibrate"
    for name, value in vars(factors).items():
        assert vars(found.factors)[name] == pytest.approx(value, rel=1e-5)
    again = tmp_path / "again.toml"
    again.write_text(cluster_text(found.factors, observations, file, run))
    assert open_cluster(again) == found


def test_a_run_is_calibrated_from_the_command_line(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "calibrated.toml"
    assert main(["calibrate", str(make_run()), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "policy.update" in shown and "decode_launch_s" in shown
    plan = ["plan", str(tmp_path / "run.toml"), "--cluster", str(out), "--lengths", str(make_run())]
    assert main(plan) == 0
    assert "assumed" not in capsys.readouterr().out


def test_the_shipped_laptop_has_the_factors_a_fit_starts_from() -> None:
    shipped = open_cluster(ROOT / "clusters/laptop.toml").factors
    assert replace(shipped, step_s=0.0, step_row_s=0.0) == this_machine(2).factors
