"""Clock: the schedule of one placement for many plans at once; each number is an array over plans.

graph, pool of every stage ─> what waits for what ─┬─ seconds [plans] ─> ends of stages [plans]
                                                   └─ segments: stages of a pool whose sum alone counts

Edges that another path makes needless are left out: they delay nothing. What is left says which stages of
a pool others wait for; between those only the sum of seconds counts, so plans differ in fewer numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rillflow.graph.graph import Graph
from rillflow.planner.objective import Floats

Number = Floats | float
"""Of every plan, or the same of all."""


class Clock:
    """When stages end, for plans that share a placement.

    Example:
        Clock(graph, pools=(0, 0, 1, -1, 0)).ends(seconds, transfers={})
    """

    def __init__(self, graph: Graph, *, pools: Sequence[int], observed: Sequence[int] = ()) -> None:
        """Of stages on pools by number, -1 for none; ``observed`` are stages whose end itself counts."""
        self.pools = tuple(pools)
        self.crossing = tuple(
            number
            for number, edge in enumerate(graph.edges)
            if edge.source >= 0
            and -1 not in (pools[edge.source], pools[edge.destination])
            and pools[edge.source] != pools[edge.destination]
        )
        self._inward = _needed(graph, self.pools, set(self.crossing))
        self.observed = tuple(observed)

    def ends(self, seconds: Sequence[Number], transfers: Mapping[int, Number]) -> list[Number]:
        """When every stage ends, [plans] each.

        Args:
            seconds: by stage.
            transfers: by the number of an edge; others take none.
        """
        ends: list[Number] = []
        free: dict[int, Number] = {}
        for index, pool in enumerate(self.pools):
            start: Number = free.get(pool, 0.0)
            for edge, source in self._inward[index]:
                sent = ends[source]
                if edge in transfers:
                    sent = sent + transfers[edge]
                start = np.maximum(start, sent)
            end = start + seconds[index]
            ends.append(end)
            if pool >= 0:
                free[pool] = end
        return ends

    def segments(self, pool: int) -> tuple[tuple[int, ...], ...]:
        """The stages of a pool in order, cut where another pool or a formula waits or is waited for."""
        own = [index for index, place in enumerate(self.pools) if place == pool]
        waited_for = {
            source
            for index, inward in enumerate(self._inward)
            for _, source in inward
            if self.pools[index] != pool
        } | set(self.observed)
        waiting = {
            index for index in own if any(self.pools[source] != pool for _, source in self._inward[index])
        }
        found: list[list[int]] = []
        for place, index in enumerate(own):
            if place == 0 or own[place - 1] in waited_for or index in waiting:
                found.append([])
            found[-1].append(index)
        return tuple(tuple(segment) for segment in found)


def _needed(graph: Graph, pools: Sequence[int], crossing: set[int]) -> list[list[tuple[int, int]]]:
    """By stage the edges it waits for, as (number, source): all but those another path implies."""
    last: dict[int, int] = {}
    before: list[set[int]] = []
    found: list[list[tuple[int, int]]] = []
    for index, pool in enumerate(pools):
        edges = [
            (number, edge.source)
            for number, edge in enumerate(graph.edges)
            if edge.destination == index and edge.source >= 0
        ]
        in_turn = [last[pool]] if pool >= 0 and pool in last else []
        kept = []
        for number, source in edges:
            others = [*in_turn, *(other for _, other in edges if other != source)]
            implied = source in in_turn or any(source in before[other] for other in others)
            if number in crossing or not implied:
                kept.append((number, source))
        found.append(kept)
        sources = {*in_turn, *(source for _, source in edges)}
        before.append(sources.union(*(before[source] for source in sources)))
        if pool >= 0:
            last[pool] = index
    return found
