"""A small run with remote samplers, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.runs import layout

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 0
[policy]
lr = 1e-5
model.new = { hidden = 32, layers = 2, heads = 4, kv_heads = 2, context = 16, alphabet = "0123456789+=" }
model.dtype = "bfloat16"
[rollout]
engine = "service"
max_tokens = 4
service = { check_share = 1.0, timeout_s = 900.0, token_file = "token" }
[links]
weights = "delta"
full_every = 1000
[algorithm]
name = "grpo"
steps = 6
prompts_per_step = 4
samples_per_prompt = 3
loss.correction = "none"
[reward]
function = "reward.py:small"
[evaluate]
every = 0
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""
TOKEN = "a token of this test"
PATIENCE_S = 900.0
"""Longest wait for anything: a machine may be busy."""


class TinyRun:
    """A run in a thread of this process.

    Args:
        folder: folder of recipe and run directory.
        settings: further settings.
    """

    def __init__(self, folder: Path, *settings: str) -> None:
        self.token = folder / "token"
        self.token.write_text(TOKEN)
        (folder / "run.toml").write_text(RECIPE)
        (folder / "reward.py").write_text(REWARD)
        self.directory = folder / "run"
        directory = f"run.dir={json.dumps(str(self.directory))}"
        loaded = load_recipe(folder / "run.toml", [directory, *settings])
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._launch, args=(loaded,), daemon=True)

    def _launch(self, loaded: Any) -> None:
        try:
            launch(loaded, quiet=True)
        except BaseException as error:  # noqa: BLE001  shown by the test
            self.errors.append(error)

    def start(self) -> str:
        """Start; return the URL of its sampler."""
        self._thread.start()
        file = self.directory / "service" / "main-0.json"
        wait_for(lambda: file.exists() or not self._thread.is_alive())
        assert not self.errors, self.errors
        return str(json.loads(file.read_text())["url"])

    def end(self) -> list[dict[str, Any]]:
        """Wait for its end; return the metrics of its steps."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive() and not self.errors, self.errors
        lines = (self.directory / layout.METRICS).read_text().splitlines()
        return [json.loads(each) for each in lines]

    def steps(self) -> int:
        """Return the number of finished steps."""
        return len((self.directory / layout.METRICS).read_text().splitlines())


class Child:
    """A process of ``rillflow`` and the lines that it says."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "rillflow.cli.main", *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def says(self, text: str) -> bool:
        """Return whether a line has the text."""
        return any(text in line for line in [*self.lines])

    def until(self, text: str) -> None:
        """Wait for a line with the text."""
        wait_for(lambda: self.says(text) or self.process.poll() is not None)
        assert self.says(text), self.lines

    def end(self) -> int:
        """Wait for its end; return the exit code."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code


@contextmanager
def rillflow(*words: str) -> Iterator[Child]:
    """A process of ``rillflow``; killed at the end."""
    child = Child(*words)
    try:
        yield child
    finally:
        child.process.kill()
        child.process.wait(PATIENCE_S)


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.05)
