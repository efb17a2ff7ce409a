"""Graph: the stages of one step, and the fields that flow between them.

stage ── fields ──> stage        one edge per pair: the fields that the later stage reads
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

DATA = "data"
"""Name of a step's input: prompts, demonstrations or pairs."""
WEIGHTS = "weights"
"""Field on the edge to a stage without data inputs: the role's state after its previous stage."""
CONTROLLER = "controller"
"""Role of stages without a model: formulas, filters and collected rows."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One named computation of one role.

    Example:
        Stage(index=1, role="reward", endpoint="score", reads=("tokens",), writes=("rewards", "valid"))
    """

    index: int
    """Position in the step, from 0."""
    role: str
    """Role that computes the stage; ``controller`` for a formula."""
    endpoint: str
    """Method of the role, or name of the formula."""
    reads: tuple[str, ...]
    """Fields that the stage reads from its arguments."""
    writes: tuple[str, ...]
    """Fields of the result; empty for a report, a version or a number."""
    transfer: str = ""
    """How arguments reach the role's ranks and results return; empty for a formula."""

    @property
    def name(self) -> str:
        """Name of the stage, ``role.endpoint``."""
        return f"{self.role}.{self.endpoint}"


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Fields of one stage's result, or of the step's input, that a later stage reads."""

    source: int
    """Index of the producing stage; -1 for the step's input, -2 and below for its further inputs."""
    destination: int
    """Index of the consuming stage."""
    fields: tuple[str, ...]
    """Fields that the destination reads; empty for a number."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One step of an algorithm.

    Example:
        print(as_text(trace(step, config, endpoints, data_fields=("tokens", "columns"))))
    """

    name: str
    """Name of the algorithm."""
    stages: tuple[Stage, ...]
    """Stages in program order."""
    edges: tuple[Edge, ...]
    """Edges, ordered by destination, then source."""
    given: tuple[str, ...] = (DATA,)
    """Names of the step's inputs, the sources -1, -2, ... in order."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles with a stage, in order of appearance, without the controller."""
        return tuple(dict.fromkeys(stage.role for stage in self.stages if stage.role != CONTROLLER))

    def into(self, stage: int) -> Iterator[Edge]:
        """Return the edges that end at a stage."""
        return (edge for edge in self.edges if edge.destination == stage)

    def source_name(self, edge: Edge) -> str:
        """Return the name of an edge's source: a stage, or an input of the step such as ``data``."""
        return self.given[-1 - edge.source] if edge.source < 0 else self.stages[edge.source].name
