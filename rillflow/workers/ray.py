"""Ray: run every rank as an actor process, on this machine or on others.

    driver ── placement group per pool ─> RankProcess 0, 1, ...     one call at a time, in order
       │                                      │ results: object store of the machine that made them
       └── references only                    └ a tensor is sent as raw memory, read without a copy

Processes get their ranks after all have reported their location (``workers.nodes``): ranks are numbered by
node, then by device. A cluster that Rillflow starts listens only on 127.0.0.1 and requires a token. It ends
with the driver, even if the driver is killed, and its files are removed (``workers.watchdog``). An existing
cluster (``address``) is joined with its own protection. This choice must be made before Ray is imported, so
only ``workers.start`` imports this module.

A lost rank is replaced in its own bundle of the placement group: on the same node, or, once Ray has declared
that node dead, where the bundle is scheduled again. References of the old process never turn into results of
the new one: they were complete, or Ray ends them with the old actor. So no late result of a rank can arrive.
Loop of a replacement's thread: see ``workers.multiprocess``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray import exceptions as faults
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rillflow.errors import ClusterError
from rillflow.workers import nodes
from rillflow.workers.backend import Node, Place, Pool, RankCall, RankLost, devices_of
from rillflow.workers.liveness import Heartbeats, HeartbeatTarget
from rillflow.workers.messages import cannot_travel, heaviest
from rillflow.workers.multiprocess import MultiprocessBackend
from rillflow.workers.nodes import ProcessSeat
from rillflow.workers.ray_actor import RankActor
from rillflow.workers.ray_cluster import RayCluster
from rillflow.workers.ray_losses import loss, raise_cause
from rillflow.workers.ray_messages import opened, packed
from rillflow.workers.ray_resources import alive_nodes, await_room, require_fit

MAX_ARGUMENT_BYTES = 16 * 2**20
"""Largest size of an option; larger data must travel as batches."""
MAX_BESIDE = 32
"""Largest number of references sent with a call; more go to the object store, once for all ranks."""


@dataclass(kw_only=True, eq=False)
class _Process:
    """One process of a rank."""

    actor: Any
    """Handle of its actor."""
    bundle: Any
    """Scheduling strategy that gives it its bundle of the placement group."""
    seat: ProcessSeat | None = None
    """Its location, once it has reported it."""
    target: HeartbeatTarget | None = None
    """Where its heartbeats go, if it sends any."""
    methods: dict[int, Any] = field(default_factory=dict)
    """Remote methods by number of results; cached, since making one costs as much as a call."""

    @property
    def node(self) -> str:
        """Address of its node."""
        assert self.seat is not None, "it has reported its location"
        return self.seat.node

    @property
    def local_pid(self) -> int:
        """Number of the process; 0 on another machine."""
        assert self.seat is not None, "it has reported its location"
        return self.seat.pid if self.node == ray.util.get_node_ip_address() else 0

    @property
    def number(self) -> str:
        """Number of its actor, as Ray's errors name it."""
        return str(self.actor._actor_id.hex())


