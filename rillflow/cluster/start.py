"""Start: the backend that the settings ask for, its pools open."""

from __future__ import annotations

from importlib.util import find_spec

from rillflow.cluster.backend import Backend, Pool
from rillflow.cluster.config import PlacementConfig
from rillflow.cluster.inline import InlineBackend
from rillflow.errors import ClusterError


def start_backend(config: PlacementConfig, *, devices: int) -> Backend:
    """An open backend; whoever asks for it closes it.

    Args:
        config: pools, and what runs them.
        devices: accelerators of each rank.

    Raises:
        ClusterError: Ray is not installed, or a pool does not fit.
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
        from rillflow.cluster.ray import RayBackend

        backend = RayBackend(config.deadline_s, address=config.address, devices=devices)
    backend.open([Pool(name=name, size=size) for name, size in config.pools.items()])
    return backend
