"""Checkpoints by weight on one rank: bits, and every way in which a directory can be invalid."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rillflow.errors import RunDirectoryError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement
from rillflow.sharding.layout import Layout, Weight
from rillflow.sharding.resharding import gathered
from rillflow.sharding.sharded_file import load_sharded
from rillflow.workers.collectives import SingleRank, ThreadGroup, ThreadRanks
from tests.distributed.sharded import save_sharded

WEIGHTS = {
    weight.name: weight
    for weight in (
        Weight(name="up", shape=(6, 4), dtype=torch.float32),
        Weight(name="down", shape=(4, 6), dtype=torch.bfloat16),
        Weight(name="scale", shape=(), dtype=torch.float64),
        Weight(name="steps", shape=(3,), dtype=torch.int64),
    )
}
LAYOUT: Layout = {name: Placement(Mesh.of(tp=1)) for name in WEIGHTS}
FILE = "rank-00000.safetensors"


def values() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        name: (9 * torch.randn(weight.shape, dtype=torch.float64)).to(weight.dtype)
        for name, weight in WEIGHTS.items()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_sharded(tmp_path / "model", WEIGHTS, LAYOUT, values(), SingleRank())
    return tmp_path / "model"


def load(folder: Path, weights: dict[str, Weight] = WEIGHTS) -> dict[str, Tensor]:
    found = {name: torch.zeros(weight.shape, dtype=weight.dtype) for name, weight in weights.items()}
    load_sharded(folder, weights, {name: Placement(Mesh.of(tp=1)) for name in weights}, found, SingleRank())
    return found


def test_the_same_bits_come_back(folder: Path) -> None:
    found = load(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in values().items())
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model"]
    assert sorted(path.name for path in folder.iterdir()) == [FILE, "weights.json"]


def test_two_views_of_one_memory(tmp_path: Path) -> None:
    whole = torch.randn(8, 3)
    weights = {name: Weight(name=name, shape=(4, 3), dtype=torch.float32) for name in ("a", "b")}
    layout = {name: Placement(Mesh.of(tp=1)) for name in weights}
    save_sharded(tmp_path / "x", weights, layout, {"a": whole[:4], "b": whole[4:]}, SingleRank())
    found = load(tmp_path / "x", weights)
    assert torch.equal(torch.cat([found["a"], found["b"]]), whole)


def test_a_rank_reads_the_weights_that_lie_on_it(folder: Path) -> None:
    """Weights of other ranks precede its own in the list."""
    places = {"up": 0, "down": 1, "scale": 0, "steps": 1}
    layout = {name: Placement(Mesh.of(first=place, dp=1)) for name, place in places.items()}
    group = ThreadGroup(2, 10.0)

    def read(rank: int) -> dict[str, Tensor]:
        own = {name for name, place in places.items() if place == rank}
        found = {name: torch.zeros_like(tensor) for name, tensor in values().items() if name in own}
        load_sharded(folder, WEIGHTS, layout, found, ThreadRanks(group, rank))
        return found

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(read, range(2))
    assert all(torch.equal(tensor, values()[name]) for name, tensor in {**first, **second}.items())


def edit(folder: Path, change: Callable[[Any], None], *, sign: bool = True) -> None:
    """Change the list; ``sign`` also updates its hash, as an attacker would."""
    path = folder / "weights.json"
    text = json.loads(path.read_text())
    change(text)
    if sign:
        body = json.dumps(text["body"], sort_keys=True).encode()
        text["sha256"] = hashlib.sha256(body).hexdigest()
    path.write_text(json.dumps(text))


def rename(folder: Path, name: str) -> None:
    """Rename the file in the list."""

    def change(text: Any) -> None:
        body = text["body"]
        body["files"] = {name: body["files"][FILE]}
        for weight in body["weights"].values():
            for entry in weight["slices"]:
                entry["file"] = name

    edit(folder, change)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def bound(name: str, bounds: list[list[int]]) -> Callable[[Any], None]:
    def change(text: Any) -> None:
        text["body"]["weights"][name]["slices"][0]["bounds"] = bounds

    return change


def twice(text: Any) -> None:
    """Replace a weight's slice by two identical halves."""
    slices = text["body"]["weights"]["up"]["slices"]
    slices[0]["bounds"] = [[0, 3], [0, 4]]
    slices.append(dict(slices[0]))


def reheaded(folder: Path) -> None:
    """Write a file with other shapes and the matching hash."""
    save_file({f"{name}:0": torch.zeros(2) for name in WEIGHTS}, folder / FILE)
    digest = {
        "bytes": (folder / FILE).stat().st_size,
        "sha256": hashlib.sha256((folder / FILE).read_bytes()).hexdigest(),
    }
    edit(folder, lambda text: text["body"]["files"].update({FILE: digest}))


def linked(folder: Path) -> None:
    (folder / FILE).rename(folder.parent / "elsewhere")
    (folder / FILE).symlink_to(folder.parent / "elsewhere")


