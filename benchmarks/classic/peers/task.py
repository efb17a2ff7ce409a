"""The task that a peer runs, as the arguments of its command: the same for every peer.

    PYTHON stable_baselines3.py '{"environment": "CartPole-v1", ...}'  ->  one line of JSON

Peers run in environments of their own, so this file imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class Task:
    """PPO in an environment, and how the peer does it."""

    environment: str
    """Id in Gymnasium: CartPole-v1, HalfCheetah-v5 or Pong."""
    slots: int = 8
    """Environments."""
    steps: int = 128
    """Steps of each in a fragment."""
    epochs: int = 4
    """Passes over a fragment."""
    minibatches: int = 4
    """Optimiser steps of a pass."""
    updates: int = 30
    """Measured fragments."""
    warm: int = 3
    """Fragments before the measurement."""
    threads: int = 1
    """Threads of torch."""
    form: str = ""
    """A choice of the peer: how it steps environments."""
    seed: int = 0
    """Seed."""

    @property
    def batch(self) -> int:
        """Rows of a fragment."""
        return self.slots * self.steps

    @property
    def is_frames(self) -> bool:
        """Whether observations are frames."""
        return self.environment == "Pong"


@dataclass(kw_only=True)
class Clock:
    """Seconds by phase, and frames, since the warm-up."""

    frames: int = 0
    """Environment steps."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase: sampling, learning."""
    began: float = 0.0
    """Start of the measurement."""
    cpu_began: float = 0.0
    """CPU seconds at the start."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a block."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def restart(self) -> None:
        """Begin the measurement."""
        self.frames, self.seconds, self.began = 0, {}, time.perf_counter()
        self.cpu_began = cpu_seconds()

    def report(self) -> None:
        """Write the result as a line of JSON."""
        total, cpu = time.perf_counter() - self.began, cpu_seconds() - self.cpu_began
        result = {"frames": self.frames, "total_s": total, "cpu_s": cpu, "phases_s": self.seconds}
        sys.stdout.write("\n" + json.dumps(result) + "\n")
        sys.stdout.flush()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of its ended children, and of all its running descendants."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    own = {os.getpid()}
    while found := {each for each, parent in parents.items() if parent in own} - own:
        own |= found
    return sum(ticks.get(each, 0) for each in own) / os.sysconf("SC_CLK_TCK")


def read_task() -> Task:
    """Return the task of the command line, with torch's threads set."""
    task = Task(**json.loads(sys.argv[1]))
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(task.threads)
    import torch

    torch.set_num_threads(task.threads)
    return task
