"""Adapters to libraries of environments: found by the scheme of a source, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.app.environment_sources import environment_source
from rillflow.app.plugins import discovered
from rillflow.errors import ConfigError, install_package
from rillflow.rollout.config import EnvironmentConfig


def test_a_source_names_the_class_and_its_argument(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rillflow.serving.environments.source.find_spec", lambda _: object())
    config = EnvironmentConfig(source="openenv:http://127.0.0.1:8", arguments={"more": 1})
    found = environment_source(config, tmp_path)
    assert found.arguments == {"url": "http://127.0.0.1:8", "more": 1} and not found.is_own
    assert found.path.file.is_file() and f"class {found.path.name}" in found.path.file.read_text()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("verifiers:", ("nothing follows the colon", '"verifiers:wordle"')),
        ("openenv:", ("nothing follows the colon", '"openenv:http://127.0.0.1:8000"')),
        ("verifiers:wordle", ("verifiers is not installed", "pip install verifiers")),
        ("openenv:http://a", ("openenv-core is not installed", "pip install openenv-core")),
    ],
)
def test_a_source_that_cannot_be_is_refused(
    source: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rillflow.serving.environments.source.find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        environment_source(EnvironmentConfig(source=source), tmp_path)
    assert all(word in str(caught.value) for word in words)


def test_without_the_part_a_source_names_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rillflow.app.plugins.entry_points", lambda **_: [])
    discovered.cache_clear()
    try:
        with pytest.raises(ConfigError, match="needs the part environments") as caught:
            environment_source(EnvironmentConfig(source="verifiers:wordle"), tmp_path)
    finally:
        discovered.cache_clear()
    assert caught.value.fix == install_package()
