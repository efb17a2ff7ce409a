"""Compute: seconds of training and scoring whole rows on a grid.

rows ─ dp ─> tokens of the busiest replica ─> micro-batches ─> 1F1B over pp ─┬─ matrix products and attention
                                                                             ├─ collectives of tp, ep
                                                                             └─ all-gathers of shards
after the last micro-batch: gradient all-reduce over dp, optimiser memory traffic
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rillflow.errors import PlanError
from rillflow.placement.grid import Grid, Numbers
from rillflow_planner.cost_model.grids import copies_of, dense_cuts, dp_stride, expert_cuts, expert_ways
from rillflow_planner.cost_model.links import Links, all_gather_s, all_reduce_s, all_to_all_s, send_s
from rillflow_planner.hardware import Factors, Fleet
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import Problem
from rillflow_planner.workload import Workload

FORWARD = 1
"""Cost of scoring, in forward passes."""
TRAINING = 3
"""Cost of training, in forward passes: a backward pass costs two."""
RECOMPUTED = 4
"""Cost of training with recomputed activations, in forward passes."""
AGREEMENTS = 3
"""Small collectives of an optimiser step: rows by rank, loss denominator, presence of a gradient."""
GRADIENT_BYTES = 4
"""Bytes of one parameter's gradient, float32."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Inputs of a stage's seconds other than the grid."""

    problem: Problem
    """The step: its rows, the software stack, and the efficiency factors."""
    shape: ModelShape
    """Shape of the model."""
    fleet: Fleet
    """Fleet of the devices."""

    @property
    def workload(self) -> Workload:
        """Rows of the step."""
        return self.problem.workload

    @property
    def factors(self) -> Factors:
        """Efficiency factors."""
        return self.problem.hardware.factors

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of a number during computation."""
        return {"float32": 4, "bfloat16": 2, "float8": 1}[self.workload.dtype]

    @cached_property
    def token_flops(self) -> float:
        """FLOPs of one token; FLOPs of routed experts are scaled up for the lower speed of small products."""
        longer = 1.0 / self.factors.expert_flops - 1.0
        return self.shape.token_flops + longer * 2.0 * self.shape.chosen_parameters

    @cached_property
    def links(self) -> Links:
        """The machines' links with their efficiency."""
        return Links.of(self.fleet, self.factors)

    @property
    def peak(self) -> float:
        """FLOP/s of a device in the workload's dtype.

        Raises:
            PlanError: the device's description lacks this dtype.
        """
        device, dtype = self.fleet.device, self.workload.dtype
        if dtype not in device.flops:
            raise PlanError(
                f"{device.name} has no FLOP/s for {dtype}",
                why=f"its description has {', '.join(sorted(device.flops))}",
                fix=f"add flops.{dtype} to the device",
            )
        return device.flops[dtype]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Work of the busiest replica between two optimiser steps, [grids]."""

    tokens: Numbers
    """Computed tokens of its rows; tokens of a shared prefix count once if they are computed once."""
    squares: Numbers
    """Sum of its rows' squared tokens."""
    seats: Numbers
    """Tokens of its rows in attention, without sharing of prefixes."""
    micro_batches: Numbers
    """Number of micro-batches."""


