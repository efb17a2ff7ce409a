"""Ray: every rank is an actor process of its own, on this machine or on others.

    driver ── placement group a pool ──> RankProcess 0, 1, ...     one call at a time, in order
       │                                      │ results: Ray's object store of the machine they are made on
       └── references only                    └ a tensor travels as the memory it is, read without a copy

A cluster that we start ourselves listens on 127.0.0.1 alone and asks for a token; it ends with us. One
that is there already (``address``) is joined with whatever protection it has.

Loop of a rank's process
    consumes      calls submitted to it, in order
    waits for     the objects its arguments refer to
    unblocked by  the ranks that make them, or the error that ended them
    produces      objects
    shuts down    healthy: ``close`` kills it. It dies with the driver
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from rillflow.cluster.backend import Site, Traffic, Work
from rillflow.cluster.pool import Place, Pool, places
from rillflow.cluster.ranks import Alone, ProcessRanks, Ranks
from rillflow.errors import ClusterError

if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
    raise ClusterError(
        "ray was imported before Rillflow could ask it for protection",
        why="whether a cluster wants a token is settled when ray is imported",
        fix="import rillflow.cluster.ray first, or set RAY_AUTH_MODE=token in the environment",
    )
# Read when ray is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # whoever reads a result gets its error
if "RAY_ADDRESS" not in os.environ:
    # Despite its name this is what keeps every port of a cluster of one machine on the loopback device.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

MAX_ARGUMENT_BYTES = 16 * 2**20
"""An option larger than this is data, and data travel as batches."""
_CLOSE_S = 3.0
"""How long ranks have to close what is open on them before they are killed."""
_START_S = 60.0
"""How long the ranks of a pool may take to be scheduled and to start."""


class RayBackend:
    """Runs calls on Ray actors.

    Args:
        deadline_s: how long a rank waits for another one's result.
        address: of a running cluster; None starts one on this machine, unless RAY_ADDRESS names one.
        devices: accelerators of each rank.
    """

    def __init__(self, deadline_s: float = 3600.0, *, address: str | None = None, devices: int = 0) -> None:
        self.traffic = Traffic()
        self.pools: dict[str, int] = {}
        self._deadline_s = deadline_s
        self._address = address
        self._devices = devices
        self._ranks: dict[Place, Any] = {}
        self._groups: list[Any] = []
        self._meetings = tempfile.TemporaryDirectory(prefix="rillflow-ranks-")
        self._started = False

    def open(self, pools: Sequence[Pool]) -> None:
        """See Backend."""
        found = places(pools)
        self._join(len(found))
        register_tensors()
        try:
            self._fit(pools)
            for pool in pools:
                self._start(pool, len(found))
            self._await_all()
            self.pools = {pool.name: pool.size for pool in pools}
        except BaseException:
            self.close()
            raise

    def pack(self, value: Any, what: str) -> Any:
        """See Backend."""
        try:
            packed = ray.cloudpickle.dumps(value)
        except Exception as error:  # noqa: BLE001  whatever an argument's own pickling raises
            raise _cannot_travel(what + _heaviest(value), error) from None
        if len(packed) > MAX_ARGUMENT_BYTES:
            raise ClusterError(
                f"{what}{_heaviest(value)} takes {len(packed) / 2**20:.0f} MiB",
                why=f"options travel with every call: {MAX_ARGUMENT_BYTES / 2**20:.0f} MiB at most",
                fix="put large data into a batch: its rows go where they are needed, once",
            )
        self.traffic.sent_bytes += len(packed)
        return _Packed(packed)

    def submit(self, place: Place, work: Work, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """See Backend."""
        self.traffic.calls += 1
        run = self._ranks[place].run.options(num_returns=results)
        try:
            made = run.remote(work, arguments)
        except TypeError as error:  # Ray tells at length what it could not turn into bytes
            raise _cannot_travel("something a call needs", error.__cause__ or error) from None
        return (made,) if results == 1 else tuple(made)

    def read(self, reference: Any, deadline_s: float) -> Any:
        """See Backend."""
        try:
            return ray.get(reference, timeout=deadline_s)
        except GetTimeoutError:
            raise TimeoutError from None
        except RayTaskError as error:
            _raise_cause(error)
        except RayActorError as error:
            raise self._dead(error) from None

    def is_ready(self, reference: Any) -> bool:
        """See Backend."""
        return bool(ray.wait([reference], timeout=0)[0])

    def close(self) -> None:
        """See Backend."""
        if self._ranks:  # without one, asking Ray for anything would start it again
            with suppress(RayError):  # a rank that is busy or dead cannot close; it is killed all the same
                ray.get([rank.close.remote() for rank in self._ranks.values()], timeout=_CLOSE_S)
        for rank in self._ranks.values():
            ray.kill(rank)
        for group in self._groups:
            remove_placement_group(group)
        self.pools.clear()
        self._ranks.clear()
        self._groups.clear()
        self._meetings.cleanup()
        if self._started:
            ray.shutdown()
            self._started = False

    def _join(self, ranks: int) -> None:
        """Join a cluster, or start one for so many ranks: they share the cores, whatever their number."""
        if ray.is_initialized():
            return
        address = self._address or os.environ.get("RAY_ADDRESS")
        if address is not None:
            ray.init(address=address, log_to_driver=True)
        else:
            ray.init(
                num_cpus=max(ranks, os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=True,
                logging_level=logging.WARNING,
            )
        self._started = True

    def _fit(self, pools: Sequence[Pool]) -> None:
        there = ray.cluster_resources()
        for kind, each in (("CPU", 1), ("GPU", self._devices)):
            wanted = sum(pool.size for pool in pools) * each
            if wanted > there.get(kind, 0):
                listed = ", ".join(f"{pool.name} {pool.size}" for pool in pools)
                raise ClusterError(
                    f"the pools ({listed}) take {wanted} {kind}s, and the cluster has {there.get(kind, 0):g}",
                    why=f"{wanted - there.get(kind, 0):g} are missing; every rank takes {each}",
                    fix="make a pool smaller, let roles share one, or add machines to the cluster",
                )

    def _start(self, pool: Pool, ranks: int) -> None:
        bundle = {"CPU": 1.0} | ({"GPU": float(self._devices)} if self._devices else {})
        group = placement_group([bundle] * pool.size, strategy="PACK")
        self._groups.append(group)
        if not group.wait(_START_S):
            raise ClusterError(
                f"pool {pool.name!r} of {pool.size} was not scheduled in {_START_S:g} s",
                why=f"free in the cluster: {ray.available_resources()}",
                fix="end what else runs on the cluster, or make the pool smaller",
            )
        meeting = str(Path(self._meetings.name) / pool.name)
        threads = max(1, (os.cpu_count() or 1) // ranks)
        actor = ray.remote(RankProcess)
        for rank in range(pool.size):
            self._ranks[Place(pool.name, rank)] = actor.options(
                num_cpus=1,
                num_gpus=self._devices,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}},
            ).remote(Place(pool.name, rank), pool.size, meeting, self._deadline_s, sys.path)

    def _await_all(self) -> None:
        end = time.monotonic() + _START_S
        for place, rank in self._ranks.items():
            try:
                self.read(rank.is_up.remote(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                raise ClusterError(
                    f"{place} did not start in {_START_S:g} s",
                    why="its process is not there, or imports still",
                ) from None

    def _dead(self, error: RayActorError) -> ClusterError:
        lost = [str(place) for place, rank in self._ranks.items() if rank._actor_id.hex() == error.actor_id]
        return ClusterError(
            f"{lost[0] if lost else 'a rank'} has died",
            why=str(error).strip().splitlines()[0],
            fix="look at the end of its output; a killed process has often run out of memory",
        )


class RankProcess:
    """One rank: the process that runs its calls."""

    def __init__(
        self, place: Place, size: int, meeting: str, deadline_s: float, paths: Sequence[str]
    ) -> None:
        sys.path += [path for path in paths if path not in sys.path]  # the driver's own modules
        register_tensors()
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        ranks: Ranks = Alone() if size == 1 else ProcessRanks.join(place.rank, size, Path(meeting))
        self._deadline_s = deadline_s
        self._site = Site(place=place, ranks=ranks, fetch=self._fetch)

    def is_up(self) -> bool:
        """Answers once the process has started."""
        return True

    def close(self) -> None:
        """Close what is open on this rank."""
        self._site.stack.close()

    def run(self, work: Work, arguments: Sequence[Any]) -> Any:
        """One call."""
        return work(self._site, *(_unpacked(argument) for argument in arguments))

    def _fetch(self, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=self._deadline_s)
        except GetTimeoutError:
            raise ClusterError(
                f"{self._site.place} waited {self._deadline_s:g} s for an argument",
                why="the call that makes it still runs, or waits itself",
            ) from None
        except RayTaskError as error:
            _raise_cause(error)


@dataclass(frozen=True)
class _Packed:
    """An argument as the bytes it travels in."""

    content: bytes


def _unpacked(argument: Any) -> Any:
    """The argument, or the list of arguments, as it was."""
    if isinstance(argument, list):
        return [_unpacked(each) for each in argument]
    return ray.cloudpickle.loads(argument.content) if isinstance(argument, _Packed) else argument


def _heaviest(value: Any) -> str:
    """Of options by name, the one that takes most bytes, or cannot be turned into any."""
    return f" {max(value, key=lambda name: _weight(value[name]))!r}" if isinstance(value, dict) else ""


def _weight(value: Any) -> float:
    try:
        return len(ray.cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001  whatever its own pickling raises
        return float("inf")


def _cannot_travel(what: str, error: BaseException) -> ClusterError:
    return ClusterError(
        f"{what} cannot travel: {error}",
        why="ranks are other processes; an argument reaches them as bytes",
        fix="give values: batches, numbers, texts, settings, functions of a module",
    )


def _raise_cause(error: RayTaskError) -> NoReturn:
    """What the call raised, as it was."""
    cause = error.cause
    raise cause if isinstance(cause, Exception) and not isinstance(cause, RayTaskError) else error


def register_tensors() -> None:
    """Let tensors travel as the memory they are: a receiver on the same machine reads it without a copy."""
    ray.util.register_serializer(Tensor, serializer=_sent, deserializer=_received)


def _sent(tensor: Tensor) -> tuple[Any, torch.dtype]:
    plain = tensor.detach().cpu().contiguous()
    return plain.view(torch.uint8 if plain.dim() else plain.dtype).numpy(), plain.dtype


def _received(sent: tuple[Any, torch.dtype]) -> Tensor:
    array, dtype = sent
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the store's memory is read-only; batches are never written to
        return torch.from_numpy(array).view(dtype) if array.ndim else torch.from_numpy(array)
