"""Link times: measure latency and bandwidth between the ranks of a recipe, pair by pair.

    recipe ─> backend, pools ─> a LinkProbe on every rank ─ ping-pong of each pair, the others wait ─> table
    table, mesh ─> seconds of a pipeline's cuts: ``links.link_seconds``

consumes      the placement of a recipe
waits for     the two ranks of a pair, at most the collectives' deadline
unblocked by  both
produces      seconds of a small and of a large message, the least of some rounds
shutdown      the backend is closed; a rank that dies ends the measurement with its error
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rillflow.app.resolved import Resolved
from rillflow.app.roles import pools_of
from rillflow.controller.executor import GroupExecutor
from rillflow.errors import ConfigError
from rillflow.placement.mesh import Mesh
from rillflow.workers.backend import Site
from rillflow.workers.collectives import ProcessRanks
from rillflow.workers.group import Group
from rillflow.workers.start import start_backend

SMALL_BYTES, LARGE_BYTES = 64, 2**20
"""Sizes of the two messages."""
ROUNDS = 3
CUT_BYTES = 2**20
"""Message for which the seconds of a pipeline's cuts are stated; only their proportions count."""


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """The link between two ranks of a pool."""

    pool: str
    """The pool."""
    ranks: tuple[int, int]
    """Both ranks."""
    latency_s: float
    """Seconds of an empty message, one way."""
    bytes_per_s: float
    """Bandwidth of a large message."""

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a message."""
        return self.latency_s + num_bytes / self.bytes_per_s


class LinkProbe:
    """A rank that exchanges messages with the others of its pool."""

    def __init__(self, site: Site) -> None:
        self.ranks = site.ranks


def measured_links(resolved: Resolved) -> list[LinkTime]:
    """Start the ranks of a recipe and measure every pair of each pool.

    Raises:
        ConfigError: no pool has two ranks that are processes.
        ClusterError: a rank cannot be started, or died.
    """
    placement = resolved.recipe.placement
    if placement.is_inline or max(placement.pools.values()) == 1:
        raise ConfigError(
            "no two ranks of a pool are processes",
            why="links are measured between the ranks of a pool, which sum gradients or send activations",
            fix="give a pool several ranks, such as placement.pools.main = 2",
        )
    with ExitStack() as stack:
        backend = start_backend(placement, pools_of(resolved), "cpu")
        stack.callback(backend.close)
        groups = {
            pool: Group(pool, {}, mesh=Mesh.of(dp=size), pool=pool, backend=backend)
            for pool, size in placement.pools.items()
            if size > 1
        }
        executor, links = GroupExecutor(groups, backend), list[LinkTime]()
        for pool, group in groups.items():
            group.start(LinkProbe, placement.load_s)
            table = executor.on_all_ranks(pool, pair_times).read(placement.deadline_s)
            links += [_link(pool, one, other, *times) for one, other, *times in table]
    return links


def pair_times(probe: LinkProbe) -> list[tuple[int, int, float, float]]:
    """Return, for each pair of ranks, the seconds of a small and of a large message; every rank calls it."""
    ranks = probe.ranks
    assert isinstance(ranks, ProcessRanks), "the pool has several processes"
    table = list[tuple[int, int, float, float]]()
    for one in range(ranks.size):
        for other in range(one + 1, ranks.size):
            times = torch.zeros(2, dtype=torch.float64)
            if ranks.rank in (one, other):
                for place, num_bytes in enumerate((SMALL_BYTES, LARGE_BYTES)):
                    times[place] = _round_trip_s(ranks, one, other, num_bytes) / 2
            every = ranks.stack(times)  # the others wait here, so that no two pairs share a link
            table.append((one, other, float(every[one, 0]), float(every[one, 1])))
    return table


def cut_seconds(links: Sequence[LinkTime], pool: str, mesh: Mesh) -> list[float]:
    """Return the seconds of a message over each cut of a pipeline: those of its slowest link."""
    known = {each.ranks: each.seconds(CUT_BYTES) for each in links if each.pool == pool}
    chains = mesh.groups("pp")
    stages = len(chains[0])
    pairs = [[sorted((chain[cut], chain[cut + 1])) for chain in chains] for cut in range(stages - 1)]
    return [max(known[one, other] for one, other in cut) for cut in pairs]


def _round_trip_s(ranks: ProcessRanks, one: int, other: int, num_bytes: int) -> float:
    """Return the least time of a message and its answer."""
    message, peer = torch.zeros(num_bytes, dtype=torch.uint8), other if ranks.rank == one else one
    least = float("inf")
    for number in range(ROUNDS + 1):
        began = time.monotonic()
        steps = (dist.send, dist.recv) if ranks.rank == one else (dist.recv, dist.send)
        for step in steps:
            step(message, ranks.members[peer], group=ranks.group)
        if number:  # the first one connects
            least = min(least, time.monotonic() - began)
    return least


def _link(pool: str, one: int, other: int, small_s: float, large_s: float) -> LinkTime:
    per_s = (LARGE_BYTES - SMALL_BYTES) / max(large_s - small_s, 1e-9)
    return LinkTime(pool=pool, ranks=(one, other), latency_s=small_s, bytes_per_s=per_s)
