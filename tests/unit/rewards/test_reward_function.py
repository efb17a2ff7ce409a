"""Naming a reward function: found by reading the file, never by running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.errors import RewardError
from rillflow.rewards.function import parse_function

SOURCE = """
import math as mathematics
from json import dumps
open("executed", "w").write("the file ran")

def exact(prompts, completions): ...
async def waits(completions): ...
made = exact
first, (second, *others) = 1, (2, 3)
if True:
    try:
        def nested(completions): ...
    except ImportError:
        fallback = None
class Grader:
    def method(self): ...
squares = [inner for inner in range(3)]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["exact", "waits", "made", "second", "others", "nested", "fallback", "Grader", "dumps", "mathematics"],
)
def test_every_name_bound_at_the_top_level_is_found(folder: Path, name: str) -> None:
    function = parse_function(f"rewards.py:{name}", folder)
    assert (function.file, function.name) == (folder / "rewards.py", name)
    assert str(function) == f"rewards.py:{name}"


def test_the_file_is_not_executed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    parse_function("rewards.py:exact", folder)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("name", ["method", "inner", "math", "exakt"])
def test_a_name_of_an_inner_scope_is_not_found(folder: Path, name: str) -> None:
    with pytest.raises(RewardError, match=f"no function '{name}'"):
        parse_function(f"rewards.py:{name}", folder)


def test_the_nearest_name_is_told(folder: Path) -> None:
    with pytest.raises(RewardError, match="did you mean 'exact'"):
        parse_function("rewards.py:exakt", folder)


def test_a_star_import_may_bind_anything(folder: Path) -> None:
    (folder / "star.py").write_text("from rewards import *\n")
    assert parse_function("star.py:whatever", folder).name == "whatever"


def test_an_absolute_path_ignores_the_base(folder: Path) -> None:
    assert parse_function(f"{folder}/rewards.py:exact", Path("/nowhere")).file == folder / "rewards.py"


def test_a_path_upwards_is_resolved(folder: Path) -> None:
    (folder / "sub").mkdir()
    assert parse_function("../rewards.py:exact", folder / "sub").file == folder / "rewards.py"


@pytest.mark.parametrize("text", ["rewards.py", "rewards.py:", ":exact", "rewards.py:not a name", "", ":"])
def test_another_form_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(RewardError, match="is not a path and a name") as caught:
        parse_function(text, folder)
    assert repr(text) in caught.value.what


def test_a_missing_file_is_told_with_the_nearest(folder: Path) -> None:
    with pytest.raises(RewardError, match=r"reward\.py:exact.*does not exist") as caught:
        parse_function("reward.py:exact", folder)
    assert str(folder / "reward.py") in caught.value.why
    assert "did you mean 'rewards.py'" in caught.value.fix


def test_a_file_in_a_missing_folder_is_told(folder: Path) -> None:
    with pytest.raises(RewardError, match="does not exist"):
        parse_function("no/such/folder.py:exact", folder)


def test_a_folder_is_no_file(folder: Path) -> None:
    with pytest.raises(RewardError, match="is not in a regular file"):
        parse_function(f"{folder}:exact", folder)


@pytest.mark.parametrize("written", ["a\0b.py", "x" * 5000 + ".py"])
def test_an_impossible_path_is_refused(folder: Path, written: str) -> None:
    with pytest.raises(RewardError, match=r"no usable path|does not exist"):
        parse_function(f"{written}:exact", folder)


def test_a_syntax_error_is_told_with_its_line(folder: Path) -> None:
    (folder / "broken.py").write_text("x = 1\ndef exact(:\n")
    with pytest.raises(RewardError, match="is not Python") as caught:
        parse_function("broken.py:exact", folder)
    assert "line 2: def exact(:" in caught.value.why


@pytest.mark.parametrize("content", [b"def exact(): '\xff\xfe'", b"x = 1\0", b"# coding: no-such\n"])
def test_bytes_that_are_no_source_are_refused(folder: Path, content: bytes) -> None:
    (folder / "bytes.py").write_bytes(content)
    with pytest.raises(RewardError, match=r"bytes\.py"):
        parse_function("bytes.py:exact", folder)
