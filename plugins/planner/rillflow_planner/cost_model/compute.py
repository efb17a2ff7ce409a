"""Compute: seconds of training and scoring whole rows on a grid.

rows ─ dp ─> tokens of the busiest replica ─> micro-batches ─> a layer ─┬─ matrix products and attention
                                                                        └─ launches, collectives of tp, cp, ep
layers of the fullest stage, head on the last ─> 1F1B over pp; all-gathers of shards beside it
after the last micro-batch: gradient all-reduce over dp, optimiser memory traffic
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rillflow.errors import PlanError
from rillflow.placement.grid import Grid, Numbers
from rillflow_planner.cost_model.links import Links, all_gather_s, all_reduce_s, all_to_all_s, send_s
from rillflow_planner.cost_model.options import (
    StageLayers,
    copies_of,
    dense_cuts,
    dp_stride,
    expert_cuts,
    expert_ways,
    stage_layers,
)
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


def rounds_of(passes: float) -> float:
    """Return how often a pass launches kernels and collectives: backward as often as forward."""
    return passes - 1 if passes > FORWARD else 1


def head_flops(setting: Setting, load: Load) -> Numbers:
    """Return the FLOPs of the head in one forward pass: 2 per parameter and token."""
    return 2.0 * setting.shape.head_parameters * load.tokens


def layer_flops(setting: Setting, load: Load) -> Numbers:
    """Return the FLOPs of a layer's forward pass: 2 per parameter and token, 2 (d + v) per head, token pair.

    Causal attention covers half of a row's squared tokens (Kaplan et al., arXiv 2001.08361, 2.1).
    """
    pairs, context = load.squares / 2, load.squares / 2 / np.maximum(load.seats, 1)
    attention = setting.shape.attention_flops(pairs, context)
    return (setting.token_flops * load.tokens - head_flops(setting, load) + attention) / setting.shape.layers


def touched_s(setting: Setting, tp: Numbers) -> Numbers:
    """Return the memory seconds of one token's activations in one layer's forward pass, outside products.

    ``touches x numbers kept of a token and layer x bytes / bandwidth``: separate kernels for norms,
    rotations, gates and sums read and write the outputs of products. The cost grows with a model's width,
    while products grow with its square.
    """
    moved = setting.factors.touches * setting.shape.layer_numbers(tp) * setting.item_bytes
    return moved / (setting.fleet.device.memory_bandwidth * setting.factors.decode_bandwidth)


def blocks_s(setting: Setting, load: Load, grids: Grid) -> Numbers:
    """Return the additional seconds of a layer's forward pass: activations in memory, blocks of attention.

    Attention runs row by row and head by head. On CPUs such small blocks cost ``head_token_s`` per head and
    token, for any head size.
    """
    heads = setting.shape.heads / grids.tp
    return load.tokens * touched_s(setting, grids.tp) + load.seats * heads * setting.factors.head_token_s


def launches_s(setting: Setting, load: Load) -> Numbers:
    """Return the launch seconds of a layer's forward pass for every micro-batch; experts take longer."""
    shape, factors = setting.shape, setting.factors
    once = factors.launch_s + factors.expert_launch_s * shape.mixture_layers / shape.layers
    return load.micro_batches * once


def tensor_s(setting: Setting, load: Load, grids: Grid) -> Numbers:
    """Return the seconds of tensor parallelism in a layer's forward pass: 2 all-reduces of its activations.

    Shoeybi et al., arXiv 1909.08053, 3: one after attention, one after the feed-forward block. The backward
    pass has as many as the forward pass.
    """
    sent = load.tokens / load.micro_batches * setting.shape.hidden * setting.item_bytes
    return 2 * load.micro_batches * all_reduce_s(setting.links, sent, grids.tp)


def context_s(setting: Setting, load: Load, grids: Grid) -> Numbers:
    """Return the seconds of context parallelism: each layer gathers the row's other keys and values per
    pass. Source: ring attention, arXiv 2310.01889.
    """
    shape = setting.shape
    numbers = shape.layer_cache / (1 if shape.latent else grids.tp)
    gathered = load.tokens / load.micro_batches * grids.cp * numbers * setting.item_bytes
    gathers = load.micro_batches * shape.attending_layers / shape.layers  # the mean over all layers
    return gathers * all_gather_s(setting.links, gathered, grids.cp, grids.tp)


def experts_s(setting: Setting, load: Load, grids: Grid) -> Numbers:
    """Return the seconds of expert parallelism in a layer's forward pass: to the experts and back.

    Two all-to-alls, in which every device sends k copies of its tokens (Lepikhin et al., arXiv 2006.16668).
    The mean over all layers, some of which may be dense. The backward pass has as many as the forward pass.
    """
    shape = setting.shape
    if not shape.is_mixture:
        return 0.0
    tokens = load.tokens / load.micro_batches / grids.tp
    sent = tokens * shape.experts_per_token * shape.hidden * setting.item_bytes
    each = 2 * shape.mixture_layers / shape.layers * load.micro_batches
    return each * all_to_all_s(setting.links, sent, grids.ep)


