"""One data plane of each kind for the tests of a module: a process with sockets, and a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rillflow_service.client import Client, started
from rillflow_service.transport import InProcess


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with started(capacity_bytes=2**24, listen="127.0.0.1:0") as found:
        yield found
    assert not found.exists()


@pytest.fixture(scope="module")
def in_process() -> Iterator[InProcess]:
    with InProcess(capacity_bytes=2**24) as found:
        yield found


@pytest.fixture(params=["shared memory", "in process"])
def near(request: pytest.FixtureRequest) -> Callable[..., Client]:
    """Clients whose columns are read where they lie."""
    home = request.getfixturevalue("folder" if request.param == "shared memory" else "in_process")
    return lambda name="near": Client(home, name=name)


@pytest.fixture(params=["shared memory", "in process", "TCP"])
def connect(request: pytest.FixtureRequest) -> Callable[..., Client]:
    """Clients of any kind."""
    if request.param == "in process":
        plane = request.getfixturevalue("in_process")
        return lambda name="near": Client(plane, name=name)
    folder = request.getfixturevalue("folder")
    address, token = (folder / "address").read_text(), (folder / "token").read_text()
    if request.param == "TCP":
        return lambda name="far": Client(address=address, token=token, name=name)
    return lambda name="near": Client(folder, name=name)
