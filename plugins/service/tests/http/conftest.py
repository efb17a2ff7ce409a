"""One service for the tests of a module: a real process, found by its socket and its token."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("starlette", reason="the service is the extra `service`")
    found = tmp_path_factory.mktemp("service")
    with serving(found, "--capacity-bytes", str(2**24)) as process:
        yield found
        process.terminate()
        assert process.wait(60.0) in (0, -15)


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A service in a folder, once it answers; killed at the end."""
    process = subprocess.Popen([sys.executable, "-m", "rillflow_service", str(folder), *words])
    try:
        until = time.monotonic() + 60.0
        while True:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as tried:
                tried.connect(str(folder / "socket"))
                break
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait(60.0)