def pipeline_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Return the seconds to send activations and gradients between stages, once per micro-batch."""
    sent = load.tokens / load.micro_batches / grids.tp * setting.shape.hidden * setting.item_bytes
    ways = 2 if passes > FORWARD else 1
    return ways * load.micro_batches * send_s(setting.links, sent, grids.pp, grids.tp)


def stage_parameters(setting: Setting, grids: Grid, dense_cuts: Numbers, expert_cuts: Numbers) -> Numbers:
    """Return a device's parameters on the fullest pipeline stage, cut outside and inside experts.

    The first stage has the embedding, and may have fewer layers than the next one.
    """
    shape, stages = setting.shape, stages_of(setting, grids)
    dense, routed = shape.trunk_parameters / dense_cuts, shape.routed_parameters / expert_cuts
    layer = (dense + routed) / shape.layers
    first = stages.first * layer + shape.vocabulary * shape.hidden / dense_cuts
    whole = shape.shared_parameters / dense_cuts + routed
    return np.where(np.greater(grids.pp, 1), np.maximum(first, stages.most * layer), whole)


def stages_of(setting: Setting, grids: Grid) -> StageLayers:
    """Return the layers of the stages of a model on these grids."""
    return stage_layers(setting.shape.layers, grids.pp, setting.problem.layouts)


def gathers_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Return the link seconds of sharded parameters: all-gathers per micro-batch, forward and backward.

    Zhao et al., arXiv 2304.11277: gradients are also reduce-scattered after each micro-batch, at the cost of
    an all-gather. Every layer is one collective, and so are the parameters outside layers.
    """
    each = stages_of(setting, grids).most + 1
    held = stage_parameters(setting, grids, grids.tp, expert_ways(grids))
    weights = held * setting.item_bytes / each
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
    held = stage_parameters(setting, grids, grids.tp, np.inf)
    found = all_reduce_s(links, GRADIENT_BYTES * held, copies_of(grids), dp_stride(grids))
    if shape.is_mixture:
        ways = expert_ways(grids)
        routed = GRADIENT_BYTES * shape.routed_parameters / shape.layers * stages_of(setting, grids).most
        copies = np.maximum(copies_of(grids) * grids.tp / ways, 1)
        found = found + all_reduce_s(links, routed / ways, copies, ways)
    agreed = AGREEMENTS * all_gather_s(links, 0.0, copies_of(grids), dp_stride(grids))
    return agreed + np.where(grids.is_sharded, 0.0, found)


def optimized_parameters(setting: Setting, grids: Grid) -> Numbers:
    """Return the parameters whose optimiser state a device keeps: all it holds, or its ZeRO-1 shard."""
    zero1 = setting.problem.hardware.engine.zero1
    cut = np.where(np.logical_and(zero1, np.logical_not(grids.is_sharded)), copies_of(grids), 1.0)
    spread = np.where(cut > 1, np.maximum(copies_of(grids) * grids.tp / expert_ways(grids), 1), 1.0)
    return stage_parameters(setting, grids, dense_cuts(grids) * cut, expert_cuts(grids) * spread)


def optimizer_s(setting: Setting, grids: Grid) -> Numbers:
    """Return the seconds of Adam, which reads gradient, weight and two moments and writes the last three.

    The float32 traffic is 28 bytes per parameter, plus the copy for computing if that has another dtype.
    """
    factors = setting.factors
    held = optimized_parameters(setting, grids)
    moved = 7 * GRADIENT_BYTES + (setting.item_bytes if setting.item_bytes < GRADIENT_BYTES else 0)
    return held * moved / (setting.fleet.device.memory_bandwidth * factors.decode_bandwidth)


@dataclass(frozen=True, kw_only=True)
class PassWork:
    """Seconds of all micro-batches of one load on the devices of a pipeline."""

    layer_s: Numbers
    """In each layer of a stage."""
    head_s: Numbers
    """In the head, on the last stage."""
    stage_s: Numbers
    """In a stage, whatever its layers."""

    def of(self, layers: Numbers, heads: int = 0) -> Numbers:
        """Return the seconds of a stage with these layers, and the head if it has it."""
        return layers * self.layer_s + heads * self.head_s + self.stage_s


def work_of(setting: Setting, load: Load, grids: Grid, passes: float, share: float) -> PassWork:
    """Return the work of a load: products at a share of the peak, and what goes with each layer."""
    rounds, speed = rounds_of(passes), grids.tp * setting.peak * share
    launched = launches_s(setting, load) + tensor_s(setting, load, grids) + experts_s(setting, load, grids)
    computed = layer_flops(setting, load) / speed + blocks_s(setting, load, grids)
    return PassWork(
        layer_s=passes * (computed + context_s(setting, load, grids)) + rounds * launched,
        head_s=passes * head_flops(setting, load) / speed,
        stage_s=rounds * load.micro_batches * setting.factors.pass_s,
    )


def passes_s(setting: Setting, load: Load, grids: Grid, passes: float, share: float) -> Numbers:
    """Return the seconds of all micro-batches of one load, including the pipeline bubble and gathers.

    1F1B (Narayanan et al., arXiv 2104.04473, 2.2): the first micro-batch passes all stages, and then each of
    the other M - 1 takes as long as the fullest stage. A share ``hidden`` of the gathers overlaps with the
    work; that share only counts if it takes longer than the work.
    """
    work, stages = work_of(setting, load, grids, passes, share), stages_of(setting, grids)
    sent_s = pipeline_s(setting, load, grids, passes)
    fullest = np.maximum(work.of(stages.most), work.of(stages.last, 1)) + sent_s
    every = grids.pp * (work.stage_s + sent_s) + setting.shape.layers * work.layer_s + work.head_s
    drained = fullest + (every - fullest) / load.micro_batches
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
