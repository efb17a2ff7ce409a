"""Group: the ranks of one pool that run the same role program.

call(endpoint, *arguments, **options)
    Batch, Pending   split or broadcast over the mesh by the endpoint's transfer
    anything else    sent unchanged to every rank, like options
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from rillflow.errors import ClusterError, PlacementError, nearest
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Partial, Split
from rillflow.records.batch import Batch
from rillflow.workers import program
from rillflow.workers.arguments import Lie, Names, are_whole, piece, shares
from rillflow.workers.awaited import Replies
from rillflow.workers.backend import Backend, Place
from rillflow.workers.endpoint import Endpoint
from rillflow.workers.pending import Pending, pack_options, submitted
from rillflow.workers.program import Call, Factory
from rillflow.workers.transfer import AXES, Transfer


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedCall:
    """A call of an endpoint whose arguments are cut for the ranks."""

    stage: str
    """Name of the stage."""
    backend: Backend
    """Backend that runs it."""
    calls: Sequence[tuple[Place, Sequence[Any]]]
    """Every rank, with the arguments of ``program.run``."""
    described: Mapping[str, Any]
    """Further arguments of ``submitted`` and ``pending_of``."""

    def submit(self) -> Pending:
        """Run it on its ranks."""
        calls = [(place, program.run, given) for place, given in self.calls]
        return submitted(self.stage, self.backend, calls, **self.described)


class Group:
    """A role on the ranks of a pool.

    Args:
        role: name of the role.
        endpoints: endpoints by name.
        mesh: names the axes of the pool's ranks.
        pool: name of the pool.
        backend: the backend that runs the ranks.
        of: role that an algorithm calls for these endpoints; by default ``role``.

    Raises:
        ClusterError: there is no such pool, or it has fewer ranks than the mesh.
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
        self._called = list(self.places)
        self._backend = backend
        _require_pool(role, pool, mesh, backend.pools)
        for each in endpoints.values():
            _require_axes(f"{role}.{each.name}", each.transfer, mesh)

    def start(self, factory: Factory, deadline_s: float = 600.0) -> None:
        """Construct the role's object on every rank.

        Raises:
            RillflowError: an error that a constructor raised.
            ClusterError: a rank died or did not finish in time.
        """
        self.begin_restart(range(len(self.places)), factory).read(deadline_s)

    def restart(self, ranks: Sequence[int], factory: Factory, deadline_s: float = 600.0) -> None:
        """Construct the role's object on some ranks only, whose processes have been replaced.

        Args:
            ranks: indices into ``places``.
            factory: constructs the object.
            deadline_s: longest wait for these ranks.

        Raises:
            RillflowError, ClusterError: see ``start``.
        """
        self.begin_restart(ranks, factory).read(deadline_s)

    def begin_restart(self, ranks: Sequence[int], factory: Factory) -> Replies:
        """Begin what ``restart`` does, without waiting; the result has ``is_ready`` and ``read``."""
        packed = self._backend.pack(factory, f"the factory of {self.role}")
        places = [self.places[rank] for rank in ranks]
        made = {at: self._backend.submit(at, program.start, self.role, packed)[0] for at in places}
        return Replies(f"making {self.role}", made, self._backend, fix="raise placement.load_s")

    def call(self, endpoint: str, *arguments: Any, **options: Any) -> Pending:
        """Run an endpoint on all ranks; return at once.

        Raises:
            ClusterError: there is no such endpoint, a batch is empty, or an argument cannot be serialised.
        """
        return self.prepared(endpoint, *arguments, **options).submit()

    def prepared(self, endpoint: str, *arguments: Any, **options: Any) -> PreparedCall:
        """Return the call of an endpoint on all ranks, ready to be submitted; see ``call``."""
        if endpoint not in self.endpoints:
            raise ClusterError(
                f"role {self.role!r} has no endpoint {endpoint!r}",
                why=f"it has {', '.join(sorted(self.endpoints))}",
                fix=nearest(endpoint, self.endpoints),
            )
        called = self.endpoints[endpoint]
        transfer = called.travels(options)
        call = Call(role=self.role, of=self.of, endpoint=endpoint, reads=called.reads)
        self._refuse_empty(call, arguments)
        ready = [self._ready(call, argument) for argument in arguments]
        packed = pack_options(options, str(call), self._backend)
        cut = _Cut.of(transfer, self.mesh, arguments, called.read(options))
        said, taken = self._backend.pack(call, str(call)), self._taken(transfer)
        speaks, calls = {*taken}, []
        for rank, place in enumerate(self._called):
            given = [cut.part(argument, rank, self._called[0]) for argument in ready]
            calls.append((place, (said, given, packed, rank in speaks)))
        described = {
            "taken": taken,
            "given": (*arguments, *options.values()),
            "about": program.described(arguments),
            "is_partial": any(isinstance(part, Partial) for part in transfer.receive.values()),
            "lie": cut.of_result(called),
        }
        return PreparedCall(stage=str(call), backend=self._backend, calls=calls, described=described)

    def takes(self, endpoint: str) -> list[Place]:
        """Return the ranks whose results of an endpoint are taken."""
        return [self._called[index] for index in self._taken(self.endpoints[endpoint].transfer)]

    def leave_out(self, ranks: Collection[int]) -> None:
        """Have the other ranks run later calls; the first axis of the mesh becomes smaller.

        Args:
            ranks: indices into ``places``: all ranks of some coordinates of the first axis.
        """
        gone = {self.places[rank] for rank in ranks}
        self._called = [place for place in self._called if place not in gone] or self._called
        first, *others = self.mesh.axes
        sizes = {axis.name: axis.size for axis in others}
        size = len(self._called) // prod(sizes.values())
        self.mesh = Mesh.of(ranks=[place.rank for place in self._called], **{first.name: size, **sizes})

    def _ready(self, call: Call, argument: Any) -> Any:
        """Return a batch unchanged; serialise any other argument once for all ranks."""
        if isinstance(argument, Batch | Pending):
            return argument
        return self._backend.pack(argument, f"an argument of {call}, {type(argument).__name__},")

    def _taken(self, transfer: Transfer) -> list[int]:
        """Return the calls whose results are taken; axes without a receive placement contribute one copy."""
        found, mesh = [], self.mesh
        for index, rank in enumerate(sorted(mesh.ranks)):
            coordinates = mesh.coordinates(rank)
            wanted = {
                axis.name: range(axis.size)[transfer.at.get(axis.name, 0)]
                for axis in mesh.axes
                if axis.name in transfer.at or axis.name not in transfer.receive
            }
            if all(coordinates[name] == place for name, place in wanted.items()):
                found.append(index)
        return found

    def _refuse_empty(self, call: Call, arguments: Sequence[Any]) -> None:
        if any(isinstance(argument, Batch) and not len(argument) for argument in arguments):
            raise ClusterError(
                f"{call} was called with a batch of 0 rows",
                why="there is nothing to compute, and the mean of no rows is undefined",
                fix="check the stage that filtered or drew the rows",
            )


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The split of the rows of a call's batches."""

    transfer: Transfer
    """Transfer of the call."""
    shares: Sequence[int]
    """Part of each rank: its coordinate along the axes that split rows."""
    count: int
    """Number of parts."""
    fields: Names
    """Fields that the endpoint reads."""
    weighed: Batch | Pending | None
    """Batch whose tokens balance the parts."""
    lie: Lie | None
    """Layout of the rows over the parts, if known."""
    is_as_held: bool
    """Whether every part equals an existing one."""

    @classmethod
    def of(cls, transfer: Transfer, mesh: Mesh, arguments: Sequence[Any], fields: Names) -> _Cut:
        """Return the split of batches for a transfer."""
        axes = [axis for axis in mesh.axes if isinstance(transfer.send.get(axis.name), Split)]
        indices = []
        for rank in sorted(mesh.ranks):
            index, coordinates = 0, mesh.coordinates(rank)
            for axis in axes:
                index = index * axis.size + coordinates[axis.name]
            indices.append(index)
        count, weighed = prod(axis.size for axis in axes), _weighed(transfer, arguments)
        batches = [each for each in arguments if isinstance(each, Batch | Pending)]
        lie, is_as_held = None, False
        if batches and not transfer.is_balanced:
            first, unit = batches[0], transfer.unit
            if isinstance(first, Batch):
                lie = Lie.new(is_even=True, is_whole=are_whole(first, shares(len(first), count, unit)))
            else:
                lies = [each.lie if isinstance(each, Pending) else None for each in batches]
                lie, equal = lies[0] or Lie.new(), lies.count(lies[0]) == len(lies)
                is_as_held = equal and lie.is_even and unit == 1 and len(first.holders) == count
                lie = lie if is_as_held else lie.again(count, unit)
        return cls(
            transfer=transfer,
            shares=indices,
            count=count,
            fields=fields,
            weighed=weighed,
            lie=lie,
            is_as_held=is_as_held,
        )

    def part(self, argument: Any, rank: int, asks: Place) -> Any:
        """Return the part of an argument for one rank; ``asks`` is one of the requesting ranks."""
        index, unit = self.shares[rank], self.transfer.unit
        if isinstance(argument, Pending):
            if self.is_as_held:
                return argument.own(index, self.fields)
            by = self.weighed if isinstance(self.weighed, Pending) else None
            if self.count == 1:
                return argument.whole(self.fields)
            return argument.rows(index, self.count, asks, unit, by, self.fields)
        if isinstance(argument, Batch):
            return piece(argument, index, self.count, unit, balanced=self.weighed is not None)
        return argument

    def of_result(self, called: Endpoint) -> Lie | None:
        """Return the layout of the result's rows, if every rank's part is in it."""
        if self.transfer.send != self.transfer.receive:
            return None
        if self.lie is not None and called.is_row_by_row:
            return self.lie
        return Lie.new(is_even=bool(called.writes), is_whole=self.lie is not None and self.lie.is_whole)