def load_of(
    workload: Workload, dp: Numbers, parts: int, computed: float = 1.0, cp: Numbers = 1, packed: int = 0
) -> Load:
    """Return the work of the busiest of dp replicas in one of ``parts`` equal parts of a step's rows.

    Rows are balanced by their tokens. The busiest replica thus has the mean number of tokens, or the longest
    row if that is more. Rows of equal length can only be distributed as wholes. ``computed`` is the share of
    tokens that everything except attention computes. Each of ``cp`` devices has an equal part of every row's
    tokens. ``packed`` is the largest number of tokens of a micro-batch, by default that of training.
    """
    rows = workload.rows / parts / np.asarray(dp, dtype=np.float64)
    mean, square = workload.row_tokens, workload.row_square
    if workload.prompt.kind == "fixed" and workload.response.kind == "fixed":
        tokens: Numbers = np.ceil(rows - 1e-9) * mean
        squares = tokens * (square / mean)
    else:
        longest = workload.prompt.mean + workload.response.quantile(1 - 0.5 * parts / workload.rows)
        tokens = np.maximum(rows * mean, longest)
        beside = np.maximum(tokens - longest, 0.0) * (square / mean)
        squares = np.maximum(tokens * (square / mean), longest**2 + beside)
    micro_batches = np.ceil(np.divide(tokens, packed or workload.tokens_per_micro_batch) - 1e-9)
    tokens, squares = np.divide(tokens, cp), np.divide(squares, cp)
    return Load(
        tokens=tokens * computed,
        squares=squares,
        seats=tokens,
        micro_batches=np.maximum(micro_batches, 1),
    )


def pass_flops(setting: Setting, load: Load) -> Numbers:
    """Return the FLOPs of one forward pass: 2 per parameter and token, 2 (d + v) per head, layer, token pair.

    Causal attention covers half of a row's squared tokens (Kaplan et al., arXiv 2001.08361, 2.1).
    """
    return setting.token_flops * load.tokens + setting.shape.attention_flops(1.0) * load.squares / 2


def products_s(setting: Setting, load: Load, grids: Grid, passes: float, share: float) -> Numbers:
    """Return the seconds of a device's part of the FLOPs, at a share of its peak."""
    return passes * pass_flops(setting, load) / (grids.pp * grids.tp * setting.peak * share)


def touched_s(setting: Setting, tp: Numbers) -> Numbers:
    """Return the memory seconds of one token's activations in one layer's forward pass, outside products.

    ``touches x numbers kept of a token and layer x bytes / bandwidth``: separate kernels for norms,
    rotations, gates and sums read and write the outputs of products. The cost grows with a model's width,
    while products grow with its square.
    """
    moved = setting.factors.touches * setting.shape.layer_numbers(tp) * setting.item_bytes
    return moved / (setting.fleet.device.memory_bandwidth * setting.factors.decode_bandwidth)


def activations_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Return the memory seconds of activations in the layers of a device."""
    return passes * load.tokens * setting.shape.layers / grids.pp * touched_s(setting, grids.tp)


def attention_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Return the additional seconds of attention in a device's layers: ``head_token_s`` per head and token.

    Attention runs row by row and head by head. On CPUs such small blocks cost time in proportion to their
    tokens, for any head size.
    """
    heads = setting.shape.heads / grids.tp
    once = load.seats * setting.shape.layers / grids.pp * heads * setting.factors.head_token_s
    return passes * once


def launches_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Return the launch seconds of a pass and its layers for every micro-batch; expert layers take longer.

    A backward pass counts as one launch, although it computes as much as two forward passes.
    """
    shape, factors = setting.shape, setting.factors
    layers, mixed = np.ceil(shape.layers / grids.pp), np.ceil(shape.mixture_layers / grids.pp)
    once = factors.pass_s + layers * factors.launch_s + mixed * factors.expert_launch_s
    return (passes - 1 if passes > FORWARD else 1) * load.micro_batches * once


def tensor_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Return the seconds of tensor parallelism: 2 all-reduces of every layer's activations in each pass.

    Shoeybi et al., arXiv 1909.08053, 3: one after attention, one after the feed-forward block. The backward
    pass has as many as the forward pass, so FLOPs of 3 passes come with collectives of 2.
    """
    layers = setting.shape.layers / grids.pp
    rounds = 2 * layers * (passes - 1 if passes > FORWARD else 1)
    sent = load.tokens / load.micro_batches * setting.shape.hidden * setting.item_bytes
    return rounds * load.micro_batches * all_reduce_s(setting.links, sent, grids.tp)


