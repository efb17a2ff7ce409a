"""The table of sizes is correct, and the page shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TEXT = '''"""A module.

Two lines more.
"""

import os  # the first line of code


class Row:
    """A row."""

    value: int = 0
    """An attribute."""

    def text(self) -> str:
        # a comment
        return (
            """a string that is code
            of two lines"""
        )
'''


def test_docstrings_comments_and_empty_lines_do_not_count(size: ModuleType) -> None:
    assert size.code(TEXT).total() == 8


def test_every_file_counts_in_one_package(size: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "inner" / "deeper").mkdir(parents=True)
    for file in ("one.py", "inner/two.py", "inner/deeper/three.py"):
        (tmp_path / file).write_text(TEXT)
    found = size.sizes(tmp_path)
    assert found == {"inner": (2, 16), "top level": (1, 8)}
    assert size.table(found).endswith("| together | 3 | 24 |\n")


def test_a_plugin_counts_without_its_tests(size: ModuleType, tmp_path: Path) -> None:
    for file in ("a/rillflow_a/__init__.py", "a/rillflow_a/inner/two.py", "a/tests/test_two.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(TEXT)
    assert size.plugin_sizes(tmp_path) == {"plugins/a": (2, 16)}


@pytest.mark.parametrize(
    ("table", "sizes"), [("TABLE", "sizes"), ("PART_TABLE", "part_sizes"), ("PLUGIN_TABLE", "plugin_sizes")]
)
def test_the_page_shows_todays_sizes(size: ModuleType, table: str, sizes: str) -> None:
    shown = vars(size)[table].search(size.PAGE.read_text("utf-8"))
    assert shown is not None
    rows = [line.strip("| ").split(" | ") for line in shown[0].splitlines()[2:-1]]
    counts = {name.strip("`"): (int(files), int(lines.replace(",", ""))) for name, files, lines in rows}
    assert counts == vars(size)[sizes](), "make docs writes the table anew"


@pytest.mark.slow
def test_the_page_shows_the_files_that_a_step_and_a_run_enter(size: ModuleType) -> None:
    """Runs the command that the page names."""
    told = re.search(r"step enters (\d+) files, a whole run (\d+):", size.PAGE.read_text("utf-8"))
    (script,) = (size.ROOT / "benchmarks").rglob("files_entered.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd=size.ROOT)
    counts = dict(re.findall(r"^(step|run): (\d+) files", done.stdout, re.MULTILINE))
    assert told is not None and (counts["step"], counts["run"]) == told.groups()
