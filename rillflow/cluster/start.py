"""Start: the backend that the settings ask for, its pools open.

recipe ─> address ─┬─ none: a cluster of our own, on the loopback device, behind a token
                   └─ one: joined with whatever protection it has
                         └─> settled in the environment, where Ray reads it when it is imported, then
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rillflow.cluster.backend import Backend, Pool
from rillflow.cluster.config import PlacementConfig
from rillflow.cluster.inline import InlineBackend
from rillflow.cluster.signals import ENVIRONMENT
from rillflow.errors import ClusterError

if TYPE_CHECKING:
    from rillflow.cluster.ray import RayBackend

_OWN = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""What protects a cluster of our own; despite its name the second keeps every port on the loopback device."""
_EVERY = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_prestart_worker_first_driver": "0",  # idle processes, one a core, never used
    "RAY_worker_niceness": "0",  # at Ray's 15 ranks starve beside other programs
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # whoever reads a result gets its error
    **ENVIRONMENT,
}


def start_backend(config: PlacementConfig, pools: Sequence[Pool], device: str) -> Backend:
    """An open backend; whoever asks for it closes it.

    Args:
        config: what runs the pools.
        pools: the ranks.
        device: see ``Backend.open``.

    Raises:
        ClusterError: Ray is not installed, a cluster cannot be joined, or a pool does not fit.
    """
    backend: Backend
    if config.is_inline:
        backend = InlineBackend(config.deadline_s)
    elif find_spec("ray") is None:
        ranks = sum(config.pools.values())
        raise ClusterError(
            f"the pools have {ranks} ranks, which run on Ray, and Ray is not installed",
            why="several ranks are several processes; inline they would share one interpreter",
            fix="pip install 'rillflow[ray]', or set placement.backend = \"inline\"",
        )
    else:
        backend = ray_backend(config.deadline_s, config.address)
    backend.open(pools, device)
    return backend


def ray_backend(deadline_s: float = 3600.0, address: str | None = None) -> RayBackend:
    """A backend on Ray, which is imported here.

    Args:
        deadline_s: how long a rank waits for another one's result.
        address: see ``settle``.

    Raises:
        ClusterError: see ``settle``.
    """
    address = settle(address)
    from rillflow.cluster.ray import RayBackend

    return RayBackend(deadline_s, address=address)


def settle(address: str | None = None) -> str | None:
    """Set in the environment what Ray reads there when it is imported; the cluster to join, if any.

    Args:
        address: of a running cluster; None is RAY_ADDRESS's, or where there is none a cluster of our own.

    Raises:
        ClusterError: Ray was imported before, for a cluster of the other kind, or the address is a client's.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    address = None if address == "local" else address
    if address is not None and "://" in address:
        raise ClusterError(
            f"placement.address is {address}",
            why="a Ray client is on no node of the cluster, and the driver has to be on one",
            fix="run it there, for example with ray job submit, with host:port or auto",
        )
    is_own = {name: os.environ.get(name) == value for name, value in _OWN.items()}
    if "ray" in sys.modules and address is None and not all(is_own.values()):
        raise ClusterError(
            "ray was imported before Rillflow could ask it for protection",
            why="whether a cluster wants a token is settled when ray is imported",
            fix="import it later, or set RAY_AUTH_MODE=token and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before",
        )
    if "ray" in sys.modules and address is not None and is_own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]:
        raise ClusterError(
            f"this process cannot join the cluster at {address}",
            why="it has had one of its own, so Ray keeps to the loopback device here",
            fix="join it from another process",
        )
    for name, value in {**_EVERY, **(_OWN if address is None else {})}.items():
        os.environ.setdefault(name, value)
    if address is not None:
        os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)  # inherited from a process with its own
    return address
