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
from typing import Any, NamedTuple

from rillflow.errors import GraphError
from rillflow.graph.graph import Edge, Graph, Stage
from rillflow_classic.operators.context import label_of

Method = str | Callable[..., Any]
"""Name of a method of a reactor's object, or a function that is called with the object first."""


class Tag(NamedTuple):
    """A point of logical time."""

    time: int
    """Time in the unit of the plan's delays."""
    microstep: int
    """Position among the points of the same time."""


@dataclass(eq=False, kw_only=True)
class PlanChannel:
    """A place for one value at each tag. Reactions read it at the tag of the value."""

    name: str
    """Name in drawings and errors."""
    slot: int
    """Index of its preallocated slot."""
    writer: Reaction | None = None
    """Reaction that writes it; None for a startup and a forward channel."""
    value: Any = None
    """Value of a startup."""
    after: int | None = None
    """Delay of a forward channel; 0: the next microstep; None: no delay."""
    source: PlanChannel | None = None
    """Channel that feeds a forward channel."""

    @property
    def instant(self) -> PlanChannel:
        """The channel that has its values at the same tag: itself, or the source without a delay between."""
        return self if self.source is None or self.after is not None else self.source.instant

    @property
    def origin(self) -> PlanChannel:
        """The channel whose values it has, delayed or not: a startup, or one that a reaction writes.

        Raises:
            GraphError: there is none.
        """
        channel, seen = self, {self}
        while channel.writer is None and channel.value is None:
            if channel.source is None or channel.source in seen:
                raise GraphError(
                    f"channel {channel.name!r} has no source",
                    why="no reaction and no startup feeds it, so its readers would wait for ever",
                    fix="connect it to a channel that has values, or remove it",
                )
            channel = channel.source
            seen.add(channel)
        return channel

    def connect(self, source: PlanChannel) -> None:
        """Feed this forward channel from another channel.

        Raises:
            GraphError: it is no forward channel, or has a source already.
        """
        if self.writer is not None or self.value is not None or self.source is not None:
            raise GraphError(
                f"channel {self.name!r} is connected to {source.name!r}",
                why="it has a source already, and a channel has one value at a tag",
                fix="connect a channel of StaticPlan.forward, once; read both channels in one reaction",
            )
        self.source = source


Input = PlanChannel | Sequence[PlanChannel]
"""One channel, or several that a reaction receives as a list: a gather."""


@dataclass(eq=False, kw_only=True)
class Reaction:
    """One method of a reactor."""

    index: int
    """Position in the order of declaration."""
    reactor: Reactor
    """Its reactor."""
    method: Method
    """What runs."""
    inputs: tuple[Input, ...]
    """What the method is called with, in order."""
    outputs: tuple[PlanChannel, ...] = ()
    """Channels that its result is written to."""

    @property
    def name(self) -> str:
        """Name in drawings, traces and errors."""
        method = self.method if isinstance(self.method, str) else label_of(self.method).strip("_")
        return f"{self.reactor.name}.{method}"

    @property
    def reads(self) -> list[PlanChannel]:
        """Every channel that it reads."""
        several = [[each] if isinstance(each, PlanChannel) else each for each in self.inputs]
        return [channel for channels in several for channel in channels]


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

    def react(self, method: Method, *inputs: Input) -> PlanChannel:
        """Declare a reaction with one output.

        At a tag with a value in an input, ``method(*values)`` runs; an input without a value there is None.
        Its result is the output's value; None is no value. Values travel by reference: a reaction must not
        change a value that it was given or has returned.
        """
        return self.react_many(method, *inputs, outputs=1)[0]

    def react_many(self, method: Method, *inputs: Input, outputs: int) -> tuple[PlanChannel, ...]:
        """Declare a reaction with several outputs; the method returns a tuple with a value for each."""
        reaction = Reaction(index=len(self.plan.reactions), reactor=self, method=method, inputs=inputs)
        self.plan.reactions.append(reaction)
        reaction.outputs = tuple(self.plan.channel(reaction.name, writer=reaction) for _ in range(outputs))
        return reaction.outputs


