"""The fork server, as far as no process has to be started."""

from __future__ import annotations

import errno
import signal
from collections.abc import Sequence

import pytest

from rillflow.errors import ClusterError
from rillflow.workers.fork_server import ForkedProcess, ForkServer


class FullMachine(ForkServer):
    """A server on a machine that has no room for another process."""

    def prepare(self) -> int:
        return 2

    def _asked(self, process: int, descriptors: Sequence[int], timeout_s: float) -> int:
        return -errno.EAGAIN


def test_a_fork_that_fails_says_why_and_what_to_do() -> None:
    with pytest.raises(ClusterError, match="a rank cannot be started") as failed:
        FullMachine([]).start(0, 1.0)
    assert failed.value.why == "fork: Resource temporarily unavailable" and "processes" in failed.value.fix


def test_the_ranks_of_a_server_that_has_ended_were_killed() -> None:
    server = ForkServer([])
    assert server.exit_code(ForkedProcess(3, 2, server)) == -signal.SIGKILL
