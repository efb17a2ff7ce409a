"""StandsOn: a resumed run finds the model that it began with, by the path in its config and by its digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.app.standing import StandsOn, standing_of
from rillflow.errors import ModelError
from rillflow.runs import layout
from rillflow.runs.json_lines import encode
from tests.unit.runs.test_pins import child_at, save

RECIPE = """
[task]
source = "prompts.jsonl"
[policy]
model.path = "{path}"
[reward]
function = "reward.py:exact"
[algorithm]
name = "grpo"
steps = 3
"""
FIRST = "base/checkpoints/step-000001/policy"


def recipe_on(folder: Path, path: str) -> Resolved:
    (folder / "run.toml").write_text(RECIPE.format(path=path))
    return load_recipe(folder / "run.toml", ())


def begun(folder: Path) -> Path:
    """Return a run that stands on the first checkpoint of the run ``base``, which has trained on."""
    save(child_at(folder / "base", "the base"), 1)
    recipe, run = recipe_on(folder, "base"), child_at(folder / "child")
    standing = standing_of(recipe, None)
    (run / layout.CONFIG).write_bytes(encode(standing.config(recipe.recipe.model_dump(mode="json"))))
    save(folder / "base", 2, keep=9, text="b")
    return run


def found(standing: StandsOn) -> tuple[str, str]:
    """Return the path to read the policy from, and the path that the config has."""
    return standing.places["policy.model.path"], standing.names["policy.model.path"]


@pytest.mark.parametrize("written", ["base", FIRST])
def test_the_same_command_takes_the_checkpoint_that_the_run_began_from(tmp_path: Path, written: str) -> None:
    run = begun(tmp_path)
    standing = standing_of(recipe_on(tmp_path, written), run)
    assert found(standing) == (FIRST, FIRST)
    assert standing.moved(run) == (f"{layout.BASES}.policy",)


def test_a_base_that_was_renamed_is_read_from_its_place_and_keeps_its_name(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (tmp_path / "base").rename(tmp_path / "other")
    there = str(tmp_path / "other/checkpoints/step-000001/policy")
    assert found(standing_of(recipe_on(tmp_path, "base"), run)) == (there, FIRST)
    assert found(standing_of(recipe_on(tmp_path, "other"), run)) == (there, FIRST)


def test_a_new_run_takes_the_newest_checkpoint(tmp_path: Path) -> None:
    begun(tmp_path)
    newest = "base/checkpoints/step-000002/policy"
    assert found(standing_of(recipe_on(tmp_path, "base"), None)) == (newest, newest)


def test_a_run_whose_config_records_no_digest_reads_the_path_that_it_began_with(tmp_path: Path) -> None:
    begun(tmp_path)
    recipe, run = recipe_on(tmp_path, FIRST), child_at(tmp_path / "old", "an older version")
    (run / layout.CONFIG).write_bytes(encode(recipe.recipe.model_dump(mode="json")))
    assert found(standing_of(recipe_on(tmp_path, "base"), run)) == (FIRST, FIRST)


def test_a_model_that_has_changed_is_refused(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (tmp_path / FIRST / "config.json").write_text("{ }")
    with pytest.raises(ModelError, match="its files have changed"):
        standing_of(recipe_on(tmp_path, "base"), run)
