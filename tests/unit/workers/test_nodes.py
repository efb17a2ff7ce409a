"""Nodes of ranks: their order, the clock of a node, its interface, the store where a pool meets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rillflow.errors import ClusterError
from rillflow.workers.backend import Place
from rillflow.workers.nodes import (
    ProcessSeat,
    Seating,
    clock_ahead_s,
    hosted_store,
    joined_store,
    meet,
    require_room,
    seat_of,
    settle_interface,
    versions,
    warn_if_nice,
)


def seat(node: str, device: int = -1, shared_bytes: int = 2**30) -> ProcessSeat:
    return ProcessSeat(node=node, device=device, shared_bytes=shared_bytes, pid=os.getpid())


def test_ranks_count_the_nodes_in_turn_and_on_each_the_devices() -> None:
    came = [seat("10.0.0.10", 0), seat("10.0.0.9", 10), seat("10.0.0.9", 2), seat("10.0.0.10", 1)]
    ordered = sorted(came, key=lambda each: each.order)
    assert [(each.node, each.device) for each in ordered] == [
        ("10.0.0.9", 2),
        ("10.0.0.9", 10),
        ("10.0.0.10", 0),
        ("10.0.0.10", 1),
    ]


def test_a_seat_is_the_first_device_that_was_given_and_has_the_room_of_the_node() -> None:
    found = seat_of("10.0.0.9", ["7", "3"], versions())
    room = os.statvfs("/dev/shm")
    at = replace(
        seat("10.0.0.9", 3, room.f_blocks * room.f_frsize), niceness=os.getpriority(os.PRIO_PROCESS, 0)
    )
    assert found == at
    assert seat_of("10.0.0.9", [], {}).device == -1


def test_every_version_that_differs_is_named_with_both() -> None:
    driver = {**versions(), "python": "3.9.1", "torch": "1.0", "a package that is only there": "2"}
    with pytest.raises(ClusterError, match=r"node 10\.0\.0\.9 has other versions than the driver") as caught:
        seat_of("10.0.0.9", [], driver)
    here = versions()
    for name, theirs in (("torch", "1.0"), ("python", "3.9.1")):
        assert f"{name} {here[name]}, not {theirs}" in caught.value.what
    assert "numpy" not in caught.value.what and "only there" not in caught.value.what


def test_a_store_that_does_not_fit_in_shared_memory_is_refused() -> None:
    require_room(seat("10.0.0.9", shared_bytes=2**26), 2**26)
    with pytest.raises(ClusterError) as caught:
        require_room(seat("10.0.0.9", shared_bytes=2**26), 2**28)
    assert (
        caught.value.what == "/dev/shm of node 10.0.0.9 has 64.0 MiB, but Ray's object store needs 256.0 MiB"
    )


@pytest.mark.parametrize(("niceness", "is_warned"), [(-5, False), (0, False), (1, True), (15, True)])
def test_a_node_whose_ranks_give_way_to_other_programs_is_warned_about(
    niceness: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_nice(replace(seat("10.0.0.9"), niceness=niceness))
    said = f"ranks on node 10.0.0.9 run at niceness {niceness}: "
    assert (said in caplog.text and "RAY_worker_niceness=0 before ray start" in caplog.text) == is_warned
    assert is_warned or not caplog.records


def late(*delays_s: float, ahead_s: float) -> Callable[[], float]:
    """Return a clock that is ahead and answers after these delays, half of each on the way there."""
    waits = iter(delays_s)

    def ask() -> float:
        wait_s = next(waits)
        time.sleep(wait_s / 2)
        now = time.time() + ahead_s
        time.sleep(wait_s / 2)
        return now

    return ask


def test_a_clock_an_hour_ahead_is_found_by_its_quickest_answer() -> None:
    ask = late(0.2, 0.01, 0.1, 0.0, 0.05, ahead_s=3600.0)
    assert clock_ahead_s(ask) == pytest.approx(3600.0, abs=0.02)


def test_a_clock_off_by_more_than_half_the_way_there_and_back_is_off() -> None:
    assert clock_ahead_s(late(0.2, 0.2, 0.2, 0.2, 0.2, ahead_s=0.19)) == pytest.approx(0.19, abs=0.1)


def test_a_clock_within_the_way_there_and_back_counts_as_right() -> None:
    assert clock_ahead_s(late(0.1, 0.1, 0.1, 0.1, 0.1, ahead_s=0.01)) == 0.0
    assert clock_ahead_s(late(0.1, 0.1, 0.1, 0.1, 0.1, ahead_s=-0.3)) == pytest.approx(-0.3, abs=0.1)


def test_collectives_go_by_the_loopback_device_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "set by somebody")
    settle_interface("192.0.2.1")  # no interface has it
    assert os.environ["GLOO_SOCKET_IFNAME"] == "set by somebody"
    settle_interface("127.0.0.2")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def seating(port: int) -> Seating:
    return Seating(
        place=Place("main", 1),
        pool_size=2,
        index=1,
        size=2,
        host="127.0.0.1",
        port=port,
        backend="gloo",
        neighbours=1,
        ahead_s=0.0,
        deadline_s=20.0,
        collective_s=20.0,
        target=None,
    )


def test_a_store_is_on_a_port_of_the_nodes_address_alone_and_others_join_it() -> None:
    first, second = hosted_store("127.0.0.3", 2, 20.0), hosted_store("127.0.0.1", 2, 20.0)
    assert first.port != second.port
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", first.port), 1.0)
    joined = joined_store("127.0.0.1", seating(second.port))
    joined.set("said", "there")
    assert second.get("said") == b"there"
    elsewhere = TCPStore("127.0.0.3", first.port, 2, False, timedelta(seconds=20))
    assert elsewhere.check(["said"]) is False


def test_a_world_whose_ranks_do_not_come_names_the_node_and_the_pool() -> None:
    store = hosted_store("127.0.0.1", 2, 0.1)
    with pytest.raises(ClusterError) as caught:
        meet("10.0.0.9", replace(seating(store.port), collective_s=0.1), store)
    assert caught.value.what == "node 10.0.0.9 cannot reach every node of pool 'main'"
    assert "\n" not in caught.value.why and "open" in caught.value.fix


def test_a_node_that_cannot_be_reached_is_named_with_both_ends() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ClusterError, match=f"node 10.0.0.9 cannot reach node 127.0.0.1 at port {port}"):
        joined_store("10.0.0.9", seating(port))
