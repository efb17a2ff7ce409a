"""PassClock: the start and the end of passes on a device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from rillflow.workers.arguments import TimedPass


class PassClock:
    """Clock of the passes on one device, in seconds since the epoch.

    On a CUDA device it records events, which ``passes`` reads after the device has finished.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._stamps: list[tuple[int, bool, Any, Any]] = []
        self._epoch_s, self._first = time.time(), self.stamp()

    def stamp(self) -> Any:
        """Return a point in time on the device."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, micro_batch: int, is_backward: bool, start: Any) -> None:
        """Add a pass that began at a stamp and ends now."""
        self._stamps.append((micro_batch, is_backward, start, self.stamp()))

    def passes(self) -> tuple[TimedPass, ...]:
        """Return the passes in their order."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return tuple(
            TimedPass(
                micro_batch=micro_batch,
                is_backward=is_backward,
                began=self._epoch_s + self._since(start),
                ended=self._epoch_s + self._since(end),
            )
            for micro_batch, is_backward, start, end in self._stamps
        )

    def _since(self, stamp: Any) -> float:
        if self._is_cuda:
            return float(self._first.elapsed_time(stamp)) / 1e3
        return float(stamp - self._first)


def median_s(passes: Sequence[TimedPass], *, is_backward: bool) -> float:
    """Return the median seconds of the passes of one direction."""
    return median(each.ended - each.began for each in passes if each.is_backward == is_backward)
