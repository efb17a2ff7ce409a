"""Links: seconds of collectives, within a machine and across machines.

    group of g devices, stride s ─> members of one machine, machines ─> the slower of both kinds of link

Between machines every device has its own share of the network. A ring over m machines with c members each
thus moves c pieces at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rillflow.placement.grid import Numbers
from rillflow_planner.hardware import Factors, Fleet


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bandwidth and latency of a machine type's links, including efficiency."""

    inside: float
    """Bytes per second in one direction between devices of a machine."""
    between: float
    """Bytes per second in one direction from a device to another machine."""
    host: float
    """Bytes per second between a device and its host."""
    per_machine: int
    """Devices of a machine."""
    inside_s: float
    """Latency of a collective within a machine."""
    between_s: float
    """Latency of a collective across machines."""

    @classmethod
    def of(cls, fleet: Fleet, factors: Factors) -> Links:
        """Return the links of a machine type with efficiency factors."""
        return cls(
            inside=fleet.device.inside_bandwidth * factors.inside_links,
            between=fleet.between_bandwidth * factors.between_links,
            host=fleet.device.host_bandwidth * factors.host_links,
            per_machine=fleet.per_machine,
            inside_s=factors.collective_s,
            between_s=max(factors.between_collective_s, factors.collective_s),
        )


def members(links: Links, group: Numbers, stride: Numbers) -> Numbers:
    """Return the number of a group's devices in one machine when its ranks are ``stride`` apart."""
    near = np.maximum(np.floor_divide(links.per_machine, np.maximum(stride, 1)), 1)
    return np.minimum(group, near)


def latency_s(links: Links, machines: Numbers) -> Numbers:
    """Return the latency of a collective over this many machines, which are joined as a tree."""
    rounds = np.log2(np.maximum(machines, 2))
    return np.where(np.greater(machines, 1), links.between_s * rounds, links.inside_s)


def all_gather_s(links: Links, total_bytes: Numbers, group: Numbers, stride: Numbers = 1) -> Numbers:
    """Return the seconds until every device of a group has ``total_bytes``; each starts with an equal part.

    Ring, the slower of ``(g - 1)/g T / inside`` and ``(m - 1)/m T / (c between)``: g devices on m machines,
    c on each (Thakur et al. 2005, and NCCL's rings over all network cards).
    """
    near = members(links, group, stride)
    machines = np.ceil(np.divide(group, near))
    inside_s = (near - 1) / near * np.divide(total_bytes, links.inside)
    between_s = (machines - 1) / machines * np.divide(total_bytes, near * links.between)
    return np.where(np.greater(group, 1), np.maximum(inside_s, between_s) + latency_s(links, machines), 0.0)


def all_reduce_s(links: Links, total_bytes: Numbers, group: Numbers, stride: Numbers = 1) -> Numbers:
    """Return the seconds of an all-reduce of ``total_bytes``: a reduce-scatter, then an all-gather."""
    return 2 * all_gather_s(links, total_bytes, group, stride)


def all_to_all_s(links: Links, sent_bytes: Numbers, group: Numbers, stride: Numbers = 1) -> Numbers:
    """Return the seconds for every device to send ``sent_bytes``, spread evenly over its group with itself.

    The slower of ``(c - 1)/g B / inside`` and ``(g - c)/g B / between``.
    """
    near = members(links, group, stride)
    machines = np.ceil(np.divide(group, near))
    inside_s = (near - 1) / group * np.divide(sent_bytes, links.inside)
    between_s = (np.subtract(group, near)) / group * np.divide(sent_bytes, links.between)
    return np.where(np.greater(group, 1), np.maximum(inside_s, between_s) + latency_s(links, machines), 0.0)


def send_s(links: Links, sent_bytes: Numbers, group: Numbers, stride: Numbers) -> Numbers:
    """Return the seconds of a message from each device of a pipeline stage to the next stage."""
    is_far = np.greater(np.multiply(group, stride), links.per_machine)
    rate = np.where(is_far, links.between, links.inside)
    least_s = np.where(is_far, links.between_s, links.inside_s)
    return np.where(np.greater(group, 1), np.divide(sent_bytes, rate) + least_s, 0.0)
