"""verl's single controller for the timings of ``benchmarks/ranks/controller.py`` with ``--verl-python``.

child (this)   workers of two groups of 4 ranks, CPU
  "call"   100 calls of a method that returns its row           ──> seconds
  "pass"   64 MiB made by one group, received by the other      ──> seconds
"""

from __future__ import annotations

import sys
import time

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

RANKS, CALLS, MIB = 4, 100, 64
MARK = "verl_controller:"


class Peer(Worker):
    """A worker that returns its input, a large batch, or one number of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self._made = torch.ones(1, MIB * 2**20 // 4 // RANKS)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def nothing(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, data: DataProto) -> DataProto:
        del data
        return DataProto.from_dict(tensors={"big": self._made})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def take(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"first": data.batch["big"][:, 0].clone()})


def main() -> None:
    cpus = 2 * RANKS * 10  # a bundle of a pool claims 10
    ray.init(num_cpus=cpus, include_dashboard=False, logging_level="WARNING")
    first, second = (
        RayWorkerGroup(
            RayResourcePool([RANKS], use_gpu=False), RayClassWithInitArgs(ray.remote(Peer)), device_name="cpu"
        )
        for _ in range(2)
    )
    small = DataProto.from_dict(tensors={"x": torch.ones(RANKS)})
    ways = {
        "call": lambda: [first.nothing(small) for _ in range(CALLS)],
        "pass": lambda: second.take(first.make(small)),
    }
    print(f"{MARK} ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        ways[line.strip()]()
        print(f"{MARK} {time.perf_counter() - began}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
