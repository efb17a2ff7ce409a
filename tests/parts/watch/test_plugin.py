"""A part runs beside a broken plugin, and the core beside a broken part."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from rillflow.cli.main import main
from rillflow.errors import install_package
from rillflow.runs.error_lines import PLUGIN_GROUP


def broken(name: str, package: str) -> EntryPoint:
    """Return the entry point of a plugin whose module lacks its name."""
    return EntryPoint(name=name, value=f"{package}.plugin:NO_SUCH_NAME", group=PLUGIN_GROUP)


@pytest.mark.parametrize("name", ["merging", "sweeps"])
def test_a_part_runs_beside_a_broken_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {
        name: broken(name, "rillflow_parts.sweeps"),
        "watch": EntryPoint(name="watch", value="rillflow_parts.watch.plugin:PLUGIN", group=PLUGIN_GROUP),
    }
    monkeypatch.setattr("rillflow.app.plugins.entry_points", lambda name, **_: [points[name]])
    assert main(["watch", "no_such_run"]) == 2
    said = capsys.readouterr().err
    assert "no_such_run" in said and "NO_SUCH_NAME" not in said


def test_the_core_runs_beside_a_broken_part_whose_error_says_how_to_repair_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = broken("watch", "rillflow_parts.watch")
    monkeypatch.setattr("rillflow.app.plugins.entry_points", lambda **_: [point])
    assert main(["check", "no_such_recipe.toml"]) == 2
    assert "NO_SUCH_NAME" not in capsys.readouterr().err
    assert main(["watch", "no_such_run"]) == 2
    said = capsys.readouterr().err
    assert "NO_SUCH_NAME" in said and f"install it again: {install_package()}" in said
