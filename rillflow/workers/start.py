"""Start: create the backend that the settings select, and open its pools.

on Ray:
recipe ─> address ─┬─ none: a cluster of our own, on the loopback device, with a token
                   └─ given: joined with its own protection
                         └─> set in environment variables, which Ray reads at import, then opened
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rillflow.errors import ClusterError, ConfigError, install_package
from rillflow.workers.backend import Backend, Pool
from rillflow.workers.config import PlacementConfig
from rillflow.workers.inline import InlineBackend

if TYPE_CHECKING:
    from rillflow.workers.fork_server import ForkServer
    from rillflow.workers.ray import RayBackend

_OWN = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Protection of a cluster of our own; the second variable, despite its name, keeps all ports on loopback."""
_EVERY = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_prestart_worker_first_driver": "0",  # idle processes, one per core, never used
    "RAY_worker_niceness": "0",  # with Ray's default of 15, ranks starve next to other programs
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # a reader of a result gets its error
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # it would abort the driver on SIGTERM
}
_AT_START = ("RAY_", "LD_", "PYTHON")
"""Beginnings of variables that a process of Ray reads before it becomes a rank."""
_OF_NODE = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PATH", "TMPDIR")
"""Variables that Ray or Rillflow sets for each rank, or that belong to its node."""


def start_backend(
    config: PlacementConfig,
    pools: Sequence[Pool],
    device: str,
    own: Callable[[float], Backend] | None = None,
    forks: ForkServer | None = None,
) -> Backend:
    """Return an open backend; the caller closes it.

    Args:
        config: placement settings.
        pools: the pools.
        device: see ``Backend.open``.
        own: makes another backend from the longest wait in seconds; None for that of the settings.
        forks: see ``ProcessBackend``.

    Raises:
        ClusterError: Ray is not installed, a cluster cannot be joined, or a pool does not fit.
    """
    backend: Backend
    if own is not None:
        backend = own(config.deadline_s)
    elif config.is_inline:
        backend = InlineBackend(config.deadline_s, load_s=config.load_s)
    elif config.backend == "process":
        from rillflow.workers.processes import ProcessBackend

        times = {"start_s": config.start_s, "load_s": config.load_s, "heartbeat_s": config.heartbeat_s}
        backend = ProcessBackend(config.deadline_s, **times, forks=forks)
    elif find_spec("ray") is None:
        ranks = sum(config.pools.values())
        raise ClusterError(
            f"the pools have {ranks} ranks, which need Ray, but Ray is not installed",
            why="several ranks run in several processes; inline they would share one interpreter",
            fix=f'{install_package("ray")}, or set placement.backend = "process"',
        )
    else:
        backend = ray_backend(
            config.deadline_s,
            config.address,
            start_s=config.start_s,
            load_s=config.load_s,
            heartbeat_s=config.heartbeat_s,
            variables=passed_variables(config.env),
        )
    backend.open(pools, device)
    return backend


def ray_backend(
    deadline_s: float = 3600.0,
    address: str | None = None,
    *,
    start_s: float = 60.0,
    load_s: float = 0.0,
    heartbeat_s: float = 5.0,
    variables: Mapping[str, str] | None = None,
) -> RayBackend:
    """Return a backend on Ray; this function imports Ray.

    Args:
        deadline_s: longest wait of a rank for another one's result.
        address: see ``settle``.
        start_s: see RayBackend, as for the other two.
        load_s: longest time to make a role.
        heartbeat_s: silence of a rank after which it is lost; 0: no heartbeats.
        variables: see RayBackend.

    Raises:
        ClusterError: see ``settle``.
    """
    address = settle(address)
    from rillflow.workers.ray import RayBackend

    times = {"start_s": start_s, "load_s": load_s, "heartbeat_s": heartbeat_s}
    return RayBackend(deadline_s, address=address, **times, variables=variables)


def passed_variables(names: Sequence[str]) -> dict[str, str]:
    """Return this process's values of the variables that ``placement.env`` names.

    Raises:
        ConfigError: a variable is not set here, or a rank cannot get it.
    """
    for name in names:
        what = f"placement.env has {name!r}"
        if not name.isidentifier():
            raise ConfigError(what, why="it is no name of a variable", fix='write names: ["HF_HOME"]')
        if name.startswith(_AT_START) or name in _OF_NODE:
            raise ConfigError(
                what,
                why="it belongs to a node, or a process reads it before it becomes a rank",
                fix="remove it, and export it before ray start on every node",
            )
        if name not in os.environ:
            raise ConfigError(
                f"{what}, which is not set here",
                why="ranks get the values of this shell",
                fix=f"export {name}, or remove it from placement.env",
            )
    return {name: os.environ[name] for name in names}


def settle(address: str | None = None) -> str | None:
    """Set the variables that Ray reads at import; return the address of the cluster to join, if any.

    Args:
        address: address of a running cluster; None: RAY_ADDRESS, or without it a cluster of our own.

    Raises:
        ClusterError: Ray was imported before for the other kind of cluster, or the address is a Ray client's.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    address = None if address == "local" else address
    if address is not None and "://" in address:
        raise ClusterError(
            f"placement.address is {address}",
            why="a Ray client runs outside the cluster, but the driver must run on one of its nodes",
            fix="run the driver on a node, for example with ray job submit, and set host:port or auto",
        )
    is_own = {name: os.environ.get(name) == value for name, value in _OWN.items()}
    if "ray" in sys.modules and address is None and not all(is_own.values()):
        raise ClusterError(
            "ray was imported before Rillflow could turn its authentication on",
            why="ray decides at import whether a cluster needs a token",
            fix="import ray later, or first set RAY_AUTH_MODE=token and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0",
        )
    if "ray" in sys.modules and address is not None and is_own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]:
        raise ClusterError(
            f"this process cannot join the cluster at {address}",
            why="it started a cluster of its own before, so its Ray only uses the loopback device",
            fix="join the cluster from a new process",
        )
    for name, value in {**_EVERY, **(_OWN if address is None else {})}.items():
        os.environ.setdefault(name, value)
    if address is not None:
        os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)  # inherited from a process with its own
    return address
