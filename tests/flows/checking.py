"""A process that runs ``rillflow check`` in forks, so that a hundred folders share one import.

    test ─ line [folder, words] ─> this ─ fork: limits, main(words) > folder/said ─> [exit code, bytes]

The bytes are the peak memory of the fork, or of a child that it waited for.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from rillflow.app import check  # noqa: F401  used by every fork
from rillflow.cli.main import main

CPU_S, DEADLINE_S = 20, 120
"""CPU seconds and wall-clock seconds after which the kernel ends a fork."""


def run(folder: str, words: list[str]) -> int:
    """Run the command within the fork and return its exit code."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(DEADLINE_S)
    os.chdir(folder)
    said = os.open("said", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def serve() -> None:
    """Answer every line."""
    for line in sys.stdin:
        folder, words = json.loads(line)
        if (pid := os.fork()) == 0:
            code = 99  # if an exception leaves ``main``
            try:
                code = run(folder, words)
            finally:
                os._exit(code)
        _, status, used = os.wait4(pid, 0)
        sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
