"""RankProcess: one rank in an actor process of Ray (``workers.ray_actor``).

Loop of a rank's process
    consumes      calls submitted to it, in order
    waits for     the objects its arguments refer to
    unblocked by  the ranks that make them, or the error that ended them
    produces      objects, and heartbeats from a thread of its own (``workers.liveness``)
    shuts down    healthy: ``RayBackend.close`` kills it. Otherwise it ends with its connection to the driver
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray import exceptions as faults

from rillflow.errors import ClusterError, Signalled
from rillflow.runs.abandoning import ABANDON
from rillflow.runs.ending_signals import leave_to_driver
from rillflow.runs.environment import usable_cores
from rillflow.workers import nodes
from rillflow.workers.backend import Site
from rillflow.workers.collectives import Stranded
from rillflow.workers.liveness import beat
from rillflow.workers.messages import Slot, cannot_travel
from rillflow.workers.nodes import Seating
from rillflow.workers.ray_losses import loss, raise_cause
from rillflow.workers.ray_messages import Body, by_name, opened, packed, replies, unpacked


class RankProcess:
    """One rank: the process that runs its calls."""

    def __init__(self) -> None:
        leave_to_driver()
        self._node = ray.util.get_node_ip_address()
        self._store: Any = None
        self._held: dict[str | int, Any] = {}
        self._era, self._running_era = 0, math.inf

    def seat(self, driver: Mapping[str, str]) -> Body:
        """Return the seat of this process; see ``nodes.seat_of``."""
        devices = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return packed(nodes.seat_of(self._node, devices, driver)).body

    def time(self) -> float:
        """Return seconds since the epoch on this node's clock."""
        return time.time()

    def host(self, size: int, deadline_s: float) -> Body:
        """Host the store of the world; return its port."""
        self._store = nodes.hosted_store(self._node, size, deadline_s)
        return packed(self._store.port).body

    def join(self, seating: Seating) -> Body:
        """Become the rank that the driver assigned."""
        if seating.target is not None:
            signal.signal(ABANDON, self._abandon)
            beat(seating.place, seating.target)
        threads = max(1, int(usable_cores()) // seating.neighbours)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
        nodes.settle_interface(self._node)
        ranks = nodes.meet(self._node, seating, self._store)
        self._deadline_s, self._seating = seating.deadline_s, seating
        self._site = Site(
            place=seating.place,
            ranks=ranks,
            pool_size=seating.pool_size,
            fetch=self._fetch,
            ahead_s=seating.ahead_s,
        )
        return packed(True).body

    def has_left(self) -> Body:
        """Return whether this rank has left its collectives, once its submitted calls have ended."""
        return packed(nodes.has_left_collectives(self._site)).body

    def meet_again(self, port: int) -> Body:
        """Connect to the world again, at the port of a new store."""
        nodes.meet_again(self._node, replace(self._seating, port=port), self._store, self._site)
        return packed(True).body

    def close(self) -> None:
        """Close the resources of this rank."""
        self._site.stack.close()

    def run(self, sent: Body, *own: Body) -> Any:
        """Run one call, given its message and the values of its own references, which Ray resolves first.

        Raises:
            Stranded: the run abandoned the call.
        """
        body, references = sent if isinstance(sent, tuple) else (sent, [])
        self._held = by_name(references) | dict(enumerate(own))
        work, arguments, results, era = unpacked(body)
        try:
            self._running_era = era
            if era < self._era:
                raise Signalled
            found = work(self._site, *arguments)
        except KeyboardInterrupt:
            nodes.leave_collectives(self._site)
            raise Stranded("was abandoned", why="the run was stopped") from None
        except BaseException:
            nodes.leave_collectives(self._site)
            raise
        finally:
            self._running_era = math.inf
            self._held = {}  # objects held after a call stay in the store
        try:
            return packed(found).body if results == 1 else replies(found, own, ray.put)
        except Exception as error:  # noqa: BLE001  any error of a result's own pickling
            raise cannot_travel(f"the result of {arguments[0]} on {self._site.place}", error) from None

    def _abandon(self, *_: object) -> None:
        """End the running call, and refuse later calls that were submitted before."""
        self._era += 1
        if self._running_era < self._era:
            raise Signalled

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
            raise_cause(error)
        except faults.RayError as error:
            what, why, fix = loss(error)
            raise Stranded(f"the rank of an argument {what}", why=why, fix=fix) from None
        self._site.fetched_bytes += fetched_bytes
        return values

    def _got(self, wanted: Sequence[Any]) -> list[Body]:
        """Return the values of references; pass through those that are already here."""
        far = [each for each in wanted if isinstance(each, ray.ObjectRef)]
        found = iter(ray.get(far, timeout=self._deadline_s) if far else ())
        return [next(found) if isinstance(each, ray.ObjectRef) else each for each in wanted]
