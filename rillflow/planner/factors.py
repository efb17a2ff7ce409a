"""Factors: how much of a device's numbers models reach, and what an engine does; fitted on other steps.

stacks.toml ─ like = "nemo-rl" ─> Stack: factors, engine, what they were fitted on, how far off they were
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Shares between 0 and 1, and seconds of what no formula gives."""

    train_flops: float = 0.4
    """Of the peak, in forward and backward passes."""
    score_flops: float = 0.5
    """Of the peak, in forward passes over whole rows; prefill as well."""
    decode_bandwidth: float = 0.6
    """Of the memory's bandwidth, reading weights and cache token by token."""
    decode_flops: float = 0.5
    """Of the peak, decoding with many rows."""
    expert_flops: float = 0.5
    """Of what other products reach, in the smaller products of routed experts."""
    inside_links: float = 0.7
    """Of the links inside a machine."""
    between_links: float = 0.7
    """Of the links between machines."""
    host_links: float = 0.5
    """Of the links to the host's memory, where states of models go that are not at work."""
    memory: float = 0.9
    """Of the memory that models may fill; the rest is the libraries'."""
    touches: float = 0.0
    """How often a forward pass reads or writes each activation beside products; 0 where kernels are fused."""
    head_token_s: float = 0.0
    """Seconds of one head's attention for one token of a row, forward, beside its products: small blocks."""
    hidden_reads: float = 1.0
    """Of what decoding reads of memory, the share that runs beside products; the rest is waited for."""
    hidden_gathers: float = 1.0
    """Of what gathering shards takes, the share that runs beside products; the rest is waited for."""
    pass_s: float = 0.0
    """Seconds of a pass over a micro-batch beside its layers: rows are laid out, losses are added up."""
    launch_s: float = 1e-4
    """Seconds of a layer's pass over a micro-batch beside its arithmetic: what its kernels cost to start."""
    expert_launch_s: float = 5e-4
    """Seconds of a layer of experts beside that: tokens are counted and sorted before they are sent."""
    decode_launch_s: float = 2e-5
    """Seconds of a layer for one token of all rows beside what is read: recorded kernels start faster."""
    decode_row_s: float = 5e-6
    """Seconds of one row for one token beside the model: scheduling and sampling, shared by no devices."""
    row_s: float = 0.0
    """Seconds of a row that is generated beside its tokens: it is given a place, and handed over."""
    collective_s: float = 1e-5
    """Seconds a collective within a machine takes at the least."""
    between_collective_s: float = 3e-5
    """Seconds a collective across machines takes at the least."""
    call_s: float = 0.0
    """Seconds to call a stage on several devices and to have its replies, beside what it computes."""
    step_s: float = 0.0
    """Seconds of a step that belong to no stage."""
    step_row_s: float = 0.0
    """Such seconds for each row of a step: what is recorded of it."""
    refit: float = 0.0
    """Bytes a second at which whole tensors go to generation in place; 0: what is missing is gathered."""
    refit_apart: float = 0.0
    """Bytes a second at which they go to a sampler apart; 0: as fast as the links are."""


@dataclass(frozen=True, kw_only=True)
class EngineFactors:
    """What a stack does that no number of a device says."""

    zero1: bool = False
    """Whether the optimiser's state is cut over the devices with other rows, weights and gradients whole."""
    offloads: bool = False
    """Whether a model that is not computing keeps its state on the host, unless a sampler is apart."""
    interrupts: bool = True
    """Whether new weights interrupt the rows of a sampler apart; else it ends what it runs before."""
    rereads: bool = False
    """Whether interrupted rows read their prefixes again under new weights; else they keep their cache."""
    holds_prompts: bool = False
    """Whether a prompt counts as in flight until its longest answer has ended."""
    cache: float = 1.0
    """The share of a device's memory that weights and cache of generation may fill, beside training."""
    cache_apart: float = 1.0
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


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Factors and engine of a training stack, with what they were fitted on."""

    name: str
    """What ``like`` calls it."""
    fitted: str
    """What on."""
    factors: Factors
    """The factors."""
    engine: EngineFactors
    """What the stack does."""
    accuracy: Accuracy | None
    """On steps left out of the fit; none where none were published."""