def context_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Return the seconds of context parallelism: each layer gathers the row's other keys and values per
    pass.
    """
    shape = setting.shape
    numbers = shape.cached_numbers / shape.layers / (1 if shape.latent else grids.tp)
    gathered = load.tokens / load.micro_batches * grids.cp * numbers * setting.item_bytes
    rounds = shape.layers / grids.pp * load.micro_batches * passes
    return rounds * all_gather_s(setting.links, gathered, grids.cp, grids.tp)


def experts_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Return the seconds of expert parallelism: 2 all-to-alls per layer and pass, to the experts and back.

    Every device sends k copies of its tokens (Lepikhin et al., arXiv 2006.16668). ``tensor_s`` counts passes
    in the same way.
    """
    shape = setting.shape
    if not shape.is_mixture:
        return 0.0
    rounds = 2 * shape.mixture_layers / grids.pp * (passes - 1 if passes > FORWARD else 1)
    tokens = load.tokens / load.micro_batches / grids.tp
    sent = tokens * shape.experts_per_token * shape.hidden * setting.item_bytes
    return rounds * load.micro_batches * all_to_all_s(setting.links, sent, grids.ep)


def pipeline_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Return the seconds to send activations and gradients between stages, once per micro-batch."""
    sent = load.tokens / load.micro_batches / grids.tp * setting.shape.hidden * setting.item_bytes
    ways = 2 if passes > FORWARD else 1
    return ways * load.micro_batches * send_s(setting.links, sent, grids.pp, grids.tp)


def bubble(load: Load, grids: Grid) -> Numbers:
    """Return the pipeline bubble as a share of the work: (N - 1) / M for N stages and M micro-batches.

    1F1B (Narayanan et al., arXiv 2104.04473, 2.2): (M + N - 1)(f + b) instead of M (f + b).
    """
    return (grids.pp - 1) / load.micro_batches


def stage_parameters(shape: ModelShape, grids: Grid) -> Numbers:
    """Return the parameters of one pipeline stage that one device computes with, after gathering shards."""
    dense = shape.shared_parameters / (grids.pp * grids.tp)
    return dense + shape.routed_parameters / (grids.pp * expert_ways(grids))


def gathers_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Return the link seconds of sharded parameters: all-gathers per micro-batch, forward and backward.

    Zhao et al., arXiv 2304.11277: gradients are also reduce-scattered after each micro-batch, at the cost of
    an all-gather. Every layer is one collective, and so are the parameters outside layers.
    """
    each = np.ceil(setting.shape.layers / grids.pp) + 1
    weights = stage_parameters(setting.shape, grids) * setting.item_bytes / each
    gather = all_gather_s(setting.links, weights, copies_of(grids), dp_stride(grids))
    if passes > FORWARD:
        gradients = weights / setting.item_bytes * GRADIENT_BYTES
        gather = 2 * gather + all_gather_s(setting.links, gradients, copies_of(grids), dp_stride(grids))
    return np.where(grids.is_sharded, load.micro_batches * each * gather, 0.0)


def gradients_s(setting: Setting, grids: Grid) -> Numbers:
    """Return the seconds over dp to agree on an optimiser step and all-reduce its float32 gradients.

    Gradients of experts are reduced over fewer devices. Sharded gradients were already reduced after every
    pass.
    """
    shape, links = setting.shape, setting.links
    dense = GRADIENT_BYTES * shape.shared_parameters / (grids.pp * grids.tp)
    found = all_reduce_s(links, dense, copies_of(grids), dp_stride(grids))
    if shape.is_mixture:
        routed = GRADIENT_BYTES * shape.routed_parameters / (grids.pp * expert_ways(grids))
        copies = np.maximum(copies_of(grids) * grids.tp / expert_ways(grids), 1)
        found = found + all_reduce_s(links, routed, copies, expert_ways(grids))
    agreed = AGREEMENTS * all_gather_s(links, 0.0, copies_of(grids), dp_stride(grids))
    return agreed + np.where(grids.is_sharded, 0.0, found)


