"""Ray's start: start a cluster of our own, or join one.

RayBackend ─┬─ no address ─> start_cluster(folder, ranks): daemons on this machine, in our own folder
            └─ address ────> join_cluster(address): a driver on a node that is up
"""

from __future__ import annotations

import logging
import os
import re
import socket
from contextlib import suppress
from pathlib import Path

import ray
import torch
from ray import exceptions as faults

from rillflow.errors import ClusterError
from rillflow.workers import nodes
from rillflow.workers.protection import warn_without_token
from rillflow.workers.signals import kept_by_driver

_REACH_S = 10.0
"""Seconds to wait for a reply of a cluster's head."""


def start_cluster(folder: Path, ranks: int) -> None:
    """Start a cluster of our own.

    Raises:
        ClusterError: one of Ray's daemons did not start in time.
    """
    try:
        with kept_by_driver():
            ray.init(
                num_cpus=max(ranks, os.cpu_count() or 1),
                num_gpus=torch.cuda.device_count(),
                include_dashboard=False,
                log_to_driver=True,
                logging_level=logging.WARNING,
                _temp_dir=str(folder / "r"),
            )
    except Exception as error:  # Ray raises exactly this class if a daemon is late
        if type(error) is not Exception:
            raise
        raise ClusterError(
            "Ray did not start on this machine",
            why=str(error),
            fix="check its load and free memory, and run the same command again",
        ) from None


def join_cluster(address: str) -> None:
    """Join a running cluster.

    Raises:
        ClusterError: nothing answers there, or this process cannot be part of the cluster.
    """
    host, _, port = address.rpartition(":")
    what = f"the cluster at {address} cannot be joined"
    fix = "check the address and ray status on that node; open every TCP port between the nodes"
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        if not _is_node():  # Ray would abort this process
            why = "Ray is not running on this machine, but a driver must run on a node of its cluster"
            raise ClusterError(what, why=why, fix=f"run ray start --address={address} first")
        fix = "use the same Python and Ray on all nodes; for a cluster with a token set RAY_AUTH_MODE=token"
        with kept_by_driver():
            ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
        warn_without_token(address)
    except (OSError, RuntimeError, ValueError, faults.RayError) as error:
        told = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
        why = told[-1] if any("Traceback" in line for line in told) else " ".join(told)
        raise ClusterError(what, why=why or type(error).__name__, fix=fix) from None


def _is_node() -> bool:
    """Return whether Ray is up on this machine; processes of neighbouring containers may be visible too."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended, or its address belongs to another machine
            if found := re.search(rb"raylet/raylet\0.*\0--node_ip_address=([^\0]+)", file.read_bytes(), re.S):
                nodes.listening(found[1].decode()).close()
                return True
    return False
