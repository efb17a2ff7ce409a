"""Scorers by name: what a recipe's text names, with the part and without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rillflow.app.facts import RecipeFacts
from rillflow.app.plugins import PROVIDERS, discovered
from rillflow.app.scorers import scorer
from rillflow.errors import ConfigError, RewardError, install_package
from rillflow.rewards.config import RewardConfig
from rillflow_parts.scorers.plugin import PLUGIN
from tests.unit.app.test_bias_notes import loaded

JUDGE = {"url": "http://127.0.0.1:9/v1", "model_name": "critic"}


@pytest.fixture
def without_the_part(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("rillflow.app.plugins.entry_points", lambda **_: [])
    discovered.cache_clear()
    yield
    discovered.cache_clear()


def test_the_core_knows_the_names_of_the_part() -> None:
    assert PROVIDERS["scorers"] == dict.fromkeys(PLUGIN.scorers, "scorers")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("code-tests", ""),
        ("http://localhost:9/score", "http://localhost:9/score"),
        ("https://a/b", "https://a/b"),
    ],
)
def test_a_text_names_a_file_of_the_part_or_a_server(text: str, address: str) -> None:
    found = scorer(text, Path(), RewardConfig())
    assert found.address == address
    assert address or found.file.is_file()


def test_a_wrong_name_lists_the_built_in_functions() -> None:
    with pytest.raises(RewardError, match="math-verify, code-tests"):
        scorer("code-test", Path(), RewardConfig())


def test_without_its_package_math_verify_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RewardError, match="math_verify is not installed") as caught:
        scorer("math-verify", Path(), RewardConfig())
    assert caught.value.fix == install_package("math")


@pytest.mark.parametrize("text", ["math-verify", "code-tests", "http://localhost:9/score", "https://a/b"])
def test_without_the_part_a_scorer_names_the_line_that_installs_it(text: str, without_the_part: None) -> None:
    with pytest.raises(ConfigError, match="needs the part scorers") as caught:
        scorer(text, Path(), RewardConfig())
    assert text in caught.value.what and caught.value.fix == install_package()


def test_without_the_part_a_judge_names_the_line_that_installs_it(without_the_part: None) -> None:
    facts = RecipeFacts(resolved=loaded(reward={"judge": JUDGE}))
    with pytest.raises(ConfigError, match=r"reward\.judge\.url needs the part scorers") as caught:
        _ = facts.judge
    assert caught.value.fix == install_package()
