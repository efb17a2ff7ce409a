"""One server for the tests of a module: real processes, sockets and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rillflow.data_plane.client import started


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with started(capacity_bytes=2**24, listen="127.0.0.1:0") as found:
        yield found
    assert not found.exists()
