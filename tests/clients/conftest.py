"""Tests against real clients, in an environment of their own: `make test-clients`.

Elsewhere the folder is not collected. A module that needs a package begins with ``pytest.importorskip``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START_S = 180.0
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Environment of child processes: threads of PyTorch that are more than cores wait for each other."""

collect_ignore_glob = [] if find_spec("lm_eval") else ["test_*.py"]
"""Everything, unless this is the clients' environment."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that `rillflow serve` serves in its own process."""

    url: str
    """Base URL, which ends in /v1."""
    token: str
    """Key of every request."""
    model: str
    """Name of the model."""
    directory: Path
    """Directory of the model."""


@contextmanager
def serving(model: Path, folder: Path, *words: str) -> Iterator[Served]:
    """Serve a model or a run until the context ends.

    Args:
        model: directory of a model or a run.
        folder: receives the token's file and the output.
        words: more words of the command.
    """
    token, said = folder / "token", folder / "said.txt"
    command = [sys.executable, "-m", "rillflow.cli.main", "serve", str(model), "--port", "0"]
    with said.open("w") as output:
        process = subprocess.Popen(
            [*command, "--token-file", str(token), *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=ONE_THREAD,
        )
        try:
            until = time.monotonic() + START_S
            while "token: written to" not in said.read_text():
                assert process.poll() is None and time.monotonic() < until, said.read_text()
                time.sleep(0.05)
            found = re.search(r"http://\S+", said.read_text())
            assert found is not None, said.read_text()
            yield Served(url=found[0], token=token.read_text(), model=model.name, directory=model)
            assert process.poll() is None, f"the server ended: {said.read_text()}"
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the small model; see small_model.py."""
    folder = tmp_path_factory.mktemp("model") / "small"
    command = [sys.executable, str(Path(__file__).with_name("small_model.py")), str(folder)]
    subprocess.run(command, check=True, env=ONE_THREAD)
    return folder


@pytest.fixture(scope="session")
def served(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the small model for all tests of the session."""
    with serving(model_directory, tmp_path_factory.mktemp("served")) as found:
        yield found
