"""Memory: bytes of a model on its fullest device.

resident   weights, gradients, optimiser            kept from step to step
working    activations of one micro-batch, logits   while a stage runs
sampling   the copy for generation, beside          while it generates
"""

from __future__ import annotations

import numpy as np

from rillflow.planner.cost_model.compute import GRADIENT_BYTES, Load, Setting, load_of, optimized_parameters
from rillflow.planner.grid import Grid, Numbers
from rillflow.planner.model_shape import ModelShape


def weight_bytes(setting: Setting, grids: Grid) -> Numbers:
    """Of the weights in the dtype they compute in, [grids]."""
    return held_parameters(setting.shape, grids) * setting.item_bytes


def held_parameters(shape: ModelShape, grids: Grid) -> Numbers:
    """Parameters a device keeps: what tp, pp, ep and shards leave of them, even over stages."""
    return shape.shared_parameters / grids.dense_cuts + shape.routed_parameters / grids.expert_cuts


def optimizer_bytes(setting: Setting, grids: Grid) -> Numbers:
    """Of gradients and Adam: 4 + 8 bytes a parameter, and 4 of a float32 copy where weights are shorter.

    Rajbhandari et al., arXiv 1910.02054, 3.1, with gradients in float32.
    """
    copy = GRADIENT_BYTES if setting.item_bytes < GRADIENT_BYTES else 0
    gradients = held_parameters(setting.shape, grids) * GRADIENT_BYTES
    return gradients + optimized_parameters(setting, grids) * (2 * GRADIENT_BYTES + copy)


def micro_batch_tokens(setting: Setting, load: Load, grids: Grid) -> Numbers:
    """Tokens of one micro-batch: never less than the longest row, which cannot be cut."""
    workload = setting.workload
    longest = (workload.prompt.limit + workload.response.limit) / grids.cp
    packed = np.maximum(workload.tokens_per_micro_batch, longest)
    return np.minimum(load.tokens, packed)


def activation_bytes(setting: Setting, load: Load, grids: Grid) -> Numbers:
    """Of training: the first stage of a pipeline holds as many micro-batches as there are stages.

    Recomputed: one hidden state a token and layer, and all of one layer; else all of every layer.
    """
    shape, tokens = setting.shape, micro_batch_tokens(setting, load, grids)
    layers = np.ceil(shape.layers / grids.pp)
    running = np.minimum(grids.pp, load.micro_batches)
    whole = shape.layer_numbers(grids.tp)
    kept = layers * running
    numbers = kept * shape.hidden + whole if setting.problem.recomputes else kept * whole
    return tokens * numbers * setting.item_bytes


def logit_bytes(setting: Setting, load: Load, grids: Grid, copies: int) -> Numbers:
    """Of a micro-batch's logits in float32: one copy to score, and one of gradients to train."""
    shape = setting.shape
    width = 1 if shape.is_scalar else shape.vocabulary
    return copies * GRADIENT_BYTES * micro_batch_tokens(setting, load, grids) * width / grids.tp


def training_bytes(setting: Setting, grids: Grid) -> Numbers:
    """The most an optimiser step needs beside what is resident, [grids]."""
    load = load_of(setting.workload, grids.dp, setting.workload.minibatches, cp=grids.cp)
    found = activation_bytes(setting, load, grids) + logit_bytes(setting, load, grids, 2)
    return found + _gathered(setting, grids)


def scoring_bytes(setting: Setting, grids: Grid) -> Numbers:
    """The most a forward pass needs beside the weights, [grids]."""
    load = load_of(setting.workload, grids.dp, 1, cp=grids.cp)
    one = (
        micro_batch_tokens(setting, load, grids) * setting.shape.layer_numbers(grids.tp) * setting.item_bytes
    )
    return one + logit_bytes(setting, load, grids, 1) + _gathered(setting, grids)


def _gathered(setting: Setting, grids: Grid) -> Numbers:
    """Two layers' weights out of their shards: the one at work and the one on its way."""
    shape = setting.shape
    layer = (shape.trunk_parameters / grids.tp + shape.routed_parameters / grids.expert_ways) / shape.layers
    return np.where(grids.is_sharded, 2 * layer * setting.item_bytes, 0.0)
