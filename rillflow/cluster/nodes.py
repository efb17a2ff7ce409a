"""Nodes: the machines that ranks have been put on, and how ranks find each other there.

    rank's process ── ProcessSeat: node, device, room ──> driver ── by node, then device ──> its rank
           │                                         └── rank 0 of a pool hosts a store on a free port
           └── refused in the process itself: versions that are not the driver's

What a process hears before its versions are compared (how it is made, and ``seat``) stays as it is from
version to version.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import platform
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rillflow.cluster.backend import Place
from rillflow.cluster.ranks import ProcessRanks, Ranks, SingleRank
from rillflow.errors import ClusterError
from rillflow.observe.environment import installed_versions, own_version
from rillflow.observe.wording import size as bytes_text

ALIKE = "install the same on every node: one image, or one environment on a shared disk"
"""What to do about a node that runs other code."""
_BETWEEN = "the ranks of a pool speak to each other without Ray"
_OPEN = (
    "let every TCP port through between the nodes; with several networks, ray start --node-ip-address takes "
    "the one that they share"
)
REACH_S = 30.0
"""How long a rank tries to reach another node."""
_LOOKS = 5
"""How often a node is asked for its time; the quickest answer counts."""
_ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of Linux."""


@dataclass(frozen=True, kw_only=True)
class ProcessSeat:
    """Where a rank's process has been put.

    Example:
        ProcessSeat(node="10.0.0.2", device=3, shared_bytes=64 * 2**30)
    """

    node: str
    """The node's address."""
    device: int
    """The first accelerator it was given there, -1 for none."""
    shared_bytes: int
    """The size of the node's /dev/shm."""

    @property
    def order(self) -> tuple[int, int]:
        """By node, then by device."""
        return int(ipaddress.ip_address(self.node)), self.device


@dataclass(frozen=True, kw_only=True)
class Seating:
    """What a process is told when it becomes a rank."""

    place: Place
    """The rank."""
    size: int
    """Ranks of its pool."""
    host: str
    """The address of rank 0's node."""
    port: int
    """Where rank 0 hosts the store that the pool meets at; 0 where there is no other rank."""
    backend: str
    """What torch.distributed goes by: ``gloo``, with tensors on accelerators ``cpu:gloo,cuda:nccl``."""
    neighbours: int
    """Ranks of all pools on this node, itself among them: they share its cores."""
    ahead_s: float
    """Seconds by which this node's clock is ahead of the driver's."""
    deadline_s: float
    """How long a rank waits for another one."""


def seat_of(node: str, devices: list[str], driver: Mapping[str, str]) -> ProcessSeat:
    """This process's seat.

    Args:
        node: the node's address.
        devices: the accelerators it was given, as Ray numbers them.
        driver: the versions of the driver's packages.

    Raises:
        ClusterError: a package of both has another version here.
    """
    here = versions()
    both = [name for name in driver if name in here]
    odd = [f"{name} {here[name]}, not {driver[name]}" for name in both if here[name] != driver[name]]
    if odd:
        raise ClusterError(
            f"node {node} has other versions than the driver: {'; '.join(odd)}",
            why="ranks that compute or speak in other ways give other numbers, or none",
            fix=ALIKE,
        )
    room = os.statvfs("/dev/shm")
    found = [int(device) for device in devices if device.isdigit()]
    return ProcessSeat(node=node, device=min(found, default=-1), shared_bytes=room.f_blocks * room.f_frsize)


def versions() -> dict[str, str]:
    """What has to be the same on every node; builds for other devices count as one version."""
    found = {name: str(version).split("+")[0] for name, version in installed_versions().items()}
    return {**found, "python": platform.python_version(), "rillflow": own_version()}


def require_room(seat: ProcessSeat, store_bytes: float) -> None:
    """Refuse a node whose object store does not fit in its shared memory.

    Raises:
        ClusterError: the store is in files of /tmp.
    """
    if seat.shared_bytes < store_bytes:
        has, wanted = bytes_text(seat.shared_bytes), bytes_text(int(store_bytes))
        raise ClusterError(
            f"/dev/shm of node {seat.node} has {has}, and Ray's object store there {wanted}",
            why="the store is then in files of /tmp, and every batch goes over the disk",
            fix="docker run --shm-size, an emptyDir of medium Memory at /dev/shm, "
            "or ray start --object-store-memory with less",
        )


def clock_ahead_s(ask: Callable[[], float]) -> float:
    """Seconds by which a node's clock is ahead of this process's; 0 where the way there and back hides them.

    Args:
        ask: brings the node's seconds since the epoch.
    """
    looks = []
    for _ in range(_LOOKS):
        began, theirs, ended = time.time(), ask(), time.time()
        looks.append(((ended - began) / 2, theirs - (began + ended) / 2))
    doubt_s, ahead_s = min(looks)
    return ahead_s if abs(ahead_s) > doubt_s else 0.0


def settle_interface(node: str) -> None:
    """Let collectives go by the interface that has the node's address; whoever set another one is heeded."""
    there = "lo" if ipaddress.ip_address(node).is_loopback else _interface_of(node)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if there == "lo":
            os.environ[name] = there
        elif there:
            os.environ.setdefault(name, there)


def _interface_of(node: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                said = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(said[20:24]) == node:
                return name
    return ""


def listening(node: str) -> socket.socket:
    """A port of this machine that was free, on the node's address.

    Raises:
        OSError: this machine has not that address.
    """
    return socket.create_server((node, 0), family=socket.AF_INET6 if ":" in node else socket.AF_INET)


def hosted_store(node: str, size: int, deadline_s: float) -> TCPStore:
    """A store that so many ranks meet at, on this node's address alone and on a port that was free."""
    with listening(node) as found:
        port, held = found.getsockname()[1], found.detach()
    wait = timedelta(seconds=deadline_s)
    return TCPStore(node, port, size, True, wait, wait_for_workers=False, master_listen_fd=held)


def joined_store(here: str, seating: Seating) -> TCPStore:
    """The store that rank 0 hosts.

    Raises:
        ClusterError: its node cannot be reached from here.
    """
    try:
        socket.create_connection((seating.host, seating.port), REACH_S).close()
    except OSError as error:
        what = f"node {here} cannot reach node {seating.host} at port {seating.port}"
        raise ClusterError(what, why=f"{error}; {_BETWEEN}", fix=_OPEN) from None
    wait = timedelta(seconds=seating.deadline_s)
    return TCPStore(seating.host, seating.port, seating.size, False, wait)


def meet(here: str, seating: Seating, store: TCPStore | None) -> Ranks:
    """This rank among those of its pool.

    Args:
        here: this node's address.
        seating: what the driver has told.
        store: what this rank hosts, if it is rank 0.

    Raises:
        ClusterError: the nodes of the pool do not all reach each other.
    """
    if seating.size == 1:
        return SingleRank()
    found = store or joined_store(here, seating)
    rank, size, backend = seating.place.rank, seating.size, seating.backend
    try:
        return ProcessRanks.join(rank, size, found, backend, seating.deadline_s)
    except RuntimeError as error:
        told = str(error).splitlines()[0]
        what = f"node {here} does not reach every node of pool {seating.place.pool!r}"
        raise ClusterError(what, why=f"{told}; {_BETWEEN}", fix=_OPEN) from None
