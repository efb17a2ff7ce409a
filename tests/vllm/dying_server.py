"""A Python for ``rollout.server`` whose real servers of vLLM end in requests of choice, one after the other.

wrapper script ─> the real Python, this file ─> the code it was given ─> server ─ ends in a request
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOWS = ("kill", "stop", "exit", "close")
"""Ways to end: SIGKILL, SIGSTOP, an exit status, a closed connection."""


def write_python(folder: Path, deaths: Mapping[str, int], *, how: str = "kill") -> Path:
    """Write a Python whose servers end in these requests, in order, and return its path.

    A server ends in the first request for which none has ended; of several servers, one does.

    Args:
        folder: folder of the Python.
        deaths: for each request, how many of them the server answers before.
        how: how a server ends.
    """
    plan = folder / "dies.json"
    plan.write_text(json.dumps({"deaths": [*deaths.items()], "how": how}))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -E -P "{__file__}" "{plan}" "$@"\n')
    python.chmod(0o755)
    return python


def _end(channel: Any, how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        os.write(2, b"ValueError: the room is full\n")
        os._exit(3)
    channel._socket.shutdown(socket.SHUT_RDWR)  # close() would wait for the thread that polls it
    time.sleep(600)


def _main(plan: Path, code: str, package: str) -> None:
    told, seen = json.loads(plan.read_text()), 0
    number = len([*plan.parent.glob(f"{plan.name}.death-*")])
    request, answers = [*told["deaths"], ("", 0)][number]
    sys.path.insert(0, str(Path(package).parent))
    from rillflow_parts.vllm import server
    from rillflow_parts.vllm.requests import Word

    answer = server._Answers.of

    def of(self: Any, message: Any) -> Any:
        nonlocal seen
        is_due = Word(message.kind).name.lower() == request
        if is_due and seen >= answers:
            try:
                Path(f"{plan}.death-{number}").open("x").close()
                _end(self._channel, told["how"])
            except FileExistsError:
                pass
        seen += is_due
        return answer(self, message)

    server._Answers.of = of  # type: ignore[method-assign]
    exec(code, {"__name__": "__main__"})  # noqa: S102  the code that the interpreter was given


if __name__ == "__main__":
    place = sys.argv.index("-c")
    own, given = sys.argv[1], sys.argv[place + 1]
    sys.argv = ["-c", *sys.argv[place + 2 :]]
    if "vllm.server" in given:
        _main(Path(own), given, sys.argv[1])
    else:  # the run asks for vLLM's release
        exec(given, {"__name__": "__main__"})  # noqa: S102
