from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.rollout.native.cache import Cache, LayerShape
from rillflow.rollout.native.scheduler import Copy

SHAPES = {0: LayerShape(heads=2, key_size=4, value_size=6), 1: LayerShape(heads=1, key_size=8, value_size=8)}
CPU = torch.device("cpu")


def filled(rows: int, length: int) -> Cache:
    cache = Cache(SHAPES, CPU, torch.float32)
    cache.reserve(rows, length, length)
    for layer in cache.layers.values():
        layer.keys.copy_(torch.randn_like(layer.keys))
        layer.values.copy_(torch.randn_like(layer.values))
    return cache


def test_growth_keeps_what_was_there_and_adds_zeros() -> None:
    cache = filled(3, 64)
    before = {index: (layer.keys, layer.values) for index, layer in cache.layers.items()}
    cache.reserve(5, 65, 1000)
    for index, layer in cache.layers.items():
        for old, new in zip(before[index], (layer.keys, layer.values), strict=True):
            assert torch.equal(new[:3, :, :64], old)
            assert not new[3:].any() and not new[:, :, 64:].any()


def test_it_grows_by_need_and_no_further_than_rows_can_reach() -> None:
    cache = Cache(SHAPES, CPU, torch.float32)
    cache.reserve(2, 10, 4000)
    assert cache.layers[0].keys.shape == (2, 2, 32, 4)
    cache.reserve(2, 100, 4000)
    assert cache.layers[0].keys.shape == (2, 2, 208, 4)
    cache.reserve(2, 257, 300)
    assert cache.layers[0].values.shape == (2, 2, 304, 6)


def test_enough_room_moves_nothing() -> None:
    cache = filled(3, 64)
    place = cache.layers[0].keys.data_ptr()
    for rows in (2, 3):
        cache.reserve(rows, 64, 64)
        assert cache.layers[0].keys.data_ptr() == place


def test_copies_reach_no_further_than_the_longest_of_them() -> None:
    cache = filled(3, 64)
    first, last = cache.layers[0].keys[0].clone(), cache.layers[0].keys[2].clone()
    cache.copy([Copy(source=0, target=1, length=5), Copy(source=1, target=2, length=4)])
    assert torch.equal(cache.layers[0].keys[1, :, :5], first[:, :5])
    assert torch.equal(cache.layers[0].keys[2, :, :4], first[:, :4])
    assert torch.equal(cache.layers[0].keys[2, :, 5:], last[:, 5:])


@settings(deadline=None)
@given(copies=st.lists(st.tuples(st.integers(0, 999), st.integers(1, 16)), min_size=1, max_size=120))
def test_copies_are_as_if_done_one_after_the_other(copies: list[tuple[int, int]]) -> None:
    listed = [
        Copy(source=source % (4 + place), target=4 + place, length=length)
        for place, (source, length) in enumerate(copies)
    ]
    cache = filled(4 + len(copies), 16)
    expected = cache.layers[0].keys.clone()
    for copy in listed:
        expected[copy.target] = expected[copy.source]
    cache.copy(listed)
    for copy in listed:
        found = cache.layers[0].keys[copy.target, :, : copy.length]
        assert torch.equal(found, expected[copy.target, :, : copy.length])


def test_release_gives_all_memory_back() -> None:
    cache = filled(3, 64)
    assert cache.held_bytes == 4 * 3 * 64 * (2 * (4 + 6) + (8 + 8))
    cache.release()
    assert cache.held_bytes == 0


def test_a_narrow_module_has_a_float32_cache_on_a_cpu() -> None:
    assert Cache(SHAPES, CPU, torch.bfloat16).layers[0].keys.dtype == torch.float32
    assert Cache(SHAPES, CPU, torch.float64).layers[0].keys.dtype == torch.float64
