"""Passes that only feed rows, in rounded shapes; ``tests/gpu`` captures them as CUDA graphs."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rillflow.models.attention import ATTENTION, register
from rillflow.rollout.native.cache import Cache, LayerShape
from rillflow.rollout.native.cache_layout import LengthBucket
from rillflow.rollout.native.cuda_graphs import GraphedPasses, rounded, rounded_rows
from rillflow.rollout.native.passes import Segment, forward
from rillflow.rollout.native.scheduler import Sequence

SHAPES = {index: LayerShape(heads=2, key_size=8, value_size=8) for index in range(2)}


def module() -> torch.nn.Module:
    register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()


def caches(count: int, sizes: dict[int, tuple[int, int]]) -> list[Cache]:
    buckets = [
        LengthBucket[Sequence](name=name, length=size[1], rows=size[0]) for name, size in sizes.items()
    ]
    found = [Cache(SHAPES, torch.device("cpu"), torch.float32) for _ in range(count)]
    for each in found:
        each.arrange(buckets)
    return found


@torch.inference_mode()
def test_rounded_passes_give_the_logits_and_the_cache_of_plain_ones() -> None:
    own, (plain, padded) = module(), caches(2, {0: (40, 64), 3: (24, 300)})
    graphed = GraphedPasses(own, captures=False)
    for position in range(6):
        rows = (21, 18) if position < 3 else (17, 3)  # some rows have ended
        positions = [torch.full((count,), position) for count in rows]
        segments = Segment.of([0, 3], [position + 1, position + 1], positions, [])
        tokens = torch.arange(sum(rows)) + 7 * position
        expected = forward(own, plain.layers, segments, tokens % 64)
        found = graphed.forward(padded.layers, segments, tokens % 64)
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-5)
    for name, count in ((0, 17), (3, 3)):
        for one, other in zip(plain.layers[1][name], padded.layers[1][name], strict=True):
            assert torch.allclose(one[:count, :, :6], other[:count, :, :6], atol=1e-5)


def test_rows_are_rounded_to_few_sizes() -> None:
    sizes = sorted({rounded_rows(rows) for rows in range(1, 513)})
    assert sizes == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(rows <= rounded_rows(rows) <= max(16, 1.5 * rows) for rows in range(1, 513))


def test_shapes_are_rounded_within_the_cache_and_follow_its_memory() -> None:
    (cache,) = caches(1, {0: (40, 200)})
    segments = Segment.of([0], [130], [torch.zeros(35, dtype=torch.int64)], [])
    ((name, rows, reach, *addresses),) = rounded(cache.layers, segments)
    assert (name, rows, reach) == (0, 40, 200)  # 48 rows and 256 positions would not fit
    few = Segment.of([0], [5], [torch.zeros(2, dtype=torch.int64)], [])
    assert rounded(cache.layers, few)[0][1:3] == (16, 128)
    assert addresses == [part.data_ptr() for layer in cache.layers.values() for part in layer[0]]
    cache.arrange([LengthBucket[Sequence](name=0, length=201, rows=40)])
    assert rounded(cache.layers, segments)[0][3:] != tuple(addresses)