def _weighed(transfer: Transfer, arguments: Sequence[Any]) -> Batch | Pending | None:
    """Return the batch whose tokens balance the parts: the first one, if all are Batches or all are Pendings.

    If some are here and others on ranks, nobody knows all lengths, and rows are split evenly.
    """
    batches = [each for each in arguments if isinstance(each, Batch | Pending)]
    kinds = {isinstance(each, Pending) for each in batches}
    if not transfer.is_balanced or len(kinds) != 1:
        return None
    here = [each for each in batches if isinstance(each, Batch)]
    return batches[0] if all("tokens" in each.fields for each in here) else None


def _require_pool(role: str, pool: str, mesh: Mesh, pools: Mapping[str, int]) -> None:
    if pool not in pools:
        there = ", ".join(f"{name} of {size}" for name, size in pools.items())
        raise ClusterError(
            f"role {role!r} is on pool {pool!r}, which does not exist",
            why=f"the pools are {there or 'not open yet'}",
            fix=nearest(pool, pools),
        )
    if max(mesh.ranks) >= pools[pool]:
        raise ClusterError(
            f"role {role!r} needs rank {max(mesh.ranks)} of pool {pool!r}",
            why=f"the pool has {pools[pool]} ranks, counted from 0",
            fix=f"give it a mesh of {pools[pool]} ranks, or make the pool larger",
        )


def _require_axes(stage: str, transfer: Transfer, mesh: Mesh) -> None:
    for name in (*transfer.send, *transfer.receive, *transfer.at):
        if name not in mesh.names and name not in AXES:
            raise PlacementError(
                f"{stage} places values along the axis {name!r}, which its mesh does not have",
                why=f"its axes are {', '.join(mesh.names) or 'none'}; {', '.join(AXES)} may be left out",
                fix=nearest(name, {*mesh.names, *AXES}),
            )
