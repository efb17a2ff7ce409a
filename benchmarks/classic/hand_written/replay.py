"""Bare Ray actors that hold a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray


@ray.remote(num_cpus=0)
class RemoteReplay:
    """A shard of a replay."""

    def __init__(self, make: Callable[[int], Any], index: int):
        self.buffer = make(index)

    def add(self, fragment: Any) -> None:
        self.buffer.add(fragment)

    def draw(self, batch_size: int, least: int) -> Any:
        return None if self.buffer.num_transitions < least else self.buffer.sample(batch_size)

    def set_priorities(self, serials: Any, errors: Any) -> None:
        self.buffer.set_priorities(serials, errors)
