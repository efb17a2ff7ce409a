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
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray import exceptions as faults

from rillflow.errors import Signalled
from rillflow.runs.ending_signals import leave_to_driver
from rillflow.workers import nodes
from rillflow.workers.collectives import Stranded
from rillflow.workers.joined_rank import JoinedRank
from rillflow.workers.messages import Slot, cannot_travel
from rillflow.workers.ray_losses import loss, raise_cause
from rillflow.workers.ray_messages import Body, by_name, opened, packed, replies, unpacked


class RankProcess(JoinedRank):
    """One rank: an actor of Ray."""

    def __init__(self) -> None:
        leave_to_driver()
        super().__init__(ray.util.get_node_ip_address())
        self._held: dict[str | int, Any] = {}

    def seat(self, driver: Mapping[str, str]) -> Body:
        """Return the seat of this process; see ``nodes.seat_of``."""
        devices = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return packed(nodes.seat_of(self.node, devices, driver)).body

    def time(self) -> float:
        """Return seconds since the epoch on this node's clock."""
        return time.time()

    def ask(self, sent: Body) -> Body:
        """Run a setup function, given its message; return its result's."""
        work, arguments = unpacked(sent)
        return packed(work(self, *arguments)).body

    def run(self, sent: Body, *own: Body) -> Any:
        """Run one call, given its message and the values of its own references, which Ray resolves first.

        Raises:
            Stranded: the run abandoned the call.
        """
        body, references = sent if isinstance(sent, tuple) else (sent, [])
        self._held = by_name(references) | dict(enumerate(own))
        work, arguments, results, era = unpacked(body)
        assert self.site is not None, "a call runs on a rank that has joined"
        try:
            self._running_era = era
            if era < self._era:
                raise Signalled
            found = work(self.site, *arguments)
        except KeyboardInterrupt:
            nodes.leave_collectives(self.site)
            raise Stranded("was abandoned", why="the run was stopped") from None
        except BaseException:
            nodes.leave_collectives(self.site)
            raise
        finally:
            self._running_era = math.inf
            self._held = {}  # objects held after a call stay in the store
        try:
            return packed(found).body if results == 1 else replies(found, own, ray.put)
        except Exception as error:  # noqa: BLE001  any error of a result's own pickling
            raise cannot_travel(f"the result of {arguments[0]} on {self.site.place}", error) from None

    def use_threads(self, threads: int) -> None:
        """See JoinedRank; the child processes of a rank do the same."""
        os.environ["OMP_NUM_THREADS"] = str(threads)
        super().use_threads(threads)

    def fetch(self, slots: Sequence[Slot], fields: Collection[str] | None = None) -> list[Any]:
        """See JoinedRank."""
        assert self.site is not None, "a call runs on a rank that has joined"
        try:
            bodies = self._got([self._held[slot.name] for slot in slots])
            values, fetched_bytes = opened(bodies, self._got, self._held, fields)
        except faults.GetTimeoutError:
            raise self._late_argument() from None
        except faults.RayTaskError as error:
            raise_cause(error)
        except faults.RayError as error:
            what, why, fix = loss(error)
            raise Stranded(f"the rank of an argument {what}", why=why, fix=fix) from None
        self.site.fetched_bytes += fetched_bytes
        return values

    def _got(self, wanted: Sequence[Any]) -> list[Body]:
        """Return the values of references; pass through those that are already here."""
        far = [each for each in wanted if isinstance(each, ray.ObjectRef)]
        found = iter(ray.get(far, timeout=self.deadline_s) if far else ())
        return [next(found) if isinstance(each, ray.ObjectRef) else each for each in wanted]
