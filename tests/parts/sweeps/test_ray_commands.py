"""Commands on Ray: the process that an actor runs on its node, without Ray."""

from __future__ import annotations

import signal
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

from rillflow_parts.sweeps.ray_commands import CommandActor


def code_of(process: CommandActor) -> int | None:
    """Return the exit code of a process that ends within half a minute."""
    for _ in range(3000):
        if (code := process.poll()) is not None:
            return code
        threading.Event().wait(0.01)
    return None


def test_a_command_tells_its_exit_code_and_writes_its_log(tmp_path: Path) -> None:
    words = ["python", "-c", "import os; print(os.getcwd()); raise SystemExit(3)"]
    assert code_of(CommandActor(words, str(tmp_path / "log"), str(tmp_path), "")) == 3
    assert (tmp_path / "log").read_text() == f"{tmp_path}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_runs_until_a_signal_ends_it(number: int, tmp_path: Path) -> None:
    process = CommandActor(["sleep", "60"], str(tmp_path / "log"), str(tmp_path), "")
    assert process.poll() is None
    process.send(number)
    assert code_of(process) == -number
    process.send(number)
