"""Copies of the repository for mutants, each with its own virtual environment.

The environment uses the installed packages of the one that runs the study. It finds ``rillflow`` and the
plugins in the copy, even if a child process drops PYTHONPATH.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

from studied import packages

TOOLS = Path(__file__).parent
COPIED = (
    *("plugins", "tests", "benchmarks", "recipes", "examples", "docs", "clusters"),
    *("README.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "constraints.txt", "Makefile"),
)


def make_copy(source: Path, copy: Path) -> Path:
    """Copy the repository's files into ``copy`` with an environment, and delete what was there."""
    copy_files(source, copy)
    make_environment(copy)
    folders = [*map(str, packages(copy)), "plugins", "tests"]
    subprocess.run([interpreter(copy), "-m", "compileall", "-q", *folders], cwd=copy, check=True)
    return copy


def copy_files(source: Path, copy: Path) -> None:
    """Copy the repository's files into ``copy``, and delete what was there."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    own = [package.name for package in packages(source) if package.parent == source]
    for name in (*own, *COPIED):
        if (source / name).is_dir():
            shutil.copytree(source / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source / name, copy / name)


def interpreter(copy: Path) -> Path:
    """Return the Python of a copy."""
    return copy / ".venv" / "bin" / "python"


def make_environment(copy: Path) -> None:
    """Create a virtual environment in a copy, with the copy's code installed."""
    venv.create(copy / ".venv", with_pip=False, symlinks=True)
    site_packages = next((copy / ".venv" / "lib").glob("python*/site-packages"))
    installed = [folder for folder in site.getsitepackages() if Path(folder).is_dir()]
    code = dict.fromkeys(str(package.parent) for package in packages(copy))
    watch = 'import os; "WATCH_LINES" in os.environ and __import__("child_lines")'
    (site_packages / "copy.pth").write_text("\n".join([*code, str(TOOLS), *installed, watch]) + "\n")
    script = Path(sys.executable).parent / "rillflow"
    text = script.read_text().replace(sys.executable, str(interpreter(copy)))
    (copy / ".venv" / "bin" / "rillflow").write_text(text)
    (copy / ".venv" / "bin" / "rillflow").chmod(0o755)
