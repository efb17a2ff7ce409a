"""A pytest plugin that serves runs: libraries load once, and every run is a fork of that process.

    python -m pytest -p warm_plugin --serve-runs modules.json
        stdin:  one JSON list of pytest arguments a line
        stdout: the fork's process id, then its exit status

A fork's main module, working directory and interpreter are those of a plain ``python -m pytest``. Children
that a test spawns and sandboxes that it enters therefore behave as usual. The package under test is not
loaded before the fork. A fork leads its own process group, which its caller can kill.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
from pathlib import Path

import pytest

CPU_LIMIT_S = 300
"""CPU seconds after which a fork is killed, because a fault may loop forever."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch to pytest's command line."""
    parser.addoption("--serve-runs", help="JSON list of modules to load before serving")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Serve runs until stdin ends, instead of running tests."""
    if not config.option.serve_runs:
        return None
    for name in json.loads(Path(config.option.serve_runs).read_text()):
        with contextlib.suppress(ImportError):  # some names are a library's copy of another library
            importlib.import_module(name)
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        if not (child := os.fork()):
            _run(json.loads(line))
        replies.write(f"{child}\n")
        replies.flush()
        _, status = os.waitpid(child, 0)
        replies.write(f"{os.waitstatus_to_exitcode(status)}\n")
        replies.flush()
    return 0


def _run(arguments: list[str]) -> None:
    """Run pytest in the fork with its own output file, and exit."""
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
        log, nothing = os.open("pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, 0)
        os.dup2(nothing, 0), os.dup2(log, 1), os.dup2(log, 2)
        sys.argv[1:] = arguments
        status = int(pytest.main(arguments))
        sys.stdout.flush()
        os._exit(status)
    finally:
        os._exit(70)  # no exception may return to the server's loop
