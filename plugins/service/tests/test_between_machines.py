"""Two machines that share nothing but TCP: tables with a store at 127.0.0.1, one that joins at 127.0.0.2."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import torch

from rillflow.data_plane.schema import ColumnType, Schema, StageColumns
from rillflow.errors import StreamError
from rillflow.records.ragged import Ragged
from rillflow_service.client import Client, Taken, started
from rillflow_service.requests import Kind
from rillflow_service.transport import Socket
from tests.unit.data_plane.streams import diamond, processes_of

NUMBERS = count()
WIDE = Schema(
    columns={"x": ColumnType(dtype="uint8", ragged=True), "y": ColumnType(dtype="uint8", ragged=True)},
    stages=(
        StageColumns(name="sample", reads=("x",), writes=("y",)),
        StageColumns(name="train", reads=("y",)),
    ),
)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Two machines."""

    tables: Path
    """The folder of the first."""
    joined: Path
    """The folder of the second."""

    @property
    def address(self) -> str:
        """Of the tables."""
        return (self.tables / "address").read_text()

    def first(self, name: str = "first") -> Client:
        """A worker beside the tables."""
        return Client(self.tables, name=name)

    def second(self, name: str = "second") -> Client:
        """A worker on the other machine."""
        return Client(self.joined, name=name)

    def third(self, name: str = "third") -> Client:
        """A worker that has no store."""
        return Client(address=self.address, token=(self.tables / "token").read_text(), name=name)

    def stored(self) -> int:
        """Bytes of the second store."""
        return sum(each.stat().st_size for each in (self.joined / "segments").iterdir())


def machines(stack: ExitStack, home: Path) -> Machines:
    for name in ("a", "b"):
        (home / name).mkdir()
    tables = stack.enter_context(started(capacity_bytes=16 * MIB, home=home / "a", listen="127.0.0.1:0"))
    joined = started(
        capacity_bytes=16 * MIB,
        home=home / "b",
        listen="127.0.0.2:0",
        joins=(tables / "address").read_text(),
        token_file=tables / "token",
    )
    return Machines(tables=tables, joined=stack.enter_context(joined))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield machines(stack, tmp_path_factory.mktemp("machines"))


def stream(client: Client, schema: Schema, capacity: int = 64) -> str:
    name = f"between{next(NUMBERS)}"
    client.create(name, schema, capacity=capacity)
    return name


def noise(nbytes: int) -> Ragged:
    return Ragged(values=torch.randint(256, (nbytes,), dtype=torch.uint8), lengths=torch.tensor([nbytes]))


def taken_by(client: Client, name: str, stage: str, groups: int = 1) -> Taken:
    found = client.take(name, stage, groups, least=groups, wait_s=30.0)
    assert found is not None
    return found


def equal(found: object, expected: Ragged) -> bool:
    assert isinstance(found, Ragged)
    return torch.equal(found.values, expected.values) and torch.equal(found.lengths, expected.lengths)


def test_columns_go_from_the_writer_s_store_to_the_reader_and_not_through_the_tables(two: Machines) -> None:
    with two.first() as first, two.second() as second, two.third() as third:
        name, x, y = stream(first, WIDE), noise(4 * MIB), noise(4 * MIB)
        before = first.status(name)["carried_bytes"]
        second.begin(name, {"x": x}, rows=[1])
        taken = taken_by(second, name, "sample")
        assert equal(taken.fields["x"], x)
        second.done(taken, {"y": y})
        found = taken_by(first, name, "train")
        assert equal(found.fields["y"], y)
        first.give_back(found)
        found = taken_by(third, name, "train")
        assert equal(found.fields["y"], y)
        third.give_back(found)
        assert 0 < first.status(name)["carried_bytes"] - before < 16_384
        first.begin(name, {"x": x}, rows=[1])
        assert first.status(name)["carried_bytes"] - before < 16_384
        assert equal(taken_by(second, name, "sample").fields["x"], x)
        assert first.status(name)["carried_bytes"] - before > 4 * MIB


