"""Graph: the stages of one step, and the fields that flow between them.

stage ── fields ──> stage        an edge per pair: what the later stage reads of the earlier one's result
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

DATA = "data"
"""The name of what a step is given: prompts, demonstrations, pairs."""
WEIGHTS = "weights"
"""What a stage reads that is given nothing: its role's state, as the role's last stage has left it."""
CONTROLLER = "controller"
"""The role of stages that belong to no model: formulas over numbers."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One named computation of one role.

    Example:
        Stage(index=1, role="reward", endpoint="score", reads=("tokens",), writes=("rewards", "valid"))
    """

    index: int
    """Its place in the step, from 0."""
    role: str
    """Who computes; ``controller`` for a formula."""
    endpoint: str
    """The role's method, or the formula's name."""
    reads: tuple[str, ...]
    """Fields it needs of its arguments."""
    writes: tuple[str, ...]
    """Fields of its result; empty for a report, a version or a number."""
    transfer: str = ""
    """How arguments reach the role's ranks and results leave them; empty for a formula."""

    @property
    def name(self) -> str:
        """``role.endpoint``."""
        return f"{self.role}.{self.endpoint}"


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A result, or a part of it, on its way to a later stage."""

    source: int
    """The stage that made it; -1 for what the step was given, -2 for what was given beside it."""
    destination: int
    """The stage that takes it."""
    fields: tuple[str, ...]
    """What the destination reads of it; empty where it is a number."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One step of an algorithm.

    Example:
        print(as_text(trace(step, config, endpoints, data_fields=("tokens", "columns"))))
    """

    name: str
    """The algorithm."""
    stages: tuple[Stage, ...]
    """In the order of the program."""
    edges: tuple[Edge, ...]
    """Ordered by destination, then source."""
    given: tuple[str, ...] = (DATA,)
    """What the step is given, the sources -1, -2, ... by name."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role with a stage, in order of appearance; the controller is none."""
        return tuple(dict.fromkeys(stage.role for stage in self.stages if stage.role != CONTROLLER))

    def into(self, stage: int) -> Iterator[Edge]:
        """The edges that end at a stage."""
        return (edge for edge in self.edges if edge.destination == stage)

    def source_name(self, edge: Edge) -> str:
        """The name of the stage an edge comes from, or ``data``."""
        return self.given[-1 - edge.source] if edge.source < 0 else self.stages[edge.source].name
