"""Environment of a run: enough to explain a number, without secrets or environment variables."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib import metadata
from pathlib import Path

import rillflow
from rillflow.runs.json_lines import JSON

_PACKAGES = ["rillflow", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic"]
_PACKAGES += ["vllm", "ray"]
CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Directory with a container's resource limits."""


def environment(*, device: str, command: Sequence[str]) -> dict[str, JSON]:
    """Describe one start of a run: time, command, folder, machine and versions."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": list(command),
        "folder": str(Path.cwd()),
        "device": device,
        "cores": len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": installed_versions(),
        "git_revision": git_revision(Path.cwd()),
    }


def installed_versions() -> Mapping[str, JSON]:
    """Return the versions of the packages that can change a result, without importing them."""
    versions = {name: package_version(name) for name in _PACKAGES}
    return {name: version for name, version in versions.items() if version is not None}


@cache
def package_version(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed.

    A process reads it once: parsing the metadata of torch takes milliseconds, and each check asks for it.
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """Return this package's version with a digest of its files; one different line changes the digest."""
    files = sorted(Path(rillflow.__file__).parent.rglob("*.py"))
    text = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
    return f"{rillflow.__version__} ({hashlib.sha256(text).hexdigest()[:8]})"


def usable_cores() -> float:
    """Return the number of cores this process may use: its affinity, or a container's quota if that is
    less.
    """
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    quota = words_of(CONTROL_GROUP / "cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        return min(cores, int(quota[0]) / int(quota[1]))
    return cores


def words_of(path: Path) -> list[str]:
    """Return the words of a system file, or no words if the file cannot be read."""
    try:
        return path.read_text("ascii").split()
    except OSError:
        return []


def git_revision(folder: Path) -> str | None:
    """Return the commit checked out in the folder, with ``-dirty`` if files differ; None without git."""
    ask = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(ask, cwd=folder, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
