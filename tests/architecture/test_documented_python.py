"""The Python of the documents runs: a page's blocks, a notebook's cells, in order, in a folder of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOTEBOOKS = ("docs/notebooks/first_run.ipynb",)


def test_the_page_and_the_notebook_run_and_give_what_is_shown(root: Path) -> None:
    command = [sys.executable, "docs/run_python.py", "--check", "docs/python.md", *NOTEBOOKS]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_notebook_is_executed_and_shows_a_curve_that_rises(root: Path) -> None:
    for name in NOTEBOOKS:
        cells = json.loads((root / name).read_text("utf-8"))["cells"]
        ran = [cell for cell in cells if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1))
        shown = "".join("".join(each.get("text", ())) for cell in ran for each in cell["outputs"])
        assert "<iframe" in json.dumps([cell["outputs"] for cell in ran])
        rewards = [float(line.split()[1]) for line in shown.splitlines() if line[:4].strip().isdigit()]
        assert len(rewards) > 4 and rewards[-1] > rewards[0] + 0.3


def test_a_cell_that_fails_is_told(root: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nnumber = 1\n```\n\n```python\nnumber / 0\n```\n")
    command = [sys.executable, "docs/run_python.py", "--check", str(page)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and "<cell 2>" in done.stderr