@dataclass
class StaticPlan:
    """A fixed topology of reactors.

    Example:
        plan = StaticPlan("ping")
        back = plan.forward("back", after=0)
        ping, pong = plan.reactor("ping", Ping), plan.reactor("pong", Pong)
        sent = ping.react("send", plan.startup(), back)
        back.connect(pong.react("answer", sent))
        StaticRun(plan, workers=2).run(tags=10)
    """

    name: str
    """Name of the plan."""
    reactors: list[Reactor] = field(default_factory=list)
    """Its reactors."""
    reactions: list[Reaction] = field(default_factory=list)
    """Their reactions, in the order of declaration."""
    channels: list[PlanChannel] = field(default_factory=list)
    """All channels, by slot."""

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
        return self.channel("startup", value=value)

    def forward(self, name: str, *, after: int | None = None) -> PlanChannel:
        """Return a channel to be connected later.

        Args:
            name: its name.
            after: delay; 0: the next microstep; None: the same tag, which closes no cycle.
        """
        if after is not None and after < 0:
            raise GraphError(f"channel {name!r} has a delay of {after}", why="time never goes back")
        return self.channel(name, after=after)

    def channel(self, name: str, **more: Any) -> PlanChannel:
        """Add a channel."""
        self.channels.append(PlanChannel(name=name, slot=len(self.channels), **more))
        return self.channels[-1]

    def levels(self) -> list[list[Reaction]]:
        """Return the reactions by level, each level in the order of declaration.

        Raises:
            GraphError: a cycle has no delay, a channel has no source, a reaction reads nothing, or reads a
                channel of another plan.
        """
        self._check_inputs()
        sorter = TopologicalSorter({each: self._before(each) for each in self.reactions})
        try:
            sorter.prepare()
        except CycleError as error:
            path = " -> ".join(each.name for each in error.args[1])
            raise GraphError(
                f"{self.name} has a cycle without a delay: {path}",
                why="each of these reactions would have to run before the others at the same tag; reactions of "
                "one reactor run in the order of their declaration",
                fix="close the cycle with plan.forward(NAME, after=0)",
            ) from None
        found = []
        while ready := sorter.get_ready():
            sorter.done(*ready)
            found.append(sorted(ready, key=lambda each: each.index))
        return found

    def graph(self) -> Graph:
        """Return the plan as a graph that can be drawn; an edge says if it is delayed."""
        self.levels()
        stages, edges = [], dict[tuple[int, int], set[str]]()
        for each in self.reactions:
            role, method = each.reactor.name, each.name.removeprefix(f"{each.reactor.name}.")
            stages.append(Stage(index=each.index, role=role, endpoint=method, reads=(), writes=()))
            for channel in each.reads:
                writer = channel.origin.writer
                names = edges.setdefault((each.index, -1 if writer is None else writer.index), set())
                names |= {"delayed"} if channel.instant.after is not None else set()
        drawn = [
            Edge(source=source, destination=destination, fields=tuple(names))
            for (destination, source), names in sorted(edges.items())
        ]
        return Graph(name=self.name, stages=tuple(stages), edges=tuple(drawn), given=("start",))

    def _before(self, reaction: Reaction) -> list[Reaction]:
        """Return the reactions that precede one at every tag."""
        found = [writer for channel in reaction.reads if (writer := channel.instant.writer) is not None]
        same = [one for one in self.reactions[: reaction.index] if one.reactor is reaction.reactor]
        return found + same[-1:]

    def _check_inputs(self) -> None:
        for each in self.reactions:
            if not each.reads:
                raise GraphError(
                    f"{each.name} reads no channel", why="it would never run", fix="give it a startup"
                )
        read = [(each.name, channel) for each in self.reactions for channel in each.reads]
        read += [(f"channel {each.name!r}", each.source) for each in self.channels if each.source is not None]
        for reader, channel in read:
            if channel not in self.channels:
                raise GraphError(
                    f"{reader} reads {channel.name!r} of another plan", why="plans share no channel"
                )
        for channel in self.channels:
            _ = channel.origin
