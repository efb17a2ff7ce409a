"""Factors: how much of a device's numbers models reach; fitted on other steps than those predicted."""

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
    inside_links: float = 0.7
    """Of the links inside a machine."""
    between_links: float = 0.7
    """Of the links between machines."""
    memory: float = 0.9
    """Of the memory that models may fill; the rest is the libraries'."""
    launch_s: float = 3e-5
    """Seconds a layer takes at the least: what its kernels cost to start."""
    collective_s: float = 1e-5
    """Seconds a collective takes at the least."""
    step_s: float = 0.0
    """Seconds of a step that belong to no stage."""
