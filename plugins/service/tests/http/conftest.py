"""One service for the tests of a module: a real process, found by its socket and its token."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("starlette", reason="the service is the extra `service`")
    found = tmp_path_factory.mktemp("service")
    command = [sys.executable, "-m", "rillflow_service", str(found), "--capacity-bytes", str(2**24)]
    process = subprocess.Popen(command)
    until = time.monotonic() + 30.0
    while not (found / "socket").exists() and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.02)
    yield found
    process.terminate()
    assert process.wait(10.0) in (0, -15)
