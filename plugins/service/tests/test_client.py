"""Clients of a real server: columns arrive as they were written, once, whoever dies."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from rillflow.data_plane.schema import ColumnType, Schema, StageColumns
from rillflow.errors import StreamError
from rillflow.records.batch import Field
from rillflow.records.ragged import Ragged
from rillflow_service.client import Client, started
from rillflow_service.transport import InProcess
from tests.unit.data_plane.streams import diamond, processes_of

NUMBERS = count()
ONE = Schema(
    columns={"x": ColumnType(dtype="float32", shape=(4,))}, stages=(StageColumns(name="train", reads=("x",)),)
)


Connect = Callable[..., Client]


def stream(client: Client, schema: Schema, capacity: int = 64) -> str:
    name = f"stream{next(NUMBERS)}"
    client.create(name, schema, capacity=capacity)
    return name


def same(found: Field, expected: Field) -> bool:
    if isinstance(expected, Ragged):
        assert isinstance(found, Ragged)
        return torch.equal(found.values, expected.values) and torch.equal(found.lengths, expected.lengths)
    return found.dtype == expected.dtype and torch.equal(torch.as_tensor(found), expected)  # type: ignore[arg-type]


def test_columns_of_every_kind_arrive_as_they_were_written(connect: Connect) -> None:
    kinds = {
        "flags": (torch.tensor([True, False, True]), ColumnType(dtype="bool")),
        "half": (torch.randn(3, 2, dtype=torch.bfloat16), ColumnType(dtype="bfloat16", shape=(2,))),
        "text": (Ragged.from_text(["", "zwölf", "x"]), ColumnType(dtype="uint8", ragged=True)),
        "pairs": (
            Ragged(values=torch.randn(5, 2), lengths=torch.tensor([0, 5, 0])),
            ColumnType(dtype="float32", shape=(2,), ragged=True),
        ),
        "prompt": (Ragged.from_rows([[1, 2, 3], []]), ColumnType(dtype="int64", ragged=True, per="group")),
    }
    schema = Schema(
        columns={name: column for name, (_, column) in kinds.items()},
        stages=(StageColumns(name="train", reads=tuple(kinds)),),
    )
    with connect() as client:
        name = stream(client, schema)
        client.begin(name, {name: field for name, (field, _) in kinds.items()}, rows=[2, 1], tokens=[5, 1])
        taken = client.take(name, "train", 9)
        assert taken is not None and (taken.rows.tolist(), taken.tokens.tolist()) == ([2, 1], [5, 1])
        assert all(same(taken.fields[name], field) for name, (field, _) in kinds.items())
        assert same(taken.by_row("prompt"), Ragged.from_rows([[1, 2, 3], [1, 2, 3], []]))
        client.done(taken)


def test_groups_from_many_writes_are_put_together_in_the_order_they_are_taken(connect: Connect) -> None:
    with connect("writer") as writer, connect() as client:
        name = stream(writer, diamond())
        for group in range(6):
            writer.begin(name, {"prompt": Ragged.from_rows([[group] * group])}, rows=[1 + group % 2])
        for index in ([4, 1, 2], [0, 1, 2]):
            taken = writer.take(name, "sample", 6)
            assert taken is not None
            rows = taken.rows[index]
            own = torch.repeat_interleave(taken.ids[index], rows)
            tokens = Ragged(values=torch.repeat_interleave(own, own), lengths=own)
            writer.done(taken, {"tokens": tokens}, index=index)
            if index[0]:
                writer.give_back(taken)
        found = client.take(name, "score", 6)
        assert found is not None and found.ids.tolist() == [0, 1, 2, 3, 4, 5]
        assert same(found.fields["prompt"], Ragged.from_rows([[group] * group for group in range(6)]))
        rows_of = [group for group in range(6) for _ in range(1 + group % 2)]
        assert same(found.fields["tokens"], Ragged.from_rows([[group] * group for group in rows_of]))


def test_a_reader_sees_shared_memory_and_what_it_changes_nobody_else_sees(near: Connect) -> None:
    schema = Schema(
        columns=ONE.columns,
        stages=(StageColumns(name="a", reads=("x",)), StageColumns(name="b", reads=("x",))),
    )
    with near() as client:
        name = stream(client, schema)
        x = torch.randn(8, 4)
        client.begin(name, {"x": x}, rows=[1] * 8)
        one, other = client.take(name, "a", 8), client.take(name, "b", 8)
        assert one is not None and other is not None
        field = one.fields["x"]
        assert isinstance(field, torch.Tensor) and field.data_ptr() % 64 == 0
        field.zero_()
        assert same(other.fields["x"], x)


def test_a_killed_worker_s_groups_go_to_another_at_once_and_its_cells_are_not_written_over(
    folder: Path,
) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom rillflow_service.client import Client\n"
        "client = Client(Path(sys.argv[1]), name='killed')\n"
        "taken = client.take(sys.argv[2], 'train', 2)\nprint(taken.ids.tolist(), flush=True)\ntime.sleep(60)"
    )
    with Client(folder, name="heir") as client:
        name = stream(client, ONE)
        client.begin(name, {"x": torch.ones(3, 4)}, rows=[1] * 3)
        worker = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), name], stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None and worker.stdout.readline() == "[0, 1]\n"
        worker.kill()
        worker.wait()
        taken = client.take(name, "train", 3, least=3, wait_s=30.0)
        assert taken is not None and taken.ids.tolist() == [0, 1, 2]
        used = client.status(name)["used_bytes"]
        client.done(taken)
        assert client.status(name)["used_bytes"] < used


def test_whoever_ends_gives_back_and_whoever_begins_with_what_is_not_there_leaves_nothing(
    connect: Connect,
) -> None:
    with connect("heir") as heir:
        name = stream(heir, ONE)
        heir.begin(name, {"x": torch.ones(2, 4)}, rows=[1, 1])
        with connect("ended") as ended:
            taken = ended.take(name, "train", 1)
            assert taken is not None and taken.ids.tolist() == [0]
            with pytest.raises(StreamError, match="is float64"):
                ended.begin(name, {"x": torch.ones(1, 4, dtype=torch.float64)}, rows=[1])
        found = heir.take(name, "train", 2, least=2, wait_s=30.0)
        assert found is not None and found.ids.tolist() == [0, 1]
        found.ids.zero_()
        assert taken.ids.tolist() == [0]
        heir.drop(name, [1], "seen")
        assert heir.status(name)["dropped"] == {"seen": 1}


def test_a_plane_of_this_process_needs_no_file_and_tells_whoever_waits_that_it_ends(tmp_path: Path) -> None:
    before = {*Path("/dev/shm").glob("rillflow-*")}
    with InProcess(capacity_bytes=2**20) as home, Client(home, name="trainer") as client:
        client.create("s", ONE, capacity=8)
        client.begin("s", {"x": torch.ones(3, 4)}, rows=[1] * 3)
        assert {*Path("/dev/shm").glob("rillflow-*")} <= before
        taken = client.take("s", "train", 3)
        began = time.monotonic()
        with pytest.raises(StreamError, match=r"trainer#0 has held group 0 for train"):
            client.take("s", "train", 1, wait_s=0.3)
        assert 0.2 < time.monotonic() - began < 30.0
        said: list[str] = []

        def wait() -> None:
            with pytest.raises(StreamError, match="does not answer take") as error:
                client.take("s", "train", 1, wait_s=60.0)
            said.append(str(error.value))

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.1)
        home.close()
        waiting.join(30.0)
        assert len(said) == 1 and not waiting.is_alive()
        with pytest.raises(StreamError, match="does not answer look"):
            client.status("s")
    assert taken is not None and same(taken.fields["x"], torch.ones(3, 4))


def test_memory_that_a_given_up_reader_sees_stays_as_it_was_and_is_freed_when_it_lets_go() -> None:
    def reserved() -> int:
        files = {
            (found := fd.stat()).st_ino: found.st_blocks * 512
            for fd in Path("/proc/self/fd").iterdir()
            if fd.exists() and "memfd:rillflow" in str(fd.readlink())
        }
        return sum(files.values())

    before, x = reserved(), torch.randn(2**18, 4)
    with InProcess(capacity_bytes=2**24) as home, Client(home, name="slow") as slow:
        slow.create("s", ONE, capacity=2)
        slow.begin("s", {"x": x}, rows=[2**18])
        late = slow.take("s", "train", 1, lease_s=0.0)
        with Client(home, name="quick") as quick:
            taken = quick.take("s", "train", 1, wait_s=30.0)
            assert late is not None and taken is not None
            quick.done(taken)
        assert slow.status("s")["used_bytes"] == 0 and same(late.fields["x"], x)
        assert reserved() - before >= x.nbytes
        del late, taken
        slow.begin("s", {"x": x[:1]}, rows=[1])
        assert reserved() - before < 2**20


def test_a_worker_that_lets_its_deadline_pass_is_refused_with_the_story(connect: Connect) -> None:
    with connect("slow") as slow, connect("quick") as quick:
        name = stream(slow, ONE)
        slow.begin(name, {"x": torch.ones(1, 4)}, rows=[1])
        late = slow.take(name, "train", 1, lease_s=0.0)
        taken = quick.take(name, "train", 1, wait_s=30.0)
        assert late is not None and taken is not None
        with pytest.raises(StreamError, match=r"returned from train, for slow#\d+ passed its deadline"):
            slow.done(late)
        assert torch.equal(torch.as_tensor(late.fields["x"]), torch.ones(1, 4))  # type: ignore[arg-type]
        quick.done(taken)


def test_who_begins_waits_for_slots_and_bytes_and_is_woken_by_who_is_done(connect: Connect) -> None:
    with connect("task") as task, connect("trainer") as trainer:
        slots = stream(task, ONE, capacity=2)
        task.begin(slots, {"x": torch.ones(2, 4)}, rows=[1, 1])
        with pytest.raises(StreamError, match=r"no worker ever took a group"):
            task.begin(slots, {"x": torch.ones(1, 4)}, rows=[1], wait_s=0.05)
        wide = Schema(columns={"x": ColumnType(dtype="uint8", ragged=True)}, stages=ONE.stages)
        nbytes = stream(task, wide)
        big = Ragged(values=torch.zeros(9 * 2**20, dtype=torch.uint8), lengths=torch.tensor([9 * 2**20]))
        task.begin(nbytes, {"x": big}, rows=[1])
        with pytest.raises(
            StreamError, match=f"16777216 bytes are in use: .*{nbytes}: group 0: begun by task"
        ):
            task.begin(nbytes, {"x": big}, rows=[1], wait_s=0.05)
        for name, columns, rows in ((slots, torch.ones(1, 4), [1]), (nbytes, big, [1])):
            waiting = threading.Thread(target=task.begin, args=(name, {"x": columns}), kwargs={"rows": rows})
            waiting.start()
            taken = trainer.take(name, "train", 1)
            assert taken is not None
            trainer.done(taken)
            waiting.join(30.0)
            assert not waiting.is_alive() and trainer.status(name)["begun"] > 1
        with pytest.raises(StreamError, match="the store has 16777216"):
            task.begin(nbytes, {"x": big.select(torch.zeros(2, dtype=torch.int64))}, rows=[2])
        for name in (slots, nbytes):
            task.drop(name, [0, 1], "over")


@pytest.mark.parametrize(
    ("columns", "rows", "said"),
    [
        ({}, [1], "'x' is missing"),
        ({"x": torch.ones(2, 3)}, [1, 1], r"column 'x' is float32 \[2, 3\]"),
        ({"x": torch.ones(2, 4, dtype=torch.float64)}, [1, 1], r"column 'x' is float64"),
        ({"x": torch.ones(2, 4)}, [1, 1, 1], r"column 'x' is float32 \[2, 4\]"),
        (
            {"x": Ragged(values=torch.ones(2, 4), lengths=torch.tensor([1, 1]))},
            [1, 1],
            "'x.lengths' is not for",
        ),
        ({"x": torch.ones(2, 4)}, [2, 0], r"groups of \[2, 0\] rows"),
        ({"x": torch.ones(2, 4), "y": torch.ones(2)}, [1, 1], "no column 'y'"),
    ],
)
def test_columns_that_are_not_the_stream_s_are_refused_and_nothing_begins(
    connect: Connect, columns: dict[str, Field], rows: list[int], said: str
) -> None:
    with connect() as client:
        name = stream(client, ONE)
        with pytest.raises(StreamError, match=said):
            client.begin(name, columns, rows=rows)
        assert client.status(name)["begun"] == 0
        client.begin(name, {"x": torch.ones(2, 4)}, rows=[1, 1])


def test_rows_that_are_put_twice_with_one_key_begin_once(connect: Connect) -> None:
    with connect() as client:
        name = stream(client, ONE)
        ids = [
            client.begin(name, {"x": torch.full((2, 4), each)}, rows=[1, 1], key="step 7")
            for each in (1.0, 2.0)
        ]
        assert ids[0].tolist() == ids[1].tolist() == [0, 1] and client.status(name)["begun"] == 2
        taken = client.take(name, "train", 4)
        assert taken is not None and torch.equal(torch.as_tensor(taken.fields["x"]), torch.ones(2, 4))  # type: ignore[arg-type]
        with pytest.raises(StreamError, match="reports no groups"):
            client.done(taken, index=[])
        client.done(taken)
        assert client.begin(name, {"x": torch.ones(1, 4)}, rows=[1], key="step 8").tolist() == [2]


def test_workers_that_ask_by_tokens_share_them_evenly_in_whole_groups(connect: Connect) -> None:
    with connect("one") as one, connect("other") as other:
        name = stream(one, ONE)
        one.begin(name, {"x": torch.ones(8, 4)}, rows=[2] * 4, tokens=[5, 6, 7, 100])
        shares = [client.take(name, "train", 4, tokens=12) for client in (one, other, one)]
        assert [share.ids.tolist() for share in shares if share] == [[0, 1], [2], [3]]
        assert [share.tokens.tolist() for share in shares if share] == [[5, 6], [7], [100]]
        one.drop(name, [0, 1, 2, 3], "seen")


def test_what_is_not_there_is_named(connect: Connect) -> None:
    with connect() as client:
        name = stream(client, ONE)
        with pytest.raises(StreamError, match=f"did you mean '{name}'"):
            client.take(name + "0", "train", 1)
        with pytest.raises(StreamError, match="did you mean 'train'"):
            client.take(name, "trian", 1)
        with pytest.raises(StreamError, match=r"count is 0"):
            client.take(name, "train", 0)
        with pytest.raises(StreamError, match="exists with another"):
            client.create(name, ONE, capacity=65)
        client.finish(name)
        assert client.take(name, "train", 1) is None
        with pytest.raises(StreamError, match="the stream is closed"):
            client.begin(name, {"x": torch.ones(1, 4)}, rows=[1])


def test_the_folder_is_for_its_owner_and_a_killed_server_s_is_removed_by_the_next(tmp_path: Path) -> None:
    with started(capacity_bytes=2**20, home=tmp_path) as folder:
        assert (
            stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE((folder / "segments").stat().st_mode) == 0o700
        )
        assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
        with Client(folder, name="left") as client:
            processes_of(str(tmp_path))[0].kill()
            with pytest.raises(StreamError, match="does not answer"):
                client.create("s", ONE, capacity=1)
        left = tmp_path / "rillflow-left"
        folder.rename(left)
    with started(capacity_bytes=2**20, home=tmp_path):
        assert not left.exists()


@pytest.mark.parametrize("where", ["127.0.0.1:1", "nowhere", "127.0.0.1:port"])
def test_an_address_without_a_data_plane_is_named(where: str) -> None:
    with pytest.raises(StreamError, match=f"no data plane answers at {where}"):
        Client(address=where, token="t", name="lost")


def test_a_folder_whose_data_plane_has_ended_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    with pytest.raises(StreamError, match=f"no data plane answers at {tmp_path}"):
        Client(tmp_path, name="lost")


def test_a_writer_keeps_some_segments_mapped_and_not_all(folder: Path) -> None:
    def mapped() -> int:
        return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())

    with Client(folder, name="writer") as client:
        name = stream(client, ONE)
        before, counts = mapped(), []
        for _ in range(40):
            client.begin(name, {"x": torch.ones(1, 4)}, rows=[1])
            counts.append(mapped() - before)
        assert counts[:10] == list(range(1, 11))
        assert max(counts) == 17, "16, and the one that is written"
        client.drop(name, list(range(40)), "seen")


def test_a_folder_without_a_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=f"no data plane answers at {tmp_path}"):
        Client(tmp_path, name="reader")
