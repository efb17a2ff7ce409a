"""Generation: the rows of one round over the replicas of a pool, until all that are wanted have ended.

prompts ─ rows, in turn ─> replicas ─ ended ─┬─> a prompt's wanted samples are there: its others are stopped
                                             └─> the wanted prompts are there: the round ends, the rest is
                                                 put aside for a later round

consumes        the rows of a round
waits for       the earliest event of any replica
unblocked by    nothing from outside
produces        prompts that are complete, prompts put aside, the seconds of each replica

Rounds in which more is begun than wanted: tail batching of RollPacker (arXiv 2509.21009). A row put aside has
the same length when it begins anew.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.planner.simulator.draws import Row
from rillflow.planner.simulator.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round of generation did."""

    seconds: float
    """Until it ended."""
    lanes: tuple[float, ...]
    """Of each replica, the seconds until its last row had ended."""
    complete: tuple[int, ...]
    """Prompts whose wanted samples are there."""
    aside: tuple[int, ...]
    """Prompts begun that are left for later."""
    tokens: int
    """Tokens of the rows that are kept, prompts and responses."""
    kept: int
    """Rows that are kept."""
    stopped: int
    """Rows of complete prompts that were not waited for."""
    peak_tokens: float
    """The most tokens a replica's cache held."""


def run_round(
    replicas: Sequence[Replica], prompts: Sequence[list[Row]], *, wanted: int, samples: int
) -> Round:
    """Run the rows of a round.

    Args:
        replicas: fresh ones; rows are dealt to them in turn.
        prompts: the rows of each prompt that begins.
        wanted: prompts that end the round once they are complete.
        samples: rows that make a prompt complete.

    Raises:
        PlanError: a row does not fit into a replica's cache.
    """
    return _Rounding(replicas, prompts, samples).run(wanted)


class _Rounding:
    """A round under way."""

    def __init__(self, replicas: Sequence[Replica], prompts: Sequence[list[Row]], samples: int) -> None:
        self.replicas = replicas
        self.prompts = prompts
        self.samples = samples
        self.homes: dict[tuple[int, int], int] = {}
        self.ended: dict[int, list[Row]] = defaultdict(list)
        self.complete: list[int] = []
        self.lanes = [0.0] * len(replicas)
        self.rows_of = {rows[0].prompt: rows for rows in prompts}

    def run(self, wanted: int) -> Round:
        heap = self._deal()
        now = 0.0
        while heap and len(self.complete) < wanted:
            now, place = heapq.heappop(heap)
            replica = self.replicas[place]
            if replica.next_s != now:
                continue
            self.lanes[place] = now
            touched = {place} | self._end(replica.advance(now), now)
            for other in touched:
                if self.replicas[other].rows:
                    heapq.heappush(heap, (self.replicas[other].next_s, other))
        return self._round(now, self.complete[:wanted])

    def _deal(self) -> list[tuple[float, int]]:
        """Rows go to replicas as cards do, so that no replica has two more than another."""
        hands: list[list[Row]] = [[] for _ in self.replicas]
        rows = [row for rows in self.prompts for row in rows]
        for number, row in enumerate(rows):
            place = number * len(hands) // len(rows)
            hands[place].append(row)
            self.homes[row.prompt, row.sample] = place
        heap = []
        for place, (replica, hand) in enumerate(zip(self.replicas, hands, strict=True)):
            replica.begin(hand, 0.0)
            if hand:
                heap.append((replica.next_s, place))
        heapq.heapify(heap)
        return heap

    def _end(self, rows: list[Row], now: float) -> set[int]:
        """Count rows that ended; the replicas on which others were stopped for them."""
        touched = set()
        left = list(rows)
        while left:
            row = left.pop()
            done = self.ended[row.prompt]
            if len(done) == self.samples:
                continue
            done.append(row)
            if len(done) < self.samples:
                continue
            self.complete.append(row.prompt)
            kept = {item.sample for item in done}
            for other in self.rows_of[row.prompt]:
                if other.sample not in kept:
                    place = self.homes[other.prompt, other.sample]
                    left += self._stop(other, place, now)
                    touched.add(place)
        return touched

    def _stop(self, row: Row, place: int, now: float) -> list[Row]:
        """Stop a row that nobody waits for; the rows that end at this very moment."""
        replica = self.replicas[place]
        ended = replica.advance(now)
        replica.stop(row)
        self.lanes[place] = now
        return ended

    def _round(self, seconds: float, complete: Sequence[int]) -> Round:
        """What was done; of prompts that were complete at the same moment, no more count than were wanted."""
        kept = [row for prompt in complete for row in self.ended[prompt]]
        begun = sum(len(self.rows_of[prompt]) for prompt in complete)
        lanes = [
            seconds if replica.rows else lane for replica, lane in zip(self.replicas, self.lanes, strict=True)
        ]
        return Round(
            seconds=seconds,
            lanes=tuple(lanes),
            complete=tuple(complete),
            aside=tuple(prompt for prompt in self.rows_of if prompt not in complete),
            tokens=sum(row.prompt_tokens + row.response_tokens for row in kept),
            kept=len(kept),
            stopped=begun - len(kept),
            peak_tokens=max(replica.peak_tokens for replica in self.replicas),
        )
