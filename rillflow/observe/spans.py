"""Spans: how long each stage of each step took, by a monotonic clock.

with spans.span("policy.generate", step=12) as span:  ─ at the end ─> one record in spans.jsonl
    ...
    span.rows, span.tokens = 512, 9000
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(kw_only=True)
class Span:
    """One stage of one step; ``rows`` and ``tokens`` are filled in while it runs."""

    step: int
    """The step it belongs to."""
    stage: str
    """The stage's name, ``role.endpoint``."""
    start_s: float
    """When it began, in seconds of the run."""
    duration_s: float = 0.0
    """How long it took; set when it ends."""
    rows: int = 0
    """Rows it worked on."""
    tokens: int = 0
    """Tokens it worked on."""


class Spans:
    """Measures stages and hands each finished one to ``write``; a stage that raises is not recorded.

    Example:
        spans = Spans(clock=time.monotonic, write=finished.append)
        with spans.span("policy.generate", step=1) as span:
            span.rows = 512
    """

    def __init__(self, *, clock: Callable[[], float], write: Callable[[Span], None]) -> None:
        self._clock = clock
        self._write = write

    @contextmanager
    def span(self, stage: str, *, step: int, rows: int = 0, tokens: int = 0) -> Iterator[Span]:
        """Measure the body of a ``with`` statement."""
        span = Span(step=step, stage=stage, start_s=self._clock(), rows=rows, tokens=tokens)
        yield span
        span.duration_s = self._clock() - span.start_s
        self._write(span)
