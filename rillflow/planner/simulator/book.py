"""Book: the timeline as it is written, and what every pool did with its time.

work, idleness ─> spans of a pool's lanes ─> seconds by cause, that with the work make up the whole time
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rillflow.planner.schedule import BESIDE
from rillflow.planner.simulator.result import Cause, PoolTime, SimulatedSpan

WHOLE = 0
"""The lane of work that all devices of a pool do together; replicas have the lanes from 1."""


class Book:
    """Writes spans down.

    Args:
        lanes: replicas by pool; of a pool that does not generate 0.
    """

    def __init__(self, lanes: Mapping[str, int]) -> None:
        self.spans: list[SimulatedSpan] = []
        self._lanes = lanes

    def work(
        self, pool: str, lane: int, stage: str, step: int, start_s: float, end_s: float, rows: int = 0
    ) -> None:
        """Something was done."""
        if end_s > start_s:
            self.spans.append(
                SimulatedSpan(
                    pool=pool,
                    lane=lane,
                    stage=stage,
                    step=step,
                    start_s=start_s,
                    duration_s=end_s - start_s,
                    rows=rows,
                )
            )

    def idle(self, pool: str, lane: int, cause: Cause, step: int, start_s: float, end_s: float) -> None:
        """Nothing was done."""
        if end_s > start_s and pool != BESIDE:
            self.spans.append(
                SimulatedSpan(
                    pool=pool,
                    lane=lane,
                    stage="",
                    step=step,
                    start_s=start_s,
                    duration_s=end_s - start_s,
                    cause=cause,
                )
            )

    def close(self, end_s: float) -> tuple[SimulatedSpan, ...]:
        """The spans in order, those beyond the end cut there."""
        kept = [span for span in self.spans if span.start_s < end_s]
        cut = [span if span.end_s <= end_s else _cut(span, end_s) for span in kept]
        return tuple(sorted(cut, key=lambda span: (span.pool, span.lane, span.start_s, span.end_s)))

    def pool_times(
        self, spans: Sequence[SimulatedSpan], pools: Sequence[str], peaks: Mapping[str, float]
    ) -> tuple[PoolTime, ...]:
        """What each pool did; of its replicas the mean."""
        busy: dict[str, float] = defaultdict(float)
        idle: dict[str, dict[Cause, float]] = {pool: {} for pool in pools}
        for span in spans:
            if span.pool == BESIDE:
                continue
            seconds = span.duration_s / (1 if span.lane == WHOLE else self._lanes[span.pool])
            if span.cause is None:
                busy[span.pool] += seconds
            else:
                causes = idle[span.pool]
                causes[span.cause] = causes.get(span.cause, 0.0) + seconds
        return tuple(
            PoolTime(pool=pool, busy_s=busy[pool], idle_s=idle[pool], peak_bytes=peaks[pool])
            for pool in pools
        )


def _cut(span: SimulatedSpan, end_s: float) -> SimulatedSpan:
    return SimulatedSpan(
        pool=span.pool,
        lane=span.lane,
        stage=span.stage,
        step=span.step,
        start_s=span.start_s,
        duration_s=end_s - span.start_s,
        cause=span.cause,
        rows=span.rows,
        tokens=span.tokens,
    )
