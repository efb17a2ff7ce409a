"""The controller against bare Ray: a call to four ranks, 64 MiB from group to group, two pools at once.

    ours    Group.call ─> 4 RankProcess ─> Pending.read        a batch made by one group, taken by another
    bare    4 x actor.method.remote ─> ray.get                 ray.put, actor.take.remote(reference), ray.get

    python benchmarks/controller.py                                    # about two minutes
    python benchmarks/controller.py --write benchmarks/results/controller.md

Both run in turn in one process, on one cluster; figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rillflow.cluster.backend import Site
from rillflow.cluster.pool import Pool
from rillflow.cluster.ray import RayBackend
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.row import RowId
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.transfer import DP

import ray  # isort: skip

RANKS, CALLS, MIB = 4, 100, 64


class Worker:
    """Does nothing, makes a large batch, takes one, or sleeps."""

    def __init__(self, site: Site) -> None:
        self._site = site

    @endpoint(DP)
    def nothing(self, batch: Batch) -> Batch:
        return batch

    @endpoint(DP)
    def make(self, batch: Batch) -> Batch:
        numbers = MIB * 2**20 // 4 // RANKS // len(batch)
        return Batch(ids=batch.ids, fields={"big": torch.ones(len(batch), numbers)})

    @endpoint(DP)
    def take(self, batch: Batch) -> int:
        return int(batch.dense("big")[0, 0])

    @endpoint(DP)
    def sleep(self, batch: Batch, *, seconds: float) -> Batch:
        time.sleep(seconds)
        return batch


@ray.remote(num_cpus=0)
class Bare:
    """The same without us."""

    def nothing(self, batch: Any) -> Any:
        return batch

    def take(self, array: Any) -> int:
        return int(array[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="rounds after the first (7)")
    parser.add_argument("--write", metavar="FILE", help="where the table goes, besides the screen")
    arguments = parser.parse_args()
    backend = RayBackend(120.0)
    backend.open([Pool(name="a", size=RANKS), Pool(name="b", size=RANKS)])
    try:
        groups = [group_on(backend, pool) for pool in ("a", "b")]
        rows = measured(groups, arguments.rounds)
    finally:
        backend.close()
    text = "\n".join(
        [
            "# The controller against bare Ray",
            "",
            f"Command: `python benchmarks/controller.py`; {os.cpu_count()} cores, Python "
            f"{platform.python_version()}, torch {version('torch')}, ray {version('ray')}; "
            f"medians of {arguments.rounds} rounds.",
            "",
            "| what | ours | bare Ray | ratio |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text)


def group_on(backend: RayBackend, pool: str) -> Group:
    """Workers on every rank of a pool."""
    group = Group(pool, endpoints_of(Worker), mesh=Mesh.of(dp=RANKS), pool=pool, backend=backend)
    group.start(Worker)
    return group


def measured(groups: list[Group], rounds: int) -> list[str]:
    """The table's rows."""
    first, second = groups
    small = Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(RANKS)]), fields={"x": torch.ones(RANKS)}
    )
    actors = [Bare.remote() for _ in range(RANKS)]
    piece = {"ids": small.ids[:1].numpy(), "x": small.dense("x")[:1].numpy()}
    array = torch.ones(MIB * 2**20 // 4).numpy()

    def call() -> None:
        for _ in range(CALLS):
            first.call("nothing", small).wait(60)

    def bare_call() -> None:
        for _ in range(CALLS):
            ray.get([actor.nothing.remote(piece) for actor in actors])

    def pass_on() -> None:
        second.call("take", first.call("make", small)).wait(60)

    def bare_pass() -> None:
        ray.get(actors[0].take.remote(ray.put(array)))

    def one_pool() -> None:
        first.call("sleep", small, seconds=1.0).wait(60)

    def two_pools() -> None:
        pending = [group.call("sleep", small, seconds=1.0) for group in groups]
        for each in pending:
            each.wait(60)

    calls = medians([call, bare_call], rounds)
    passes = medians([pass_on, bare_pass], rounds)
    pools = medians([two_pools, one_pool], rounds)
    return [
        f"| a call to {RANKS} ranks and its results | {calls[0] / CALLS * 1e3:.2f} ms | "
        f"{calls[1] / CALLS * 1e3:.2f} ms | {calls[0] / calls[1]:.2f} |",
        f"| {MIB} MiB made by {RANKS} ranks, taken by {RANKS} others | {passes[0] * 1e3:.0f} ms | "
        f"{passes[1] * 1e3:.0f} ms (put, taken by one actor) | {passes[0] / passes[1]:.2f} |",
        f"| a second of sleep on two pools at once, against one | {pools[0]:.3f} s | {pools[1]:.3f} s "
        f"(one pool) | {pools[0] / pools[1]:.2f} |",
    ]


def medians(ways: list[Callable[[], None]], rounds: int) -> list[float]:
    """Median seconds of each, taken in turn; a first round warms up."""
    found: list[list[float]] = [[] for _ in ways]
    for index in range(rounds + 1):
        for way, seconds in zip(ways, found, strict=True):
            began = time.perf_counter()
            way()
            if index:
                seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in found]


if __name__ == "__main__":
    main()
