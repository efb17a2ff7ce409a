"""Memory: bytes of a model on its fullest device.

resident   weights, gradients, optimiser            kept from step to step
working    activations of one micro-batch, logits   while a stage runs
sampling   additional copy for generation           during generation
"""

from __future__ import annotations

import numpy as np

from rillflow.placement.activations import MOST_LOGITS, NARROW, kept_numbers
from rillflow.placement.grid import Grid, Numbers
from rillflow_planner.cost_model.compute import (
    GRADIENT_BYTES,
    Load,
    Setting,
    load_of,
    optimized_parameters,
    stage_parameters,
)
from rillflow_planner.cost_model.options import dense_cuts, expert_cuts, expert_ways


def weight_bytes(setting: Setting, grids: Grid) -> Numbers:
    """Return the bytes of the weights in their compute dtype, [grids]."""
    return held_parameters(setting, grids) * setting.item_bytes


def held_parameters(setting: Setting, grids: Grid) -> Numbers:
    """Return the parameters a device of the fullest stage keeps after sharding by tp, pp, ep and fsdp."""
    return stage_parameters(setting, grids, dense_cuts(grids), expert_cuts(grids))


def optimizer_bytes(setting: Setting, grids: Grid) -> Numbers:
    """Return bytes of Adam: 8 per parameter, and 4 for a float32 copy of shorter weights.

    Rajbhandari et al., arXiv 1910.02054, 3.1.
    """
    copy = GRADIENT_BYTES if setting.item_bytes < GRADIENT_BYTES else 0
    return optimized_parameters(setting, grids) * (2 * GRADIENT_BYTES + copy)


def gradient_bytes(setting: Setting, grids: Grid) -> Numbers:
    """Return bytes of float32 gradients; Rillflow frees them after a step, others keep them."""
    return held_parameters(setting, grids) * GRADIENT_BYTES


def micro_batch_tokens(setting: Setting, load: Load, grids: Grid, packed: int = 0) -> Numbers:
    """Return the tokens of one micro-batch, at least the longest row, which cannot be split."""
    workload = setting.workload
    longest = workload.prompt.limit + workload.response.limit
    return np.minimum(load.tokens, max(packed or workload.tokens_per_micro_batch, longest) / grids.cp)


def activation_bytes(setting: Setting, load: Load, grids: Grid, micro_batches: int | None = None) -> Numbers:
    """Return activation bytes in training of a number of micro-batches.

    By default as many as the first pipeline stage holds: one for each stage.
    With recomputation: one hidden state per token and layer, plus one complete layer; otherwise every
    complete layer. Rillflow keeps what ``rillflow check`` counts, and common prefixes once; Megatron's fused
    layers keep less.
    """
    shape, tokens = setting.shape, micro_batch_tokens(setting, load, grids)
    recomputes = setting.problem.recomputes
    held = np.minimum(grids.pp, load.micro_batches) if micro_batches is None else micro_batches
    kept = np.ceil(shape.layers / grids.pp) * held
    if setting.problem.layouts.is_own:
        numbers = kept_numbers(
            hidden=shape.hidden,
            inner=shape.layer_inner / grids.tp,
            kv_width=shape.kv_heads * shape.head_dim / grids.tp,
            layers=kept,
            recomputes=recomputes,
        )
        computed = tokens * setting.workload.packing.trained
        return computed * numbers * GRADIENT_BYTES * (NARROW if setting.item_bytes < GRADIENT_BYTES else 1.0)
    cut = grids.tp if setting.problem.hardware.engine.cuts_sequence else 1
    whole = shape.layer_numbers(grids.tp / cut) / cut
    numbers = kept * shape.hidden / cut + whole if recomputes else kept * whole
    return tokens * numbers * setting.item_bytes


def logit_bytes(setting: Setting, tokens: Numbers, grids: Grid, copies: int) -> Numbers:
    """Return the bytes of a micro-batch's float32 logits: one copy to score, two with gradients to train.

    Rillflow's runtime computes at most ``MOST_LOGITS`` of them at a time.
    """
    found = tokens * (1 if setting.shape.is_scalar else setting.shape.vocabulary) / grids.tp
    if setting.problem.layouts.is_own:
        found = np.minimum(found, MOST_LOGITS)
    return copies * GRADIENT_BYTES * found


def training_bytes(setting: Setting, grids: Grid, micro_batches: int | None = None) -> Numbers:
    """Return the largest additional bytes of an optimiser step that keeps some micro-batches, [grids].

    The first micro-batch's gradients replace its activations layer by layer. They are kept together with
    the activations of later ones: ``later`` is the size of the second, if rows are as long as they may be.
    """
    workload = setting.workload
    load = load_of(workload, grids.dp, workload.minibatches, cp=grids.cp)
    tokens = micro_batch_tokens(setting, load, grids)
    logits = logit_bytes(setting, tokens, grids, 2)
    found = activation_bytes(setting, load, grids, micro_batches)
    if micro_batches is None:  # the first stage holds micro-batches, the last one and its logits
        found = np.maximum(found, activation_bytes(setting, load, grids, 1) + logits)
    else:
        found = found + logits
    if setting.problem.layouts.is_own:
        gradients, longest = gradient_bytes(setting, grids), workload.prompt.limit + workload.response.limit
        rows = np.ceil(workload.rows / workload.minibatches / grids.dp)
        later = np.clip(rows * longest / workload.tokens_per_micro_batch - 1, 0, 1)
        found = np.maximum(found, gradients + later * found)
    return found + _gathered(setting, grids)


def scoring_bytes(setting: Setting, grids: Grid) -> Numbers:
    """Return the largest additional bytes of a forward pass, [grids]."""
    workload = setting.workload
    load = load_of(workload, grids.dp, 1, cp=grids.cp)
    tokens = micro_batch_tokens(setting, load, grids, workload.scoring_tokens)
    one = tokens * setting.shape.layer_numbers(grids.tp) * setting.item_bytes
    return one + logit_bytes(setting, tokens, grids, 1) + _gathered(setting, grids)


def _gathered(setting: Setting, grids: Grid) -> Numbers:
    """Return the bytes of two gathered layers: the current one and the prefetched one."""
    shape = setting.shape
    layer = (shape.trunk_parameters / grids.tp + shape.routed_parameters / expert_ways(grids)) / shape.layers
    return np.where(grids.is_sharded, 2 * layer * setting.item_bytes, 0.0)
