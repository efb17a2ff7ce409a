"""A plain interpreter of static plans, and random plans for it: no levels, no slots, no threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import strategies as st

from rillflow_classic.executor.plan import DelayedChannel, PlanChannel, Reaction, StaticPlan, Tag

Line = tuple[Tag, str, Any]
"""Tag, name and result of a reaction."""


@dataclass
class Mixer:
    """A reactor whose results depend on its state and on every input."""

    salt: int
    state: int = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("r"):
            raise AttributeError(name)
        return partial(self.mix, int(name[1:]))

    def mix(self, number: int, *given: Any) -> int | None:
        """Return a number, or None at some tags."""
        self.state = hash((self.salt, self.state, number, *(_flat(each) for each in given))) % 1009
        return None if self.state % 7 == 0 else self.state


def _flat(given: Any) -> Any:
    return tuple(-1 if each is None else each for each in given) if isinstance(given, list) else given or -1


class Clock:
    """A reactor that starts itself again after a delay."""

    def tick(self, start: Any, again: Any) -> Any:
        return again if start is None else start


def timer(plan: StaticPlan, period: int) -> PlanChannel:
    """Return a channel that has a value at time 0 and then every ``period``."""
    again = plan.delayed("again", after=period)
    ticked = plan.reactor(f"clock {period}", Clock).react("tick", plan.startup(5), again)
    again.connect(ticked)
    return ticked


@st.composite
def plans(draw: st.DrawFn) -> StaticPlan:
    """Draw a plan of some reactors: acyclic within a tag, with delayed channels back."""
    plan = StaticPlan("random")
    reactors = [
        plan.reactor(f"reactor {index}", partial(Mixer, index))
        for index in range(draw(st.integers(1, 5), label="reactors"))
    ]
    sources = [plan.startup(3), timer(plan, draw(st.integers(1, 3)))]
    delayed = [
        plan.delayed(f"delayed {index}", after=draw(st.integers(0, 2)))
        for index in range(draw(st.integers(0, 3), label="delays"))
    ]
    channels = [*sources, *delayed]
    for number in range(draw(st.integers(1, 8), label="reactions")):
        picked = st.sampled_from(channels)
        inputs = draw(st.lists(picked | st.lists(picked, min_size=1, max_size=3), min_size=1, max_size=3))
        channels.append(draw(st.sampled_from(reactors)).react(f"r{number}", *inputs))
    for each in delayed:
        each.connect(draw(st.sampled_from(channels[len(sources) + len(delayed) :])))
    return plan


@dataclass
class Interpreter:
    """Runs a plan one reaction at a time: always the first whose predecessors have had their turn."""

    plan: StaticPlan
    pending: dict[Tag, dict[int, Any]] = field(default_factory=dict)

    def run(self, tags: int) -> list[Line]:
        """Return the lines of some tags; those of one tag are sorted by name."""
        states = {each.name: each.make() for each in self.plan.reactors}
        for each in self.plan.channels:
            if each.value is not None:
                self.pending.setdefault(Tag(0, 0), {})[each.slot] = each.value
        lines: list[Line] = []
        for _ in range(tags):
            if not self.pending:
                break
            tag = min(self.pending)
            values = self.pending.pop(tag)
            lines += sorted(self._one_tag(tag, values, states), key=lambda line: line[1])
            for each in self.plan.channels:
                if isinstance(each, DelayedChannel):
                    value = self._read(each.reads[0], values)
                    if value is not None:
                        later = (
                            Tag(tag.time + each.after, 0) if each.after else Tag(tag.time, tag.microstep + 1)
                        )
                        self._add(later, each, value)
        return lines

    def _one_tag(self, tag: Tag, values: dict[int, Any], states: dict[str, Any]) -> list[Line]:
        left, lines = list(self.plan.reactions), []
        while left:
            reaction = next(each for each in left if not self._waits(each, left))
            left.remove(reaction)
            given = [
                self._read(each, values)
                if isinstance(each, PlanChannel)
                else [self._read(one, values) for one in each]
                for each in reaction.inputs
            ]
            if all(self._read(each, values) is None for each in reaction.reads):
                continue
            result = getattr(states[reaction.reactor.name], str(reaction.method))(*given)
            lines.append((tag, reaction.name, result))
            if result is not None:
                values[reaction.slot] = result
        return lines

    def _waits(self, reaction: Reaction, left: list[Reaction]) -> bool:
        for channel in reaction.reads:
            if channel in left:
                return True
        return any(each.reactor is reaction.reactor for each in left[: left.index(reaction)])

    def _read(self, channel: PlanChannel, values: dict[int, Any]) -> Any:
        return values.get(channel.slot)

    def _add(self, tag: Tag, channel: PlanChannel, value: Any) -> None:
        self.pending.setdefault(tag, {})[channel.slot] = value
