"""The code of a study and its tests: the package, its parts and each plugin, with the tests that mirror them.

rillflow/PACKAGE/...                   tests/unit/PACKAGE/
rillflow_parts/PART/...                tests/parts/PART/
plugins/NAME/rillflow_NAME/...         plugins/NAME/tests/
"""

from __future__ import annotations

from pathlib import Path


def packages(root: Path) -> list[Path]:
    """Return the folders of code below a repository's root: the package, its parts, then the plugins."""
    patterns = ("rillflow*/__init__.py", "plugins/*/rillflow_*/__init__.py")
    return [file.parent for pattern in patterns for file in sorted(root.glob(pattern))]


def files(root: Path) -> list[Path]:
    """Return every file of code below a repository's root."""
    return [file for package in packages(root) for file in sorted(package.rglob("*.py"))]


def is_studied(path: str) -> bool:
    """Return whether a path from the root belongs to a code file, not to a test."""
    match path.split("/"):
        case ["rillflow" | "rillflow_parts", *_]:
            return True
        case ["plugins", _, package, *_]:
            return package.startswith("rillflow_")
    return False


def own_tests(path: str) -> str:
    """Return the folder of tests that mirrors a file's package."""
    top, package = path.split("/")[:2]
    if top == "plugins":
        return f"plugins/{package}/tests/"
    return f"tests/{'unit' if top == 'rillflow' else 'parts'}/{package}/"
