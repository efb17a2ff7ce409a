"""Resume: sources and data that a run keeps, and the rows that it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.app.recipe import load_recipe
from rillflow.app.recorded_recipe import recipe_of
from rillflow.app.resolved import Resolved
from rillflow.app.resume import keep_data, keep_sources, require_same_rows, run_config
from rillflow.errors import DataError
from rillflow.runs import layout
from rillflow.runs.run_data import load
from rillflow.runs.run_directory import RunDirectory
from rillflow.tasks.kinds import PROMPTS
from rillflow.tasks.task import Task, open_task

RECIPE = """
[task]
source = "prompts.jsonl"
held_out = 2
{held_out_source}
[policy]
model.new = {{ hidden = 32, layers = 2, context = 32 }}
[rollout]
max_tokens = 8
[reward]
function = "reward.py:exact"
[algorithm]
name = "grpo"
steps = 3
prompts_per_step = 4
"""
REWARD = "def exact(prompts, completions, **_):\n    return [0.0 for _ in completions]\n"
ROWS = [f"{number}+1=" for number in range(10)]


def loaded(folder: Path, held_out_source: str = "") -> Resolved:
    (folder / "run.toml").write_text(RECIPE.format(held_out_source=held_out_source))
    (folder / "reward.py").write_text(REWARD)
    return load_recipe(folder / "run.toml", ())


def written(folder: Path, name: str, prompts: list[str]) -> None:
    (folder / name).write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in prompts))


def opened(folder: Path, recipe: Resolved) -> Task:
    return open_task(recipe.recipe.task, PROMPTS, base=folder, seed=0)


def test_each_version_of_a_source_is_kept_once(tmp_path: Path) -> None:
    written(tmp_path, "prompts.jsonl", ROWS)
    loaded_recipe, run = loaded(tmp_path), tmp_path / "run"
    task = opened(tmp_path, loaded_recipe)
    with RunDirectory.open(run, {}):
        for text in (REWARD, REWARD, REWARD + "\n"):
            (tmp_path / "reward.py").write_text(text)
            keep_sources(loaded_recipe.recipe, task, tmp_path, run)
    kept = [file.read_text() for file in (run / "sources").iterdir()]
    assert sorted(kept) == [REWARD, REWARD + "\n"]


@pytest.mark.parametrize("changed", range(len(ROWS)))
def test_a_changed_row_is_named_also_if_it_was_drawn_for_evaluation(tmp_path: Path, changed: int) -> None:
    written(tmp_path, "prompts.jsonl", ROWS)
    recipe, run = loaded(tmp_path), tmp_path / "run"
    with RunDirectory.open(run, {}):
        keep_data(opened(tmp_path, recipe), run)
    rows = ["changed" if number == changed else row for number, row in enumerate(ROWS)]
    written(tmp_path, "prompts.jsonl", rows)
    with pytest.raises(DataError, match=rf'prompts\.jsonl line {changed + 1} \("changed"\) differs'):
        require_same_rows(opened(tmp_path, recipe), run)


def test_a_changed_row_of_a_held_out_file_is_named(tmp_path: Path) -> None:
    written(tmp_path, "prompts.jsonl", ROWS)
    written(tmp_path, "apart.jsonl", ["2+2=", "3+3="])
    recipe, run = loaded(tmp_path, 'held_out_source = "apart.jsonl"'), tmp_path / "run"
    with RunDirectory.open(run, {}):
        keep_data(opened(tmp_path, recipe), run)
    written(tmp_path, "apart.jsonl", ["2+2=", "4+4="])
    with pytest.raises(DataError, match=r'apart\.jsonl line 2 \("4\+4="\) differs'):
        require_same_rows(opened(tmp_path, recipe), run)


def test_a_run_directory_gives_its_recipe_back_with_the_folder_of_the_recipe(tmp_path: Path) -> None:
    written(tmp_path, "prompts.jsonl", ROWS)
    recipe, run = loaded(tmp_path), tmp_path / "run"
    config = run_config(recipe, opened(tmp_path, recipe))
    with RunDirectory.open(run, config) as directory:
        directory.log_start({"base": str(tmp_path)})
    found = recipe_of(load(run))
    assert found.recipe == recipe.recipe
    assert (found.path, found.base) == (run, tmp_path)
    assert {*found.given.values()} == {layout.CONFIG} and not found.is_open("policy.lr")
