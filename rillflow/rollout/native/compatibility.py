"""Compatibility of a module with the engine: tested at first use on a few tokens, not looked up in a list.

    whole text, plain attention through a plan ── which layers used it, and their shapes ──> Cache
            │ logits                                                                           │
            └──────────── equal ────────── a prefix, then token by token over the cache ───────┘

The test detects layers that mix tokens by other means than keys and values (a recurrence, a convolution)
and layers whose attention bypasses the plan.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rillflow.errors import ModelError
from rillflow.models.architecture import Witness, relative_difference, vocabulary_of
from rillflow.rollout.native.cache import Cache, LayerShape
from rillflow.rollout.native.cache_layout import CacheRow, LengthBucket
from rillflow.rollout.native.passes import Prefixes, Segment, call, forward
from rillflow.rollout.native.runner import CACHE_BLOCK
from rillflow.rollout.native.scheduler import Prefill

_TOKENS = 8
_TOLERANCE = 1e-3
_ROUGH = 0.1
"""Largest difference of the logits over the largest logit; ``_ROUGH`` for types narrower than float32."""
_SEES = {"full_attention": False, "sliding_attention": True}
"""Supported kinds of layers, and whether such a layer has a window."""


def check_compatible(module: nn.Module, context: int) -> dict[int, LayerShape]:
    """Return the key and value shapes of each layer, after testing that cached passes give the same logits.

    Args:
        module: a transformers causal language model.
        context: maximum tokens of a row.

    Raises:
        ModelError: a layer does not use Rillflow's attention, or a pass over cached keys and values
            gives other logits than a pass over the whole text.
    """
    embedding: Tensor = module.get_input_embeddings().weight  # type: ignore[operator]
    device, name = embedding.device, type(module).__name__
    count = min(_TOKENS, context)
    positions = torch.arange(count, device=device)
    tokens = positions % vocabulary_of(module)
    witness = Witness()
    try:
        whole = call(module, tokens, positions, witness, wanted=positions)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise _unfit(name, f"a trial run failed with {type(error).__name__}: {error}") from error
    config = module.config.get_text_config()  # type: ignore[union-attr, operator]
    layers = list(range(config.num_hidden_layers))
    if sorted(witness.states) != layers:
        asked = len(witness.states)
        raise _unfit(name, f"only {asked} of its {len(layers)} layers call Rillflow's attention")
    for layer, kind in zip(layers, config.to_dict().get("layer_types") or (), strict=False):
        if _SEES.get(kind) is not (witness.windows[layer] is not None):
            raise _unfit(name, f"layer {layer} is of type {kind!r} but has window {witness.windows[layer]}")
    shapes = {
        layer: LayerShape(heads=key.shape[1], key_size=key.shape[3], value_size=value.shape[3])
        for layer, (key, value) in witness.states.items()
    }
    cache = Cache(shapes, device, embedding.dtype)
    cache.arrange([LengthBucket(name=0, length=count, rows=1)])
    parts = []
    for last in (count - 2, count - 1):
        prefill = Prefill(tokens=tuple(tokens[:last].tolist()), cache_rows=[CacheRow(0, 0)])
        reads = [prefill] if last == count - 2 and last else []
        segments = Segment.of([0], [count], [positions[last : last + 1]], reads)
        prefixes = Prefixes.of(reads, device) if reads else None
        parts.append(forward(module, cache.layers, segments, tokens[last : last + 1], prefixes))
    _compare(name, whole[-2:], torch.cat(parts), embedding.dtype)
    return shapes


def check_fixed_shapes(module: nn.Module, shapes: dict[int, LayerShape], rows: int) -> None:
    """Check that, with fixed shapes, a row's bits depend neither on its slot nor on the length of cache read.

    Raises:
        ModelError: they do, with this machine's matrix products.
    """
    embedding: Tensor = module.get_input_embeddings().weight  # type: ignore[operator]
    device, name = embedding.device, type(module).__name__
    short, long = CACHE_BLOCK, 4 * CACHE_BLOCK
    cache = Cache(shapes, device, embedding.dtype)
    cache.arrange([LengthBucket(name=0, length=long, rows=rows)])
    for layer in cache.layers.values():
        for states in layer[0]:
            wave = torch.arange(states[0].numel(), device=device).sin().view_as(states[0])
            states.copy_(wave.expand_as(states))
    tokens = torch.full((rows,), vocabulary_of(module) - 1, device=device)
    positions = torch.full((rows,), short // 2, device=device)
    first, second = (
        forward(module, cache.layers, Segment.of([0], [length], [positions], ()), tokens)
        for length in (short, long)
    )
    by_slot, by_length = (first != first[:1]).any(1), (first != second).any(1)
    if bool((by_slot | by_length).any()):
        differs = (
            f"in slot {int(by_slot.nonzero()[0])} of {rows} than in slot 0"
            if bool(by_slot.any())
            else f"with {long} cached positions read than with {short}"
        )
        raise ModelError(
            f"{name} computes other bits {differs}, for the same text",
            why="even with fixed shapes, this machine's matrix products depend on a row's slot or on the "
            "length of the cache",
            fix="try another rollout.max_rows, or set rollout.deterministic to false",
        )


def _compare(name: str, whole: Tensor, cached: Tensor, dtype: torch.dtype) -> None:
    if not bool(whole.isfinite().all()):
        return  # the first step reports it and names the row
    difference = relative_difference(cached, whole)
    if not difference <= (_TOLERANCE if dtype.itemsize >= 4 else _ROUGH):
        raise _unfit(
            name,
            f"with a KV cache, its logits differ by {difference:.2g} of the largest: a layer keeps state "
            "other than keys and values",
        )


def _unfit(name: str, why: str) -> ModelError:
    return ModelError(
        f"{name} cannot be sampled by the native engine",
        why=why,
        fix="load a decoder with plain or sliding-window attention, such as qwen2, llama, mistral or gpt2, "
        "with attn_implementation='rillflow', or sample with rollout.engine = \"vllm\"",
    )
