"""Small role programs for the tests of both backends."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

from rillflow.errors import RecordError
from rillflow.records.batch import Batch
from rillflow.records.metrics import Max, Mean, Metric
from rillflow.workers.backend import Site
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import BROADCAST, DP, ROWS, SPLIT_ALL, SPLIT_DP, SPLIT_DP_REDUCE, Transfer

EVERYONE = Transfer(name="EVERYONE", send={}, receive={"pp": ROWS, "dp": ROWS, "tp": ROWS})
"""Every rank gets all rows; the results return as a list over the ranks."""


class Worker:
    """Endpoints of every kind."""

    updates = 0

    def __init__(self, site: Site) -> None:
        self.site, self.ranks = site, site.ranks

    @endpoint(DP, reads=("x",), writes=("y",))
    def double(self, batch: Batch) -> Batch:
        return Batch(ids=batch.ids, fields={"y": batch.dense("x") * 2, "rank": self._mine(batch)})

    @endpoint(DP)
    def join(self, one: Batch, other: Batch) -> Batch:
        return one.join(other)

    @endpoint(DP)
    def same(self, batch: Batch) -> Batch:
        return batch

    @endpoint(DP)
    def scale(self, batch: Batch, *, by: float) -> Batch:
        return Batch(ids=batch.ids, fields={"x": batch.dense("x") * by})

    @endpoint(DP)
    def first_half(self, batch: Batch) -> Batch:
        """Return fewer rows than were given; later stages must find them."""
        return batch.slice(0, len(batch) // 2 + self.ranks.rank % 2)

    @endpoint(DP)
    def make(self, batch: Batch, *, numbers: int) -> Batch:
        """Return a large field."""
        return Batch(ids=batch.ids, fields={"big": torch.ones(len(batch), numbers)})

    @endpoint(DP)
    def make_two(self, batch: Batch, *, numbers: int) -> Batch:
        """Return two large fields."""
        fields = {
            name: torch.full((len(batch), numbers), value) for name, value in (("x", 1.0), ("big", 2.0))
        }
        return Batch(ids=batch.ids, fields=fields)

    @endpoint(DP, reads=("x",), writes=("fetched",))
    def weigh(self, batch: Batch) -> Batch:
        """Return the bytes that this rank has fetched; check that only the requested field arrived."""
        assert set(batch.fields) == {"x"}
        fetched = torch.full((len(batch),), self.site.fetched_bytes)
        return Batch(ids=batch.ids, fields={"fetched": fetched})

    @endpoint(SPLIT_DP_REDUCE)
    def measure(self, batch: Batch) -> dict[str, Metric]:
        values = batch.dense("x").double()
        most = float(values.max()) if len(values) else float("-inf")
        return {
            "x/all/mean": Mean(total=float(values.sum()), count=len(values)),
            "x/all/max": Max(value=most),
        }

    @endpoint(BROADCAST)
    def add_up(self, *, seed: int) -> torch.Tensor:
        mine = torch.randn(1000, generator=torch.Generator().manual_seed(seed + self.ranks.rank))
        exact = mine.double()
        self.ranks.sum_([mine, exact])
        return torch.cat([mine.double(), exact])

    @endpoint(EVERYONE)
    def gather(self) -> list[list[float]]:
        mine = torch.full((self.ranks.rank,), float(self.ranks.rank))
        return [each.tolist() for each in self.ranks.gather(mine)]

    @endpoint(EVERYONE)
    def lock(self) -> object:
        return threading.Lock()

    @endpoint(SPLIT_DP)
    def by_data_rank(self, batch: Batch) -> Batch:
        return Batch(ids=batch.ids, fields={"rank": self._mine(batch)})

    @endpoint(SPLIT_ALL)
    def by_replica(self, batch: Batch) -> Batch:
        return Batch(ids=batch.ids, fields={"rank": self._mine(batch)})

    @endpoint(DP)
    def sleep(self, batch: Batch, *, seconds: float) -> Batch:
        time.sleep(seconds)
        return batch

    @endpoint(DP)
    def meet(self, batch: Batch, *, mine: Path, other: Path) -> Batch:
        """Return only after the other call has begun too."""
        mine.touch()
        while not other.exists():
            time.sleep(0.02)
        return batch

    @endpoint(DP)
    def fail(self, batch: Batch, *, rank: int) -> Batch:
        if self.ranks.rank == rank:
            raise ValueError("one divided by none")
        return batch

    @endpoint(DP)
    def fail_alone(self, batch: Batch, *, until: Path) -> Batch:
        """Raise at once on the last rank; the others work until a file exists."""
        if self.ranks.rank == self.ranks.size - 1:
            raise ValueError("one divided by none")
        while not until.exists():
            time.sleep(0.02)
        return batch

    @endpoint(DP)
    def complain(self, batch: Batch) -> Batch:
        raise RecordError("the batch has no field 'z'", why="it has x", fix="add it")

    @endpoint(DP)
    def die(self, batch: Batch, *, rank: int) -> Batch:
        if self.ranks.rank == rank:
            os._exit(3)
        return batch

    @endpoint(DP)
    def part(self, batch: Batch, *, how: str, seconds: float = 0.0) -> Batch:
        """Raise or die on the last rank while the others wait for it in a collective."""
        if self.ranks.rank == self.ranks.size - 1:
            time.sleep(seconds)
            if how == "die":
                os._exit(3)
            raise ValueError("one divided by none")
        self.ranks.gather(torch.zeros(1))
        return batch

    def _mine(self, batch: Batch) -> torch.Tensor:
        return torch.full((len(batch),), self.ranks.rank)


def overwriting(x: torch.Tensor) -> torch.Tensor:
    """Overwrite the input of the formula."""
    return x.mul_(0)


def half_of(x: torch.Tensor) -> float:
    """Return a number."""
    return float(x.sum()) / 2


def leave_open(site: Site, folder: Path) -> None:
    """Register a callback that writes a file when the rank's resources are closed."""
    site.stack.callback((folder / f"{site.place.pool}-{site.place.rank}").touch)


class Unmakeable:
    """A role that raises in its constructor."""

    def __init__(self, site: Site) -> None:
        raise OSError(f"no weights on rank {site.ranks.rank}")

    @endpoint(DP)
    def double(self, batch: Batch) -> Batch:
        return batch


class Apart:
    """A role whose constructor raises on the last rank while the others wait for it in a collective."""

    def __init__(self, site: Site) -> None:
        if site.ranks.rank == site.ranks.size - 1:
            raise OSError("no weights on the last rank")
        site.ranks.gather(torch.zeros(1))

    @endpoint(DP)
    def double(self, batch: Batch) -> Batch:
        return batch
