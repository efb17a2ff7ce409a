"""Resharding from training to generation: ours against designs that gather, and against a checkpoint.

    ours                   WeightSwitch.to_generation: receive the missing slices, free training's memory
    gather the model       all ranks gather all weights, then cut their generation shards
    plain grouping         the ranks of a replica gather its weights, then cut; groups of consecutive ranks
    plain, slices alone    consecutive groups too, but ranks exchange only slices (with our resharding)
    full_tensor            DTensor.full_tensor() of every parameter, then cut; broadcast between stages
    checkpoint             write one under the training mesh, read it under the generation mesh

    python benchmarks/weights/resharding.py                                    # some minutes
    python benchmarks/weights/resharding.py --write benchmarks/results/resharding.md

Eight processes on gloo, bfloat16, tp 2 in generation. The designs take turns, round by round. The time of a
round is that of its slowest rank; figures are medians.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Part, Split
from rillflow.placement.slices import Slice
from rillflow.sharding.digest import slice_digest
from rillflow.sharding.layout import (
    Layout,
    Weight,
    generation_layout,
    generation_mesh,
    local_shape,
    training_layout,
)
from rillflow.sharding.reshard_plan import reshard_plan
from rillflow.sharding.resharding import Resharding, keep
from rillflow.sharding.sharded_file import load_sharded
from rillflow.sharding.switch import WeightSwitch
from rillflow.workers.collectives import ProcessRanks

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/distributed"))
from sharded import save_sharded

SMALLEST = []
SLOW = ["--rounds 1"]  # starts eight ranks

RANKS, TP, LAYERS, HIDDEN, INNER, WORDS = 8, 2, 8, 1024, 4096, 8192
CASES = {"(p, t, d) = (1, 8, 1)": (1, 8), "(p, t, d) = (2, 4, 1)": (2, 4)}
DTYPE = torch.bfloat16
MIB = 2**20
WAIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes that a design needs on one rank."""

    received: int
    """Bytes received from other ranks."""
    peak: int
    """Peak bytes of parameters: training's, generation's and temporary copies."""


def model() -> tuple[dict[str, Weight], dict[str, Part]]:
    """Return the weights of a decoder of 288 MiB, and the split of each under tp."""
    shapes: dict[str, tuple[tuple[int, ...], Part]] = {
        name: ((WORDS, HIDDEN), Split(0)) for name in ("embed", "head")
    }
    for layer in range(LAYERS):
        for name in ("q", "k", "v"):
            shapes[f"layers.{layer}.{name}"] = ((HIDDEN, HIDDEN), Split(0))
        shapes[f"layers.{layer}.o"] = ((HIDDEN, HIDDEN), Split(1))
        for name in ("gate", "up"):
            shapes[f"layers.{layer}.{name}"] = ((INNER, HIDDEN), Split(0))
        shapes[f"layers.{layer}.down"] = ((HIDDEN, INNER), Split(1))
        shapes[f"layers.{layer}.norm"] = ((HIDDEN,), Broadcast())
    weights = {name: Weight(name=name, shape=shape, dtype=DTYPE) for name, (shape, _) in shapes.items()}
    return weights, {name: part for name, (_, part) in shapes.items()}


