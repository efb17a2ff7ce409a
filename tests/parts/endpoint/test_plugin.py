"""``rillflow serve --train`` without the plugin that trains names the line that installs it."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from rillflow.app.plugins import discovered
from rillflow.cli.main import main
from rillflow.errors import install_plugin
from rillflow.runs.error_lines import PLUGIN_GROUP


def test_serve_train_without_the_plugin_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [point for point in entry_points(group=PLUGIN_GROUP) if point.name == "endpoint"]
    monkeypatch.setattr("rillflow.app.plugins.entry_points", lambda **_: points)
    discovered.cache_clear()
    try:
        assert main(["serve", "model", "--train"]) == 2
    finally:
        discovered.cache_clear()
    said = capsys.readouterr().err
    assert "rillflow serve --train needs the plugin" in said and install_plugin("training_service") in said