def test_groups_of_stages_on_several_machines_are_put_together_in_order(two: Machines) -> None:
    with two.first() as first, two.second() as second, two.third() as third:
        name, everywhere = stream(first, diamond(train="in_order")), (first, second, third)
        for group in range(9):
            everywhere[group % 3].begin(name, {"prompt": Ragged.from_rows([[group] * group])}, rows=[2])
        for turn, client in enumerate((second, third, first, second)):
            taken = taken_by(client, name, "sample", 2 + (turn == 3))
            own = taken.ids.repeat_interleave(2)
            assert equal(
                taken.fields["prompt"], Ragged.from_rows([[each] * each for each in taken.ids.tolist()])
            )
            client.done(taken, {"tokens": Ragged(values=own.repeat_interleave(own), lengths=own)})
        for stage, column in (("score", "reward"), ("critic", "value")):
            for client in (third, second, first):
                taken = taken_by(client, name, stage, 3)
                lengths = taken.fields["tokens"].lengths  # type: ignore[union-attr]
                assert lengths.tolist() == [each for each in taken.ids.tolist() for _ in range(2)]
                client.done(taken, {column: lengths.to(torch.float32)})
        for client in (second, third, first):
            taken = taken_by(client, name, "train", 3)
            rows = [each for each in taken.ids.tolist() for _ in range(2)]
            assert equal(taken.fields["tokens"], Ragged.from_rows([[each] * each for each in rows]))
            assert taken.fields["reward"].tolist() == taken.fields["value"].tolist() == rows  # type: ignore[union-attr]
            client.done(taken)
        assert cleared(first, name, 9)


def test_what_is_deleted_is_free_in_the_store_that_had_it(two: Machines) -> None:
    with two.first() as first, two.second() as second:
        name, x = stream(first, WIDE, capacity=2), noise(3 * MIB)
        for _ in range(12):
            second.begin(name, {"x": x}, rows=[1], wait_s=30.0)
            taken = taken_by(second, name, "sample")
            second.done(taken, {"y": x})
            first.done(taken_by(first, name, "train"))
        assert two.stored() <= 16 * MIB
        second.begin(name, {"x": noise(9 * MIB)}, rows=[1])
        with pytest.raises(StreamError, match=f"bytes are in use: the tables at {two.address}"):
            second.begin(name, {"x": x}, rows=[1], wait_s=0.05)
        second.drop(name, [12], "too long")
        second.begin(name, {"x": noise(9 * MIB)}, rows=[1], wait_s=30.0)
        second.drop(name, [13], "too long")


def test_a_put_that_is_refused_leaves_nothing_in_the_store(two: Machines) -> None:
    with two.first() as first, two.second() as second:
        name, x = stream(first, WIDE, capacity=1), noise(4 * MIB)
        for _ in range(6):
            with pytest.raises(StreamError, match="column 'x' is int16"):
                second.begin(
                    name, {"x": Ragged(values=x.values.to(torch.int16), lengths=x.lengths)}, rows=[1]
                )
        second.begin(name, {"x": x}, rows=[1])
        for _ in range(6):
            with pytest.raises(StreamError, match="all 1 slots are in use"):
                second.begin(name, {"x": x}, rows=[1], wait_s=0.01)
        late = second.take(name, "sample", 1, lease_s=0.0)
        taken = taken_by(first, name, "sample")
        assert late is not None
        for _ in range(6):
            with pytest.raises(StreamError, match=r"for second#\d+ passed its deadline"):
                second.done(late, {"y": x})
        first.drop(name, taken.ids, "seen")
        for _ in range(6):
            assert second.begin(name, {"x": x}, rows=[1], key="k", wait_s=30.0).tolist() == [1]
        first.drop(name, [1], "seen")