class Rank:
    """One process with its training weights; every design is a method."""

    def __init__(self, ranks: ProcessRanks, p: int, t: int, folder: Path) -> None:
        self.ranks, self.p, self.t, self.folder = ranks, p, t, folder
        self.weights, self.parts = model()
        self.train = Mesh.of(dp=1, pp=p, tp=t)
        ends = {"embed": 0, "head": p - 1}
        self.stages = {
            name: (ends[name] if name in ends else int(name.split(".")[1]) * p // LAYERS,)
            for name in self.weights
        }
        self.source = training_layout(self.weights, self.parts, self.stages, self.train)
        self.grouped = generation_layout(self.weights, self.parts, generation_mesh(self.train, TP))
        plain = Mesh.of(dp=1, micro_dp=RANKS // TP, pp=1, tp=TP)
        self.plain = generation_layout(self.weights, self.parts, plain)
        self.training = self.empty(self.source)
        for tensor in self.training.values():
            tensor.normal_(generator=torch.Generator().manual_seed(ranks.rank + tensor.numel()))
        for name, part in self.parts.items():
            if isinstance(part, Broadcast) and name in self.training:
                self.training[name].fill_(0.5)
        self.switch = WeightSwitch(
            reshard_plan(self.weights, self.source, self.grouped), ranks, self.training
        )
        self.pipes = [[stage * t + place for stage in range(p)] for place in range(t)]
        self.pipe = ranks.part(self.pipes)
        self.device_mesh: DeviceMesh = init_device_mesh("cpu", (p, t), mesh_dim_names=("pp", "tp"))
        self.found: dict[str, dict[str, int]] = {}

    def empty(self, layout: Layout) -> dict[str, Tensor]:
        """Return this rank's uninitialised tensors of a layout."""
        return {
            name: torch.empty(local_shape(layout[name], weight.shape, self.ranks.rank), dtype=DTYPE)
            for name, weight in self.weights.items()
            if self.ranks.rank in layout[name].mesh.ranks
        }

    def note(self, design: str, generation: Mapping[str, Tensor]) -> None:
        """Record the digests of the generation weights, in the first round, which is not timed."""
        self.found[design] = {
            name: int(slice_digest(tensor.view(-1), _line(tensor), DTYPE))
            for name, tensor in generation.items()
        }

    def ours(self, check: bool) -> Cost:
        before = self.switch.resharding.received_bytes
        generation = self.switch.to_generation()
        if check:
            self.note("ours", generation)
        return Cost(received=self.switch.resharding.received_bytes - before, peak=self.switch.peak_bytes)

    def gather(self, check: bool) -> Cost:
        return self.gathered("gather the model", self.grouped, check)

    def group(self, check: bool) -> Cost:
        return self.gathered("plain grouping", self.plain, check)

    def gathered(self, design: str, layout: Layout, check: bool) -> Cost:
        """Gather all weights on every rank, bucket by bucket, then cut the shards of the layout."""
        whole: dict[str, Tensor] = {}
        received = 0
        for names in self.portions():
            own = torch.cat([self.training[name].reshape(-1) for name in names[self.stage]])
            everyone = torch.empty(RANKS * own.numel(), dtype=DTYPE)
            dist.all_gather_into_tensor(everyone, own, group=self.ranks.group)
            received += (RANKS - 1) * own.nbytes
            for stage, portion in enumerate(names):
                shards = everyone.view(self.p, self.t, -1)[stage]
                place = 0
                for name in portion:
                    size = self.shard_size(name)
                    whole[name] = self.joined(name, shards[:, place : place + size])
                    place += size
        peak = _bytes(whole) + _bytes(self.training)
        generation = {name: self.cut(name, whole.pop(name), layout) for name in self.weights}
        if check:
            self.note(design, generation)
        return Cost(received=received, peak=peak)

    @property
    def stage(self) -> int:
        return self.ranks.rank // self.t

    def portions(self) -> Iterator[tuple[list[str], ...]]:
        """Yield the weights of every stage, a layer at a time; all stages have as many, of the same sizes."""
        by_stage: list[dict[str, list[str]]] = [{} for _ in range(self.p)]
        for name, (stage,) in self.stages.items():
            by_stage[stage].setdefault(name.rpartition(".")[0] or name, []).append(name)
        return zip(*(units.values() for units in by_stage), strict=True)

    def shard_size(self, name: str) -> int:
        weight = self.weights[name]
        rank = self.train.groups("pp")[0][self.stages[name][0]]
        return torch.Size(local_shape(self.source[name], weight.shape, rank)).numel()

    def joined(self, name: str, shards: Tensor) -> Tensor:
        """Return a whole weight from the shards of all tp ranks, given one per row."""
        part, shape = self.parts[name], self.weights[name].shape
        if isinstance(part, Broadcast):
            return shards[0].clone()
        if part.dim == 0:
            return shards.reshape(shape)
        return shards.reshape(self.t, shape[0], -1).transpose(0, 1).reshape(shape)

    def cut(self, name: str, whole: Tensor, layout: Layout) -> Tensor:
        """Return a copy of this rank's generation shard of a weight."""
        part = self.parts[name]
        if isinstance(part, Broadcast):
            return whole.clone()
        place = layout[name].mesh.coordinates(self.ranks.rank)["tp"]
        assert isinstance(part, Split)
        return whole.chunk(TP, part.dim)[place].clone(memory_format=torch.contiguous_format)

    def slices(self, check: bool) -> Cost:
        """Exchange missing slices in consecutive groups; training's tensors stay in memory."""
        plan = reshard_plan(self.weights, self.source, self.plain)
        generation = self.empty(self.plain)
        resharding = Resharding(plan, self.ranks)
        for place, bucket in enumerate(plan.buckets):
            for name in (part.name for part in bucket.parts if part.is_last):
                keep(plan, name, self.ranks.rank, self.training, generation)
            resharding.pack(place, self.training)
            resharding.exchange(place, generation)
        resharding.close()
        if check:
            self.note("plain, slices alone", generation)
        return Cost(received=resharding.received_bytes, peak=_bytes(generation) + _bytes(self.training))

    def full_tensor(self, check: bool) -> Cost:
        whole: dict[str, Tensor] = {}
        received = 0
        for name, weight in self.weights.items():
            (stage,) = self.stages[name]
            if stage == self.stage:
                part = self.parts[name]
                place = Shard(part.dim) if isinstance(part, Split) else Replicate()
                tensor = DTensor.from_local(
                    self.training[name], self.device_mesh["tp"], [place], run_check=False
                )
                whole[name] = tensor.full_tensor()
                received += weight.num_bytes - self.training[name].nbytes
            else:
                whole[name] = torch.empty(weight.shape, dtype=DTYPE)
                received += weight.num_bytes
            if self.p > 1:
                sender = self.pipes[self.ranks.rank % self.t][stage]
                assert isinstance(self.pipe, ProcessRanks)
                dist.broadcast(whole[name], sender, group=self.pipe.group)
        peak = _bytes(whole) + _bytes(self.training)
        generation = {name: self.cut(name, whole.pop(name), self.grouped) for name in self.weights}
        if check:
            self.note("full_tensor", generation)
        return Cost(received=received, peak=peak)

    def checkpoint(self, check: bool) -> Cost:
        folder = self.folder / "model"
        save_sharded(folder, self.weights, self.source, self.training, self.ranks)
        generation = self.empty(self.grouped)
        load_sharded(folder, self.weights, self.grouped, generation, self.ranks)
        if check:
            self.note("checkpoint", generation)
        return Cost(received=0, peak=_bytes(generation) + _bytes(self.training))


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def _line(tensor: Tensor) -> Slice:
    return Slice(((0, tensor.numel()),))


DESIGNS: dict[str, tuple[Callable[[Rank, bool], Cost], str]] = {
    "ours": (Rank.ours, "(tp - t_g)/(t_g tp) M"),
    "gather the model": (Rank.gather, "(tpd - 1)/(tpd) M"),
    "plain grouping": (Rank.group, "(tp - 1)/(tp) M"),
    "plain, slices alone": (Rank.slices, "at most M/t_g"),
    "full_tensor": (Rank.full_tensor, "(tp - 1)/(tp) M"),
    "checkpoint": (Rank.checkpoint, "0, by way of the disk"),
}
"""The measured designs, with the bytes that a rank should receive."""


def on_rank(said: Any, rank: int, rendezvous: str, sizes: tuple[int, int], rounds: int, folder: str) -> None:
    """Run every design once to check that all agree, then time the rounds."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    ranks = ProcessRanks.join(rank, RANKS, dist.FileStore(rendezvous, RANKS), deadline_s=WAIT_S)
    own = Rank(ranks, *sizes, Path(folder))
    seconds: dict[str, list[float]] = {name: [] for name in DESIGNS}
    costs: dict[str, Cost] = {}
    for turn in range(rounds + 1):
        for name, (design, _) in DESIGNS.items():
            dist.barrier()
            begin = time.perf_counter()
            costs[name] = design(own, turn == 0)
            spent = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            seconds[name] += [float(spent)] if turn else []
            if own.switch.is_generating:
                own.switch.to_training()
    same_shard = (
        own.plain["head"].mesh.coordinates(rank)["tp"] == own.grouped["head"].mesh.coordinates(rank)["tp"]
    )
    for name, digests in own.found.items():
        if same_shard or not name.startswith("plain"):
            assert digests == own.found["ours"], f"{name} has other weights than ours on rank {rank}"
    said.put((rank, seconds, costs))
    dist.barrier()


def measured(sizes: tuple[int, int], rounds: int) -> tuple[dict[str, list[float]], dict[str, Cost]]:
    """Return the seconds of each design, and the largest costs of any rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor"])
    said = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(said, rank, f"{folder}/rendezvous", sizes, rounds, folder) for rank in range(RANKS)]
        processes = [context.Process(target=on_rank, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        try:
            found = [said.get(timeout=WAIT_S) for _ in processes]
        finally:
            for process in processes:
                process.join(30)
                process.kill()
    costs = {
        name: Cost(
            received=max(each[2][name].received for each in found),
            peak=max(each[2][name].peak for each in found),
        )
        for name in DESIGNS
    }
    return found[0][1], costs


def table(title: str, sizes: tuple[int, int], rounds: int) -> list[str]:
    """Return the section of one mesh."""
    seconds, costs = measured(sizes, rounds)
    ours = statistics.median(seconds["ours"])
    rows = []
    for name, (_, formula) in DESIGNS.items():
        median = statistics.median(seconds[name])
        rows.append(
            f"| {name} | {median:.2f} | {ours / median:.2f} | {costs[name].received / MIB:.1f} | {formula} | "
            f"{costs[name].peak / MIB:.1f} |"
        )
    return [
        f"## {title} to t_g = {TP}",
        "",
        "| design | seconds | ours / this | MiB received per rank | formula | peak MiB per rank |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def digest_speed() -> list[str]:
    """Return the section with digest speeds on one core."""
    lines = ["## Digests, on one core", "", "| elements | GB/s | SHA-256, GB/s |", "|---|---|---|"]
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(2048, 2048).to(dtype)
        box = Slice(((0, 2048), (0, 2048)))
        data = values.view(torch.uint8).numpy().data
        own, other = (
            min(_seconds(work) for _ in range(7))
            for work in (lambda: slice_digest(values, box, dtype), lambda: hashlib.sha256(data).digest())  # noqa: B023
        )
        row = (str(dtype).removeprefix("torch."), values.nbytes / own / 1e9, values.nbytes / other / 1e9)
        lines.append("| {} | {:.2f} | {:.2f} |".format(*row))
    return [*lines, ""]


def _seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call in this process."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the first (5)")
    parser.add_argument("--write", metavar="FILE", help="where the tables go, besides the screen")
    arguments = parser.parse_args()
    size = sum(weight.num_bytes for weight in model()[0].values())
    lines = [
        "# Resharding: from training's mesh to generation's",
        "",
        f"Command: `python benchmarks/weights/resharding.py`; {os.cpu_count()} cores for "
        f"{RANKS} processes on gloo, "
        f"Python {platform.python_version()}, torch {version('torch')}; M = {size / MIB:.0f} MiB, bfloat16; "
        f"medians of {arguments.rounds} rounds in which the designs take turns, the slowest rank's time.",
        "",
    ]
    for title, sizes in CASES.items():
        lines += table(title, sizes, arguments.rounds)
    text = "\n".join([*lines, *digest_speed()])
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text)


if __name__ == "__main__":
    main()
