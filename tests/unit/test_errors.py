"""The lines that install an extra or a plugin: right in a clone, beside it, and without one."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rillflow
from rillflow.errors import install_package, install_plugin

CLONE = Path(rillflow.__file__).resolve().parents[1]
PRINT = """
from rillflow.errors import install_package, install_plugin
print(install_package("service"), install_package(), install_plugin("planner"), sep="\\n")
"""


def printed(package: Path, cwd: Path) -> list[str]:
    """Return the lines that a copy of the package prints in a working directory."""
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n{PRINT}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a copy of the package's first files in a folder of its own, which is no clone."""
    package = tmp_path / "site packages" / "rillflow"
    package.mkdir(parents=True)
    for name in ("__init__.py", "errors.py"):
        shutil.copy(CLONE / "rillflow" / name, package / name)
    return package


def test_in_the_clone_the_lines_are_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CLONE)
    assert install_package("service") == "pip install -e '.[service]'"
    assert install_package("datasets", "math") == "pip install -e '.[datasets,math]'"
    assert install_package() == "pip install -e ."
    assert install_plugin("planner") == "pip install ./plugins/planner"
    assert install_plugin("classic", "minatar") == "pip install './plugins/classic[minatar]'"


def test_beside_the_clone_the_lines_name_folders_that_pip_can_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in (install_package("service"), install_package(), install_plugin("classic", "minatar")):
        place = Path(shlex.split(line)[-1].partition("[")[0])
        assert place.is_absolute() and (place / "pyproject.toml").is_file(), line


def test_a_clone_whose_name_has_a_space_is_quoted(copied: Path, tmp_path: Path) -> None:
    clone = copied.parent
    (clone / "pyproject.toml").touch()
    (clone / "plugins" / "planner").mkdir(parents=True)
    assert [shlex.split(line)[2:] for line in printed(copied, tmp_path)] == [
        ["-e", f"{clone}[service]"],
        ["-e", str(clone)],
        [f"{clone}/plugins/planner"],
    ]
    assert printed(copied, clone)[0] == "pip install -e '.[service]'"


def test_without_a_clone_the_lines_say_where_to_run_them(copied: Path, tmp_path: Path) -> None:
    assert printed(copied, tmp_path) == [
        "in a clone of Rillflow: pip install -e '.[service]'",
        "in a clone of Rillflow: pip install -e .",
        "in a clone of Rillflow: pip install ./plugins/planner",
    ]


def test_a_plugin_whose_folder_was_removed_is_in_another_clone(copied: Path, tmp_path: Path) -> None:
    (copied.parent / "pyproject.toml").touch()
    (copied.parent / "plugins").mkdir()
    package, _, plugin = printed(copied, tmp_path)
    assert package.startswith("pip install -e ") and plugin.startswith("in a clone of Rillflow: ")


def test_in_a_deleted_working_directory_the_lines_are_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert install_package("service") == f"pip install -e {shlex.quote(f'{CLONE}[service]')}"
