"""Static plan: reactors, their reactions and the channels between them, checked before anything runs.

    startup, timer ──> reaction of a reactor ── channel ──> reactions        the same tag
                            ^                      └─ after=0 ─────────┐     the next microstep
                            └──────────────────────────────────────────┘     after=t: t later

Logical time is a tag (time, microstep). A reaction runs at a tag if one of its inputs has a value there. Its
level is the length of the longest chain of reactions before it within a tag, so the reactions of one level
may run side by side. Two reactions of one reactor never do: the one that was declared first is first. A cycle
without a delay has no level and is refused.

Source: Kwok et al., "Efficient parallel reinforcement learning framework using the reactor model", SPAA 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rillflow.errors import GraphError
from rillflow.graph.graph import Edge, Graph, Stage


class Tag(NamedTuple):
    """A point of logical time."""

    time: int
    """Time in the unit of the plan's delays."""
    microstep: int
    """Position among the points of the same time."""


@dataclass(eq=False)
class Channel:
    """A place for one value at each tag. Reactions read it at the tag of the value."""

    name: str
    """Name in drawings and errors."""
    slot: int
    """Index of its preallocated slot."""
    after: int | None = None
    """Delay of a forward channel; 0: the next microstep; None: no delay."""
    writer: Reaction | None = None
    """Reaction that writes it; None for a forward channel, a startup or a timer."""
    source: Channel | None = None
    """Channel that feeds a forward channel."""
    period: int | None = None
    """Period of a timer; 0: once, at the start."""
    value: Any = True
    """Value of a startup or a timer."""

    def connect(self, source: Channel) -> None:
        """Feed this forward channel from another channel.

        Raises:
            GraphError: it is no forward channel, or has a source already.
        """
        if self.writer is not None or self.period is not None:
            raise GraphError(
                f"channel {self.name!r} is connected to {source.name!r}",
                why="it has a writer of its own",
                fix="connect a channel of StaticPlan.forward",
            )
        if self.source is not None:
            raise GraphError(
                f"channel {self.name!r} is connected to {source.name!r}",
                why=f"it is fed by {self.source.name!r} already, and a channel has one value at a tag",
                fix="read both channels in one reaction",
            )
        self.source = source


Input = Channel | Sequence[Channel]
"""One channel, or several that a reaction receives as a list: a gather."""


@dataclass(eq=False)
class Reaction:
    """One method of a reactor."""

    index: int
    """Position in the order of declaration."""
    reactor: Reactor
    """Its reactor."""
    method: str
    """Name of the method."""
    inputs: tuple[Input, ...]
    """What the method is called with, in order."""
    outputs: tuple[Channel, ...] = ()
    """Channels that its result is written to."""

    @property
    def name(self) -> str:
        """Name in drawings, traces and errors."""
        return f"{self.reactor.name}.{self.method}"

    @property
    def reads(self) -> list[Channel]:
        """Every channel that it reads."""
        return [
            channel
            for each in self.inputs
            for channel in ((each,) if isinstance(each, Channel) else tuple(each))
        ]


