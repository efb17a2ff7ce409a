"""Reading a recipe's file: every syntax or value error names the file and its position."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from rillflow.config.load import read_toml, validate
from rillflow.config.schema import Section
from rillflow.errors import ConfigError


class Small(Section):
    """A section with a list and a number."""

    names: tuple[str, ...] = ()
    rate: float = Field(1.0, gt=0)


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_toml(path)
    assert str(path) in caught.value.what
    return caught.value


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    error = refusal(tmp_path / "rum.toml")
    assert "does not exist" in error.what
    assert "did you mean 'run.toml'?" in error.fix


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere" / "run.toml").why


def test_a_directory_names_the_recipe_inside(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    error = refusal(tmp_path)
    assert "is a directory" in error.what
    assert str(tmp_path / "run.toml") in error.fix


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    assert "not a regular file" in refusal(tmp_path / "pipe.toml").what


def test_bad_toml_has_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nseed = 1\nlr == 3\n")
    error = refusal(path)
    assert "line 3, column 5" in error.what
    assert "lr == 3" in error.why


def test_toml_that_ends_too_early_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nnames = [1, ")
    assert "line 2, column 13" in refusal(path).what


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\nseed = 2\n")
    assert "line 2" in refusal(path).what


def test_bad_utf8_has_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'a = 1\nb = "caf\xe9"\n')
    error = refusal(path)
    assert "line 2, byte 9: 0xe9 is not UTF-8" in error.what


def test_deep_nesting_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("a = " + "[" * 100_000)
    refusal(path)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 1\n")
    assert read_toml(path) == {"seed": 1}


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "run.toml"
    path.write_bytes(content)
    try:
        assert isinstance(read_toml(path), dict)
    except ConfigError as error:
        assert str(path) in error.what


def test_lists_become_tuples() -> None:
    assert validate(Small, {"names": ["a", "b"], "rate": 2}, "it").names == ("a", "b")


def test_one_problem_is_its_own_error() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Small, {"rate": 0.0}, "it")
    assert caught.value.what == "rate is 0.0"
    assert "greater than 0" in caught.value.why
    assert "default, 1.0" in caught.value.fix


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Small, {"rate": -1, "names": "a", "colour": 3}, "small.toml")
    assert caught.value.what.splitlines()[0] == "small.toml has 3 problems"
    for text in ("rate is -1", 'names is "a"', "colour = 3"):
        assert text in caught.value.what
