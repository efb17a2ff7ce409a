"""Checkpoints of many ranks: written under one mesh, read under another, refused by all ranks together."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from rillflow.errors import RunDirectoryError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Part, Split
from rillflow.placement.slices import slices
from rillflow.sharding.layout import Layout, Weight, intervals, local_index, local_shape, training_layout
from rillflow.sharding.resharding import gathered
from rillflow.sharding.sharded_file import load_sharded
from rillflow.workers.collectives import Ranks

sys.path.insert(0, str(Path(__file__).parent))
from processes import together
from sharded import save_sharded

PARTS: dict[str, Part] = {
    "embed": Split(0),
    "up": Split(0),
    "fused": Split(0, runs=2),
    "down": Split(1),
    "norm": Broadcast(),
}
SHAPES = {"embed": (10, 4), "up": (7, 4), "fused": (12, 4), "down": (4, 8), "norm": (5,)}
WEIGHTS = {name: Weight(name=name, shape=shape, dtype=torch.float32) for name, shape in SHAPES.items()}
MESHES = {1: [(1, 1, 1)], 2: [(1, 2, 1), (2, 1, 1)], 4: [(2, 1, 2), (1, 1, 4), (1, 2, 2)]}


def whole(name: str) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(sum(map(ord, name))))


def layout_of(d: int, p: int, t: int) -> Layout:
    stages = {
        "embed": (0, p - 1) if p > 1 else (0,),
        "up": (0,),
        "fused": (0,),
        "down": (p - 1,),
        "norm": (p - 1,),
    }
    return training_layout(WEIGHTS, PARTS, stages, Mesh.of(dp=d, pp=p, tp=t), fsdp=d)


def held(layout: Layout, rank: int, *, filled: bool) -> dict[str, Tensor]:
    found = {}
    for name, placement in layout.items():
        if rank in placement.mesh.ranks:
            shape = SHAPES[name]
            found[name] = torch.zeros(local_shape(placement, shape, rank))
            for box in slices(placement, shape)[rank] if filled else ():
                there = tuple(slice(start, stop) for start, stop in box.bounds)
                index = local_index(intervals(placement, shape, rank), box)
                found[name][index] = whole(name)[there]
    return found


def save(ranks: Ranks, folder: Path) -> None:
    for place, mesh in enumerate(MESHES[ranks.size]):
        layout = layout_of(*mesh)
        tensors = held(layout, ranks.rank, filled=True)
        save_sharded(folder / f"{ranks.size}-{place}", WEIGHTS, layout, tensors, ranks)


def load(ranks: Ranks, folder: Path) -> list[str]:
    wrong = []
    for found in sorted(folder.iterdir()):
        for mesh in MESHES[ranks.size]:
            layout = layout_of(*mesh)
            tensors, wanted = (held(layout, ranks.rank, filled=filled) for filled in (False, True))
            load_sharded(found, WEIGHTS, layout, tensors, ranks)
            wrong += [
                f"{found.name} {mesh} {name}"
                for name in wanted
                if not torch.equal(tensors[name], wanted[name])
            ]
    return wrong


def test_any_mesh_reads_what_any_mesh_wrote(tmp_path: Path) -> None:
    for size in MESHES:
        together(size, save, tmp_path)
    written = [sum(path.stat().st_size for path in folder.glob("rank-*")) for folder in tmp_path.iterdir()]
    assert len(written) == 6
    assert max(written) < min(written) + 8_192  # only headers differ: a slice is written once
    for size in MESHES:
        assert together(size, load, tmp_path) == [[]] * size


def refused(ranks: Ranks, folder: Path) -> str:
    tensors = held(layout_of(1, 1, 4), ranks.rank, filled=False)
    try:
        load_sharded(folder, WEIGHTS, layout_of(1, 1, 4), tensors, ranks)
    except RunDirectoryError as error:
        return f"{error.what} {any(tensor.any() for tensor in tensors.values())}"
    return ""


def test_all_ranks_refuse_what_one_of_them_finds(tmp_path: Path) -> None:
    together(4, save, tmp_path)
    path = tmp_path / "4-1" / "rank-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 16
    path.write_bytes(data)
    found = together(4, refused, tmp_path / "4-1")
    assert len(set(found)) == 1
    assert found[0].endswith("rank-00002.safetensors does not match its hash False")


def unwritable(ranks: Ranks, folder: Path) -> str:
    layout = layout_of(1, 1, 2)
    tensors = held(layout, ranks.rank, filled=True)
    if ranks.rank == 1:
        tensors["up"] = tensors["up"].double()
    try:
        save_sharded(folder / "model", WEIGHTS, layout, tensors, ranks)
    except RunDirectoryError as error:
        return error.what
    return ""


def test_a_rank_that_cannot_write_stops_all(tmp_path: Path) -> None:
    found = together(2, unwritable, tmp_path)
    assert found[0] == found[1]
    assert "up is torch.float64 here" in found[0]


def collected(ranks: Ranks) -> list[str]:
    wrong = []
    to = {name: place % ranks.size for place, name in enumerate(WEIGHTS)}
    for mesh in MESHES[4]:
        layout = layout_of(*mesh)
        names, mine = [], held(layout, ranks.rank, filled=True)
        for name, tensor in gathered(WEIGHTS, layout, mine, ranks, to, most_bytes=100):
            names.append(name)
            wrong += [] if torch.equal(tensor, whole(name)) else [f"{mesh} {name}"]
        expected = {name for name, rank in to.items() if rank == ranks.rank}
        wrong += [] if set(names) == expected else [f"{mesh} {names}"]
    return wrong


def test_the_rank_that_a_weight_goes_to_sees_it_whole() -> None:
    assert together(4, collected) == [[], [], [], []]