@dataclass(eq=False)
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

    def react(self, method: str, *inputs: Input) -> Channel:
        """Declare a reaction with one output.

        At a tag with a value in an input, ``method(*values)`` runs; an input without a value there is None.
        Its result is the output's value; None is no value. Values travel by reference: a reaction must not
        change a value that it was given or has returned.
        """
        return self.react_many(method, *inputs, outputs=1)[0]

    def react_many(self, method: str, *inputs: Input, outputs: int) -> tuple[Channel, ...]:
        """Declare a reaction with several outputs; the method returns a tuple with a value for each."""
        return self.plan.add_reaction(self, method, inputs, outputs)


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
    channels: list[Channel] = field(default_factory=list)
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

    def startup(self, value: Any = True) -> Channel:
        """Return a channel that has a value once, at the first tag."""
        return self._channel("startup", period=0, value=value)

    def timer(self, period: int, value: Any = True) -> Channel:
        """Return a channel that has a value at time 0 and then every ``period``."""
        if period < 1:
            raise GraphError(f"a timer of {self.name} has period {period}", why="time must advance")
        return self._channel(f"timer {period}", period=period, value=value)

    def forward(self, name: str, *, after: int | None = None) -> Channel:
        """Return a channel to be connected later.

        Args:
            name: its name.
            after: delay; 0: the next microstep; None: the same tag, which closes no cycle.
        """
        if after is not None and after < 0:
            raise GraphError(f"channel {name!r} has a delay of {after}", why="time never goes back")
        return self._channel(name, after=after)

    def add_reaction(
        self, reactor: Reactor, method: str, inputs: tuple[Input, ...], outputs: int
    ) -> tuple[Channel, ...]:
        """Declare a reaction; see ``Reactor.react``."""
        if outputs < 1:
            raise GraphError(
                f"{reactor.name}.{method} has {outputs} outputs",
                why="every reaction has one; None is no value",
            )
        reaction = Reaction(index=len(self.reactions), reactor=reactor, method=method, inputs=inputs)
        named = [
            f"{reaction.name}" if outputs == 1 else f"{reaction.name} {place}" for place in range(outputs)
        ]
        reaction.outputs = tuple(self._channel(name, writer=reaction) for name in named)
        self.reactions.append(reaction)
        return reaction.outputs

    def levels(self) -> list[list[Reaction]]:
        """Return the reactions by level, each level in the order of declaration.

        Raises:
            GraphError: a cycle has no delay, a forward channel is not connected, a reaction reads nothing,
                or reads a channel of another plan.
        """
        self._check_inputs()
        before = {each: self._before(each) for each in self.reactions}
        level: dict[Reaction, int] = {}
        left = list(self.reactions)
        while left:
            ready = [each for each in left if all(one in level for one in before[each])]
            if not ready:
                raise self._cycle(left, before)
            for each in ready:
                level[each] = 1 + max((level[one] for one in before[each]), default=-1)
            left = [each for each in left if each not in level]
        found: list[list[Reaction]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
        for each in self.reactions:
            found[level[each]].append(each)
        return found

    def graph(self) -> Graph:
        """Return the plan as a graph that can be drawn; an edge through a delayed channel names the delay."""
        self.levels()
        stages = tuple(
            Stage(index=each.index, role=each.reactor.name, endpoint=each.method, reads=(), writes=())
            for each in self.reactions
        )
        edges: dict[tuple[int, int], dict[str, None]] = {}
        for each in self.reactions:
            for channel in each.reads:
                writer = _origin(channel).writer
                found = edges.setdefault((each.index, -1 if writer is None else writer.index), {})
                found.update(dict.fromkeys(f"after {delay}" for delay in _delays(channel)))
        drawn = [
            Edge(source=source, destination=destination, fields=tuple(delays))
            for (destination, source), delays in sorted(edges.items())
        ]
        return Graph(name=self.name, stages=stages, edges=tuple(drawn), given=("start",))

    def _channel(self, name: str, **more: Any) -> Channel:
        self.channels.append(Channel(name=name, slot=len(self.channels), **more))
        return self.channels[-1]

    def _before(self, reaction: Reaction) -> list[Reaction]:
        """Return the reactions that precede one at every tag."""
        found = [writer for channel in reaction.reads if (writer := _instant(channel)) is not None]
        same = [one for one in self.reactions[: reaction.index] if one.reactor is reaction.reactor]
        return found + same[-1:]

    def _check_inputs(self) -> None:
        for each in self.reactions:
            if not each.reads:
                raise GraphError(
                    f"{each.name} reads no channel", why="it would never run", fix="give it a startup"
                )
            for channel in each.reads:
                self._check_own(channel, each.name)
        for channel in self.channels:
            if channel.source is not None:
                self._check_own(channel.source, f"channel {channel.name!r}")
            origin = _origin(channel)
            if origin.writer is None and origin.period is None:
                raise GraphError(
                    f"channel {channel.name!r} of {self.name} has no source",
                    why="no reaction, startup or timer feeds it, so its readers would wait for ever",
                    fix="connect it to a channel that has values, or remove it",
                )

    def _check_own(self, channel: Channel, reader: str) -> None:
        if channel.slot >= len(self.channels) or self.channels[channel.slot] is not channel:
            raise GraphError(f"{reader} reads {channel.name!r} of another plan", why="plans share no channel")

    def _cycle(self, left: Sequence[Reaction], before: dict[Reaction, list[Reaction]]) -> GraphError:
        """Return the error that names a cycle among reactions that have no level."""
        path = [left[0]]
        while path.count(path[-1]) < 2:
            path.append(next(one for one in before[path[-1]] if one in left))
        names = [each.name for each in reversed(path[path.index(path[-1]) :])]
        return GraphError(
            f"{self.name} has a cycle without a delay: {' -> '.join(names)}",
            why="each of these reactions would have to run before the others at the same tag (those of one "
            "reactor run in the order of their declaration)",
            fix="close the cycle with plan.forward(NAME, after=0)",
        )


def _origin(channel: Channel) -> Channel:
    """Return the channel whose values a forward channel has, delayed or not."""
    seen = {channel}
    while channel.source is not None and channel.source not in seen:
        channel = channel.source
        seen.add(channel)
    return channel


def _delays(channel: Channel) -> Iterator[int]:
    """Yield the delays between a channel and its origin."""
    origin = _origin(channel)
    while channel is not origin and channel.source is not None:
        if channel.after is not None:
            yield channel.after
        channel = channel.source


def _instant(channel: Channel) -> Reaction | None:
    """Return the reaction that writes a channel at the same tag; None if a delay is between."""
    while channel.source is not None and channel.after is None:
        channel = channel.source
    return channel.writer if channel.after is None else None
