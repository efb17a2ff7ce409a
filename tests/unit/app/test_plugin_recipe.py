"""Recipes of a plugin's kind: they are checked, run, stopped, resumed and shown with no code of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from rillflow.app.any_recipe import DirectoryConfig, origins, with_directory
from rillflow.app.check import check_plugin_recipe
from rillflow.app.check_report import Report
from rillflow.app.plugin_recipe import OpenRun, PluginRecipe
from rillflow.app.plugin_run import run_plugin_recipe
from rillflow.config.load import Override, apply_overrides, validate
from rillflow.config.schema import Section
from rillflow.controller.interrupt import Interruption, RunStage
from rillflow.controller.run_checkpoint import save_in
from rillflow.errors import ConfigError, Interrupted, RunDirectoryError
from rillflow.graph.graph import Graph
from rillflow.records.metrics import Mean
from rillflow.runs import layout
from rillflow.runs.reader import read_metrics
from rillflow.workers.backend import RankDied, RankLost


class CountingRecipe(Section):
    """Counts up to a number."""

    kind: str
    steps: int = Field(4, gt=0)
    first: int = 0
    run: DirectoryConfig = DirectoryConfig()


@dataclass(frozen=True, kw_only=True)
class LoadedCounting(PluginRecipe):
    """Adds 1 in every step; its checkpoint is the sum."""

    @property
    def may_change(self) -> tuple[str, ...]:
        return ("steps", "run")

    @property
    def phase(self) -> str:
        return "counting"

    @property
    def steps(self) -> int:
        return int(self.recipe.steps)

    def look(self, report: Report, *, runs_code: bool) -> None:
        report.say("count", [f"to {self.steps}"])
        if self.recipe.first < 0:
            report.problems.append(ConfigError(f"first is {self.recipe.first}", why="a sum begins at 0"))

    def graphs(self) -> list[Graph]:
        return []

    def train(self, run: OpenRun) -> None:
        kept = run.checkpoint
        step, total = (kept.step, kept.state["total"]) if kept else (0, self.recipe.first)
        run.interruption.stage = RunStage.TRAINING
        while step < self.steps:
            step, total = step + 1, total + 1
            run.directory.log_metrics(step, self.phase, {"sum/value/mean": Mean(total=total, count=1)})
            run.progress.step(self.phase, step, {}, 0.1)
            save_in(run.directory, step, lambda _: {}, {"total": total}, self.recipe.run.keep_checkpoints)
            if run.interruption.requested and step < self.steps:
                raise Interrupted("stopped")


def loaded(folder: Path, **given: Any) -> LoadedCounting:
    """Return the recipe of a file in a folder with settings of the command line."""
    path, data = folder / "count.toml", {"kind": "counting", "run": {"dir": str(folder / "run")}}
    overrides = [Override(path=(name,), value=value) for name, value in given.items()]
    recipe = validate(CountingRecipe, apply_overrides(data, overrides), str(path))
    return LoadedCounting(
        recipe=with_directory(recipe, path), path=path, base=folder, given=origins(path, data, overrides)
    )


def sums(run: Path) -> Mapping[int, float]:
    return {each.step: each.metrics["sum/value/mean"].value for each in read_metrics(run)}


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    asked, recipe = Interruption(), loaded(tmp_path, first=5)

    def stop(phase: str, step: int, metrics: object) -> None:
        asked.requested = step == 2

    with pytest.raises(Interrupted):
        run_plugin_recipe(recipe, quiet=True, told=stop, interruption=asked)
    assert sums(recipe.directory) == {1: 6, 2: 7} and not recipe.is_finished
    run_plugin_recipe(recipe, quiet=True)
    assert sums(recipe.directory) == {1: 6, 2: 7, 3: 8, 4: 9} and recipe.is_finished
    assert (recipe.directory / layout.REPORT).is_file()
    run_plugin_recipe(recipe, quiet=True)
    longer = loaded(tmp_path, first=5, steps=6)
    assert not longer.is_finished
    run_plugin_recipe(longer, quiet=True)
    assert sums(recipe.directory)[6] == 11


def test_a_resumed_run_keeps_what_may_not_change(tmp_path: Path) -> None:
    run_plugin_recipe(loaded(tmp_path, steps=1), quiet=True)
    with pytest.raises(RunDirectoryError, match="first"):
        run_plugin_recipe(loaded(tmp_path, steps=2, first=1), quiet=True)
    run_plugin_recipe(loaded(tmp_path, steps=1, first=1), quiet=True, fresh=True)
    assert sums(tmp_path / "run") == {1: 2} and (tmp_path / "run.old-1").is_dir()


def test_a_run_whose_ranks_die_starts_again_from_its_checkpoint_and_says_the_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deaths = [RankLost("has died", why="process 7 ended by SIGKILL"), RankDied("no worker is left")]

    def die(phase: str, step: int, metrics: object) -> None:
        if step == 2 and deaths:  # before its checkpoint
            raise deaths.pop(0)

    run_plugin_recipe(loaded(tmp_path, first=5), told=die)
    assert sums(tmp_path / "run") == {1: 6, 2: 7, 3: 8, 4: 9}
    said = capsys.readouterr().out
    assert "a worker has died; all ranks start again from step 1 (restart 1 of 3)" in said
    assert "no worker is left; all ranks start again from step 1 (restart 2 of 3)" in said
    assert said.count("; 1 steps without a checkpoint are repeated") == 2


def test_a_problem_stops_the_run_before_it_writes(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, first=-1)
    with pytest.raises(ConfigError, match="first is -1"):
        run_plugin_recipe(recipe, quiet=True)
    assert not recipe.directory.exists()


def test_a_check_shows_settings_and_their_origins(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, steps=3)
    report = check_plugin_recipe(recipe)
    assert report.topics["count"] == ["to 3"] and not report.problems
    assert "steps = 3  (--set)" in report.topics["settings"]
    assert 'kind = "counting"  (count.toml)' in report.topics["settings"]
    assert report.topics["settings"][-1] == "and 6 more have their defaults; --all shows them"
    every = check_plugin_recipe(recipe, every_setting=True).topics["settings"]
    assert "first = 0  (default)" in every and "run.keep_checkpoints = 2  (default)" in every


def test_a_run_without_a_directory_is_named_after_its_file(tmp_path: Path) -> None:
    recipe = validate(CountingRecipe, {"kind": "counting"}, "count")
    assert with_directory(recipe, tmp_path / "count.toml").run.dir == "runs/count"
    assert with_directory(recipe, tmp_path / "sums" / "run.toml").run.dir == "runs/sums"
