"""Compute: seconds of training and scoring whole rows on a grid.

rows ─ dp ─> tokens of the busiest replica ─> micro-batches ─> 1F1B over pp ─┬─ products and attention
                                                                             ├─ collectives of tp, ep
                                                                             └─ gathers of shards
after the last: gradients over dp, the optimiser's bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rillflow.errors import PlanError
from rillflow.planner.cost_model.links import Links, all_gather_s, all_reduce_s, all_to_all_s, send_s
from rillflow.planner.grid import Grid, Numbers
from rillflow.planner.hardware import Factors, Fleet
from rillflow.planner.model_shape import ModelShape
from rillflow.planner.problem import Problem
from rillflow.planner.workload import Workload

FORWARD = 1
"""Passes of scoring, in forwards."""
TRAINING = 3
"""Passes of training: a backward costs two forwards."""
RECOMPUTED = 4
"""Passes of training with activations recomputed."""
AGREEMENTS = 3
"""Small collectives of an optimiser step: its rows by rank, the denominator, whether there is a gradient."""
GRADIENT_BYTES = 4
"""Of one parameter's gradient, float32."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a stage's seconds depend on beside the grid."""

    problem: Problem
    """The step: its rows, what the engine does, how well devices are used."""
    shape: ModelShape
    """The model."""
    fleet: Fleet
    """The devices."""

    @property
    def workload(self) -> Workload:
        """The rows."""
        return self.problem.workload

    @property
    def factors(self) -> Factors:
        """How well devices are used."""
        return self.problem.hardware.factors

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of a number while it computes."""
        return {"float32": 4, "bfloat16": 2, "float8": 1}[self.workload.dtype]

    @cached_property
    def token_flops(self) -> float:
        """FLOPs of one token, those of routed experts counted by how much longer small products take."""
        longer = 1.0 / self.factors.expert_flops - 1.0
        return self.shape.token_flops + longer * 2.0 * self.shape.chosen_parameters

    @cached_property
    def links(self) -> Links:
        """The fleet's links as models find them."""
        return Links.of(self.fleet, self.factors)

    @property
    def peak(self) -> float:
        """FLOP/s of a device in the workload's dtype.

        Raises:
            PlanError: the device's description does not say.
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
    """What the busiest replica computes between two optimiser steps, [grids]."""

    tokens: Numbers
    """Tokens of its rows, those that several share counted once where they are computed once."""
    squares: Numbers
    """Sum of its rows' squared tokens."""
    seats: Numbers
    """Tokens of its rows as attention has them: none shared."""
    micro_batches: Numbers
    """Forward and backward passes it takes them in."""


def load_of(workload: Workload, dp: Numbers, parts: int, computed: float = 1.0, cp: Numbers = 1) -> Load:
    """The busiest of dp replicas in one of ``parts`` equal parts of a step's rows.

    Rows are shared out by their tokens, so that it has the mean, or the longest row where that is more, and
    attends to that; rows of one length can only be shared out whole. ``computed`` is the share of tokens that
    everything but attention computes; each of ``cp`` devices has as many of every row's.
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
    tokens, squares = np.divide(tokens, cp), np.divide(squares, cp)
    micro_batches = np.ceil(np.divide(tokens, workload.tokens_per_micro_batch) - 1e-9)
    return Load(
        tokens=tokens * computed,
        squares=squares,
        seats=tokens,
        micro_batches=np.maximum(micro_batches, 1),
    )


def pass_flops(setting: Setting, load: Load) -> Numbers:
    """FLOPs of one forward pass: 2 a parameter and token, and 2 (d + v) a head, layer and pair of tokens.

    Causal attention looks at half of a row's squared tokens (Kaplan et al., arXiv 2001.08361, 2.1).
    """
    return setting.token_flops * load.tokens + setting.shape.attention_flops(1.0) * load.squares / 2


def products_s(setting: Setting, load: Load, grids: Grid, passes: float, share: float) -> Numbers:
    """Seconds of a device's share of the passes' FLOPs, at a share of its peak."""
    return passes * pass_flops(setting, load) / (grids.pp * grids.tp * setting.peak * share)


def touched_s(setting: Setting, tp: Numbers) -> Numbers:
    """Seconds of memory that one token's activations take in one layer's forward pass, beside products.

    ``touches x numbers kept of a token and layer x bytes / bandwidth``: norms, rotations, gates and sums that
    are kernels of their own read and write what products leave. It grows with a model's width, products with
    its square.
    """
    moved = setting.factors.touches * setting.shape.layer_numbers(tp) * setting.item_bytes
    return moved / (setting.fleet.device.memory_bandwidth * setting.factors.decode_bandwidth)


def activations_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Seconds of memory that activations take in the layers of a device."""
    return passes * load.tokens * setting.shape.layers / grids.pp * touched_s(setting, grids.tp)


