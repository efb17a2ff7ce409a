"""Process child: a child process that steps some of the slots of a vector environment.

commands ── stdin ─> lanes ─> shared rows          answers ── the pipe that was stdout ─> parent

consumes      commands: the buffer to write, whether to reset, a seed
waits for     the next command
unblocked by  a command; the end of the pipe, also while an environment hangs
produces      one byte for each command, or an error and its end
shuts down    healthy: the parent closes the pipe; crash: the parent sees the end of the answers
"""

from __future__ import annotations

import json
import os
import select
import struct
import sys
import threading

from rillflow.errors import ConfigError, RillflowError
from rillflow_classic.environments.catalog import find, make_lane
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.inline import LaneGroup
from rillflow_classic.environments.shared_rows import SharedRows

COMMAND = struct.Struct("<BBQ")
"""Buffer to write, whether to reset, seed of the reset."""
DONE = b"."
"""Answer to a command that succeeded; an error is JSON."""


def serve(text: str) -> None:
    """Step slots until the parent closes stdin; ``text`` is what the parent says about them, as JSON."""
    answers = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    told = json.loads(text)
    try:
        _work(told, answers)
    except RillflowError as error:
        sentences = {"what": error.what, "why": error.why, "fix": error.fix}
        kind = "config" if isinstance(error, ConfigError) else "failure"
        os.write(answers, json.dumps({"kind": kind, **sentences}).encode())


def _work(told: dict[str, int], answers: int) -> None:
    config = EnvironmentSettings.model_validate_json(json.dumps(told["config"]))
    entry, first, width = find(config), told["first"], told["width"]
    lanes = [make_lane(config, entry, (first + index) * width) for index in range(told["lanes"])]
    group = LaneGroup(lanes, first)
    shared = SharedRows(
        lanes[0].observation_space, lanes[0].action_space, told["slots"], descriptor=told["descriptor"]
    )
    start, count = first * width, len(lanes) * width
    parts = [group.split(rows.part(start, count)) for rows in shared.buffers]
    actions = shared.actions[start : start + count]
    os.write(answers, DONE)
    while command := os.read(0, COMMAND.size):
        buffer, is_reset, seed = COMMAND.unpack(command)
        if is_reset:
            group.begin(seed, parts[buffer])
        else:
            group.step(actions, parts[buffer])
        os.write(answers, DONE)
    group.close()


def _end_with_parent() -> None:
    """End this process when the parent has closed the pipe or died, even if an environment hangs."""
    poller = select.poll()
    poller.register(0, 0)
    poller.poll()
    threading.Event().wait(1.0)
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
