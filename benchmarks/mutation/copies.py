"""Copies of the repository in which faults are put, each with a virtual environment of its own.

The environment borrows the installed packages of the one that runs the study, and finds ``rillflow`` in the
copy, also where a child process drops PYTHONPATH.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

TOOLS = Path(__file__).parent
COPIED = (
    *("rillflow", "tests", "benchmarks", "recipes", "examples", "docs", "clusters"),
    *("README.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "constraints.txt", "Makefile"),
)


def make_copy(source: Path, copy: Path) -> Path:
    """Copy the repository's files into ``copy``, with an environment; what was there goes."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source / name, copy / name)
    _make_environment(copy)
    subprocess.run([interpreter(copy), "-m", "compileall", "-q", "rillflow", "tests"], cwd=copy, check=True)
    return copy


def interpreter(copy: Path) -> Path:
    """Return a copy's own Python."""
    return copy / ".venv" / "bin" / "python"


def _make_environment(copy: Path) -> None:
    venv.create(copy / ".venv", with_pip=False, symlinks=True)
    packages = next((copy / ".venv" / "lib").glob("python*/site-packages"))
    installed = [folder for folder in site.getsitepackages() if Path(folder).is_dir()]
    watch = 'import os; "WATCH_LINES" in os.environ and __import__("child_lines")'
    (packages / "copy.pth").write_text("\n".join([str(copy), str(TOOLS), *installed, watch]) + "\n")
    script = Path(sys.executable).parent / "rillflow"
    text = script.read_text().replace(sys.executable, str(interpreter(copy)))
    (copy / ".venv" / "bin" / "rillflow").write_text(text)
    (copy / ".venv" / "bin" / "rillflow").chmod(0o755)
