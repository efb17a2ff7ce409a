"""What an engine keeps of its rows, looked at from outside."""

from __future__ import annotations

from rillflow.rollout.native.cache import Cache
from rillflow.rollout.native.engine import NativeEngine


def num_bytes(cache: Cache) -> int:
    """What its keys and values take."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers.values())


def cached_bytes(engine: NativeEngine) -> int:
    """What keys and values of all lanes take now."""
    return sum(num_bytes(lane._runner._cache) for lane in engine._lanes if lane._runner is not None)
