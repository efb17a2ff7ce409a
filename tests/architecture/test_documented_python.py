"""The Python code of documents runs: blocks of a page and cells of a notebook, in order, in a new folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.architecture.test_links import FOLDERS

NOTEBOOKS = ("docs/notebooks/first_run.ipynb",)
PAGES = ("docs/python.md", *(pytest.param(name, marks=pytest.mark.slow) for name in NOTEBOOKS))


@pytest.fixture(scope="module")
def run(root: Path) -> Callable[[list[str]], int]:
    """Return ``python docs/run_python.py`` as a function of this process."""
    spec = spec_from_file_location("run_python", root / "docs/run_python.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[[list[str]], int] = module.main
    return main


@pytest.mark.parametrize("page", PAGES)
def test_a_page_and_a_notebook_run_and_give_what_is_shown(
    page: str, root: Path, run: Callable[[list[str]], int]
) -> None:
    assert run(["--check", str(root / page)]) == 0


def test_the_front_page_runs_as_printed(root: Path, tmp_path: Path, run: Callable[[list[str]], int]) -> None:
    """The blocks run after the commands above them, which make the recipe's model."""
    pattern = tmp_path / "recipes/your_own"
    shutil.copytree(root / "recipes/your_own", pattern, ignore=shutil.ignore_patterns("model"))
    subprocess.run([sys.executable, pattern / "make_model.py"], check=True, capture_output=True)
    assert run(["--check", str(root / "README.md"), "--inside", str(tmp_path)]) == 0
    assert (tmp_path / "runs/mine/report.html").is_file()


def test_the_table_of_layers_has_every_package(root: Path) -> None:
    text = (root / "docs/architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| \d \w+ \| ([^|]+) \|", text, re.M)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    packages = [path.parent.name for path in (root / "rillflow").glob("*/__init__.py")]
    assert sorted(listed) == sorted([*packages, "errors"])


def test_the_tree_has_every_folder(root: Path) -> None:
    text = (root / "docs/architecture.md").read_text("utf-8")
    tree = text.partition("## The tree")[2].partition("\n## ")[0]
    listed = re.findall(r"^(\w+)/ ", tree, re.M)
    assert sorted(listed) == sorted(["rillflow", "rillflow_parts", "tests", *FOLDERS])


def test_a_notebook_is_executed_and_shows_a_curve_that_rises(root: Path) -> None:
    for name in NOTEBOOKS:
        cells = json.loads((root / name).read_text("utf-8"))["cells"]
        ran = [cell for cell in cells if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1))
        shown = "".join("".join(each.get("text", ())) for cell in ran for each in cell["outputs"])
        assert "<iframe" in json.dumps([cell["outputs"] for cell in ran])
        rewards = [float(line.split()[1]) for line in shown.splitlines() if line[:4].strip().isdigit()]
        assert len(rewards) > 4 and rewards[-1] > rewards[0] + 0.3


def test_a_cell_that_fails_is_told(tmp_path: Path, run: Callable[[list[str]], int]) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nnumber = 1\n```\n\n```python\nnumber / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run(["--check", str(page)])
    assert "<cell 2>" in "".join(traceback.format_exception(caught.value))
