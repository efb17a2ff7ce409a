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


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanNode:
    """One operator of a plan."""

    label: str
    """Name in drawings and errors."""
    inputs: tuple[PlanNode, ...] = ()
    """Operators whose items it takes; a source and the end of a queue have none."""
    role: str = CONTROLLER
    """Pool of the workers that run it; the controller's process for ``controller``."""
    queue: object = None
    """Queue that it fills, or empties if it has no inputs."""
    initial: int = 0
    """Items that the queue begins with."""
    copies: int = 1
    """Operators that may read its items: one, or one for each copy."""
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
            nothing reads, or a flow that waits for its own items: a cycle without a delay.
    """
    if root.is_parallel:
        raise GraphError(
            f"the items of {root.label} are on {root.role}",
            why="a parallel iterator has one sequence of items per worker, and no order among them",
            fix="add gather_sync(), gather_async() or batch_across_workers()",
        )
    nodes = ordered(root)
    readers = Counter(each for node in nodes for each in node.inputs)
    read = {None, *(node.queue for node in nodes if not node.inputs)}
    starts = {node for node in nodes if not node.inputs and (node.queue is None or node.initial)}
    for _ in nodes:
        starts |= {node for node in nodes if starts.intersection((*node.inputs, *_writers(node, nodes)))}
    for node in nodes:
        if readers[node] < node.copies and node is not root:
            raise GraphError(
                f"{node.copies - readers[node]} of the {node.copies} copies of {node.label} have no reader",
                why="a copy that nothing reads fills its buffer, and then the others wait for ever",
                fix="make fewer copies, or give each one a flow of concurrently(...)",
            )
        if readers[node] > node.copies:
            raise GraphError(
                f"{readers[node]} operators read {node.label}",
                why="each item goes to one reader, so that each of them would miss items",
                fix="make copies with duplicate(n), or a second iterator from the same workers",
            )
        if node.queue not in read:
            raise GraphError(
                f"nothing in the plan reads the queue of {node.label}",
                why="it would fill up, and its flow would wait for ever",
                fix="add the flow of its dequeue to concurrently(...)",
            )
        if node not in starts:
            raise GraphError(
                f"{node.label} waits for items that nothing makes",
                why="no flow fills its queue, or only a cycle without a delay, which waits for itself",
                fix="fill the queue from a source, or begin it with items: queue(capacity, initial=[...])",
            )


def as_graph(root: PlanNode, name: str) -> Graph:
    """Return the plan as a graph that ``rillflow graph`` draws."""
    nodes = ordered(root)
    index = {node: place for place, node in enumerate(nodes)}
    stages = [
        Stage(index=place, role=node.role, endpoint=node.label, reads=(), writes=())
        for node, place in index.items()
    ]
    edges = [
        Edge(source=index[one], destination=place, fields=() if one in node.inputs else ("queue",))
        for node, place in index.items()
        for one in sorted((*node.inputs, *_writers(node, nodes)), key=lambda each: index[each])
    ]
    return Graph(name=name, stages=tuple(stages), edges=tuple(edges), given=())


def _writers(node: PlanNode, nodes: Sequence[PlanNode]) -> list[PlanNode]:
    """Return the operators that fill the queue of a ``dequeue``."""
    if node.inputs or node.queue is None:
        return []
    return [each for each in nodes if each.inputs and each.queue is node.queue]
