"""Group: the ranks of one pool that run the same role program.

call(endpoint, *arguments, **options)
    Batch, Pending   cut or broadcast over the mesh as the endpoint's transfer says
    anything else    the same for every rank, as options are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rillflow.cluster.awaited import Awaited, answers
from rillflow.cluster.backend import Backend, Place
from rillflow.errors import ClusterError, PlacementError, nearest
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Partial, Split
from rillflow.records.batch import Batch
from rillflow.workers import program
from rillflow.workers.endpoint import Endpoint
from rillflow.workers.pending import Pending
from rillflow.workers.program import Call, Factory
from rillflow.workers.transfer import AXES, Transfer
from rillflow.workers.values import RemoteValue, piece


class Group:
    """A role on the ranks of a pool.

    Args:
        role: its name.
        endpoints: what may be called.
        mesh: names the axes of the pool's ranks.
        pool: the pool's name.
        backend: where the ranks are.
        of: the role whose stages its endpoints are, as an algorithm calls them; its own name if left out.

    Raises:
        ClusterError: there is no such pool, or it has not the mesh's ranks.
        PlacementError: an endpoint's transfer names an axis that no mesh has.

    Example:
        group = Group("critic", endpoints_of(Critic), mesh=Mesh.of(dp=2), pool="main", backend=backend)
        group.start(factory)
        values = group.call("values", rollouts)
    """

    def __init__(
        self,
        role: str,
        endpoints: Mapping[str, Endpoint],
        *,
        mesh: Mesh,
        pool: str,
        backend: Backend,
        of: str = "",
    ) -> None:
        self.role = role
        self.of = of or role
        self.endpoints = endpoints
        self.mesh = mesh
        self.places = [Place(pool, rank) for rank in sorted(mesh.ranks)]
        self._backend = backend
        _require_pool(role, pool, mesh, backend.pools)
        for each in endpoints.values():
            _require_axes(f"{role}.{each.name}", each.transfer, mesh)

    def start(self, factory: Factory, deadline_s: float = 600.0) -> None:
        """Make the role's object on every rank.

        Raises:
            RillflowError: what a constructor raised.
            ClusterError: a rank died or did not answer.
        """
        packed = self._backend.pack(factory, f"what makes {self.role}")
        awaited = [
            Awaited(doing=f"making {self.role}", place=place, reference=made)
            for place in self.places
            for made in self._backend.submit(place, program.start, self.role, packed)
        ]
        try:
            answers(awaited, self._backend, deadline_s)
        except TimeoutError:
            late = [str(each.place) for each in awaited if not self._backend.is_ready(each.reference)]
            raise ClusterError(
                f"{self.role} was not made on {', '.join(late)} in {deadline_s:g} s",
                why="its constructor still runs",
            ) from None

    def call(self, endpoint: str, *arguments: Any, **options: Any) -> Pending:
        """Run an endpoint on all ranks; returns at once.

        Raises:
            ClusterError: there is no such endpoint, a batch has no row, or an argument cannot travel.
        """
        if endpoint not in self.endpoints:
            raise ClusterError(
                f"role {self.role!r} has no endpoint {endpoint!r}",
                why=f"it has {', '.join(sorted(self.endpoints))}",
                fix=nearest(endpoint, self.endpoints),
            )
        transfer = self.endpoints[endpoint].transfer
        call = Call(role=self.role, of=self.of, endpoint=endpoint, reads=self.endpoints[endpoint].reads)
        self._refuse_empty(call, arguments)
        ready = [self._ready(call, argument) for argument in arguments]
        named = {key: _described(value) for key, value in options.items()}
        packed = self._backend.pack(named, f"option of {call}:") if named else named
        weighed = _weighed(transfer, arguments)
        made = []
        for rank, place in enumerate(self.places):
            given = [self._part(argument, transfer, rank, weighed) for argument in ready]
            value, facts = self._backend.submit(place, program.run, call, given, packed, results=2)
            made.append(RemoteValue(value=value, facts=facts))
        taken = self._taken(transfer)
        others = [rank for rank in range(len(made)) if rank not in taken]
        return Pending(
            str(call),
            given=program.described(arguments),
            places=[self.places[rank] for rank in (*taken, *others)],
            references=[made[rank] for rank in taken],
            others=[made[rank] for rank in others],
            is_partial=any(isinstance(part, Partial) for part in transfer.receive.values()),
            sources=[each for each in (*arguments, *options.values()) if isinstance(each, Pending)],
            backend=self._backend,
        )

    def _ready(self, call: Call, argument: Any) -> Any:
        """An argument that is no batch travels packed, once for all ranks."""
        if isinstance(argument, Batch | Pending):
            return argument
        return self._backend.pack(argument, f"an argument of {call}, {type(argument).__name__},")

    def _part(self, argument: Any, transfer: Transfer, rank: int, weighed: Batch | Pending | None) -> Any:
        """What one rank is sent of an argument."""
        index, count = self._share(transfer, rank)
        if isinstance(argument, Pending):
            by = weighed if isinstance(weighed, Pending) else None
            return argument.whole() if count == 1 else argument.rows(index, count, transfer.unit, by)
        if isinstance(argument, Batch):
            return piece(argument, index, count, transfer.unit, balanced=weighed is not None)
        return argument

    def _share(self, transfer: Transfer, rank: int) -> tuple[int, int]:
        """Which of how many parts a rank gets: its coordinate along the axes that cut rows."""
        index, count, mesh, coordinates = 0, 1, self.mesh, self.mesh.coordinates(rank)
        for axis in mesh.axes:
            if isinstance(transfer.send.get(axis.name), Split):
                index, count = index * axis.size + coordinates[axis.name], count * axis.size
        return index, count

    def _taken(self, transfer: Transfer) -> list[int]:
        """The ranks whose results are taken: along axes that receive nothing, one copy is enough."""
        found, mesh = [], self.mesh
        for rank in sorted(mesh.ranks):
            coordinates = mesh.coordinates(rank)
            wanted = {
                axis.name: range(axis.size)[transfer.at.get(axis.name, 0)]
                for axis in mesh.axes
                if axis.name in transfer.at or axis.name not in transfer.receive
            }
            if all(coordinates[name] == place for name, place in wanted.items()):
                found.append(rank)
        return found

    def _refuse_empty(self, call: Call, arguments: Sequence[Any]) -> None:
        if any(isinstance(argument, Batch) and not len(argument) for argument in arguments):
            raise ClusterError(
                f"{call} was called with a batch of 0 rows",
                why="there is nothing to compute, and a mean over nothing is no number",
                fix="look at what filtered or drew the rows",
            )


def _weighed(transfer: Transfer, arguments: Sequence[Any]) -> Batch | Pending | None:
    """The batch by whose tokens rows are shared out: the first, if what follows it is of its kind.

    Where some batches are here and some with the ranks, nobody knows all of their lengths, and rows are
    shared out evenly.
    """
    batches = [each for each in arguments if isinstance(each, Batch | Pending)]
    kinds = {isinstance(each, Pending) for each in batches}
    if not transfer.is_balanced or len(kinds) != 1:
        return None
    here = [each for each in batches if isinstance(each, Batch)]
    return batches[0] if all("tokens" in each.fields for each in here) else None


def _described(value: Any) -> Any:
    return value.whole() if isinstance(value, Pending) else value


def _require_pool(role: str, pool: str, mesh: Mesh, pools: Mapping[str, int]) -> None:
    if pool not in pools:
        there = ", ".join(f"{name} of {size}" for name, size in pools.items())
        raise ClusterError(
            f"role {role!r} has no pool: there is none called {pool!r}",
            why=f"the pools are {there or 'not open yet'}",
            fix=nearest(pool, pools),
        )
    if max(mesh.ranks) >= pools[pool]:
        raise ClusterError(
            f"role {role!r} is to be on rank {max(mesh.ranks)} of pool {pool!r}",
            why=f"the pool has {pools[pool]} ranks, counted from 0",
            fix=f"give it a mesh of {pools[pool]} ranks, or make the pool larger",
        )


def _require_axes(stage: str, transfer: Transfer, mesh: Mesh) -> None:
    for name in (*transfer.send, *transfer.receive, *transfer.at):
        if name not in mesh.names and name not in AXES:
            raise PlacementError(
                f"{stage} places values along the axis {name!r}, which the mesh of its ranks has not",
                why=f"its axes are {', '.join(mesh.names) or 'none'}; {', '.join(AXES)} may be left out",
                fix=nearest(name, {*mesh.names, *AXES}),
            )