def attention_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Seconds of attention in the layers of a device beside its products: ``head_token_s`` a head and token.

    Rows are attended to each by itself, head by head: on processors blocks so small cost by their number
    of tokens, whatever the width of a head.
    """
    heads = setting.shape.heads / grids.tp
    once = load.seats * setting.shape.layers / grids.pp * heads * setting.factors.head_token_s
    return passes * once


def launches_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Seconds that a pass and its layers cost to start, for every micro-batch; layers of experts more.

    A backward pass starts once: it has two forwards' products in kernels nobody has to call one by one.
    """
    shape, factors = setting.shape, setting.factors
    layers, mixed = np.ceil(shape.layers / grids.pp), np.ceil(shape.mixture_layers / grids.pp)
    once = factors.pass_s + layers * factors.launch_s + mixed * factors.expert_launch_s
    return (passes - 1 if passes > FORWARD else 1) * load.micro_batches * once


def tensor_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Seconds of tensor parallelism: 2 all-reduces of every layer's activations in each pass.

    Shoeybi et al., arXiv 1909.08053, 3: one after attention, one after the feed-forward block; the backward
    pass has as many as the forward, so that 3 passes' FLOPs have 2 passes' collectives.
    """
    layers = setting.shape.layers / grids.pp
    rounds = 2 * layers * (passes - 1 if passes > FORWARD else 1)
    sent = load.tokens / load.micro_batches * setting.shape.hidden * setting.item_bytes
    return rounds * load.micro_batches * all_reduce_s(setting.links, sent, grids.tp)


def context_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Seconds of context parallelism: in each pass a layer gathers a row's other keys and values."""
    shape = setting.shape
    numbers = shape.cached_numbers / shape.layers / (1 if shape.latent else grids.tp)
    gathered = load.tokens / load.micro_batches * grids.cp * numbers * setting.item_bytes
    rounds = shape.layers / grids.pp * load.micro_batches * passes
    return rounds * all_gather_s(setting.links, gathered, grids.cp, grids.tp)


def experts_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Seconds of expert parallelism: tokens go to their experts and back, 2 all-to-alls a layer and pass.

    Every device sends k copies of its tokens (Lepikhin et al., arXiv 2006.16668); as many rounds as
    ``tensor_s``.
    """
    shape = setting.shape
    if not shape.is_mixture:
        return 0.0
    rounds = 2 * shape.mixture_layers / grids.pp * (passes - 1 if passes > FORWARD else 1)
    tokens = load.tokens / load.micro_batches / grids.tp
    sent = tokens * shape.experts_per_token * shape.hidden * setting.item_bytes
    return rounds * load.micro_batches * all_to_all_s(setting.links, sent, grids.ep)


def pipeline_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Seconds of activations and their gradients on their way between stages, once a micro-batch."""
    sent = load.tokens / load.micro_batches / grids.tp * setting.shape.hidden * setting.item_bytes
    ways = 2 if passes > FORWARD else 1
    return ways * load.micro_batches * send_s(setting.links, sent, grids.pp, grids.tp)


def bubble(load: Load, grids: Grid) -> Numbers:
    """What filling and draining a pipeline adds: (N - 1) / M of the work, N stages and M micro-batches.

    1F1B (Narayanan et al., arXiv 2104.04473, 2.2): (M + N - 1)(f + b) instead of M (f + b).
    """
    return (grids.pp - 1) / load.micro_batches


def stage_parameters(shape: ModelShape, grids: Grid) -> Numbers:
    """Parameters of one pipeline stage that one device computes with, shards gathered."""
    dense = shape.shared_parameters / (grids.pp * grids.tp)
    return dense + shape.routed_parameters / (grids.pp * grids.expert_ways)


