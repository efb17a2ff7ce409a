"""Engines with a process of their own, which dies in a request of choice, once or always.

    engine ── a line for each request ──> child process ── dies, or answers ──> engine: the native one samples

The variable CHILD names a file with the request, how the child ends, and how many such requests it answers
before. Of several children one dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rillflow.errors import RolloutError
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.engine import Capability, EngineLost, RowByRow
from rillflow.rollout.native.engine import NativeEngine

CHILD = """
import json, os, signal, sys
from pathlib import Path
file = Path(sys.argv[1])
plan, seen = json.loads(file.read_text()), 0

def is_first():
    try:
        Path(f"{file}.death").open("x").close()
    except FileExistsError:
        return plan["always"]
    return True

for line in sys.stdin:
    is_due = line.strip() == plan["request"]
    if line.strip() == plan["hangs"] and Path(f"{file}.death").exists():
        Path(f"{file}.hang").touch()
        signal.pause()
    if is_due and seen >= plan["answers"] and is_first():
        if plan["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif plan["how"] == "exit":
            sys.exit(3)
        elif plan["how"] == "refuse":
            print("no", flush=True)
            continue
        os.close(1)
        signal.pause()
    seen += is_due
    print("ok", flush=True)
"""


class ChildEngine(RowByRow):
    """The native engine, behind a child process that every request passes."""

    can = frozenset({Capability.GREEDY, Capability.ROWS, Capability.PARTS, Capability.LOOK, Capability.STOP})

    def __init__(self, module: Any, config: Any, *, tp: Any, **given: Any) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-S", "-c", CHILD, os.environ["CHILD"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask("start")
        self._inner = NativeEngine(module, config, tp=tp, **given)

    def __del__(self) -> None:
        self._child.kill()
        self._child.wait()

    def _ask(self, request: str) -> None:
        try:
            assert self._child.stdin is not None and self._child.stdout is not None
            print(request, file=self._child.stdin, flush=True)
            said = self._child.stdout.readline()
            if not said:
                raise EOFError
        except (OSError, EOFError):
            self._report(request)
        if said == "no\n":
            raise RolloutError(f"the child cannot {request}")

    def _report(self, request: str) -> None:
        self._child.kill()
        status = self._child.wait()
        raise EngineLost(f"the child (process {self._child.pid}) ended with {status} in {request}") from None

    @property
    def has_work(self) -> bool:
        return self._inner.has_work

    @property
    def held_bytes(self) -> int:
        return self._inner.held_bytes

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self._ask("load")
        self._inner.load(version, weights)

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        self._ask("add")
        self._inner.add(rollout, sampling)

    def step(self) -> list[Rollout]:
        self._ask("step")
        return self._inner.step()

    def abort(self, row: RowId) -> Rollout:
        self._ask("abort")
        return self._inner.abort(row)

    def look(self, row: RowId) -> Rollout:
        return self._inner.look(row)

    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        raise NotImplementedError

    def sleep(self) -> None:
        self._ask("sleep")
        self._inner.sleep()

    def wake(self) -> None:
        self._ask("wake")
        self._inner.wake()

    def _clear(self) -> None:
        self._inner._clear()


class CarelessEngine(ChildEngine):
    """The same engine, which lets the errors of its pipe through."""

    def _report(self, request: str) -> None:
        raise BrokenPipeError(f"during {request}")


def plan(
    file: Path, request: str, *, how: str = "kill", answers: int = 0, always: bool = False, hangs: str = ""
) -> None:
    """Let a child end in a request.

    Args:
        file: the file that CHILD names.
        request: the request.
        how: ``kill``, ``exit``, ``close`` for a closed pipe, or ``refuse`` for an answer that is an error.
        answers: such requests that are answered before.
        always: whether every child ends there, and not only the first.
        hangs: request in which later children hang.
    """
    told = {"request": request, "how": how, "answers": answers, "always": always, "hangs": hangs}
    file.write_text(json.dumps(told))
    Path(f"{file}.death").unlink(missing_ok=True)
