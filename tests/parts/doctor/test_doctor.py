"""rillflow doctor finds obstacles of a run, on this machine and under artificial limits."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rillflow.app.plugins import discovered
from rillflow.cli.main import main
from rillflow.isolation.sandbox import Level
from rillflow_parts.doctor.doctor import (
    Finding,
    Health,
    disk,
    examine,
    home_folder,
    package_finding,
    plugins,
    sandbox,
    screen,
    threads_finding,
    writing,
)

LIMITED = """
import resource
from rillflow_parts.doctor.doctor import limits
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
print(*(f"{finding.name}|{finding.health}|{finding.what}|{finding.fix}" for finding in limits()), sep="\\n")
"""

APART = """
import sys
from pathlib import Path
from rillflow.isolation.kernel import USERS
from rillflow.isolation.sandbox import isolate
isolate(USERS)
if sys.argv[1]:
    Path("/proc/sys/user/max_user_namespaces").write_text(sys.argv[1])
from rillflow_parts.doctor.doctor import sandbox
print(*(f"{finding.name}|{finding.health}|{finding.what}|{finding.fix}" for finding in sandbox()), sep="\\n")
"""


def test_this_machine_can_run(tmp_path: Path) -> None:
    findings = examine(tmp_path)
    assert [finding for finding in findings if finding.health is Health.FAIL] == []
    assert next(finding for finding in findings if finding.name == "torch").what.startswith("2.")
    names = {finding.name for finding in findings}
    assert names >= {
        "python",
        "torch",
        "device",
        "threads",
        "memory",
        "disk",
        "writing",
        "open files",
        "sandbox",
    }
    assert names >= {"pyarrow", "reasoning-gym", "ray"}, "packages that only some runs need"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_every_warning_says_what_to_do(tmp_path: Path) -> None:
    for finding in examine(tmp_path):
        assert bool(finding.fix) is (finding.health is not Health.OK), finding


def test_a_folder_that_is_not_there_cannot_be_written(tmp_path: Path) -> None:
    (finding,) = writing(tmp_path / "missing")
    assert finding.health is Health.FAIL
    assert "missing" in finding.what


def test_a_package_outside_its_range_is_found() -> None:
    (finding,) = package_finding(Requirement("pytest>=1000"))
    assert finding.health is Health.WARN
    assert ">=1000" in finding.what
    assert package_finding(Requirement("no-such-package>=1"))[0].health is Health.FAIL
    assert package_finding(Requirement("pytest>=1"))[0].health is Health.OK


def test_too_many_threads_are_found() -> None:
    (finding,) = threads_finding(8, 1.5)
    assert finding.health is Health.WARN
    assert "run.threads = 1" in finding.fix


def test_threads_lost_to_the_environment_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "unset OMP_NUM_THREADS (now 1)" in threads_finding(1, 4)[0].fix
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_finding(1, 4)[0].health is Health.OK


def test_low_limits_are_found() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert "open files|warn|100 allowed; at least 256 are recommended|ulimit -n 1024" in done.stdout


def test_space_is_told_with_its_number(tmp_path: Path) -> None:
    (finding,) = disk(tmp_path)
    assert "iB free in" in finding.what


def test_a_user_without_a_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_folder()[0].health is Health.OK
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    assert home_folder()[0].what == f"{tmp_path / 'gone'} cannot be written"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 999_999)
    (found,) = home_folder()
    assert "no entry in /etc/passwd" in found.what and "HF_HOME" in found.fix


@pytest.mark.parametrize(("encoding", "health"), [("utf-8", Health.OK), ("ascii", Health.WARN)])
def test_a_screen_that_lacks_characters_is_found(
    encoding: str, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    (found,) = screen()
    assert found.health is health and encoding in found.what


def test_a_finding_is_a_record() -> None:
    with pytest.raises(AttributeError):
        Finding(name="a", health=Health.OK, what="b").name = "c"  # type: ignore[misc]


@pytest.mark.skipif(
    not Path("/proc/sys/user/max_user_namespaces").is_file()
    or Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0",
    reason="this kernel gives no user namespaces",
)
@pytest.mark.parametrize(
    ("namespaces", "told", "fix"),
    [
        ("", "sandbox|warn|shared-user: ", "start runs as root"),
        ("0", "sandbox|warn|none: unshare: No space left on device; ", "sysctl user.max_user_namespaces"),
    ],
)
def test_the_sandboxs_level_is_named_and_what_is_missing(namespaces: str, told: str, fix: str) -> None:
    command = [sys.executable, "-c", APART, namespaces]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("sandbox|")]
    assert line.startswith(told) and fix in line


def test_doctor_says_ok(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    assert "ok    torch" in capsys.readouterr().out


@pytest.mark.skipif(
    not Path("/proc/sys/user/max_user_namespaces").is_file()
    or Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0",
    reason="this kernel gives no user namespaces",
)
def test_the_doctor_tries_no_stronger_level_than_its_limit() -> None:
    (finding,) = sandbox(Level.SHARED_USER)
    assert finding.what.startswith(f"{Level.SHARED_USER}: ")


def test_a_plugin_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint(name="broken", value="rillflow.app.plugins:NO_SUCH_NAME", group="rillflow.plugins")
    monkeypatch.setattr("rillflow.app.plugins.entry_points", lambda **_: [broken])
    discovered.cache_clear()
    (finding,) = plugins()
    discovered.cache_clear()
    assert finding.health is Health.WARN and finding.fix and "the plugin broken" in finding.what
