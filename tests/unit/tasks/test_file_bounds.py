"""Data files are regular, and what they unpack to is bounded before it is read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rillflow.errors import DataError
from rillflow.tasks import file_bounds
from rillflow.tasks.example import example_of
from rillflow.tasks.file_bounds import LEAST_UNPACKED, FileBounds
from rillflow.tasks.files import read_rows


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(path, example_of)
    return f"{caught.value.what} {caught.value.why} {caught.value.fix}"


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a named pipe"),
    "socket": (listening, "is a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a character device"),
    "folder": (lambda path: path.mkdir(), "is a directory"),
    "loop": (lambda path: path.symlink_to(path), "is a link without a target"),
    "kernel": (lambda path: path.symlink_to("/proc/self/status"), "is a file of the kernel"),
    "empty": (lambda path: path.touch(), "has no rows"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    make, words = KINDS[kind]
    make(path := tmp_path / "rows.jsonl")
    assert words in refusal(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_also_as_parquet(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("pyarrow")
    make, words = KINDS[kind]
    make(path := tmp_path / "rows.parquet")
    assert words in refusal(path)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").write_text('{"prompt": "1"}\n\n{"prompt": "2"}')
    (path := tmp_path / "rows.jsonl").symlink_to("data")
    assert [each.prompt for each in read_rows(path, example_of)] == ["1", "2"]


def test_parquet_that_unpacks_to_much_more_than_its_size_is_refused(tmp_path: Path) -> None:
    """One long cell, many equal long cells, nested lists, and columns of nulls, each of some kilobytes."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    long = "x" * 2**20
    equal = arrow.DictionaryArray.from_arrays(arrow.array([0] * 300, "int32"), arrow.array([long]))
    nested = arrow.ListArray.from_arrays(
        np.arange(31, dtype=np.int32) * 10**6, np.zeros(30 * 10**6, np.int32)
    )
    tables = {
        "cell": arrow.table({"prompt": ["x" * (LEAST_UNPACKED + 1)]}),
        "equal": arrow.table({"prompt": equal}),
        "inner": arrow.table({"prompt": ["1"] * 70, "more": arrow.array([[long]] * 70)}),
        "nested": arrow.table({"prompt": ["1"] * 30, "more": nested}),
    }
    for name, table in tables.items():
        parquet.write_table(
            table, path := tmp_path / f"{name}.parquet", compression="zstd", write_statistics=False
        )
        assert path.stat().st_size < 2**17, name
        told = refusal(path)
        assert "a compressed file stands for at most 1,000 times its size" in told, (name, told)
        assert str(path) in told and "write it uncompressed" in told


def test_rows_beyond_half_of_the_free_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_bounds, "free_memory", lambda: 2**21)
    (path := tmp_path / "rows.jsonl").write_text('{"prompt": "' + "x" * 2**20 + '"}\n')
    assert "half of the free memory is 1,048,576 bytes" in refusal(path)
    path.write_text('{"prompt": "1", "more": [' + ",".join("1" * 20_000) + "]}")
    assert "bytes of memory" in refusal(path)
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"prompt": ["1"] * 5000, "nothing": arrow.nulls(5000)})
    parquet.write_table(table, path := tmp_path / "rows.parquet")
    assert "bytes of memory" in refusal(path)


def test_what_fits_is_read_whole(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"prompt": f"{n}+1=", "tests": [f"a{n % 3}", None], "more": {"a": n % 2, "b": "c"}}
        for n in range(3000)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), path := tmp_path / "rows.parquet")
    found = read_rows(path, example_of)
    assert [each.prompt for each in found] == [row["prompt"] for row in rows]
    assert [dict(each.columns) for each in found[:2]] == [
        {name: row[name] for name in ("tests", "more")} for row in rows[:2]
    ]


def test_room_counts_rows_and_values() -> None:
    room = FileBounds("f", 10, is_packed=False, free=10_000)
    room.take(1000, rows=2, values=10)
    with pytest.raises(DataError, match="the rows of f need at least"):
        room.take(1000, rows=2, values=10)


def test_a_key_that_occurs_twice_among_many_is_found_at_once(tmp_path: Path) -> None:
    many = ", ".join(f'"k{n}": 1' for n in range(50_000))
    (path := tmp_path / "rows.jsonl").write_text(f'{{"prompt": "1", {many}, "k49999": 2}}')
    assert "the key 'k49999' occurs twice" in refusal(path)