def gathers_s(setting: Setting, load: Load, grids: Grid, passes: float) -> Numbers:
    """Seconds of links that shards of parameters take: gathered for every micro-batch, forward and backward.

    Zhao et al., arXiv 2304.11277: and gradients are reduce-scattered after each, which is a gather backwards.
    Every layer is a collective of its own, and so is what lies around the layers.
    """
    each = np.ceil(setting.shape.layers / grids.pp) + 1
    weights = stage_parameters(setting.shape, grids) * setting.item_bytes / each
    gather = all_gather_s(setting.links, weights, grids.copies, grids.dp_stride)
    if passes > FORWARD:
        gradients = weights / setting.item_bytes * GRADIENT_BYTES
        gather = 2 * gather + all_gather_s(setting.links, gradients, grids.copies, grids.dp_stride)
    return np.where(grids.is_sharded, load.micro_batches * each * gather, 0.0)


def gradients_s(setting: Setting, grids: Grid) -> Numbers:
    """Seconds to agree over dp on an optimiser step and to add up its float32 gradients.

    Experts are added up over fewer devices; shards have been after every pass.
    """
    shape, links = setting.shape, setting.links
    dense = GRADIENT_BYTES * shape.shared_parameters / (grids.pp * grids.tp)
    found = all_reduce_s(links, dense, grids.copies, grids.dp_stride)
    if shape.is_mixture:
        routed = GRADIENT_BYTES * shape.routed_parameters / (grids.pp * grids.expert_ways)
        copies = np.maximum(grids.copies * grids.tp / grids.expert_ways, 1)
        found = found + all_reduce_s(links, routed, copies, grids.expert_ways)
    agreed = AGREEMENTS * all_gather_s(links, 0.0, grids.copies, grids.dp_stride)
    return agreed + np.where(grids.is_sharded, 0.0, found)


def optimized_parameters(setting: Setting, grids: Grid) -> Numbers:
    """Parameters whose optimiser state a device keeps: all it holds, or its share of them (ZeRO-1)."""
    shape = setting.shape
    zero1 = setting.problem.hardware.engine.zero1
    cut = np.where(np.logical_and(zero1, np.logical_not(grids.is_sharded)), grids.copies, 1.0)
    spread = np.where(cut > 1, np.maximum(grids.copies * grids.tp / grids.expert_ways, 1), 1.0)
    dense = shape.shared_parameters / grids.dense_cuts / cut
    return dense + shape.routed_parameters / grids.expert_cuts / spread


def optimizer_s(setting: Setting, grids: Grid) -> Numbers:
    """Seconds of Adam: it reads gradient, weight and two moments and writes the last three, float32.

    28 bytes a parameter, and the copy for computing where that has another dtype.
    """
    factors = setting.factors
    held = optimized_parameters(setting, grids)
    moved = 7 * GRADIENT_BYTES + (setting.item_bytes if setting.item_bytes < GRADIENT_BYTES else 0)
    return held * moved / (setting.fleet.device.memory_bandwidth * factors.decode_bandwidth)


def passes_s(setting: Setting, load: Load, grids: Grid, passes: float, share: float) -> Numbers:
    """Seconds of all micro-batches of one load: the work, drained through the pipeline, or the gathers.

    Of gathers, ``hidden`` run beside the work: they count where they take longer than it.
    """
    work = products_s(setting, load, grids, passes, share)
    for term in (activations_s, attention_s, launches_s, tensor_s, experts_s, context_s, pipeline_s):
        work = work + term(setting, load, grids, passes)
    drained = work * (1 + bubble(load, grids))
    gathers, hidden = gathers_s(setting, load, grids, passes), setting.factors.hidden
    return np.maximum(drained, hidden * gathers) + (1 - hidden) * gathers


def score_s(setting: Setting, grids: Grid) -> Numbers:
    """Seconds of one forward pass over a step's rows, [grids]."""
    load = load_of(setting.workload, grids.dp, 1, setting.workload.packing.scored, grids.cp)
    return passes_s(setting, load, grids, FORWARD, setting.factors.score_flops)


def train_s(setting: Setting, grids: Grid) -> Numbers:
    """Seconds of all epochs and optimiser steps over a step's rows, [grids]."""
    workload = setting.workload
    load = load_of(workload, grids.dp, workload.minibatches, workload.packing.trained, grids.cp)
    passes, learnt = RECOMPUTED if setting.problem.recomputes else TRAINING, workload.gradient_share
    once = (
        learnt * passes_s(setting, load, grids, passes, setting.factors.train_flops)
        + (1 - learnt) * passes_s(setting, load, grids, FORWARD, setting.factors.score_flops)
        + gradients_s(setting, grids)
        + optimizer_s(setting, grids)
    )
    return workload.epochs * workload.minibatches * once
