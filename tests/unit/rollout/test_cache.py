from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.rollout.native.cache import Cache, LayerShape
from rillflow.rollout.native.cache_layout import CacheRow, Copy, LengthBucket

SHAPES = {0: LayerShape(heads=2, key_size=4, value_size=6), 1: LayerShape(heads=1, key_size=8, value_size=8)}
CPU = torch.device("cpu")


def bucket(rows: int, length: int, name: int = 0) -> LengthBucket[Any]:
    return LengthBucket(name=name, length=length, rows=rows)


def filled(*buckets: LengthBucket[Any]) -> Cache:
    cache = Cache(SHAPES, CPU, torch.float32)
    cache.arrange(buckets)
    for layer in cache.layers.values():
        for states in (part for each in layer.values() for part in each):
            states.copy_(torch.randn_like(states))
    return cache


def copy(source: tuple[int, int], target: tuple[int, int], length: int) -> Copy:
    return Copy(source=CacheRow(*source), target=CacheRow(*target), length=length)


def test_growth_keeps_what_was_there_and_adds_zeros() -> None:
    cache = filled(bucket(3, 64))
    before = {index: layer[0] for index, layer in cache.layers.items()}
    cache.arrange([bucket(5, 80)])
    for index, layer in cache.layers.items():
        for old, new in zip(before[index], layer[0], strict=True):
            assert torch.equal(new[:3, :, :64], old)
            assert not new[3:].any() and not new[:, :, 64:].any()


def test_enough_room_moves_nothing() -> None:
    cache = filled(bucket(3, 64))
    place = cache.layers[0][0].keys.data_ptr()
    cache.arrange([bucket(3, 64)])
    cache.arrange([bucket(1, 80, name=1), bucket(3, 64)])
    assert cache.layers[0][0].keys.data_ptr() == place


def test_copies_reach_no_further_than_the_longest_of_them() -> None:
    cache = filled(bucket(3, 64))
    first, last = (cache.layers[0][0].keys[row].clone() for row in (0, 2))
    cache.arrange([bucket(3, 64)], [copy((0, 0), (0, 1), 5), copy((0, 0), (0, 2), 4)])
    keys = cache.layers[0][0].keys
    assert torch.equal(keys[1, :, :5], first[:, :5])
    assert torch.equal(keys[2, :, :4], first[:, :4])
    assert torch.equal(keys[2, :, 5:], last[:, 5:])


@settings(deadline=None, max_examples=50)
@given(
    copies=st.dictionaries(
        st.tuples(st.integers(0, 1), st.integers(0, 89)),
        st.tuples(st.integers(0, 1), st.integers(0, 89)),
        min_size=1,
        max_size=80,
    ),
    lengths=st.lists(st.sampled_from([16, 32]), min_size=2, max_size=2),
)
def test_copies_read_what_was_there_before(
    copies: dict[tuple[int, int], tuple[int, int]], lengths: list[int]
) -> None:
    """Copies within a bucket and between two buckets, one of which may be reallocated."""
    cache = filled(bucket(90, 16, name=0), bucket(90, 16, name=1))
    before = {index: dict(layer) for index, layer in cache.layers.items()}
    before = {
        i: {n: type(b)(b.keys.clone(), b.values.clone()) for n, b in each.items()}
        for i, each in before.items()
    }
    buckets = [bucket(90, length, name=name) for name, length in enumerate(lengths)]
    cache.arrange(buckets, [copy(source, target, 9) for target, source in copies.items()])
    for index, layer in cache.layers.items():
        for name, row in ((name, row) for name in (0, 1) for row in range(90)):
            source = copies.get((name, row), (name, row))
            for new, old in zip(layer[name], before[index][source[0]], strict=True):
                assert torch.equal(new[row, :, :9], old[source[1], :, :9])


def test_what_is_made_anew_is_there_twice_by_the_layer() -> None:
    cache = filled(bucket(3, 64), bucket(2, 16, name=1))
    assert cache.peak_bytes == cache.held_bytes == sum(cache.position_bytes) * (3 * 64 + 2 * 16)
    cache.arrange([bucket(3, 80), bucket(2, 16, name=1)])
    kept = cache.position_bytes[1] * 3 * 64
    assert cache.peak_bytes == cache.held_bytes + kept
    assert cache.position_bytes == [4 * 2 * (4 + 6), 4 * (8 + 8)]


def test_release_gives_all_memory_back() -> None:
    cache = filled(bucket(3, 64))
    assert cache.held_bytes == 4 * 3 * 64 * (2 * (4 + 6) + (8 + 8))
    cache.release()
    assert cache.held_bytes == 0


def test_a_narrow_module_has_a_float32_cache_on_a_cpu() -> None:
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        cache = Cache(SHAPES, CPU, dtype)
        cache.arrange([bucket(1, 16)])
        assert cache.layers[0][0].keys.dtype == wanted
