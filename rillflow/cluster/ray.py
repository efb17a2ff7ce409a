"""Ray: every rank is an actor process of its own, on this machine or on others.

    driver ── placement group a pool ──> RankProcess 0, 1, ...     one call at a time, in order
       │                                      │ results: Ray's object store of the machine they are made on
       └── references only                    └ a tensor travels as the memory it is, read without a copy

A cluster that we start ourselves listens on 127.0.0.1 alone and asks for a token; it ends with us, killed
or not, and its files with it (``cluster.watchdog``). One that is there already (``address``) is joined with
whatever protection it has.

Loop of a rank's process
    consumes      calls submitted to it, in order
    waits for     the objects its arguments refer to
    unblocked by  the ranks that make them, or the error that ended them
    produces      objects
    shuts down    healthy: ``close`` kills it. It dies with the driver, or by the watchdog's hand
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from rillflow.cluster.awaited import Awaited, answers
from rillflow.cluster.backend import Place, Pool, RankCall, RankLost, Site, Traffic, places
from rillflow.cluster.ranks import ProcessRanks, Ranks, SingleRank, Stranded
from rillflow.cluster.watchdog import MARK, watch
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
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # idle processes, one a core, never used
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # whoever reads a result gets its error
if "RAY_ADDRESS" not in os.environ:
    # Despite its name this is what keeps every port of a cluster of one machine on the loopback device.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray
from ray import exceptions as faults
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rillflow.cluster.messages import Body, Slot, by_name, opened, packed, replies, unpacked

MAX_ARGUMENT_BYTES = 16 * 2**20
"""An option larger than this is data, and data travel as batches."""
MAX_BESIDE = 32
"""References that travel beside every call; more are put into the object store, once for all ranks."""
_CLOSE_S = 3.0
"""How long ranks have to close what is open on them before they are killed."""
_START_S = 60.0
"""How long a pool may take to be scheduled, and the ranks to start, where they are few."""
_START_EACH_S = 15.0
"""How much longer each rank may take: importing is work, and ranks of one machine share its cores."""


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
        self._methods: dict[tuple[Place, int], Any] = {}
        self._groups: list[Any] = []
        self._folder: Path | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._started = False

    def open(self, pools: Sequence[Pool]) -> None:
        """See Backend."""
        found = places(pools)
        try:
            self._join(len(found))
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
            message = packed(value)
        except Exception as error:  # noqa: BLE001  whatever an argument's own pickling raises
            raise _cannot_travel(what + _heaviest(value), error) from None
        if message.nbytes > MAX_ARGUMENT_BYTES:
            raise ClusterError(
                f"{what}{_heaviest(value)} takes {message.nbytes / 2**20:.0f} MiB",
                why=f"options travel with every call: {MAX_ARGUMENT_BYTES / 2**20:.0f} MiB at most",
                fix="put large data into a batch: its rows go where they are needed, once",
            )
        return message

    def table(self, references: tuple[Any, ...]) -> Any:
        """See Backend."""
        message = packed(references)
        if len(message.references) <= MAX_BESIDE:
            return message
        return ray.put((message.body, list(message.references)))

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """See Backend."""
        try:
            message = packed((work, arguments))
        except Exception as error:  # noqa: BLE001  whatever an argument's own pickling raises
            raise _cannot_travel("something a call needs", error) from None
        self.traffic.calls += 1
        self.traffic.sent_bytes += message.nbytes
        sent = (message.body, list(message.references), results)  # one argument: Ray's price is by argument
        made = self._method(place, results).remote(sent)
        return (made,) if results == 1 else tuple(made)

    def read_all(self, references: Sequence[Any], deadline_s: float) -> list[Any]:
        """See Backend."""
        try:
            bodies = ray.get(list(references), timeout=deadline_s)
        except faults.GetTimeoutError:
            raise TimeoutError from None
        except faults.RayTaskError as error:
            _raise_cause(error)
        except faults.RayError as error:
            raise RankLost(*_loss(error)) from None
        values, fetched_bytes = opened(bodies, ray.get)
        self.traffic.read_bytes += fetched_bytes
        return values

    def is_ready(self, reference: Any) -> bool:
        """See Backend."""
        return bool(ray.wait([reference], timeout=0)[0])

    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        """See Backend."""
        return bool(ray.wait(list(references), num_returns=1, timeout=deadline_s)[0])

    def mend(self, pools: Collection[str], deadline_s: float) -> None:
        """See Backend; processes meet as before, and not without one that has died."""

    def close(self) -> None:
        """See Backend."""
        if self._ranks:  # without one, asking Ray for anything would start it again
            with suppress(faults.RayError):  # a rank that is busy or dead cannot close; it is killed anyway
                ray.get([rank.close.remote() for rank in self._ranks.values()], timeout=_CLOSE_S)
        for rank in self._ranks.values():
            ray.kill(rank)
        for group in self._groups:
            remove_placement_group(group)
        for held in (self.pools, self._ranks, self._methods, self._groups):
            held.clear()
        if self._started:
            ray.shutdown()
            self._started = False
        if self._watchdog is not None:
            with suppress(subprocess.TimeoutExpired):  # a fork of ours may hold its input open until it ends
                self._watchdog.communicate(timeout=_CLOSE_S)
            self._watchdog = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _method(self, place: Place, results: int) -> Any:
        """How a rank is called for so many results; made once, for it costs as much as the call."""
        key = (place, results)
        if key not in self._methods:
            self._methods[key] = self._ranks[place].run.options(num_returns=results)
        return self._methods[key]

    def _join(self, ranks: int) -> None:
        """Join a cluster, or start one for so many ranks: they share the cores, whatever their number."""
        self._folder = Path(tempfile.mkdtemp(prefix="rf-", dir=os.environ.get("RAY_TMPDIR")))
        if ray.is_initialized():
            return
        self._started = True
        address = self._address or os.environ.get("RAY_ADDRESS")
        if address is not None:
            ray.init(address=address, log_to_driver=True)
            return
        self._watchdog = watch(self._folder)
        os.environ[MARK] = str(self._folder)
        try:
            ray.init(
                num_cpus=max(ranks, os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=True,
                logging_level=logging.WARNING,
                _temp_dir=str(self._folder),
            )
        finally:
            del os.environ[MARK]

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
        assert self._folder is not None  # there is one from _join to close
        bundle = {"CPU": 1.0} | ({"GPU": float(self._devices)} if self._devices else {})
        group = placement_group([bundle] * pool.size, strategy="PACK")
        self._groups.append(group)
        if not group.wait(_START_S):
            raise ClusterError(
                f"pool {pool.name!r} of {pool.size} was not scheduled in {_START_S:g} s",
                why=f"free in the cluster: {ray.available_resources()}",
                fix="end what else runs on the cluster, or make the pool smaller",
            )
        rendezvous = str(self._folder / pool.name)
        threads = max(1, (os.cpu_count() or 1) // ranks)
        backend = "cpu:gloo,cuda:nccl" if self._devices else "gloo"
        actor = ray.remote(RankProcess)
        for rank in range(pool.size):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            made = actor.options(num_cpus=1, num_gpus=self._devices, scheduling_strategy=strategy)
            place = Place(pool.name, rank)
            given = (pool.size, rendezvous, self._deadline_s, sys.path, backend, threads)
            self._ranks[place] = made.remote(place, *given)

    def _await_all(self) -> None:
        timeout_s = _START_S + _START_EACH_S * len(self._ranks)
        awaited = [
            Awaited(doing="its start", place=place, reference=rank.is_up.remote())
            for place, rank in self._ranks.items()
        ]
        try:
            answers(awaited, self, timeout_s)
        except TimeoutError:
            late = ", ".join(str(each.place) for each in awaited if not self.is_ready(each.reference))
            raise ClusterError(
                f"{late} did not start in {timeout_s:g} s", why="a process is not there, or imports still"
            ) from None


class RankProcess:
    """One rank: the process that runs its calls."""

    def __init__(
        self,
        place: Place,
        size: int,
        rendezvous: str,
        deadline_s: float,
        paths: Sequence[str],
        backend: str,
        threads: int,
    ) -> None:
        sys.path += [path for path in paths if path not in sys.path]  # the driver's own modules
        os.environ |= {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
        torch.set_num_threads(threads)
        ranks: Ranks = SingleRank()
        if size > 1:
            ranks = ProcessRanks.join(place.rank, size, Path(rendezvous), backend, deadline_s)
        self._deadline_s = deadline_s
        self._held: dict[str, Any] = {}
        self._site = Site(place=place, ranks=ranks, fetch=self._fetch)

    def is_up(self) -> Body:
        """Answers once the process has started."""
        return packed(True).body

    def close(self) -> None:
        """Close what is open on this rank."""
        self._site.stack.close()

    def run(self, sent: tuple[Body, list[Any], int]) -> Any:
        """One call: its message, what the Slots of its arguments stand for, and how many results it has."""
        body, references, results = sent
        self._held = dict(by_name(references))
        work, arguments = unpacked(body)
        try:
            found = work(self._site, *arguments)
        finally:
            self._held = {}  # what is held after a call stays in the store, and its owner has to ask for it
        try:
            return packed(found).body if results == 1 else replies(found, ray.put)
        except Exception as error:  # noqa: BLE001  whatever a result's own pickling raises
            raise _cannot_travel(f"the result of {arguments[0]} on {self._site.place}", error) from None

    def _fetch(self, slots: Sequence[Slot], fields: Collection[str] | None = None) -> list[Any]:
        get = partial(ray.get, timeout=self._deadline_s)
        try:
            bodies = get([self._held[slot.name] for slot in slots])
            values, fetched_bytes = opened(bodies, get, self._held, fields)
        except faults.GetTimeoutError:
            raise ClusterError(
                f"{self._site.place} waited {self._deadline_s:g} s for an argument",
                why="the call that makes it still runs, or waits itself",
            ) from None
        except faults.RayTaskError as error:
            _raise_cause(error)
        except faults.RayError as error:
            what, why, fix = _loss(error)
            raise Stranded(f"the rank of an argument {what}", why=why, fix=fix) from None
        self._site.fetched_bytes += fetched_bytes
        return values


def _heaviest(value: Any) -> str:
    """Of options by name, the one that takes most bytes, or cannot be turned into any."""
    return f" {max(value, key=lambda name: _weight(value[name]))!r}" if isinstance(value, dict) else ""


def _weight(value: Any) -> float:
    try:
        return packed(value).nbytes
    except Exception:  # noqa: BLE001  whatever its own pickling raises
        return float("inf")


def _cannot_travel(what: str, error: BaseException) -> ClusterError:
    return ClusterError(
        f"{what} cannot travel: {error}",
        why="ranks are other processes; what passes between them does so as bytes",
        fix="give values: batches, numbers, texts, settings, functions of a module",
    )


_LOSSES: dict[tuple[type[faults.RayError], ...], tuple[str, str]] = {
    (faults.OutOfMemoryError,): (
        "was killed for want of memory",
        "smaller micro-batches, fewer ranks a machine, or RAY_memory_usage_threshold nearer to 1",
    ),
    (faults.RayActorError, faults.WorkerCrashedError, faults.LocalRayletDiedError, faults.NodeDiedError): (
        "has died",
        "look at the end of its output; a killed process has often run out of memory",
    ),
    (faults.ObjectLostError, faults.ObjectStoreFullError, faults.OutOfDiskError): (
        "has lost what it had made",
        "look at the cluster's nodes, and at the room of /dev/shm and /tmp there",
    ),
}
"""What each kind of Ray's errors says of a rank, and what to do."""


def _loss(error: faults.RayError) -> tuple[str, str, str]:
    """Of what Ray itself reports: what became of a rank, why, and what to do."""
    what, fix = next(
        (said for kinds, said in _LOSSES.items() if isinstance(error, kinds)),
        ("has failed", "the same command goes on from the last checkpoint"),
    )
    told = [line for line in str(error).splitlines() if line.strip()]
    return what, f"{type(error).__name__}: {told[0].strip() if told else 'Ray says no more'}", fix


def _raise_cause(error: faults.RayTaskError) -> NoReturn:
    """What the call raised, as it was, however many ranks have passed it on."""
    cause: object = error
    while isinstance(cause, faults.RayTaskError):
        cause = cause.cause
    if isinstance(cause, Exception) and not isinstance(cause, faults.RayError):
        raise cause
    what, why, fix = _loss(cause if isinstance(cause, faults.RayError) else error)
    raise Stranded(f"a rank {what}", why=why, fix=fix) from None
