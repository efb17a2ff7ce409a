"""Adapters to libraries of environments: found by the scheme of a source, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.errors import ConfigError
from rillflow_parts.environments.config import EnvironmentConfig
from rillflow_parts.environments.writer import EnvironmentWriter


def test_a_source_names_the_class_and_its_argument(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rillflow_parts.environments.source.find_spec", lambda _: object())
    config = EnvironmentConfig(source="openenv:http://127.0.0.1:8", arguments={"more": 1})
    found = EnvironmentWriter(config, tmp_path).code
    assert found.arguments == {"url": "http://127.0.0.1:8", "more": 1} and not found.is_own
    assert found.function.file.is_file() and f"class {found.function.name}" in found.function.file.read_text()


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
    monkeypatch.setattr("rillflow_parts.environments.source.find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        _ = EnvironmentWriter(EnvironmentConfig(source=source), tmp_path).code
    assert all(word in str(caught.value) for word in words)