def piped(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def pickled(folder: Path) -> None:
    (folder / FILE).write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


WRONGS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (lambda folder: truncated(folder / FILE), f"{FILE} does not match its hash"),
    "a bit of the numbers": (lambda folder: flip(folder / FILE, -1), f"{FILE} does not match its hash"),
    "a bit of the header": (lambda folder: flip(folder / FILE, 12), f"{FILE} does not match its hash"),
    "a pickle": (pickled, f"{FILE} does not match its hash"),
    "missing": (lambda folder: (folder / FILE).unlink(), f"{FILE} is missing"),
    "a link": (linked, f"{FILE} is a link, or not a regular file"),
    "a pipe": (piped, f"{FILE} is a link, or not a regular file"),
    "absolute": (lambda folder: rename(folder, "/etc/passwd"), "'/etc/passwd' is not a name"),
    "upwards": (lambda folder: rename(folder, f"../{FILE}"), f"'../{FILE}' is not a name"),
    "no list": (lambda folder: (folder / "weights.json").unlink(), "weights.json is missing"),
    "half a list": (lambda folder: truncated(folder / "weights.json"), "JSONDecodeError"),
    "a changed list": (
        lambda folder: edit(folder, bound("up", [[0, 5], [0, 4]]), sign=False),
        "weights.json does not match its hash",
    ),
    "a newer format": (
        lambda folder: edit(folder, lambda text: text.update(format=2)),
        "it has format 2, and this version reads format 1",
    ),
    "a part": (
        lambda folder: edit(folder, bound("up", [[0, 5], [0, 4]])),
        "the slices of up do not cover the whole",
    ),
    "too much": (lambda folder: edit(folder, bound("up", [[2, 8], [0, 4]])), "the slices of up do not cover"),
    "a negative place": (
        lambda folder: edit(folder, bound("up", [[-6, 0], [0, 4]])),
        "the slices of up do not cover",
    ),
    "overlapping": (lambda folder: edit(folder, twice), "slices of up overlap"),
    "other shapes inside": (reheaded, f"{FILE} holds F32 .2. for up"),
    "no slices": (
        lambda folder: edit(folder, lambda text: text["body"]["weights"]["up"].pop("slices")),
        "KeyError: 'slices'",
    ),
    "a list of lists": (lambda folder: (folder / "weights.json").write_text("[[]]"), "TypeError"),
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_what_is_wrong_is_named_before_anything_is_loaded(folder: Path, wrong: str) -> None:
    harm, said = WRONGS[wrong]
    harm(folder)
    found = {name: torch.zeros(weight.shape, dtype=weight.dtype) for name, weight in WEIGHTS.items()}
    with pytest.raises(RunDirectoryError, match=said):
        load_sharded(folder, WEIGHTS, LAYOUT, found, SingleRank())
    assert not any(tensor.any() for tensor in found.values())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            Weight(name="up", shape=(4, 6), dtype=torch.float32),
            r"up is \[6, 4\] of float32 in the checkpoint and \[4, 6\]",
        ),
        (Weight(name="up", shape=(6, 4), dtype=torch.bfloat16), "of bfloat16 in the model"),
        (Weight(name="more", shape=(1,), dtype=torch.float32), "more is in the model only"),
    ],
)
def test_another_model(folder: Path, other: Weight, said: str) -> None:
    with pytest.raises(RunDirectoryError, match=said):
        load(folder, {**WEIGHTS, other.name: other})
    with pytest.raises(RunDirectoryError, match="scale is in the checkpoint only"):
        load(folder, {name: weight for name, weight in WEIGHTS.items() if name != "scale"})


def test_tensors_of_another_type_are_not_cast_unseen(tmp_path: Path) -> None:
    tensors = {**values(), "up": values()["up"].double()}
    with pytest.raises(RunDirectoryError, match=r"up is torch.float64 here"):
        save_sharded(tmp_path / "model", WEIGHTS, LAYOUT, tensors, SingleRank())
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_one_rank_gathers_by_copying() -> None:
    tensors = values()
    found = dict(gathered(WEIGHTS, LAYOUT, tensors, SingleRank(), dict.fromkeys(WEIGHTS, 0)))
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    found["up"].zero_()
    assert tensors["up"].any()


def test_ranks_that_hold_the_same_write_about_as_much_each(tmp_path: Path) -> None:
    """Eight weights that four ranks hold whole give two weights per file."""
    weights = {f"w{place}": Weight(name=f"w{place}", shape=(4,), dtype=torch.float32) for place in range(8)}
    layout = {name: Placement(Mesh.of(dp=4)) for name in weights}
    tensors, group = {name: torch.ones(4) for name in weights}, ThreadGroup(4, 10.0)

    def save(rank: int) -> None:
        save_sharded(tmp_path / "model", weights, layout, tensors, ThreadRanks(group, rank))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(save, range(4)))
    written = [len(load_file(file)) for file in sorted((tmp_path / "model").glob("*.safetensors"))]
    assert written == [2, 2, 2, 2]
