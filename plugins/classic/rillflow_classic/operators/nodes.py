"""Nodes: the graph of a plan, which is checked and drawn before anything starts.

    actors.sample ─> gather_async(1) ─> train ─┐
                          enqueue ─ queue ─> dequeue ─> ... ─┴─> concurrently ─> metrics

Every operator makes one node. An edge of a queue goes from its ``enqueue`` to its ``dequeue``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.errors import GraphError
from rillflow.graph.graph import CONTROLLER, Edge, Graph, Stage

SOURCE, TRANSFORM = "source", "transform"
SPLIT, ENQUEUE, DEQUEUE = "split", "enqueue", "dequeue"


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanNode:
    """One operator of a plan."""

    label: str
    """Name in drawings and errors."""
    kind: str = TRANSFORM
    """What it does with its inputs."""
    inputs: tuple[PlanNode, ...] = ()
    """Operators whose items it takes."""
    role: str = CONTROLLER
    """Pool of the workers that run it; the controller's process for ``controller``."""
    queue: object = None
    """Queue that it fills or empties."""
    size: int = 0
    """Copies of a ``split``; items that an empty queue begins with for a ``dequeue``."""
    is_parallel: bool = False
    """Whether its items are on the workers, and no gather has brought them here yet."""


def ordered(root: PlanNode) -> list[PlanNode]:
    """Return the nodes that a plan's end takes items from, inputs before their readers."""
    found: dict[PlanNode, None] = {}

    def visit(node: PlanNode) -> None:
        if node not in found:
            for each in node.inputs:
                visit(each)
            found[node] = None

    visit(root)
    return list(found)


def check(root: PlanNode) -> None:
    """Refuse a plan that cannot run.

    Raises:
        GraphError: a parallel iterator without a gather, an operator with two readers, a copy or a queue that
            nothing reads, or a flow that waits for its own items.
    """
    nodes = ordered(root)
    if root.is_parallel:
        raise GraphError(
            f"the items of {root.label} are on {root.role}",
            why="a parallel iterator has one sequence of items per worker, and no order among them",
            fix="add gather_sync(), gather_async() or batch_across_workers()",
        )
    _check_readers(nodes)
    _check_starts(nodes)


def as_graph(root: PlanNode, name: str) -> Graph:
    """Return the plan as a graph that ``rillflow graph`` draws."""
    nodes = ordered(root)
    index = {node: place for place, node in enumerate(nodes)}
    stages = [
        Stage(index=place, role=node.role, endpoint=node.label, reads=(), writes=())
        for node, place in index.items()
    ]
    arrows: list[tuple[PlanNode, PlanNode, tuple[str, ...]]]
    arrows = [(one, node, ()) for node in nodes for one in node.inputs]
    arrows += [(one, node, ("queue",)) for node in nodes for one in _writers(node, nodes)]
    edges = [Edge(source=index[one], destination=index[node], fields=fields) for one, node, fields in arrows]
    edges.sort(key=lambda edge: (edge.destination, edge.source))
    return Graph(name=name, stages=tuple(stages), edges=tuple(edges), given=())


def _writers(node: PlanNode, nodes: Sequence[PlanNode]) -> list[PlanNode]:
    """Return the operators that fill the queue of a ``dequeue``."""
    if node.kind != DEQUEUE:
        return []
    return [each for each in nodes if each.kind == ENQUEUE and each.queue is node.queue]


def _check_readers(nodes: Sequence[PlanNode]) -> None:
    readers = Counter(each for node in nodes for each in node.inputs)
    queues = {node.queue for node in nodes if node.kind == DEQUEUE}
    for node in nodes:
        if node.kind == SPLIT and readers[node] < node.size:
            raise GraphError(
                f"{node.size - readers[node]} of the {node.size} copies of {node.label} have no reader",
                why="a copy that nothing reads fills its buffer, and then the others wait for ever",
                fix="make fewer copies, or give each one a flow of concurrently(...)",
            )
        if node.kind != SPLIT and readers[node] > 1:
            raise GraphError(
                f"{readers[node]} operators read {node.label}",
                why="each item goes to one reader, so that each of them would miss items",
                fix="make copies with duplicate(n), or a second iterator from the same workers",
            )
        if node.kind == ENQUEUE and node.queue not in queues:
            raise GraphError(
                f"nothing in the plan reads the queue of {node.label}",
                why="it would fill up, and its flow would wait for ever",
                fix="add the flow of its dequeue to concurrently(...)",
            )


def _check_starts(nodes: Sequence[PlanNode]) -> None:
    """Refuse a flow that no source and no initial item of a queue starts: a cycle without a delay."""
    starts = {node for node in nodes if node.kind == SOURCE or (node.size and node.kind == DEQUEUE)}
    for _ in nodes:
        starts |= {node for node in nodes if starts.intersection((*node.inputs, *_writers(node, nodes)))}
    for node in nodes:
        if node not in starts:
            raise GraphError(
                f"{node.label} waits for items that nothing makes",
                why="no flow fills its queue, or only a cycle without a delay, which waits for itself",
                fix="fill the queue from a source, or begin it with items: queue(capacity, initial=[...])",
            )
