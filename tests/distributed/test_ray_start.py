"""Starts of a cluster of our own without a home directory or with a long TMPDIR, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
from small_recipe import RECIPE, REWARD

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
SETTINGS = ("placement.backend=ray", "placement.pools={ main = 2 }", "warm_start=none", "evaluate=none")
LONG = "slurm_jobdir_" * 9
_NO_HOME = ["unshare", "--user", "--map-user=54321", "--map-group=54321", "env", "-i"]


def words(folder: Path, *settings: str) -> list[str]:
    given = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    return [str(BIN / "rillflow"), "run", str(folder / "run.toml"), "--dir", str(folder / "run"), *given]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a recipe, and a TMPDIR as Slurm's jobs have."""
    (tmp_path / "run.toml").write_text(RECIPE.replace("NAME", "grpo"))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / LONG).mkdir()
    return tmp_path


def clusters_of(pid: int) -> set[Path]:
    """Return the folders of the clusters that a process has started."""
    places = (each for place in ("/tmp", "/var/tmp", "/dev/shm") for each in Path(place).glob("rf-*"))
    return {each for each in places if [*each.glob(f"r/session_*_{pid}")]}


def test_a_user_without_a_home_starts_ray(folder: Path) -> None:
    refused = subprocess.run([*_NO_HOME[:4], "true"], capture_output=True, check=False).returncode
    if refused:
        pytest.skip("no user namespaces")
    for path in (folder, *folder.rglob("*"), *folder.parents[:2]):
        path.chmod(0o777)
    started = [*_NO_HOME, f"PATH={BIN}:/usr/bin:/bin", "OMP_NUM_THREADS=1"]
    done = subprocess.run(
        [*started, *words(folder, "algorithm.steps=1")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ending", ["done", "error", "interrupted", "killed"])
def test_a_long_tmpdir_starts_ray_and_nothing_is_left(folder: Path, ending: str) -> None:
    if ending == "error":
        wrong = "def small(completions): return [0.0] * min(2, len(completions))\n"  # the check has two rows
        (folder / "reward.py").write_text(wrong)
    steps = "algorithm.steps=1" if ending in ("done", "error") else "algorithm.steps=500"
    env, own = {**os.environ, "TMPDIR": str(folder / LONG), "OMP_NUM_THREADS": "1"}, set[Path]()
    log, number = folder / "log", {"interrupted": signal.SIGINT, "killed": signal.SIGKILL}
    with log.open("w") as output:
        run = subprocess.Popen(words(folder, steps), env=env, stdout=output, stderr=output)
        while run.poll() is None:
            own |= clusters_of(run.pid)
            if ending in number and (folder / "run" / "metrics.jsonl").exists():
                run.send_signal(number.pop(ending))
            time.sleep(0.05)
    expected = {"done": [0], "error": [1, 2], "interrupted": [130], "killed": [-signal.SIGKILL]}[ending]
    assert run.returncode in expected, log.read_text()
    assert "bug in Rillflow" not in log.read_text()
    until = time.monotonic() + 30
    while any(each.exists() for each in own) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(own) == 1 and not [each for each in own if each.exists()]
    left = {each.name for each in (folder / LONG).iterdir()}
    assert {name for name in left if not name.startswith("torchinductor_")} == set()
