"""Rows: what they are like is measured where a run has them, computed where only prompts are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rillflow.app.recipe import load_recipe
from rillflow.errors import PlanError
from rillflow.runs.reader import SpanRecord
from rillflow.runs.run_directory import RunDirectory
from rillflow_planner.recipe_rows import workload_of
from rillflow_planner.workload import Workload, distinct_prompts
from tests.unit.written_rollouts import write_rollouts

RECIPE = """
[policy]
model.new = { hidden = 64, layers = 4, heads = 8, kv_heads = 4, context = 64 }
[rollout]
max_tokens = 16
[task]
size = 600
[algorithm]
name = "grpo"
steps = 3
prompts_per_step = 24
samples_per_prompt = 4
minibatches = 3
"""


def sampled_run(path: Path) -> Path:
    """Two steps of four rows: two prompts of three tokens, two answers each."""
    with RunDirectory.open(path, {"a": 1}, clock=iter(range(100)).__next__) as run:
        for step in (1, 2):
            scored = SpanRecord(step=step, stage="reward.score", start_s=step, duration_s=1, rows=4, tokens=0)
            run.log_span(scored)
            write_rollouts(run.path, step, [_row(prompt, sample) for prompt in (0, 1) for sample in (0, 1)])
    return path


def _row(prompt: int, sample: int) -> dict[str, object]:
    answer = [7] * (2 + sample)
    return {
        "epoch": 0,
        "prompt_id": prompt,
        "sample": sample,
        "prompt": "p",
        "columns": {},
        "tokens": [1, prompt, 3, *answer],
        "logprobs": [0.0] * (3 + len(answer)),
        "versions": [-1] * 3 + [0] * len(answer),
        "finish": "stop",
        "reward": 1.0,
        "outcome": "score",
        "advantage": float(prompt),
    }


def rows_of(folder: Path, *settings: str, run: Path | None = None) -> Workload:
    """The rows of the recipe's last phase."""
    (folder / "run.toml").write_text(RECIPE)
    loaded = load_recipe(folder / "run.toml", settings)
    return workload_of(loaded, loaded.phases[-1], run)


def test_a_runs_rows_are_measured(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "algorithm.minibatches=1", run=sampled_run(tmp_path / "run"))
    assert (rows.prompt.mean, rows.prompt.limit) == (3, 3)
    assert (rows.response.mean, rows.response.limit) == (2.5, 3)
    assert rows.function_s == pytest.approx(1 / 4), "the clock moves a second a look"
    assert rows.packing.scored == pytest.approx(9 / 22), "1 | 0 3 7 7 | 1 3 7 7 of 22 tokens"
    assert rows.packing.trained == rows.packing.scored, "one optimiser step has all rows"
    assert rows.gradient_share == 0.5, "one of two prompts has an advantage"


def test_a_run_without_rows_measures_nothing(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {"a": 1}):
        pass
    with pytest.raises(PlanError, match="no rollouts"):
        rows_of(tmp_path, run=tmp_path / "run")


def test_what_is_learnt_from_shares_what_its_texts_share(tmp_path: Path) -> None:
    sft = "algorithm={{ name = 'sft', steps = 3, prompts_per_step = 50, minibatches = {} }}"
    short = ("task.digits=1", "task.held_out=10")
    whole, cut = (rows_of(tmp_path, *short, sft.format(parts)).packing for parts in (1, 5))
    assert whole.trained == whole.scored < cut.trained < 1, "fewer rows beside one another share less"
    assert whole.scored == pytest.approx(cut.scored)


def test_of_sampled_rows_only_the_prompts_are_known_to_be_shared(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    prompt, response = rows.prompt.mean, rows.response.mean
    assert rows.packing.scored == pytest.approx((response + prompt / 4) / (response + prompt))
    assert rows.packing.scored < rows.packing.trained < 1


@given(samples=st.integers(1, 16), parts=st.integers(1, 8))
def test_prompts_are_read_once_in_each_part_that_has_them(samples: int, parts: int) -> None:
    found = distinct_prompts(samples, parts)
    assert 1 / samples <= found + 1e-12 and found <= 1 + 1e-12
    generator = torch.Generator().manual_seed(samples * 100 + parts)
    drawn = torch.randint(parts, (4000, samples), generator=generator).sort(dim=1).values
    counted = 1 + (drawn[:, 1:] != drawn[:, :-1]).sum(1).double().mean()
    assert found * samples == pytest.approx(float(counted), abs=0.12)
