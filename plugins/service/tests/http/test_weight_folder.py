"""The weights that a trainer publishes through the service: checked, bounded, in any order of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the service is the extra `service`")

from rillflow.errors import RillflowError, StreamError
from rillflow_service.tensors import encoded
from rillflow_service.weight_folder import WeightFolder


def body(halves: frozenset[str] = frozenset(), **arrays: Any) -> bytes:
    return encoded({}, arrays, halves)


async def parts(data: bytes, between: Callable[[], None] = lambda: None) -> AsyncIterator[bytes]:
    yield data[:100]
    between()
    yield data[100:]


def put(folder: WeightFolder, version: int, name: str, data: bytes, **meanwhile: Any) -> int:
    return asyncio.run(folder.receive(version, name, parts(data, **meanwhile)))


def test_a_file_that_arrives_while_its_version_is_published_is_refused(tmp_path: Path) -> None:
    folder, data = WeightFolder(tmp_path, most_bytes=10**6), body(w=np.zeros(64, np.float32))
    put(folder, 0, "a.safetensors", data)
    with pytest.raises(StreamError, match="version 0 are not the next ones"):
        put(folder, 0, "b.safetensors", data, between=lambda: folder.publish(0, ["a.safetensors"]))
    folder.require_next(1)
    assert folder.version == 0 and WeightFolder(tmp_path, most_bytes=1).version == 0
    assert folder.path(0, "a.safetensors").read_bytes() == data
    for version in (-1, 0, 2, 10**11):
        with pytest.raises(StreamError, match="not the next ones"):
            put(folder, version, "a.safetensors", data)


def test_all_files_of_a_version_count(tmp_path: Path) -> None:
    """One that is put again counts once."""
    data = body(w=np.zeros(250))
    folder = WeightFolder(tmp_path, most_bytes=2 * len(data))
    for name in ("a", "a", "b", "b"):
        if name == "b":
            folder._most_bytes = 3 * len(data)
        put(folder, 0, f"{name}.safetensors", data)
    with pytest.raises(StreamError, match="has more than"):
        put(folder, 0, "c.safetensors", body(w=np.zeros(500)))
    assert not [*tmp_path.rglob("*.part")]


@pytest.mark.parametrize("name", ["../x.safetensors", ".x.safetensors", "x", "a/b.safetensors", "x" * 200])
def test_names_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path, most_bytes=10**6)
    with pytest.raises(StreamError, match="is no file name"):
        put(folder, 0, name, body(w=np.zeros(9)))
    with pytest.raises(StreamError, match="has no file"):
        folder.path(0, name)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a": b"garbage" * 30}, "is no safetensors file"),
        ({"a": b""}, "is no safetensors file"),
        ({"a": body()}, "has no weights"),
        ({"a": body(w=np.array([1.0, np.inf]))}, "weight 'w' of version 0 is not finite"),
        (
            {"a": body(frozenset({"w"}), w=np.array([0x7FC0], np.int16))},
            "weight 'w' of version 0 is not finite",
        ),
        ({"a": body(w=np.zeros(9)), "b": body(w=np.zeros(9))}, "weight 'w' is in two files"),
    ],
)
def test_a_version_that_nobody_could_sample_with_is_refused(
    files: dict[str, bytes], said: str, tmp_path: Path
) -> None:
    folder = WeightFolder(tmp_path, most_bytes=10**6)
    for name, data in files.items():
        put(folder, 0, f"{name}.safetensors", data)
    with pytest.raises(RillflowError, match=said):
        folder.publish(0, [f"{name}.safetensors" for name in files])
    assert folder.version == -1
    put(folder, 0, "a.safetensors", body(frozenset({"w"}), w=np.array([0x3F80], np.int16)))
    folder.publish(0, ["a.safetensors"])
