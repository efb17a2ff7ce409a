"""Segments: how much memory a pool keeps for later values."""

from __future__ import annotations

import gc
import os

import numpy as np

from rillflow.workers.segments import MAX_POOL_BYTES, SegmentPool


def test_a_pool_keeps_as_many_bytes_as_its_limit_says() -> None:
    """Two values fill it; once nobody holds them, the next two are written into the same memory."""
    pool, value = SegmentPool(), np.zeros(MAX_POOL_BYTES // 4 + 1, np.uint8)

    def inodes() -> set[int]:
        held = [pool.hold([value])[0] for _ in range(2)]
        return {os.fstat(each.descriptor).st_ino for each in held}

    first = inodes()
    gc.collect()
    assert len(first) == 2 and inodes() == first
