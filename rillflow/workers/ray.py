"""Ray: run every rank as an actor process, on this machine or on others.

    driver ── placement group per pool ─> RankProcess 0, 1, ...     one call at a time, in order
       │                                      │ results: object store of the machine that made them
       └── references only                    └ a tensor is sent as raw memory, read without a copy

Processes get their ranks after all have reported their location (``workers.nodes``): ranks are numbered by
node, then by device. A cluster that Rillflow starts listens only on 127.0.0.1 and requires a token. It ends
with the driver, even if the driver is killed, and its files are removed (``workers.watchdog``). An existing
cluster (``address``) is joined with its own protection. This choice must be made before Ray is imported, so
only ``workers.start`` imports this module.

Loop of a rank's process
    consumes      calls submitted to it, in order
    waits for     the objects its arguments refer to
    unblocked by  the ranks that make them, or the error that ended them
    produces      objects
    shuts down    healthy: ``close`` kills it. Otherwise it ends with the driver, or the watchdog kills it
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import ray
import torch
from ray import exceptions as faults
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rillflow.errors import ClusterError
from rillflow.runs.environment import usable_cores
from rillflow.workers import nodes
from rillflow.workers.backend import Backend, Node, Place, Pool, RankCall, RankLost, Site, devices_of
from rillflow.workers.collectives import Stranded
from rillflow.workers.messages import Body, Slot, by_name, opened, packed, replies, unpacked
from rillflow.workers.nodes import ProcessSeat, Seating
from rillflow.workers.pending import await_replies
from rillflow.workers.ray_cluster import RayCluster, left_to_driver

MAX_ARGUMENT_BYTES = 16 * 2**20
"""Largest size of an option; larger data must travel as batches."""
MAX_BESIDE = 32
"""Largest number of references sent with a call; more go to the object store, once for all ranks."""
_CLOSE_S = 3.0
"""Seconds that ranks have to close their resources before they are killed."""
_START_S = 60.0
"""Seconds for a pool to be scheduled, and base time for ranks to start."""
_START_EACH_S = 15.0
"""Additional start time in seconds per rank: imports take time, and ranks of one machine share its cores."""


class RayBackend(Backend):
    """Backend that runs calls on Ray actors.

    Args:
        deadline_s: longest wait of a rank for another one's result.
        address: address of a running cluster; None starts one on this machine.
    """

    def __init__(self, deadline_s: float = 3600.0, *, address: str | None = None) -> None:
        super().__init__(deadline_s)
        self._address = address
        self._ranks: dict[Place, Any] = {}
        self._methods: dict[tuple[Place, int], Any] = {}
        self._groups: list[Any] = []
        self._cluster = RayCluster(address)

    def _start(self, pools: Sequence[Pool], found: Sequence[Place], device: str) -> None:
        self._cluster.enter(len(found))
        there = [node for node in ray.nodes() if node["Alive"]]
        if device == "auto":
            device = "cuda" if any("GPU" in node["Resources"] for node in there) else "cpu"
        self.devices = devices_of(pools, device)
        self._fit(pools, there)
        for pool in pools:
            self._place(pool)
        self._seat()

    def pack(self, value: Any, what: str) -> Any:
        """See Backend."""
        try:
            message = packed(value)
        except Exception as error:  # noqa: BLE001  any error of an argument's own pickling
            raise _cannot_travel(what + _heaviest(value), error) from None
        if message.nbytes > MAX_ARGUMENT_BYTES:
            raise ClusterError(
                f"{what}{_heaviest(value)} takes {message.nbytes / 2**20:.0f} MiB",
                why=f"options are sent with every call; the limit is {MAX_ARGUMENT_BYTES / 2**20:.0f} MiB",
                fix="put large data into a batch: each row is sent once, to the ranks that need it",
            )
        return message

    def table(self, references: tuple[Any, ...]) -> Any:
        """See Backend."""
        message = packed(references)
        if len(message.references) <= MAX_BESIDE:
            return message
        return packed(ray.put((message.body, list(message.references))))

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """See Backend."""
        try:
            message = packed((work, arguments, results), is_call=True)
        except Exception as error:  # noqa: BLE001  any error of an argument's own pickling
            raise _cannot_travel("an argument of a call", error) from None
        self.traffic.calls += 1
        self.traffic.sent_bytes += message.nbytes
        held = list(message.references)
        sent = (message.body, held) if held else message.body  # Ray sends plain bytes unchanged
        made = self._method(place, results).remote(sent, *message.own)
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

    def close(self) -> None:
        """See Backend."""
        if self._ranks:  # without ranks, any Ray call would start Ray again
            with suppress(faults.RayError):  # a busy or dead rank cannot close; it is killed anyway
                ray.get([rank.close.remote() for rank in self._ranks.values()], timeout=_CLOSE_S)
        for rank in self._ranks.values():
            ray.kill(rank)
        for group in self._groups:
            remove_placement_group(group)
        for held in (self.pools, self.devices, self._ranks, self._methods, self._groups):
            held.clear()
        self._cluster.leave()

    def _method(self, place: Place, results: int) -> Any:
        """Return the remote method for a number of results; cached, since it costs as much as a call."""
        key = (place, results)
        if key not in self._methods:
            self._methods[key] = self._ranks[place].run.options(num_returns=results)
        return self._methods[key]

    def _fit(self, pools: Sequence[Pool], there: Sequence[Mapping[str, Any]]) -> None:
        """Raise ClusterError if the pools need more devices than all nodes have."""
        for kind in ("CPU", "GPU"):
            taking = [pool for pool in pools if kind == "CPU" or self.devices[pool.name] != "cpu"]
            wanted = sum(pool.size for pool in taking)
            has = sum(node["Resources"].get(kind, 0) for node in there)
            if wanted > has:
                listed = ", ".join(f"{pool.name} {pool.size}" for pool in taking)
                raise ClusterError(
                    f"the pools ({listed}) need {wanted} {kind}s, but the cluster has {has:g}",
                    why=f"{wanted - has:g} are missing, because every rank takes 1; {_listed(there)}",
                    fix="make a pool smaller, let roles share one, or add machines to the cluster",
                )

    def _place(self, pool: Pool) -> None:
        """Start a pool's processes wherever there is room, numbered in the order of creation."""
        bundle = {"CPU": 1.0} | ({} if self.devices[pool.name] == "cpu" else {"GPU": 1.0})
        group = placement_group([bundle] * pool.size, strategy="PACK")
        self._groups.append(group)
        if not group.wait(_START_S):
            raise ClusterError(
                f"pool {pool.name!r} of {pool.size} was not scheduled in {_START_S:g} s",
                why=f"free in the cluster: {ray.available_resources()}; {_listed(ray.nodes())}",
                fix="stop other programs on the cluster, or make the pool smaller",
            )
        actor = ray.remote(RankProcess)
        for index in range(pool.size):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            given = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
            self._ranks[Place(pool.name, index)] = actor.options(**given).remote(sys.path)

    def _seat(self) -> None:
        """Give every process its rank, ordered by node and device, and connect the ranks of each pool."""
        driver, came = nodes.versions(), self._ranks
        seats = self._asked("its start", {at: each.seat.remote(driver) for at, each in came.items()})
        self._ranks, seated = {}, dict[Place, ProcessSeat]()
        for at in sorted(came, key=lambda at: (at.pool, seats[at].order, at.rank)):
            place = Place(at.pool, sum(each.pool == at.pool for each in seated))
            self._ranks[place], seated[place] = came[at], seats[at]
        if self._address is not None:
            self.nodes = self._looked_at(seated)
        sizes, neighbours = Counter(at.pool for at in seated), Counter(seat.node for seat in seated.values())
        first = [at for at in seated if at.rank == 0 and sizes[at.pool] > 1]
        hosting = {at: self._ranks[at].host.remote(sizes[at.pool], self._deadline_s) for at in first}
        ports = self._asked("opening the store of its pool", hosting)
        joining = {}
        for at, seat in seated.items():
            host = Place(at.pool, 0)
            seating = Seating(
                place=at,
                size=sizes[at.pool],
                host=seated[host].node,
                port=ports.get(host, 0),
                backend="gloo" if self.devices[at.pool] == "cpu" else "cpu:gloo,cuda:nccl",
                neighbours=neighbours[seat.node],
                ahead_s=self.nodes[at].ahead_s if at in self.nodes else 0.0,
                deadline_s=self._deadline_s,
            )
            joining[at] = self._ranks[at].join.remote(seating)
        self._asked("joining its pool", joining)

    def _looked_at(self, seated: Mapping[Place, ProcessSeat]) -> dict[Place, Node]:
        """Return the node of every rank; check each node's shared memory and clock once."""
        stores = {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        found: dict[str, Node] = {}
        for at, seat in seated.items():
            if seat.node not in found:
                nodes.require_room(seat, stores[seat.node].get("object_store_memory", 0))
                ahead_s = nodes.clock_ahead_s(partial(_time_of, self._ranks[at]))
                found[seat.node] = Node(address=seat.node, ahead_s=ahead_s)
        return {at: found[seat.node] for at, seat in seated.items()}

    def _asked(self, doing: str, calls: Mapping[Place, Any]) -> dict[Place, Any]:
        """Return the replies of processes during the start."""
        return await_replies(doing, calls, self, _START_S + _START_EACH_S * len(self._ranks))


class RankProcess:
    """One rank: the process that runs its calls.

    Args:
        paths: module search path of the driver.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        sys.path += [path for path in paths if path not in sys.path]
        left_to_driver()
        self._node = ray.util.get_node_ip_address()
        self._store: Any = None
        self._held: dict[str | int, Any] = {}

    def seat(self, driver: Mapping[str, str]) -> Body:
        """Return the seat of this process; see ``nodes.seat_of``."""
        devices = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return packed(nodes.seat_of(self._node, devices, driver)).body

    def time(self) -> float:
        """Return seconds since the epoch on this node's clock."""
        return time.time()

    def host(self, size: int, deadline_s: float) -> Body:
        """Host the store of the pool; return its port."""
        self._store = nodes.hosted_store(self._node, size, deadline_s)
        return packed(self._store.port).body

    def join(self, seating: Seating) -> Body:
        """Become the rank that the driver assigned."""
        threads = max(1, int(usable_cores()) // seating.neighbours)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
        nodes.settle_interface(self._node)
        ranks = nodes.meet(self._node, seating, self._store)
        self._deadline_s = seating.deadline_s
        self._site = Site(place=seating.place, ranks=ranks, fetch=self._fetch, ahead_s=seating.ahead_s)
        return packed(True).body

    def close(self) -> None:
        """Close the resources of this rank."""
        self._site.stack.close()

    def run(self, sent: Body, *own: Body) -> Any:
        """Run one call, given its message and the values of its own references, which Ray resolves first."""
        body, references = sent if isinstance(sent, tuple) else (sent, [])
        self._held = by_name(references) | dict(enumerate(own))
        work, arguments, results = unpacked(body)
        try:
            found = work(self._site, *arguments)
        finally:
            self._held = {}  # objects held after a call stay in the store
        try:
            return packed(found).body if results == 1 else replies(found, own, ray.put)
        except Exception as error:  # noqa: BLE001  any error of a result's own pickling
            raise _cannot_travel(f"the result of {arguments[0]} on {self._site.place}", error) from None

    def _fetch(self, slots: Sequence[Slot], fields: Collection[str] | None = None) -> list[Any]:
        try:
            bodies = self._got([self._held[slot.name] for slot in slots])
            values, fetched_bytes = opened(bodies, self._got, self._held, fields)
        except faults.GetTimeoutError:
            raise ClusterError(
                f"{self._site.place} waited {self._deadline_s:g} s for an argument",
                why="the call that returns it is still running or waiting",
            ) from None
        except faults.RayTaskError as error:
            _raise_cause(error)
        except faults.RayError as error:
            what, why, fix = _loss(error)
            raise Stranded(f"the rank of an argument {what}", why=why, fix=fix) from None
        self._site.fetched_bytes += fetched_bytes
        return values

    def _got(self, wanted: Sequence[Any]) -> list[Body]:
        """Return the values of references; pass through those that are already here."""
        far = [each for each in wanted if isinstance(each, ray.ObjectRef)]
        found = iter(ray.get(far, timeout=self._deadline_s) if far else ())
        return [next(found) if isinstance(each, ray.ObjectRef) else each for each in wanted]


def _listed(there: Sequence[Mapping[str, Any]]) -> str:
    """Return the resources of every node as text for an error."""
    alive = [node for node in there if node["Alive"]]
    return "; ".join(
        f"node {node['NodeManagerAddress']}: "
        + ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
        for node in sorted(alive, key=lambda node: str(node["NodeManagerAddress"]))
    )


def _time_of(rank: Any) -> float:
    """Return a process's seconds since the epoch."""
    return float(ray.get(rank.time.remote(), timeout=_START_S))


def _heaviest(value: Any) -> str:
    """Return the name of the largest option, or of one that cannot be serialised."""
    return f" {max(value, key=lambda name: _weight(value[name]))!r}" if isinstance(value, dict) else ""


def _weight(value: Any) -> float:
    try:
        return packed(value).nbytes
    except Exception:  # noqa: BLE001  any error of its own pickling
        return float("inf")


def _cannot_travel(what: str, error: BaseException) -> ClusterError:
    return ClusterError(
        f"{what} cannot be serialised: {error}",
        why="ranks are separate processes, and values pass between them as bytes",
        fix="pass plain values: batches, numbers, strings, settings, functions of a module",
    )


_LOSSES: dict[tuple[type[faults.RayError], ...], tuple[str, str]] = {
    (faults.OutOfMemoryError,): (
        "was killed because its node ran out of memory",
        "use smaller micro-batches or fewer ranks per node, or raise RAY_memory_usage_threshold towards 1",
    ),
    (faults.RayActorError, faults.WorkerCrashedError, faults.LocalRayletDiedError, faults.NodeDiedError): (
        "has died",
        "read the end of its output; a killed process has often run out of memory",
    ),
    (faults.ObjectLostError, faults.ObjectStoreFullError, faults.OutOfDiskError): (
        "has lost its results",
        "check the cluster's nodes and the free space of /dev/shm and /tmp on them",
    ),
}
"""Message and advice for each kind of Ray error."""


def _loss(error: faults.RayError) -> tuple[str, str, str]:
    """Return what happened to a rank, why, and what to do, from an error of Ray itself."""
    what, fix = next(
        (said for kinds, said in _LOSSES.items() if isinstance(error, kinds)),
        ("has failed", "run the same command again: it resumes from the last checkpoint"),
    )
    told = [line.strip() for line in str(error).splitlines() if line.strip()] or ["Ray gives no reason"]
    if "creation task" in told[0]:
        on = re.search(r"ip=([\w.:]+)", told[0])
        return f"could not be started{f' on node {on[1]}' if on else ''}", told[-1], nodes.ALIKE
    return what, f"{type(error).__name__}: {told[0]}", fix


def _raise_cause(error: faults.RayTaskError) -> NoReturn:
    """Raise the original error of a call, no matter how many ranks have passed it on."""
    cause: object = error
    while isinstance(cause, faults.RayTaskError):
        cause = cause.cause
    if isinstance(cause, Exception) and not isinstance(cause, faults.RayError):
        raise cause
    what, why, fix = _loss(cause if isinstance(cause, faults.RayError) else error)
    raise Stranded(f"a rank {what}", why=why, fix=fix) from None
