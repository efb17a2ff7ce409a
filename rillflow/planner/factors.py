"""Factors: how much of a device's numbers models reach, and what an engine does; fitted on other steps.

stacks.toml ─ like = "nemo-rl" ─> factors, engine, what they were fitted on, how far off they were
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rillflow.planner.quantities import Part, Rate, Seconds, Share, number


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Shares between 0 and 1, and seconds of what no formula gives."""

    train_flops: Share = 0.4
    """Of the peak, in forward and backward passes."""
    score_flops: Share = 0.5
    """Of the peak, in forward passes over whole rows; prefill as well."""
    decode_bandwidth: Share = 0.6
    """Of the memory's bandwidth, reading weights and cache token by token."""
    decode_flops: Share = 0.5
    """Of the peak, decoding with many rows."""
    expert_flops: Share = 0.5
    """Of what other products reach, in the smaller products of routed experts."""
    inside_links: Share = 0.7
    """Of the links inside a machine."""
    between_links: Share = 0.7
    """Of the links between machines."""
    host_links: Share = 0.5
    """Of the links to the host's memory, where states of models go that are not at work."""
    memory: Share = 0.9
    """Of the memory that models may fill; the rest is the libraries'."""
    touches: Annotated[float, number(0.0, 1000.0, "it counts passes over memory: 0 to 1000")] = 0.0
    """How often a forward pass reads or writes each activation beside products; 0 where kernels are fused."""
    head_token_s: Seconds = 0.0
    """Seconds of one head's attention for one token of a row, forward, beside its products: small blocks."""
    hidden: Part = 1.0
    """Of reads token by token and gathers of shards, the share that runs beside products, not before them."""
    pass_s: Seconds = 0.0
    """Seconds of a pass over a micro-batch beside its layers: rows are laid out, losses are added up."""
    launch_s: Seconds = 1e-4
    """Seconds of a layer's pass over a micro-batch beside its arithmetic: what its kernels cost to start."""
    expert_launch_s: Seconds = 5e-4
    """Seconds of a layer of experts beside that: tokens are counted and sorted before they are sent."""
    decode_launch_s: Seconds = 2e-5
    """Seconds of a layer for one token of all rows beside what is read: recorded kernels start faster."""
    decode_row_s: Seconds = 5e-6
    """Seconds of one row for one token beside the model: scheduling and sampling, shared by no devices."""
    row_s: Seconds = 0.0
    """Seconds of a row that is generated beside its tokens: it is given a place, and handed over."""
    collective_s: Seconds = 1e-5
    """Seconds a collective within a machine takes at the least."""
    between_collective_s: Seconds = 3e-5
    """Seconds a collective across machines takes at the least."""
    call_s: Seconds = 0.0
    """Seconds to call a stage on several devices and to have its replies, beside what it computes."""
    step_s: Seconds = 0.0
    """Seconds of a step that belong to no stage."""
    step_row_s: Seconds = 0.0
    """Such seconds for each row of a step: what is recorded of it."""
    refit: Rate = 0.0
    """Bytes a second at which whole tensors go to generation in place; 0: what is missing is gathered."""
    refit_apart: Rate = 0.0
    """Bytes a second at which they go to a sampler apart; 0: as fast as the links are."""


@dataclass(frozen=True, kw_only=True)
class EngineFactors:
    """What a stack does that no number of a device says."""

    zero1: bool = False
    """Whether the optimiser's state is cut over the devices with other rows, weights and gradients whole."""
    offloads: bool = False
    """Whether a model that is not computing keeps its state on the host, unless a sampler is apart."""
    interrupts: bool = True
    """Whether new weights interrupt rows of a sampler apart, which go on; else replicas end theirs first."""
    drains: bool = False
    """Where they do not: whether they wait until all replicas have ended their rows."""
    holds_prompts: bool = False
    """Whether a prompt counts as in flight until its longest answer has ended."""
    cache: Share = 1.0
    """The share of a device's memory that weights and cache of generation may fill, beside training."""
    cache_apart: Share = 1.0
    """The same of a sampler apart."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How far off predictions were on steps that nothing was fitted on."""

    median: float
    """Of the absolute errors, as shares of what was measured."""
    worst: float
    """The largest of them."""
    low: float
    """Measured over predicted: nine in ten steps had more."""
    high: float
    """Nine in ten steps had less."""
