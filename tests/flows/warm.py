"""``rillflow`` commands in processes that skip the imports: each is a fork of one server that has made them.

A new process imports PyTorch, transformers and Rillflow for seconds before its command begins. A fork has the
same signals, children and exit codes; the tests of the command line start new processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.tensor", "transformers", "rillflow.app.build"])
"""Makes processes that are forks of the server."""


class Command:
    """A running command.

    Args:
        words: the words after ``rillflow``.
        said: file for the output and the error output.
    """

    def __init__(self, words: Sequence[str], said: Path) -> None:
        self._process = CONTEXT.Process(target=_run, args=([*words], said, dict(os.environ), Path.cwd()))
        with contextlib.chdir(ROOT):  # the server imports Rillflow from its working directory
            self._process.start()
        self._said = said
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def said(self) -> str:
        """The output so far."""
        return self._said.read_text() if self._said.exists() else ""

    def poll(self) -> int | None:
        """Return the exit code, minus the signal if one ended the command, or None while it runs."""
        return self._process.exitcode

    def wait(self, limit_s: float) -> int:
        """Return the exit code; raise TimeoutError if the command runs for longer."""
        self._process.join(limit_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"the command did not end in {limit_s:g} s:\n{self.said}")
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the command."""
        self._process.kill()


def _run(words: list[str], said: Path, environment: dict[str, str], folder: Path) -> None:
    """Call ``main`` in a new session, as a new process of the command would."""
    os.setsid()
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # in order with standard error
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    from rillflow.cli.main import main

    sys.exit(main(words))
