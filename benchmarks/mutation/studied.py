"""The code of a study and its tests: the package and each plugin, with the tests that mirror them.

rillflow/PACKAGE/...                   tests/unit/PACKAGE/
plugins/NAME/rillflow_NAME/...         plugins/NAME/tests/
"""

from __future__ import annotations

from pathlib import Path


def packages(root: Path) -> list[Path]:
    """Return the folders of code below a repository's root: the package, then those of the plugins."""
    return [root / "rillflow", *sorted(file.parent for file in root.glob("plugins/*/rillflow_*/__init__.py"))]


def files(root: Path) -> list[Path]:
    """Return every file of code below a repository's root."""
    return [file for package in packages(root) for file in sorted(package.rglob("*.py"))]


def is_studied(path: str) -> bool:
    """Return whether a path from the root belongs to a code file, not to a test."""
    parts = path.split("/")
    return parts[0] == "rillflow" or (parts[0] == "plugins" and parts[2].startswith("rillflow_"))


def own_tests(path: str) -> str:
    """Return the folder of tests that mirrors a file's package."""
    top, package = path.split("/")[:2]
    return f"tests/unit/{package}/" if top == "rillflow" else f"plugins/{package}/tests/"
