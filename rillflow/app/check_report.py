"""Check report: facts, notes and problems that the checks of ``run`` and ``check`` find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rillflow.errors import RillflowError

F = TypeVar("F")


@dataclass(kw_only=True)
class Report:
    """Results of the checks."""

    topics: dict[str, list[str]] = field(default_factory=dict)
    """Lines by subject."""
    notes: list[str] = field(default_factory=list)
    """Behaviour of the run that its author may not expect."""
    problems: list[RillflowError] = field(default_factory=list)
    """Errors that would stop a run, each once."""

    def say(self, title: str, lines: Sequence[str]) -> None:
        """Add facts about a subject."""
        self.topics.setdefault(title, []).extend(lines)

    def attempt(self, check: Callable[[F, Report], None], facts: F) -> None:
        """Run one check; its error becomes a problem, so that the next check still runs."""
        try:
            check(facts, self)
        except RillflowError as error:
            if str(error) not in map(str, self.problems):  # several checks may read the same fact
                self.problems.append(error)