def test_a_reader_of_a_lease_that_ended_is_told_and_reads_nothing_else(two: Machines) -> None:
    with two.first() as first, two.second() as second:
        token = (two.tables / "token").read_text()
        there = Socket((two.joined / "address").read_text(), token, "reader")
        name = stream(first, WIDE)
        second.begin(name, {"x": noise(100)}, rows=[1])
        for cells, columns, said in (
            ([[10**6, 0]], ["x"], "segment 1000000 no longer exists"),
            ([[0, 9]], ["x"], "does not exist|no longer exists"),
            ([[0, -1]], ["x"], "does not exist|no longer exists"),
            ([[0, 0]], ["nosuch"], "no column 'nosuch'|does not exist|no longer exists"),
            ([], ["x"], "cells are"),
        ):
            with pytest.raises(StreamError, match=said):
                asked = torch.tensor(cells, dtype=torch.int64).numpy()
                there.ask(Kind.FETCH, {"columns": columns}, {".cells": asked}, 5.0)
        with pytest.raises(StreamError, match="cannot keep or clear cells"):
            there.ask(Kind.CLEAR, {"holder": "second"}, {}, 5.0)
        there.close()
        first.drop(name, [0], "seen")


def test_groups_of_a_store_that_is_gone_are_dropped_with_the_reason_and_others_go_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        both = machines(stack, tmp_path)
        first, second = stack.enter_context(both.first()), stack.enter_context(both.second())
        first.create("s", WIDE, capacity=4)
        second.begin("s", {"x": noise(99)}, rows=[1])
        first.begin("s", {"x": noise(99)}, rows=[1])
        second.begin("s", {"x": noise(99)}, rows=[1])
        mine = taken_by(first, "s", "sample")
        assert mine.ids.tolist() == [0]
        kill(both.joined)
        until = time.monotonic() + 20.0
        while first.status("s")["stores"] and time.monotonic() < until:
            time.sleep(0.02)
        gone = "store 127.0.0.2:[0-9]+ is gone, with columns of the group"
        with pytest.raises(StreamError, match=f"dropped: {gone}"):
            first.done(mine, {"y": noise(9)})
        assert [*first.status("s")["dropped"].values()] == [2]
        with pytest.raises(StreamError, match="does not answer reserve"):
            second.begin("s", {"x": noise(99)}, rows=[1])
        taken = taken_by(first, "s", "sample")
        assert taken.ids.tolist() == [1]
        first.done(taken, {"y": noise(9)})
        second.done(taken_by(second, "s", "train"))
        assert cleared(first, "s", 3)


def cleared(client: Client, name: str, groups: int) -> bool:
    """Whether every store says in time that the cells of the first groups are deleted."""
    until = time.monotonic() + 20.0
    while (oldest := client.status(name)["oldest"]) < groups and time.monotonic() < until:
        time.sleep(0.02)
    return bool(oldest == groups)


def kill(folder: Path) -> None:
    for process in processes_of(str(folder.parent)):
        process.kill()


def test_a_store_ends_with_the_tables_that_it_joined(tmp_path: Path) -> None:
    with ExitStack() as stack:
        both = machines(stack, tmp_path)
        with both.second() as second:
            second.create("s", WIDE, capacity=4)
            kill(both.tables)
            until = time.monotonic() + 20.0
            while both.joined.exists() and time.monotonic() < until:
                time.sleep(0.05)
            assert not both.joined.exists()
            with pytest.raises(StreamError, match="does not answer look"):
                second.status("s")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--join", "127.0.0.1:1"], "add --host ADDRESS --token-file FILE"),
        (["--join", "127.0.0.1:1", "--host", "127.0.0.2"], "add --host ADDRESS --token-file FILE"),
        (["--join", "127.0.0.1:1", "--host", "127.0.0.2", "--token-file", "{token}"], "Connect call failed"),
        (["--join", "{address}", "--host", "127.0.0.2", "--token-file", "{token}"], "the token is wrong"),
    ],
)
def test_a_store_that_cannot_join_says_why(
    two: Machines, tmp_path: Path, options: list[str], said: str
) -> None:
    (tmp_path / "token").write_text("another one")
    named = [each.format(token=tmp_path / "token", address=two.address) for each in options]
    command = [sys.executable, "-m", "rillflow_service.server", str(MIB), "--home", str(tmp_path), *named]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert not [*tmp_path.glob("rillflow-*")]
