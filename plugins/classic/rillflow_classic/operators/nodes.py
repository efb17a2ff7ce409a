"""Nodes: the graph of a plan, which is checked and drawn before anything starts.

    actors.sample ─> gather_async(1) ─> train ─┐
                          enqueue ─ queue ─> dequeue ─> ... ─┴─> concurrently ─> metrics

Every operator makes one node. An edge of a queue goes from its ``enqueue`` to its ``dequeue``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

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
    is_parallel: ClassVar[bool] = False
    """Whether its items are on the workers, and no gather has brought them here yet."""

    def check(self) -> None:
        """Refuse a plan that ends here and cannot run. Nothing starts.

        Raises:
            GraphError: a parallel iterator without a gather, an operator with two readers, a copy or a queue
                that nothing reads, or a flow that waits for its own items: a cycle without a delay.
        """
        if self.is_parallel:
            raise GraphError(
                f"the items of {self.label} are on {self.role}",
                why="a parallel iterator has one sequence of items per worker, and no order among them",
                fix="add gather_sync(), gather_async() or batch_across_workers()",
            )
        nodes = _ordered(self)
        readers = Counter(each for node in nodes for each in node.inputs)
        read = {None, *(node.queue for node in nodes if not node.inputs)}
        starts = {node for node in nodes if not node.inputs and (node.queue is None or node.initial)}
        for _ in nodes:
            starts |= {node for node in nodes if starts.intersection(_before(node, nodes))}
        for node in nodes:
            left = node.copies - readers[node]
            if left > 0 and node is not self:
                raise GraphError(
                    f"{left} of the {node.copies} copies of {node.label} have no reader",
                    why="a copy that nothing reads fills its buffer, and then the others wait for ever",
                    fix="make fewer copies, or give each one a flow of concurrently(...)",
                )
            if left < 0:
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
                    fix="fill it from a source, or begin it with items: queue(capacity, initial=[...])",
                )

    def graph(self, name: str) -> Graph:
        """Return the plan that ends here as a graph that ``rillflow graph`` draws."""
        nodes = _ordered(self)
        stages = [
            Stage(index=index, role=node.role, endpoint=node.label, reads=(), writes=())
            for index, node in enumerate(nodes)
        ]
        edges = [
            Edge(source=source, destination=index, fields=() if one in node.inputs else ("queue",))
            for index, node in enumerate(nodes)
            for source, one in enumerate(nodes)
            if one in _before(node, nodes)
        ]
        return Graph(name=name, stages=tuple(stages), edges=tuple(edges), given=())


def _ordered(node: PlanNode) -> list[PlanNode]:
    """Return the nodes that an operator takes items from, and itself; inputs before their readers."""
    return list(dict.fromkeys([one for each in node.inputs for one in _ordered(each)] + [node]))


def _before(node: PlanNode, nodes: Sequence[PlanNode]) -> list[PlanNode]:
    """Return the operators whose items a node has: its inputs, or those that fill the queue it empties."""
    filled = [each for each in nodes if each.inputs and each.queue is node.queue is not None]
    return list(node.inputs) or filled
