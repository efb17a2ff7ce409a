"""The watch over programs of one namespace, without a namespace."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rillflow.rewards.program_watch import ProgramWatch


def test_a_watch_of_a_namespace_that_has_ended_polls_and_closes_nothing_more() -> None:
    control, sender = socket.socketpair()
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    watch = ProgramWatch(first=nobody, control=control)
    reading, writing = os.pipe()
    with sender:
        socket.send_fds(sender, [b"watch"], [reading])
        watch.advance({control.fileno()})
        (listener,) = watch.descriptors()
        watch.advance({listener})
    assert watch.descriptors() == []
    os.dup2(writing, listener)  # the number belongs to another file now
    watch.close()
    os.fstat(listener)
    for descriptor in (reading, writing, listener):
        os.close(descriptor)
