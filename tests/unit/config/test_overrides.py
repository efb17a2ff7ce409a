"""--set: parsing of values, and the settings that they change."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.config.load import Override, apply_overrides, parse_override
from rillflow.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("7", 7),
        ("true", True),
        ("cosine", "cosine"),
        ('"7"', "7"),
        ("a/b.jsonl:f", "a/b.jsonl:f"),
        ('["=", "\\n"]', ["=", "\n"]),
        ("{ hidden = 64 }", {"hidden": 64}),
        ("none", None),
        ('"none"', "none"),
        ("2026-01-01", "2026-01-01"),
        ("007", "007"),
        ("", ""),
        ("a=b", "a=b"),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_a_text_is_a_toml_value_or_itself(text: str, value: object) -> None:
    assert parse_override(f"policy.lr={text}") == Override(path=("policy", "lr"), value=value)


@given(st.text(max_size=20))
def test_every_text_can_be_quoted(text: str) -> None:
    quoted = '"' + "".join(f"\\U{ord(char):08x}" for char in text if not 0xD800 <= ord(char) < 0xE000) + '"'
    expected = "".join(char for char in text if not 0xD800 <= ord(char) < 0xE000)
    assert parse_override(f"a={quoted}").value == expected


@given(st.text(max_size=30))
def test_no_text_sets_more_than_its_own_key(text: str) -> None:
    data = apply_overrides({"b": 1}, [parse_override(f"a={text}")])
    assert set(data) == {"a", "b"}
    assert data["b"] == 1


@pytest.mark.parametrize("text", ["policy.lr", "=1", ".lr=1", "policy..lr=1", "policy.=1"])
def test_a_malformed_setting_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="not of the form") as caught:
        parse_override(text)
    assert text in caught.value.what


def test_overrides_leave_the_rest_and_the_original_alone() -> None:
    data = tomllib.loads("[policy]\nlr = 1\n[policy.model]\npath = 'a'\n[run]\nseed = 3")
    settings = [
        parse_override(text) for text in ("policy.lr=2", "policy.model.path=b", "task.size=5", "policy.lr=4")
    ]
    assert apply_overrides(data, settings) == {
        "policy": {"lr": 4, "model": {"path": "b"}},
        "run": {"seed": 3},
        "task": {"size": 5},
    }
    assert data["policy"] == {"lr": 1, "model": {"path": "a"}}


def test_a_section_taken_away_can_be_set_again() -> None:
    settings = [parse_override(text) for text in ("warm_start=none", "warm_start.steps=5")]
    assert apply_overrides({"warm_start": {"lr": 1.0}}, settings) == {"warm_start": {"steps": 5}}


def test_a_value_is_no_section() -> None:
    with pytest.raises(ConfigError, match=r"policy\.lr is the value 0\.1, not a section"):
        apply_overrides({"policy": {"lr": 0.1}}, [parse_override("policy.lr.peak=1")])
