"""Timeline: the fake clock of a simulated run, its numbered events, and the faults at some of them.

    every event ─ number, line of the trace ─> a fault of the plan strikes, or nothing

Events are the moments at which something can fail: a rank begins a call, the controller communicates with its
ranks, a file changes. One seed decides all delays and durations, so a seed gives the same events with the
same numbers every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random


class DriverKilled(BaseException):
    """The driver's process is gone; no handler of the driver may run."""


class Timeline:
    """Clock, chance and events of one start of a run.

    Args:
        chance: decides delays and durations.
        plan: faults by the number of their event.
        origin: first line of the trace.
    """

    def __init__(self, chance: Random, plan: Mapping[int, Callable[[Timeline], None]], origin: str) -> None:
        self.chance = chance
        self.now = 1_000.0
        """Seconds on the fake clock."""
        self.number = 0
        """Events so far."""
        self.trace: list[str] = [origin]
        """One line per event, and one per fault."""
        self.is_over = False
        """True if the driver is dead: its further actions raise DriverKilled."""
        self.inside: object = None
        """The rank whose call is running; None while the driver runs."""
        self._plan = dict(plan)

    def event(self, what: str) -> None:
        """Record an event; execute the fault of the plan at this event, which may raise."""
        if self.is_over and self.inside is None:
            raise DriverKilled
        self.number += 1
        self.trace.append(f"{self.number:5d} {self.now:12.4f} {what}")
        if self.number in self._plan and not self.is_over:
            self._plan[self.number](self)

    def postpone(self, fault: Callable[[Timeline], None]) -> None:
        """Schedule a fault at the next event, unless that has one."""
        self._plan.setdefault(self.number + 1, fault)

    def fault(self, what: str) -> None:
        """Record a fault."""
        self.trace.append(f"      FAULT {what}")

    def die(self) -> None:
        """End the driver.

        Raises:
            DriverKilled: always.
        """
        self.is_over = True
        raise DriverKilled

    def clock(self) -> float:
        """Return seconds on the fake clock."""
        return self.now
