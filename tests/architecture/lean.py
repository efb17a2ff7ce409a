"""The environment of ``make quickstart``: this one's packages that the core requires, and no others.

this environment ─ requirements without extras, followed ─> links to their files in a new virtual environment
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def required(name: str = "rillflow") -> dict[str, Distribution]:
    """Return the installed distributions that one needs without its extras, itself included, by name."""
    found: dict[str, Distribution] = {}
    open_names = [Requirement(name)]
    while open_names:
        wanted = open_names.pop()
        key = canonicalize_name(wanted.name)
        try:
            each = distribution(wanted.name)
        except PackageNotFoundError:  # a requirement of another platform, as torch's of CUDA
            continue
        if key in found:
            continue
        found[key] = each
        extras = [{"extra": extra} for extra in ("", *wanted.extras)]
        for text in each.requires or []:
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate(extra) for extra in extras):
                open_names.append(inner)
    return found


def make_lean_environment(folder: Path, source: Path) -> Path:
    """Make a virtual environment that runs the package of a source tree; return its folder of programs.

    Args:
        folder: the new environment.
        source: a copy of the repository.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    programs = folder / "bin"
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    site = Path(paths["purelib"])
    for name, each in required().items():
        for entry in {Path(file).parts[0] for file in each.files or [] if Path(file).parts[0] != ".."}:
            origin = Path(str(each.locate_file(entry)))
            if name != "rillflow" and origin.exists() and not (site / entry).exists():
                (site / entry).symlink_to(origin)
    (site / "source.pth").write_text(f"{source}\n")
    metadata = site / "rillflow-0.dist-info"  # the source's own, wherever this environment found it
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rillflow\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(distribution("rillflow").read_text("entry_points.txt") or "")
    command = programs / "rillflow"
    command.write_text(
        f"#!{programs / Path(sys.executable).name}\n"
        "import sys\nfrom rillflow.cli.main import main\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    return programs
