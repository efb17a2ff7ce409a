"""Install Rillflow as its users do, run a shipped recipe with it, then add the plugins and try them.

    repository ─> sdist ─> wheel ──┬─> 3.11, oldest allowed dependencies ─┐  core alone: check, run, report
    plugins/* ─> sdists ─> wheels ─┼─> 3.11, newest                       ├─> of a recipe; then the plugins:
                                   └─> 3.13, oldest and newest           ─┘  plan, merge, service

    python .ci/packages.py [--only 3.11-oldest]

Every environment is empty and lies outside the repository. A wheel holds no recipe: the recipe and the
cluster's file are copied beside the environments. Skipped Pythons are named. The plugins' own dependencies
are the newest. Packages come through pip; with a warm cache one environment takes a minute or two.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.13")
ENDS = ("oldest", "newest")
PLUGINS = ("planner", "merging", "service", "training_service", "links", "classic")
SMALL = (
    *("warm_start.steps=2", "warm_start.warmup_steps=0", "policy.warmup_steps=0"),
    *("algorithm.steps=1", "algorithm.prompts_per_step=4", "algorithm.minibatches=1"),
    *("algorithm.samples_per_prompt=2", "evaluate.problems=4", "task.held_out=8"),
)
"""Settings with which the recipe takes seconds."""
_log = logging.getLogger("packages")


def main() -> int:
    """Try every environment; return 1 if one failed, or if there was none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[f"{python}-{end}" for python in PYTHONS for end in ENDS])
    only = parser.parse_args().only
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    failed, skipped, passed = [], [], []
    with tempfile.TemporaryDirectory(prefix="rillflow-packages-") as folder:
        shutil.copytree(ROOT / "recipes/arithmetic", Path(folder) / "recipe")
        shutil.copy2(ROOT / "clusters/laptop.toml", folder)
        wheels = built(Path(folder))
        for python in PYTHONS:
            found = interpreter(python)
            for name in (f"{python}-{end}" for end in ENDS):
                if only not in (None, name):
                    continue
                if found is None:
                    skipped.append(name)
                    continue
                _log.info("%s: installing and running", name)
                try:
                    environment = Path(folder) / name
                    run(found, "-m", "venv", environment / "venv")
                    try_core(wheels[0], environment, floors(python) if name.endswith("oldest") else [])
                    try_plugins(wheels[1:], environment)
                    passed.append(name)
                except subprocess.CalledProcessError as error:
                    _log.error("%s failed: %s\n%s", name, " ".join(map(str, error.cmd)), error.output)
                    failed.append(name)
                shutil.rmtree(Path(folder) / name, ignore_errors=True)
    _log.info("passed: %s", ", ".join(passed) or "none")
    _log.info("failed: %s", ", ".join(failed) or "none")
    _log.info("skipped, for this machine has no such Python: %s", ", ".join(skipped) or "none")
    return int(bool(failed) or not passed)


def built(folder: Path) -> list[Path]:
    """Build the sdists, and the wheels from them; return the wheels, the core's first."""
    tools, wheels = folder / "tools", []
    run(sys.executable, "-m", "venv", tools)
    pip(tools, "build")
    for source in (ROOT, *(ROOT / "plugins" / name for name in PLUGINS)):
        out = folder / "dist" / source.name
        run(tools / "bin/python", "-m", "build", "--outdir", out, source)
        wheels += out.glob("*.whl")
    return wheels


def interpreter(python: str) -> str | None:
    """Return the command of a Python release, or None where this machine has none that starts."""
    version = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{python}')"
    versions = Path("~/.pyenv/versions").expanduser()
    for command in (f"python{python}", *sorted(map(str, versions.glob(f"{python}.*/bin/python")))):
        if (
            shutil.which(command)
            and not subprocess.run([command, "-c", version], capture_output=True).returncode
        ):
            return command
    return None


def try_core(wheel: Path, folder: Path, oldest: Sequence[str]) -> None:
    """Install the core's wheel alone; check, run and report a recipe; a plugin's command must be refused."""
    pip(folder / "venv", wheel, *oldest)
    settings = [word for setting in SMALL for word in ("--set", setting)]
    rillflow, recipe = folder / "venv/bin/rillflow", folder.parent / "recipe/run.toml"
    run(rillflow, "check", recipe, *settings, cwd=folder)
    run(rillflow, "run", recipe, "--dir", folder / "run", *settings, cwd=folder)
    run(rillflow, "report", folder / "run", cwd=folder)
    if not (folder / "run/report.html").stat().st_size:
        raise subprocess.CalledProcessError(1, ["rillflow", "report"], "the report is empty")
    for command in ("plan", "merge"):
        refused = subprocess.run([rillflow, command, recipe], cwd=folder, capture_output=True, text=True)
        if refused.returncode != 2 or "pip install rillflow-" not in refused.stderr:
            raise subprocess.CalledProcessError(refused.returncode, refused.args, refused.stderr)


def try_plugins(wheels: Sequence[Path], folder: Path) -> None:
    """Install the plugins' wheels beside the core's and run a command of each."""
    pip(folder / "venv", *wheels)
    rillflow, recipe, trained = (
        folder / "venv/bin/rillflow",
        folder.parent / "recipe/run.toml",
        folder / "run",
    )
    run(rillflow, "plan", recipe, "--cluster", folder.parent / "laptop.toml", cwd=folder)
    run(rillflow, "merge", trained, trained, "--out", folder / "merged", cwd=folder)
    run(folder / "venv/bin/python", "-m", "rillflow_service", "--help", cwd=folder)


def floors(python: str) -> list[str]:
    """Return the dependencies of pyproject.toml, each at its lowest version that is for a Python release."""
    found = []
    for dependency in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        wanted, _, marker = dependency.partition(";")
        if marker and not applies(marker, python):
            continue
        name, _, bounds = wanted.partition(">=")
        found.append(f"{name.strip()}=={bounds.partition(',')[0].strip()}")
    return found


def applies(marker: str, python: str) -> bool:
    """Return whether a marker on python_version holds for a Python release."""
    name, sign, version = marker.split()
    if name != "python_version" or sign not in ("<", ">="):
        raise ValueError(f"{marker!r} is no marker that this program reads: python_version < or >= a version")
    own, bound = ([int(part) for part in text.strip("\"'").split(".")] for text in (python, version))
    return own < bound if sign == "<" else own >= bound


def pip(environment: Path, *words: object) -> None:
    """Install packages into an environment."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-compile")
    run(environment / "bin/python", "-m", "pip", "install", *quiet, *words)


def run(*words: object, cwd: Path | None = None) -> None:
    """Run a command; what it says is shown only where it fails."""
    command = list(map(str, words))
    subprocess.run(command, check=True, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    raise SystemExit(main())