class RayBackend(MultiprocessBackend[_Process]):
    """Backend that runs calls on Ray actors.

    Args:
        deadline_s: longest wait of a rank for another one's result.
        address: address of a running cluster; None starts one on this machine.
        start_s: see MultiprocessBackend, as for the other two.
        load_s: see Backend.
        heartbeat_s: silence of a rank after which it is lost; 0: no heartbeats.
        variables: environment variables that every rank gets.
    """

    def __init__(
        self,
        deadline_s: float,
        *,
        address: str | None = None,
        start_s: float = 60.0,
        load_s: float = 0.0,
        heartbeat_s: float = 5.0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(deadline_s, start_s=start_s, load_s=load_s, heartbeat_s=heartbeat_s)
        self._address, self._variables = address, dict(variables or {})
        self._groups: list[Any] = []
        self._cluster = RayCluster(address)
        self._told: dict[str, RankLost] = {}

    def _start(self, pools: Sequence[Pool], found: Sequence[Place], device: str) -> None:
        self._cluster.enter(len(found))
        if device == "auto":
            device = "cuda" if any("GPU" in node["Resources"] for node in alive_nodes()) else "cpu"
        self.devices = devices_of(pools, device)
        require_fit(pools, self.devices)
        if self._heartbeat_s:
            self._heartbeats = Heartbeats(ray.util.get_node_ip_address(), self._heartbeat_s)
        for pool in pools:
            self._place(pool, pools)
        came = self._ranks
        self._seat(came)
        self._ranks, counts = {}, Counter[str]()
        for at in sorted(came, key=lambda at: (at.pool, _order(came[at]), at.rank)):
            self._ranks[Place(at.pool, counts[at.pool])] = came[at]
            counts[at.pool] += 1
        self._join(self._ranks)

    def pack(self, value: Any, what: str) -> Any:
        """See Backend."""
        try:
            message = packed(value)
        except Exception as error:  # noqa: BLE001  any error of an argument's own pickling
            raise cannot_travel(what + heaviest(value, _size), error) from None
        if message.nbytes > MAX_ARGUMENT_BYTES:
            raise ClusterError(
                f"{what}{heaviest(value, _size)} takes {message.nbytes / 2**20:.0f} MiB",
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
            message = packed((work, arguments, results, self._era), is_call=True)
        except Exception as error:  # noqa: BLE001  any error of an argument's own pickling
            raise cannot_travel("an argument of a call", error) from None
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
            raise_cause(error)
        except faults.RayError as error:
            raise self._lost(error) from None
        values, fetched_bytes = opened(bodies, ray.get)
        self.traffic.read_bytes += fetched_bytes
        return values

    def is_ready(self, reference: Any) -> bool:
        """See Backend."""
        return bool(ray.wait([reference], timeout=0)[0])

    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        """See Backend."""
        return bool(ray.wait(list(references), num_returns=1, timeout=deadline_s)[0])

    @property
    def refused(self) -> int:
        """See Backend: connections of processes that are no longer ranks; results cannot be late."""
        return 0 if self._heartbeats is None else self._heartbeats.refused

    def _spawned(self, place: Place, old: _Process | None) -> _Process:
        """See MultiprocessBackend."""
        assert old is not None, "a pool's first processes are started by its placement group"
        return _Process(actor=self._actor(place.pool, old.bundle), bundle=old.bundle)

    def _ask(self, process: _Process, work: Callable[..., Any], *arguments: Any) -> Any:
        """See MultiprocessBackend."""
        return process.actor.ask.remote(packed((work, arguments)).body)

    def _wait_for_all(self, references: Sequence[Any], deadline_s: float) -> None:
        """See MultiprocessBackend."""
        ray.wait(list(references), num_returns=len(references), timeout=deadline_s)

    def _end(self, process: _Process, reason: RankLost) -> None:
        """See MultiprocessBackend."""
        self._told.setdefault(process.number, reason)
        ray.kill(process.actor)

    def _silent(self, process: _Process, reason: RankLost) -> None:
        """See MultiprocessBackend; every read of the process's results fails with the reason."""
        self._told[process.number] = reason
        ray.kill(process.actor)
        if self._address is None and process.seat is not None:  # Ray gives a stopped process five seconds
            with suppress(ProcessLookupError):
                os.kill(process.seat.pid, signal.SIGKILL)

    def _release(self, processes: Sequence[_Process]) -> None:  # noqa: ARG002
        """See MultiprocessBackend."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        self._cluster.leave()

    def _lost(self, error: faults.RayError) -> RankLost:
        """Return the loss of a rank that an error of Ray reports, with the reason that is known here."""
        if not isinstance(error, faults.ActorDiedError) or error.actor_id is None:
            return RankLost(*loss(error))
        known = self._told.setdefault(error.actor_id, RankLost(*loss(error)))
        return RankLost(known.what, known.why, known.fix)

    def _method(self, place: Place, results: int) -> Any:
        """Return the remote method for a number of results."""
        process = self._ranks[place]
        if results not in process.methods:
            process.methods[results] = process.actor.run.options(num_returns=results)
        return process.methods[results]

    def _place(self, pool: Pool, pools: Sequence[Pool]) -> None:
        """Start a pool's processes wherever there is room, numbered in the order of creation."""
        bundle = {"CPU": 1.0} | ({} if self.devices[pool.name] == "cpu" else {"GPU": 1.0})
        group = placement_group([bundle] * pool.size, strategy="PACK")
        self._groups.append(group)
        await_room(group, pool, pools, self.devices, self._start_s)
        for index in range(pool.size):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            self._ranks[Place(pool.name, index)] = _Process(
                actor=self._actor(pool.name, strategy), bundle=strategy
            )

    def _actor(self, pool: str, bundle: Any) -> Any:
        """Start a process in a bundle."""
        gpus = 0 if self.devices[pool] == "cpu" else 1
        how = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": bundle}
        return ray.remote(RankActor).options(**how).remote(sys.path, self._variables)

    def _seat(self, fresh: Mapping[Place, _Process]) -> None:
        """See MultiprocessBackend."""
        driver = nodes.versions()
        seats = self._asked("its start", {at: each.actor.seat.remote(driver) for at, each in fresh.items()})
        for at, seat in seats.items():
            fresh[at].seat = seat

    def _join(self, fresh: Mapping[Place, _Process]) -> None:
        """See MultiprocessBackend."""
        if self._address is not None:
            self.nodes = {**self.nodes, **self._looked_at(fresh)}
        super()._join(fresh)

    def _looked_at(self, fresh: Mapping[Place, _Process]) -> dict[Place, Node]:
        """Return the node of every rank; check each node's shared memory and clock once."""
        stores = {node["NodeManagerAddress"]: node["Resources"] for node in alive_nodes()}
        found: dict[str, Node] = {}
        for process in fresh.values():
            if process.node not in found:
                assert process.seat is not None, "it has reported its location"
                nodes.require_room(process.seat, stores[process.node].get("object_store_memory", 0))
                nodes.warn_if_nice(process.seat)
                ahead_s = nodes.clock_ahead_s(partial(_time_of, process.actor, self._start_s))
                found[process.node] = Node(address=process.node, ahead_s=ahead_s)
        return {at: found[process.node] for at, process in fresh.items()}

    def _start_advice(self) -> str:
        """See MultiprocessBackend."""
        room = "ray status on a node shows what is free: the ranks of a lost node need room on another one"
        advice = super()._start_advice()
        return advice if self._address is None else f"{advice}; {room}"


def _order(process: _Process) -> tuple[int, int]:
    """Return the sort key of a process: its node, then its device."""
    assert process.seat is not None, "it has reported its location"
    return process.seat.order


def _time_of(actor: Any, wait_s: float) -> float:
    """Return a process's seconds since the epoch."""
    return float(ray.get(actor.time.remote(), timeout=wait_s))


def _size(value: Any) -> int:
    return packed(value).nbytes
