"""TransferQueue's put and get, for ``benchmarks/ranks/data_plane.py``; runs in the Python of its environment.

    python benchmarks/ranks/peers/queue_storage.py ROWS FIELDS LENGTH ROUNDS dense|ragged

Uses the calls and fields of TransferQueue's ``scripts/performance_test`` (kv_batch_put, kv_batch_get,
kv_clear) and its own storage with two units. The last line of output is JSON: seconds of each round's put and
get.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict


def fields(rows: int, count: int, length: int, *, is_ragged: bool) -> TensorDict:
    """Return the fields of its performance test: dense, or ragged with lengths from 1 to ``length``."""
    torch.manual_seed(1)
    found = TensorDict(batch_size=(rows,))
    lengths = torch.linspace(1, length, rows).round().to(torch.int64).tolist()
    for place in range(count):
        if is_ragged:
            parts = torch.split(torch.randn(sum(lengths)), lengths)
            found.set(f"x{place}", torch.nested.as_nested_tensor(parts, layout=torch.jagged))
        else:
            found.set(f"x{place}", torch.randn(rows, length))
    return found


def main() -> None:
    """Measure put and get."""
    rows, count, length, rounds = map(int, sys.argv[1:5])
    data = fields(rows, count, length, is_ragged=sys.argv[5] == "ragged")
    ray.init(num_cpus=8, include_dashboard=False)  # hangs unless each of its three actors gets a CPU
    storage = {"total_storage_size": rows * (rounds + 1), "num_data_storage_units": 2}
    tq.init(OmegaConf.create({"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": storage}}))
    keys = [f"key{row}" for row in range(rows)]
    puts, gets = [], []
    for turn in range(rounds + 1):
        began = time.perf_counter()
        tq.kv_batch_put(keys=keys, partition_id=f"p{turn}", fields=data)
        put = time.perf_counter()
        found = tq.kv_batch_get(keys=keys, partition_id=f"p{turn}")
        got = time.perf_counter()
        if turn:
            puts.append(put - began)
            gets.append(got - put)
        for name in data.keys():  # noqa: SIM118 (a TensorDict iterates over rows)
            pairs = zip(data[name].unbind(0), found[name].unbind(0), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
        tq.kv_clear(keys=keys, partition_id=f"p{turn}")
        del found
    tq.close()
    versions = {name: version(name) for name in ("TransferQueue", "ray", "torch")}
    sys.stdout.write(json.dumps({"put": puts, "get": gets, "versions": versions}) + "\n")


if __name__ == "__main__":
    main()
