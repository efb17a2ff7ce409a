"""Liveness: silence of real processes, distinguished from a busy listener, and the fence that ends a rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, Queue

import pytest

from rillflow.errors import ClusterError
from rillflow.workers.backend import Place, RankLost
from rillflow.workers.liveness import BEAT_S, TICK_S, Heartbeats, HeartbeatTarget, Silence, beat, fence_s

HEARTBEAT_S = 2.0
BOUND_S = 30.0
"""A deadline far above any duration, also on a loaded machine."""
PLACE = Place("answers", 1)
RANK = """
import json, sys, time
from rillflow.workers.backend import Place
from rillflow.workers.liveness import HeartbeatTarget, beat
given = json.loads(sys.argv[1])
beat(Place("answers", 1), HeartbeatTarget(**given | {"token": bytes.fromhex(given["token"])}))
print("up", flush=True)
exec(sys.argv[2])
"""
DRIVER = """
import time
from rillflow.workers.backend import Place
from rillflow.workers.liveness import Heartbeats
beats = Heartbeats("127.0.0.1", 2.0)
lost = lambda reason: print("lost", flush=True)
target = beats.watch(Place("answers", 1), lost, node="127.0.0.1")
print(target.port, target.token.hex(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yield a function that starts Python programs, which end with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *arguments]
        made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(made)
        return made

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def beats() -> Iterator[Heartbeats]:
    made = Heartbeats("127.0.0.1", HEARTBEAT_S)
    yield made
    made.close()


def rank_not_awaited(
    started: Callable[..., subprocess.Popen[str]], target: HeartbeatTarget, doing: str = "time.sleep(600)"
) -> subprocess.Popen[str]:
    return started(RANK, json.dumps({**vars(target), "token": target.token.hex()}), doing)


def rank_of(
    started: Callable[..., subprocess.Popen[str]], target: HeartbeatTarget, doing: str = "time.sleep(600)"
) -> subprocess.Popen[str]:
    process = rank_not_awaited(started, target, doing)
    assert process.stdout is not None and process.stdout.readline() == "up\n", process.communicate()[1]
    return process


def test_only_silence_while_the_listener_is_on_time_counts() -> None:
    silence = Silence()
    assert silence.add(TICK_S) == TICK_S
    assert silence.add(3600.0) == 3 * TICK_S, "the listener was stopped for an hour, not the rank"
    silence.hear()
    assert silence.add(0.1) == pytest.approx(0.1)


def test_a_fence_is_later_than_the_loss() -> None:
    assert all(fence_s(heartbeat_s) > 2 * heartbeat_s for heartbeat_s in (0.1, 5.0, 600.0))


@pytest.mark.parametrize("is_local", [True, False])
def test_a_stopped_rank_is_lost_and_ends_when_it_goes_on(
    beats: Heartbeats, started: Callable[..., subprocess.Popen[str]], is_local: bool
) -> None:
    """The error names the stopped process if it is on this machine."""
    losses = Queue[RankLost]()
    target = beats.watch(PLACE, losses.put, node="10.0.0.7")
    process = rank_of(started, target)
    if is_local:
        beats._watched[target.token].local_pid = process.pid
    with pytest.raises(Empty):
        losses.get(timeout=2 * HEARTBEAT_S)
    process.send_signal(signal.SIGSTOP)
    reason = losses.get(timeout=BOUND_S)
    assert "its process is stopped" in reason.what
    assert (f"process {process.pid}" if is_local else "node 10.0.0.7 answers TCP probes") in reason.why
    process.send_signal(signal.SIGCONT)
    assert process.wait(BOUND_S) == 1, "a process that was given up does not live on"
    assert losses.empty(), "it is lost once"


def test_a_rank_here_that_holds_the_interpreter_is_busy_and_not_lost(
    beats: Heartbeats, started: Callable[..., subprocess.Popen[str]]
) -> None:
    """One regular expression holds the GIL for longer than the heartbeat, so none of its threads can send."""
    losses = Queue[RankLost]()
    target = beats.watch(PLACE, losses.put, node="127.0.0.1")
    holding = "import re; re.match('(a+)+b', 'a' * 60)"
    process = rank_of(started, target, holding)
    watched = beats._watched[target.token]
    watched.local_pid = process.pid
    until = time.monotonic() + BOUND_S
    while watched.silence.seconds < 1.5 * HEARTBEAT_S and time.monotonic() < until:
        time.sleep(0.1)
    assert watched.silence.seconds >= 1.5 * HEARTBEAT_S, "the lock was not held; the test shows nothing"
    assert losses.empty()
    watched.local_pid = 0  # processes on another node cannot be inspected
    assert "holds Python's interpreter lock" in losses.get(timeout=BOUND_S).why


@pytest.mark.slow
def test_a_rank_ends_with_its_driver_but_not_because_the_driver_is_stopped(
    started: Callable[..., subprocess.Popen[str]],
) -> None:
    """Ctrl-Z may stop a driver for any time; its kernel still accepts data."""
    driver = started(DRIVER)
    assert driver.stdout is not None
    port, token = driver.stdout.readline().split()
    target = HeartbeatTarget(
        host="127.0.0.1", port=int(port), token=bytes.fromhex(token), fence_s=HEARTBEAT_S
    )
    process = rank_of(started, target)
    driver.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(4 * HEARTBEAT_S)
    driver.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):  # messages sent meanwhile have been received
        process.wait(2 * HEARTBEAT_S)
    driver.kill()
    assert "lost" not in driver.communicate()[0]
    assert process.wait(BOUND_S) == 1
    assert "the driver has ended" in process.communicate()[1]


def test_a_late_process_of_a_rank_is_refused_counted_and_ends(
    beats: Heartbeats, started: Callable[..., subprocess.Popen[str]]
) -> None:
    """Its rank was replaced before its first message, or while it ran."""
    losses = Queue[RankLost]()
    late, present = (beats.watch(PLACE, losses.put, node="127.0.0.1") for _ in range(2))
    beats.forget(late)
    process, other = rank_not_awaited(started, late), rank_of(started, present)
    assert process.wait(BOUND_S) == 1 and beats.refused == 1
    assert other.poll() is None
    beats.forget(present)
    assert other.wait(BOUND_S) == 1 and losses.empty()


def test_a_rank_that_dies_is_not_told_here(
    beats: Heartbeats, started: Callable[..., subprocess.Popen[str]]
) -> None:
    """Ray reports deaths sooner and with more detail."""
    losses = Queue[RankLost]()
    process = rank_of(started, beats.watch(PLACE, losses.put, node="127.0.0.1"))
    process.kill()
    with pytest.raises(Empty):
        losses.get(timeout=2 * HEARTBEAT_S)
    assert beats._watched == {}


def test_strangers_are_refused_and_heard_no_further(beats: Heartbeats) -> None:
    host, port = beats._door.getsockname()[:2]
    with socket.create_connection((host, port), 5) as stranger:
        stranger.settimeout(BOUND_S)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):  # it had sent more than was read
            assert stranger.recv(1) == b""
    assert beats.refused == 1


def test_a_driver_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = HeartbeatTarget(host="127.0.0.1", port=port, token=os.urandom(16), fence_s=30.0)
    with pytest.raises(ClusterError, match=f"rank 1 of pool 'answers' cannot reach the driver .* {port}"):
        beat(PLACE, target)


def test_a_rank_sends_often_enough() -> None:
    assert BEAT_S + TICK_S < 1.0, "a heartbeat_s of one second is met by a rank that lives"
