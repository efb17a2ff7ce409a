"""Static plan: reactors, their reactions and the channels between them, checked before anything runs.

    startup ──> reaction of a reactor ── channel ──> reactions        the same tag
                      ^                    └─ after=0 ─────────┐      the next microstep
                      └────────────────────────────────────────┘      after=t: t later

Logical time is a tag (time, microstep). A reaction runs at a tag if one of its inputs has a value there. Its
level is the length of the longest chain of reactions before it within a tag, so the reactions of one level
may run side by side. Two reactions of one reactor never do: the one that was declared first is first. A cycle
without a delay has no level and is refused.

Source: Kwok et al., "Efficient parallel reinforcement learning framework using the reactor model", SPAA 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple, TypeVar

from rillflow.errors import GraphError
from rillflow.graph.graph import Edge, Graph, Stage
from rillflow_classic.operators.context import label_of
from rillflow_classic.worker_set import Method

C = TypeVar("C", bound="PlanChannel")


class Tag(NamedTuple):
    """A point of logical time."""

    time: int
    """Time in the unit of the plan's delays."""
    microstep: int
    """Position among the points of the same time."""


@dataclass(eq=False, kw_only=True)
class PlanChannel:
    """A place for one value at each tag: a startup, a reaction's result, or a delayed channel."""

    name: str
    """Name in drawings, traces and errors."""
    slot: int
    """Index of its preallocated slot."""
    value: Any = None
    """Value of a startup."""
    reads: list[PlanChannel] = field(default_factory=list)
    """Channels that its values come from."""


@dataclass(eq=False, kw_only=True)
class DelayedChannel(PlanChannel):
    """A channel that has the values of another one at later tags."""

    after: int
    """Delay; 0: the next microstep."""

    def connect(self, source: PlanChannel) -> None:
        """Feed it from a channel that is declared later.

        Raises:
            GraphError: it has a source already.
        """
        if self.reads:
            raise GraphError(
                f"channel {self.name!r} is connected to {source.name!r}",
                why=f"it is fed by {self.reads[0].name!r} already, and a channel has one value at a tag",
                fix="read both channels in one reaction",
            )
        self.reads.append(source)


Input = PlanChannel | Sequence[PlanChannel]
"""One channel, or several that a reaction receives as a list: a gather."""


@dataclass(eq=False, kw_only=True)
class Reaction(PlanChannel):
    """One method of a reactor, and the channel of its result."""

    reactor: Reactor
    """Its reactor."""
    method: Method
    """Method of the reactor that the reaction calls."""
    inputs: list[Input] = field(default_factory=list)
    """What the method is called with, in order."""

    def connect(self, *inputs: Input) -> Reaction:
        """Add inputs, behind those it has; they may be declared later than it."""
        self.inputs += inputs
        for each in inputs:
            self.reads += [each] if isinstance(each, PlanChannel) else each
        return self


@dataclass(eq=False, kw_only=True)
class Reactor:
    """State with reactions. Made by ``StaticPlan.reactor``."""

    name: str
    """Its name."""
    index: int
    """Position in the order of declaration."""
    make: Callable[[], Any]
    """Constructs the object whose methods are the reactions, when a run begins."""
    plan: StaticPlan
    """Its plan."""

    def react(self, method: Method, *inputs: Input) -> Reaction:
        """Declare a reaction.

        At a tag with a value in an input, ``method(*values)`` runs; an input without a value there is None.
        Its result is the value of its channel; None is no value. Values travel by reference: a reaction must
        not change a value that it was given or has returned.
        """
        name = f"{self.name}.{method if isinstance(method, str) else label_of(method).strip('_')}"
        return self.plan.added(Reaction, name, reactor=self, method=method).connect(*inputs)


