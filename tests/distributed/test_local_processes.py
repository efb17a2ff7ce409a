"""Local processes: calls in order, shared memory without a trace, ends of ranks and of the driver."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rillflow.errors import ClusterError
from rillflow.workers.backend import Place, Pool, RankLost, Site
from rillflow.workers.collectives import Stranded
from rillflow.workers.fork_server import ForkedProcess, ForkServer
from rillflow.workers.processes import ProcessBackend
from rillflow.workers.segments import MAX_POOL_BYTES, MAX_SEGMENTS, SegmentPool
from rillflow.workers.shared_memory import MAX_CONTENT_BYTES, MAX_INLINE_BYTES, PACKET_BYTES, Parcel

BOUND_S = 60.0
POOL = SegmentPool()
FIRST, SECOND = Place("ranks", 0), Place("ranks", 1)


def pid(site: Site) -> int:
    return os.getpid()


def same(site: Site, value: Any) -> Any:
    return value


def note(site: Site, number: int) -> list[int]:
    site.objects.setdefault("noted", []).append(number)
    return list(site.objects["noted"])


def fetched(site: Site, references: list[Any]) -> list[Any]:
    return site.fetch(references)


def overwritten(site: Site, references: list[Any]) -> float:
    """Write into a fetched array, and return its first number."""
    (array,) = site.fetch(references)
    array[:] = 7.0
    return float(array[0])


def wait_for(site: Site, file: Path) -> str:
    while not file.exists():
        time.sleep(0.02)
    return file.name


def fail(site: Site) -> None:
    raise ZeroDivisionError("one divided by none")


class _Strange(Exception):
    """An error that cannot be rebuilt from its arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("strange")


def fail_strangely(site: Site) -> None:
    raise _Strange(1, 2)


@pytest.fixture(scope="module")
def backend() -> Iterator[ProcessBackend]:
    made = ProcessBackend(BOUND_S)
    made.open([Pool(name="ranks", size=2, world=1)])
    yield made
    made.close()


def read(backend: ProcessBackend, place: Place, work: Any, *arguments: Any) -> Any:
    return backend.read_all(backend.submit(place, work, *arguments), BOUND_S)[0]


