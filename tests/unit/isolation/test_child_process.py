"""Child processes: what they get, how they end, and that they end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from rillflow.isolation.child_process import ChildProcess, how_ended, start_python

BOUND_S = 60.0
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(600)
"""
PARENT = """
import sys, threading
from rillflow.isolation.child_process import start_python
boot = "import sys, time; from rillflow.isolation.child_process import end_with; "
boot += "end_with(int(sys.argv[1])); print('bound', flush=True); time.sleep(600)"
started = []
thread = threading.Thread(target=lambda: started.append(start_python(boot, descriptors=[])))
thread.start()
thread.join()
print(started[0].pid, flush=True)
threading.Event().wait()
"""
"""A process whose child was started by a thread that has ended."""


def sleeping(seconds: float = 600.0) -> ChildProcess:
    return ChildProcess([sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"])


def stubborn(folder: Path) -> ChildProcess:
    """Return a child that ignores SIGTERM."""
    ready = folder / "ready"
    child = ChildProcess([sys.executable, "-S", "-c", STUBBORN, str(ready)])
    until = time.monotonic() + BOUND_S
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return child


def is_over(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_child_ends_by_itself_in_the_time_that_it_has() -> None:
    child = ChildProcess([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    assert child.end(alone_s=BOUND_S) == 3 == child.poll() == child.wait()


def test_a_child_is_terminated_before_it_is_killed() -> None:
    assert sleeping().end(terminated_s=BOUND_S) == -signal.SIGTERM


@pytest.mark.parametrize("terminated_s", [0.0, 0.2])
def test_a_child_that_goes_on_is_killed(tmp_path: Path, terminated_s: float) -> None:
    child = stubborn(tmp_path)
    assert not child.ends_within(0.0) and child.poll() is None
    assert child.end(alone_s=0.1, terminated_s=terminated_s, killed_s=BOUND_S) == -signal.SIGKILL


def test_the_end_of_a_child_that_has_ended_is_its_own() -> None:
    child = sleeping(0.0)
    assert child.wait() == 0
    child.kill()
    child.send_signal(signal.SIGTERM)
    assert child.end(terminated_s=BOUND_S, killed_s=0.0) == 0


@pytest.mark.parametrize("seconds", [0.0, 600.0])
def test_what_a_child_has_started_ends_with_it_also_if_it_has_ended_before(seconds: float) -> None:
    sleeper = "[sys.executable, '-S', '-c', 'import time; time.sleep(600)']"
    program = f"import subprocess, sys, time; print(subprocess.Popen({sleeper}).pid, flush=True)"
    with tempfile.TemporaryFile() as output:
        child = ChildProcess([sys.executable, "-c", f"{program}; time.sleep({seconds})"], output=output)
        until = time.monotonic() + BOUND_S
        while not (said := os.pread(output.fileno(), 100, 0)).endswith(b"\n") and time.monotonic() < until:
            time.sleep(0.01)
        started = psutil.Process(int(said))
        if not seconds:
            assert child.ends_within(None) and started.is_running()
        assert child.end_all() == (-signal.SIGKILL if seconds else 0)
        while not is_over(started) and time.monotonic() < until:
            time.sleep(0.01)
        assert is_over(started)


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_program_that_does_not_exist_is_an_error(is_bound: bool) -> None:
    with pytest.raises(FileNotFoundError, match="no_such_program"):
        ChildProcess(["/no_such_program"], is_bound=is_bound)


def test_a_child_has_the_variables_that_it_is_told() -> None:
    boot = "import os; raise SystemExit(int(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert start_python(boot, descriptors=[], told={"CUDA_VISIBLE_DEVICES": "5"}).wait() == 5


def test_a_child_has_its_output_its_descriptors_and_a_session_of_its_own() -> None:
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as output:
        program = f"import os, sys; os.write({writing}, b'passed'); print(os.getsid(0), file=sys.stderr)"
        child = ChildProcess(
            [sys.executable, "-S", "-c", program], descriptors=[writing], output=output, environment={}
        )
        os.close(writing)
        assert child.wait() == 0 and os.read(reading, 16) == b"passed"
        os.close(reading)
        output.seek(0)
        assert int(output.read()) == child.pid


def test_a_bound_child_outlives_the_thread_that_asked_for_it_and_ends_with_its_process() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as lines:
        said = {next(lines).strip() for _ in range(2)}
        (pid,) = said - {"bound"}
        child = psutil.Process(int(pid))
        time.sleep(0.2)
        assert child.status() != psutil.STATUS_ZOMBIE, "the thread has ended, and the child has not"
        parent.kill()
        parent.wait(BOUND_S)
        with pytest.raises(psutil.NoSuchProcess):
            child.wait(BOUND_S)
            child.status()


def test_the_parent_of_a_bound_child_is_a_thread_that_ends_with_it() -> None:
    before = {*threading.enumerate()}
    child = start_python("import time; time.sleep(600)", descriptors=[])
    (parent,) = {*threading.enumerate()} - before
    assert child.end() == -signal.SIGKILL
    parent.join(BOUND_S)
    assert not parent.is_alive()


def test_how_a_process_ended_is_said_in_words() -> None:
    assert how_ended(-9) == "by SIGKILL" and how_ended(3) == "with exit code 3"