@dataclass
class StaticPlan:
    """A fixed topology of reactors.

    Example:
        plan = StaticPlan("ping")
        back = plan.delayed("back")
        ping, pong = plan.reactor("ping", Ping), plan.reactor("pong", Pong)
        sent = ping.react("send", plan.startup(), back)
        back.connect(pong.react("answer", sent))
        StaticRun(plan, workers=2).run(tags=10)
    """

    name: str
    """Name of the plan."""
    reactors: list[Reactor] = field(default_factory=list)
    """Its reactors."""
    channels: list[PlanChannel] = field(default_factory=list)
    """All channels, by slot."""

    @property
    def reactions(self) -> list[Reaction]:
        """All reactions, in the order of declaration."""
        return [each for each in self.channels if isinstance(each, Reaction)]

    def reactor(self, name: str, make: Callable[[], Any]) -> Reactor:
        """Add a reactor.

        Raises:
            GraphError: another reactor has this name.
        """
        if any(each.name == name for each in self.reactors):
            raise GraphError(
                f"two reactors of {self.name} are called {name!r}", why="drawings and errors name them"
            )
        self.reactors.append(Reactor(name=name, index=len(self.reactors), make=make, plan=self))
        return self.reactors[-1]

    def startup(self, value: Any = True) -> PlanChannel:
        """Return a channel that has a value once, at the first tag."""
        return self.added(PlanChannel, "startup", value=value)

    def delayed(self, name: str, *, after: int = 0) -> DelayedChannel:
        """Return a channel to be connected later, which has its values ``after`` later; 0: a microstep."""
        if after < 0:
            raise GraphError(f"channel {name!r} has a delay of {after}", why="time never goes back")
        return self.added(DelayedChannel, name, after=after)

    def added(self, kind: Callable[..., C], name: str, **more: Any) -> C:
        """Add a channel of some kind."""
        made = kind(name=name, slot=len(self.channels), **more)
        self.channels.append(made)
        return made

    def levels(self) -> list[list[Reaction]]:
        """Return the reactions by level, each level in the order of declaration.

        Raises:
            GraphError: a cycle has no delay, a channel has no source, or one of another plan.
        """
        self._check_channels()
        sorter = TopologicalSorter({each: self._before(each) for each in self.reactions})
        try:
            sorter.prepare()
        except CycleError as error:
            path = " -> ".join(each.name for each in error.args[1])
            raise GraphError(
                f"{self.name} has a cycle without a delay: {path}",
                why="each of these reactions would have to run before the others at the same tag; those of "
                "one reactor run in the order of their declaration",
                fix="close the cycle with plan.delayed(NAME)",
            ) from None
        found = []
        while ready := sorter.get_ready():
            sorter.done(*ready)
            found.append(sorted(ready, key=lambda each: each.slot))
        return found

    def graph(self) -> Graph:
        """Return the plan as a graph that can be drawn; an edge says if it is delayed."""
        self.levels()
        numbers: dict[PlanChannel, int] = {each: number for number, each in enumerate(self.reactions)}
        stages, edges = [], dict[tuple[int, int], tuple[str, ...]]()
        for number, each in enumerate(self.reactions):
            role, method = each.reactor.name, each.name.removeprefix(f"{each.reactor.name}.")
            stages.append(Stage(index=number, role=role, endpoint=method, reads=(), writes=()))
            for channel in each.reads:
                is_delayed = isinstance(channel, DelayedChannel)
                key = number, numbers.get(channel.reads[0] if is_delayed else channel, -1)
                edges[key] = ("delayed",) if is_delayed else edges.get(key, ())
        drawn = [
            Edge(source=source, destination=destination, fields=fields)
            for (destination, source), fields in sorted(edges.items())
        ]
        return Graph(name=self.name, stages=tuple(stages), edges=tuple(drawn), given=("start",))

    def _before(self, reaction: Reaction) -> list[Reaction]:
        """Return the reactions that precede one at every tag."""
        found = [each for each in reaction.reads if isinstance(each, Reaction)]
        same = [each for each in self.reactions if each.reactor is reaction.reactor]
        return found + same[: same.index(reaction)][-1:]

    def _check_channels(self) -> None:
        for each in self.channels:
            if not each.reads and each.value is None:
                raise GraphError(
                    f"{each.name!r} reads no channel",
                    why="it would never have a value, and what reads it would wait for ever",
                    fix="give a reaction a startup, and connect a delayed channel",
                )
            if not set(each.reads) <= set(self.channels):
                raise GraphError(f"{each.name!r} reads a channel of another plan", why="plans share none")