@pytest.mark.parametrize(
    "count", [0, 1, MAX_INLINE_BYTES // 8 - 1, MAX_INLINE_BYTES // 8, PACKET_BYTES, 3 * 2**18]
)
def test_arrays_and_tensors_of_every_size_come_back(count: int, backend: ProcessBackend) -> None:
    """Inside the packet, around the limit, in a packet that is too large for a socket, in shared memory."""
    value = {
        "array": np.arange(count, dtype=np.float64),
        "tensor": torch.arange(count, dtype=torch.bfloat16),
        "text": "x" * count,
        "twice": [np.full((2, count), index) for index in range(3)],
    }
    found = read(backend, FIRST, same, value)
    assert np.array_equal(found["array"], value["array"]) and torch.equal(found["tensor"], value["tensor"])
    assert found["text"] == value["text"]
    assert all(np.array_equal(*pair) for pair in zip(found["twice"], value["twice"], strict=True))


def test_large_arrays_do_not_pass_through_the_socket() -> None:
    large, small = np.ones(MAX_INLINE_BYTES // 8), np.ones(MAX_INLINE_BYTES // 8 - 1)
    assert len(Parcel.of(large, POOL).content) < 1000 and Parcel.of(large, POOL).segments
    assert len(Parcel.of(small, POOL).content) == 0, "a content of that size is in shared memory as a whole"
    tiny = Parcel.of(np.ones(MAX_CONTENT_BYTES // 16), POOL)
    assert not tiny.segments and tiny.open().sum() == MAX_CONTENT_BYTES // 16


def test_shared_memory_has_no_name() -> None:
    """So nothing is left of it, no matter which process is killed, and /dev/shm may be small."""
    (segment,) = Parcel.of(np.ones(2**14), POOL).segments
    path = Path(f"/proc/self/fd/{segment.descriptor}")
    assert str(path.readlink()) == "/memfd:rillflow (deleted)"
    del segment
    gc.collect()
    assert not path.exists()


def test_a_value_ends_with_its_parcel() -> None:
    """Without a collection of cycles, so that memory is free at once."""
    pool = SegmentPool()

    def used() -> int:
        (segment,) = Parcel.of(np.ones(2**16), pool).segments
        return os.fstat(segment.descriptor).st_ino

    gc.disable()
    try:
        inodes = {used() for _ in range(9)}
    finally:
        gc.enable()
    assert len(inodes) == 1


def test_memory_is_written_again_once_nobody_holds_it() -> None:
    pool = SegmentPool()

    def held(value: float) -> Any:
        return pool.hold([np.full(2**14, value)])[0]

    def inode(segment: Any) -> int:
        return os.fstat(segment.descriptor).st_ino

    first = held(1.0)
    used = inode(first)
    assert inode(held(2.0)) != used, "its descriptor is held"
    mapped = first.mapped().view(np.float64)
    del first
    gc.collect()
    assert all(inode(held(3.0)) != used for _ in range(3)) and (mapped == 1.0).all(), "it is mapped"
    del mapped
    gc.collect()
    assert used in {inode(held(4.0)) for _ in range(3)}
    again = [held(float(value)) for value in range(20)]
    assert [float(each.mapped().view(np.float64)[-1]) for each in again] == [float(v) for v in range(20)]


def test_a_pool_is_bounded() -> None:
    pool = SegmentPool()
    for _ in range(12):
        pool.hold([np.ones(MAX_POOL_BYTES // 8, np.uint8)])
    assert 0 < pool._bytes <= MAX_POOL_BYTES
    held = [pool.hold([np.ones(2**16, np.uint8)]) for _ in range(2 * MAX_SEGMENTS)]
    assert len(pool._kept) == MAX_SEGMENTS < len(held)


def test_a_packed_argument_is_copied_once_for_all_ranks(backend: ProcessBackend) -> None:
    weights = {name: np.full(2**16, index, dtype=np.float32) for index, name in enumerate("ab")}
    packed = backend.pack(weights, "weights")
    (segment,) = packed.segments
    made = [backend.submit(place, same, packed)[0] for place in (FIRST, SECOND)]
    for found in backend.read_all(made, BOUND_S):
        assert found["b"].sum() == 2**16 and found["a"].sum() == 0
    nested = read(backend, FIRST, same, (packed, np.ones(2**15), packed))
    assert nested[0]["b"].sum() == nested[2]["b"].sum() == 2**16 and nested[1].sum() == 2**15
    call = Parcel.of((same, (packed, packed)), POOL)
    assert call.segments == (segment,)


def test_calls_of_a_rank_run_in_the_order_of_submission(backend: ProcessBackend) -> None:
    made = [backend.submit(FIRST, note, number)[0] for number in range(200)]
    assert backend.read_all(made, BOUND_S)[-1] == list(range(200))


def test_a_submit_waits_for_nothing(backend: ProcessBackend, tmp_path: Path) -> None:
    """The rank reads nothing, and the calls are larger than its socket's buffer; the other rank works on."""
    (busy,) = backend.submit(FIRST, wait_for, tmp_path / "go")
    texts = [str(index) * 60_000 for index in range(10)]
    made = [backend.submit(FIRST, same, text)[0] for text in texts for _ in range(3)]
    assert read(backend, SECOND, same, 1) == 1
    assert not backend.is_ready(busy) and not backend.wait_for_any(made, 0.1)
    (tmp_path / "go").touch()
    assert backend.read_all(made, BOUND_S)[::3] == texts


def test_results_stay_readable_and_are_fetched_by_other_ranks(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    """Also while the rank that has made them is busy, and before they are there."""
    before = backend.traffic.calls
    large = backend.submit(FIRST, same, np.full(2**17, 3.0))[0]
    small = backend.submit(FIRST, same, "small")[0]
    (later,) = backend.submit(FIRST, wait_for, tmp_path / "later")
    assert read(backend, SECOND, overwritten, [large]) == 7.0, "what a rank writes nobody else sees"
    (waiting,) = backend.submit(SECOND, fetched, [large, small, later, small])
    assert not backend.wait_for_any([waiting], 0.2)
    (tmp_path / "later").touch()
    found = backend.read_all([waiting], BOUND_S)[0]
    assert found[0].sum() == 3.0 * 2**17 and found[1:] == ["small", "later", "small"]
    assert backend.traffic.calls == before + 5, "fetches and reads are no calls"


def test_errors_reach_readers_and_ranks_that_fetch(backend: ProcessBackend) -> None:
    (failed,) = backend.submit(FIRST, fail)
    with pytest.raises(ZeroDivisionError, match="one divided by none") as caught:
        backend.read_all([failed], BOUND_S)
    assert "rank 0 of pool 'ranks'" in caught.value.__notes__[0] and "in fail" in caught.value.__notes__[0]
    with pytest.raises(ZeroDivisionError):
        read(backend, SECOND, fetched, [failed])
    with pytest.raises(ClusterError, match="_Strange: strange"):
        read(backend, FIRST, fail_strangely)
    assert read(backend, FIRST, same, 1) == 1


@pytest.mark.slow
def test_a_fetch_ends_at_the_deadline(tmp_path: Path) -> None:
    """The call that is fetched from never returns; the rank that waits goes on with its next call."""
    backend = ProcessBackend(1.0)
    backend.open([Pool(name="ranks", size=2, world=1)])
    try:
        (endless,) = backend.submit(FIRST, wait_for, tmp_path / "never")
        with pytest.raises(ClusterError, match=r"rank 1 of pool 'ranks' waited 1 s for an argument"):
            read(backend, SECOND, fetched, [endless])
        with pytest.raises(TimeoutError):
            backend.read_all([endless], 0.1)
        assert read(backend, SECOND, same, 1) == 1
    finally:
        backend.close()


def open_files(process: int | str) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


def listens(site: Site) -> bool:
    there = psutil.Process().net_connections("tcp")
    return any(each.status == psutil.CONN_LISTEN for each in there)


def test_a_rank_alone_in_its_world_listens_to_nothing(backend: ProcessBackend) -> None:
    assert [read(backend, place, listens) for place in (FIRST, SECOND)] == [False, False]


def test_no_descriptor_is_left_of_results(backend: ProcessBackend) -> None:
    before = open_files("self")
    for _ in range(3 * MAX_SEGMENTS):
        made = [backend.submit(place, same, np.ones(2**14))[0] for place in (FIRST, SECOND)]
        backend.submit(SECOND, fetched, made)
        backend.read_all(made, BOUND_S)
    ranks = [read(backend, place, pid) for place in (FIRST, SECOND)]
    del made
    gc.collect()
    assert open_files("self") <= before + 2 * MAX_SEGMENTS
    assert all(open_files(rank) < 30 + 2 * MAX_SEGMENTS for rank in ranks)


def test_a_killed_rank_loses_its_calls_and_no_other(tmp_path: Path) -> None:
    backend = ProcessBackend(BOUND_S)
    backend.open([Pool(name="ranks", size=2, world=1)])
    try:
        old = read(backend, FIRST, pid)
        made = backend.submit(FIRST, same, np.ones(2**17))[0]
        backend.wait_for_any([made], BOUND_S)
        (running,) = backend.submit(FIRST, wait_for, tmp_path / "never")
        (beside,) = backend.submit(SECOND, wait_for, tmp_path / "go")
        (fetching,) = backend.submit(SECOND, fetched, [running])
        gc.collect()
        before = len(psutil.Process().net_connections("unix"))
        os.kill(old, signal.SIGKILL)
        with pytest.raises(RankLost, match=f"process {old} ended by SIGKILL"):
            backend.read_all([running], BOUND_S)
        assert len(psutil.Process().net_connections("unix")) == before - 1, "its socket is closed"
        with pytest.raises(RankLost, match="has died"):
            read(backend, FIRST, pid)
        (tmp_path / "go").touch()
        assert backend.read_all([beside], BOUND_S) == ["go"]
        with pytest.raises(Stranded, match="the rank of an argument has died"):
            backend.read_all([fetching], BOUND_S)
        backend.replace([FIRST]).read(BOUND_S)
        assert read(backend, FIRST, pid) != old and backend.epochs[FIRST] == 1
        assert read(backend, SECOND, fetched, [made])[0].sum() == 2**17, "its results outlive it"
    finally:
        backend.close()


DRIVER = """
import os, sys, time
sys.path.insert(0, {tests!r})
from test_local_processes import pid, same, wait_for
import numpy as np
from pathlib import Path
from rillflow.workers.backend import Place, Pool
from rillflow.workers.processes import ProcessBackend

backend = ProcessBackend(60.0, heartbeat_s={heartbeat_s})
backend.open([Pool(name="ranks", size=2)])
places = [Place("ranks", 0), Place("ranks", 1)]
made = [backend.submit(place, same, np.ones(2**20))[0] for place in places]
backend.read_all(made, 60)
backend.submit(places[0], wait_for, Path("/never"))
print(*[backend._ranks[place].process.pid for place in places], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("heartbeat_s", [0.0, pytest.param(5.0, marks=pytest.mark.slow)])
def test_nothing_is_left_when_the_driver_is_killed(heartbeat_s: float) -> None:
    """One rank is in a call and stopped, the other one waits for a call."""
    program = DRIVER.format(tests=str(Path(__file__).parent), heartbeat_s=heartbeat_s)
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    ranks = [int(each) for each in driver.stdout.readline().split()]
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len(ranks) == 2 and len(family) == 3, "the ranks, and the process that forks them"
    psutil.Process(ranks[0]).suspend()
    driver.kill()
    driver.communicate()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def test_closing_ends_every_process_also_in_a_call(tmp_path: Path) -> None:
    backend = ProcessBackend(BOUND_S)
    backend.open([Pool(name="ranks", size=2, world=1)])
    ranks = [psutil.Process(read(backend, place, pid)) for place in (FIRST, SECOND)]
    complete, (running,) = read(backend, FIRST, same, 1), backend.submit(FIRST, wait_for, tmp_path / "never")
    backend.close()
    backend.close()
    assert complete == 1 and not any(each.is_running() for each in ranks)
    with pytest.raises(RankLost, match="was closed"):
        backend.read_all([running], BOUND_S)


def parent(site: Site) -> int:
    return os.getppid()


def numbers(site: Site) -> list[float]:
    """Draw from the global generators, whose states forks inherit."""
    return [float(np.random.random()), float(torch.rand(()))]


def has_imported(site: Site, module: str) -> bool:
    return module in sys.modules


def test_ranks_are_forks_of_a_process_with_their_imports() -> None:
    """A rank that replaces another one is a fork, too; no two ranks draw the same numbers."""
    forks = ForkServer(["this"])
    backend = ProcessBackend(BOUND_S, forks=forks)
    backend.open([Pool(name="ranks", size=2, world=1)])
    try:
        assert read(backend, FIRST, has_imported, "this")
        server = read(backend, FIRST, parent)
        assert read(backend, SECOND, parent) == server != os.getpid()
        drawn = {*read(backend, FIRST, numbers), *read(backend, SECOND, numbers)}
        backend.replace([FIRST]).read(BOUND_S)
        assert read(backend, FIRST, parent) == server
        assert len(drawn | {*read(backend, FIRST, numbers)}) == 6
    finally:
        backend.close()
        assert psutil.pid_exists(server), "another backend may use it"
        forks.close()
    assert not psutil.pid_exists(server)


def test_ranks_end_with_the_process_that_forks_them(tmp_path: Path) -> None:
    """Their replacements are forks of a new one."""
    backend = ProcessBackend(BOUND_S)
    backend.open([Pool(name="ranks", size=2, world=1)])
    try:
        server = read(backend, FIRST, parent)
        (running,) = backend.submit(SECOND, wait_for, tmp_path / "never")
        os.kill(server, signal.SIGKILL)
        with pytest.raises(RankLost, match="ended by SIGKILL"):
            backend.read_all([running], BOUND_S)
        backend.replace([FIRST, SECOND]).read(BOUND_S)
        assert read(backend, FIRST, parent) == read(backend, SECOND, parent) != server
    finally:
        backend.close()


def test_a_replacement_that_cannot_be_started_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new fork server cannot import what the first one has imported."""
    (tmp_path / "brittle_module.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with ForkServer(["brittle_module"]) as forks:
        backend = ProcessBackend(BOUND_S, forks=forks)
        backend.open([Pool(name="ranks", size=2, world=1)])
        try:
            server = read(backend, FIRST, parent)
            (tmp_path / "brittle_module.py").unlink()
            os.kill(server, signal.SIGKILL)
            with pytest.raises(RankLost):
                while read(backend, FIRST, pid):
                    pass
            replacement = backend.replace([FIRST])
            with pytest.raises(ClusterError, match="the process that starts ranks has ended"):
                replacement.read(BOUND_S)
        finally:
            backend.close()


def test_the_answer_of_an_interrupted_start_is_not_taken_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import lasts until a file is there, so the interruption comes during the start."""
    (tmp_path / "waiting_module.py").write_text(
        f"import time\nfrom pathlib import Path\nwhile not Path({str(tmp_path / 'go')!r}).exists():\n"
        "    time.sleep(0.02)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with ForkServer(["waiting_module"]) as forks, ours, theirs:
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                forks.start(theirs.fileno(), BOUND_S)
            (tmp_path / "go").touch()
            ranks = [forks.start(theirs.fileno(), BOUND_S) for _ in range(2)]
            forked = psutil.Process(ranks[0].parent).children()
            assert len(forked) == 3 and [each.pid for each in ranks] == [each.pid for each in forked[1:]]
            ranks[1].kill()
            assert ranks[1].wait() == -signal.SIGKILL
            again = ForkedProcess(ranks[1].pid, ranks[1].parent, forks)
            assert again.wait() == -signal.SIGKILL, "an interrupted request may have reaped it"
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("module", "start_s", "said"),
    [
        ("no_such_module", 60.0, "it ended with exit code 1"),
        ("slow_module", 2.0 - 30.0, "raise placement.start_s if imports need more than 2 s"),
    ],
)
def test_an_import_that_fails_or_hangs_is_an_error(
    module: str, start_s: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of two ranks may take 30 s more than ``start_s``."""
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(600)\n")  # killed long before
    monkeypatch.syspath_prepend(str(tmp_path))
    before = psutil.Process().children()
    forks = ForkServer([module])
    backend = ProcessBackend(BOUND_S, start_s=start_s, forks=forks)
    with pytest.raises(ClusterError, match="the process that starts ranks has ended") as raised:
        backend.open([Pool(name="ranks", size=2, world=1)])
    backend.close()
    forks.close()
    assert said in str(raised.value)
    assert psutil.Process().children() == before


def test_a_pool_that_needs_more_accelerators_than_there_are() -> None:
    backend = ProcessBackend(BOUND_S)
    with pytest.raises(ClusterError, match=r"need 99 accelerators, but this machine has"):
        backend.open([Pool(name="ranks", size=99, takes_device=True)], "cuda")