def optimized_parameters(setting: Setting, grids: Grid) -> Numbers:
    """Return the parameters whose optimiser state a device keeps: all it holds, or its ZeRO-1 shard."""
    shape = setting.shape
    zero1 = setting.problem.hardware.engine.zero1
    cut = np.where(np.logical_and(zero1, np.logical_not(grids.is_sharded)), copies_of(grids), 1.0)
    spread = np.where(cut > 1, np.maximum(copies_of(grids) * grids.tp / expert_ways(grids), 1), 1.0)
    dense = shape.shared_parameters / dense_cuts(grids) / cut
    return dense + shape.routed_parameters / expert_cuts(grids) / spread


def optimizer_s(setting: Setting, grids: Grid) -> Numbers:
    """Return the seconds of Adam, which reads gradient, weight and two moments and writes the last three.

    The float32 traffic is 28 bytes per parameter, plus the copy for computing if that has another dtype.
    """
    factors = setting.factors
    held = optimized_parameters(setting, grids)
    moved = 7 * GRADIENT_BYTES + (setting.item_bytes if setting.item_bytes < GRADIENT_BYTES else 0)
    return held * moved / (setting.fleet.device.memory_bandwidth * factors.decode_bandwidth)


def work_s(setting: Setting, load: Load, grids: Grid, passes: float, share: float) -> Numbers:
    """Return the seconds of all micro-batches on a pipeline stage: products and what goes with each layer."""
    work = products_s(setting, load, grids, passes, share)
    for term in (activations_s, attention_s, launches_s, tensor_s, experts_s, context_s):
        work = work + term(setting, load, grids, passes)
    return work


def passes_s(setting: Setting, load: Load, grids: Grid, passes: float, share: float) -> Numbers:
    """Return the seconds of all micro-batches of one load, including the pipeline bubble and gathers.

    A share ``hidden`` of the gathers overlaps with the work; that share only counts if it takes longer than
    the work.
    """
    sent_s = pipeline_s(setting, load, grids, passes)
    drained = (work_s(setting, load, grids, passes, share) + sent_s) * (1 + bubble(load, grids))
    gathers, hidden = gathers_s(setting, load, grids, passes), setting.factors.hidden
    return np.maximum(drained, hidden * gathers) + (1 - hidden) * gathers


def score_s(setting: Setting, grids: Grid) -> Numbers:
    """Return the seconds of one forward pass over a step's rows, [grids]."""
    workload = setting.workload
    load = load_of(workload, grids.dp, 1, workload.packing.scored, grids.cp, workload.scoring_tokens)
    return passes_s(setting, load, grids, FORWARD, setting.factors.score_flops)


def train_s(setting: Setting, grids: Grid) -> Numbers:
    """Return the seconds of all epochs and optimiser steps over a step's rows, [grids]."""
    workload, load = setting.workload, training_load(setting, grids)
    passes = RECOMPUTED if setting.problem.recomputes else TRAINING
    once = workload.gradient_share * passes_s(setting, load, grids, passes, setting.factors.train_flops)
    return workload.epochs * workload.minibatches * (once + beside_s(setting, load, grids))


def training_load(setting: Setting, grids: Grid) -> Load:
    """Return the work of the busiest replica in one optimiser step."""
    workload = setting.workload
    return load_of(workload, grids.dp, workload.minibatches, workload.packing.trained, grids.cp)


def beside_s(setting: Setting, load: Load, grids: Grid) -> Numbers:
    """Return the seconds of an optimiser step outside its backward passes: rows without a gradient, Adam."""
    unlearnt = 1 - setting.workload.gradient_share
    forward_s = unlearnt * passes_s(setting, load, grids, FORWARD, setting.factors.score_flops)
    return forward_s + gradients_s(setting, grids) + optimizer_s(setting, grids)
