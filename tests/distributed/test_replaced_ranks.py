"""Ranks, local or on Ray, that are killed, stopped or cut off: seen in seconds and replaced."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

from rillflow.errors import ClusterError
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.row import RowId
from rillflow.workers.backend import Place, Pool, RankDied, RankLost, Site
from rillflow.workers.collectives import Stranded
from rillflow.workers.endpoint import endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.liveness import fence_s
from rillflow.workers.processes import ProcessBackend
from rillflow.workers.start import ray_backend

if TYPE_CHECKING:
    from rillflow.workers.ray import RayBackend

    Cluster = RayBackend | ProcessBackend

sys.path.insert(0, str(Path(__file__).parent))
from machines import PORT, SHARED, Machine, machines, number_within, ray_up, why_not
from programs import Worker

BATCH = Batch(ids=row_ids([RowId(0, index, 0) for index in range(4)]), fields={"x": torch.arange(4.0)})
HEARTBEAT_S = 2.0
BOUND_S = 60.0
"""A deadline far above any duration, also on a loaded machine."""
POOLS = [Pool(name="answers", size=2, world=1), Pool(name="pair", size=2)]
ANSWERS = [Place("answers", rank) for rank in range(2)]
PAIR = [Place("pair", rank) for rank in range(2)]


def pid(site: Site) -> int:
    return os.getpid()


def sleep(site: Site, seconds: float) -> str:
    time.sleep(seconds)
    return f"slept on {site.place}"


def hold_lock(site: Site, seconds: float) -> str:
    """Hold the GIL for longer than some seconds, in one regular expression."""
    for length in range(18, 60):
        began = time.monotonic()
        re.match("(a+)+b", "a" * length)
        if time.monotonic() - began > seconds:
            break
    return f"busy on {site.place}"


def wait_for(site: Site, file: Path) -> str:
    while not file.exists():
        time.sleep(0.05)
    return f"waited on {site.place}"


def large(site: Site) -> torch.Tensor:
    return torch.full((2**20,), float(site.place.rank))


def total(site: Site) -> float:
    tensor = torch.tensor([1.0 + site.place.rank])
    site.ranks.sum_([tensor])
    return float(tensor)


def total_unless_first(site: Site) -> float:
    if site.place.rank == 0:
        raise ArithmeticError("a bit of this rank fell over")
    return total(site)


def crash(site: Site) -> None:
    os._exit(7)


def cluster_of(heartbeat_s: float = HEARTBEAT_S) -> RayBackend:
    return ray_backend(BOUND_S, start_s=120.0, heartbeat_s=heartbeat_s)


@pytest.fixture(scope="module", params=["process", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    is_local = request.param == "process"
    made = ProcessBackend(BOUND_S, start_s=120.0, heartbeat_s=HEARTBEAT_S) if is_local else cluster_of()
    made.open(POOLS)
    yield made
    made.close()


def read(cluster: Cluster, place: Place, work: Any, *arguments: Any) -> Any:
    return cluster.read_all(cluster.submit(place, work, *arguments), BOUND_S)[0]


def lost_after(cluster: Cluster, reference: Any) -> tuple[RankLost, float]:
    """Return the loss of a running call, and the seconds until it is detected."""
    began = time.monotonic()
    with pytest.raises(RankLost) as caught:
        cluster.read_all([reference], BOUND_S)
    return caught.value, time.monotonic() - began


def test_an_abandoned_call_ends_and_later_calls_run(cluster: Cluster, tmp_path: Path) -> None:
    """Queued calls behind it are refused, also on ranks that are idle when the calls are abandoned."""
    place, other = ANSWERS
    running = cluster.submit(place, wait_for, tmp_path / "never")[0]
    waiting = cluster.submit(place, pid)[0]
    assert read(cluster, other, pid)
    cluster.abandon()
    for each in (running, waiting):
        with pytest.raises(Stranded, match="was abandoned"):
            cluster.read_all([each], BOUND_S)
    assert [bool(read(cluster, each, pid)) for each in ANSWERS] == [True, True]


def test_collectives_are_those_of_a_world(cluster: Cluster) -> None:
    assert [read(cluster, place, total) for place in ANSWERS] == [1.0, 2.0]
    made = [cluster.submit(place, total)[0] for place in PAIR]
    assert cluster.read_all(made, BOUND_S) == [3.0, 3.0]


def test_a_world_whose_rank_failed_before_a_collective_is_mended_and_adds_again(cluster: Cluster) -> None:
    failing, waiting = (cluster.submit(place, total_unless_first)[0] for place in PAIR)
    with pytest.raises(ArithmeticError, match="fell over"):
        cluster.read_all([failing], BOUND_S)
    with pytest.raises(Exception, match="Connection closed by peer"):
        cluster.read_all([waiting], BOUND_S)
    cluster.mend(["pair"], BOUND_S)
    again = [cluster.submit(place, total)[0] for place in PAIR]
    assert cluster.read_all(again, BOUND_S) == [3.0, 3.0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_seen_at_once_and_replaced_while_others_work_on(
    cluster: Cluster, how: signal.Signals, tmp_path: Path
) -> None:
    """A killed rank is detected at once, a stopped one after the heartbeat; results survive or are lost."""
    place, other = ANSWERS
    group = Group("worker", endpoints_of(Worker), mesh=Mesh.of(dp=2), pool="answers", backend=cluster)
    if how is signal.SIGKILL:
        group.start(Worker)
    before, epoch = read(cluster, place, pid), cluster.epochs[place]
    complete, stored = (cluster.submit(place, work)[0] for work in (pid, large))
    cluster.read_all([complete, stored], BOUND_S)
    (running,), (waiting,) = (cluster.submit(place, sleep, 600.0) for _ in range(2))
    (beside,) = cluster.submit(other, wait_for, tmp_path / "go on")
    time.sleep(0.5)
    os.kill(before, how)
    lost, seconds = lost_after(cluster, running)
    assert seconds < 30.0 + (0.0 if how is signal.SIGKILL else HEARTBEAT_S)
    said = "has died" if how is signal.SIGKILL else r"not answered a heartbeat for .* its process is stopped"
    assert re.search(said, lost.what) and str(before) in lost.why

    replacement = cluster.replace([place])
    assert replacement.places == (place,) and not replacement.is_ready
    for each in (
        waiting,
        cluster.submit(place, pid)[0],
    ):  # the old process stays until the new one is ready
        assert lost_after(cluster, each)[0].what == lost.what
    replacement.read(BOUND_S)
    assert not cluster.is_ready(beside)
    assert read(cluster, place, pid) != before and cluster.epochs[place] == epoch + 1
    (tmp_path / "go on").touch()
    assert cluster.read_all([beside], BOUND_S) == [f"waited on {other}"]
    with pytest.raises(ClusterError, match=f"there is no worker on {place}"):
        group.call("double", BATCH).read(BOUND_S)
    group.restart([0], Worker, BOUND_S)
    assert group.call("double", BATCH).read(BOUND_S).dense("y").tolist() == [0.0, 2.0, 4.0, 6.0]

    assert cluster.read_all([complete], BOUND_S) == [before], "a result of the old process"
    assert cluster.read_all([stored], BOUND_S)[0].sum() == 0.0
    for each in (running, waiting):
        assert lost_after(cluster, each)[0].what == lost.what
    assert cluster.refused == 0


@pytest.mark.slow
def test_a_world_is_replaced_whole(cluster: Cluster) -> None:
    """The rank that lost its peer ends as well, and both join a new process group."""
    before = [read(cluster, place, pid) for place in PAIR]
    stranded = cluster.submit(PAIR[0], total)[0]
    cluster.submit(PAIR[1], crash)
    with pytest.raises((Stranded, ClusterError, RuntimeError)):
        cluster.read_all([stranded], BOUND_S)
    replacement = cluster.replace([PAIR[1]])
    assert replacement.places == tuple(PAIR)
    with pytest.raises(ClusterError, match="rank 0 of pool 'pair' is being replaced"):
        cluster.replace([PAIR[0]])
    replacement.read(BOUND_S)
    assert not {*before} & {read(cluster, place, pid) for place in PAIR}
    made = [cluster.submit(place, total)[0] for place in PAIR]
    assert cluster.read_all(made, BOUND_S) == [3.0, 3.0]


@pytest.mark.slow
def test_the_first_cause_of_a_rank_that_crashes_at_every_start_is_raised(
    cluster: Cluster,
) -> None:
    group = Group("crashing", endpoints_of(Worker), mesh=Mesh.of(dp=2), pool="answers", backend=cluster)
    causes = []
    for _ in range(2):
        with pytest.raises(RankDied, match="rank 1 of pool 'answers' has died") as caught:
            group.restart([1], crash, BOUND_S)
        assert caught.value.__notes__ == [f"in making crashing on {ANSWERS[1]}"]
        causes.append(caught.value)
        cluster.replace([causes[0].place]).read(BOUND_S)
    assert [cause.place for cause in causes] == [ANSWERS[1]] * 2
    assert causes[0].why != causes[1].why, "each names its own process"


@pytest.mark.slow
def test_the_error_of_a_process_that_cannot_start_is_raised_and_the_place_stays_dead(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rillflow.workers import nodes

    if isinstance(cluster, ProcessBackend):
        pytest.skip("a local process has the driver's versions")
    place, versions = ANSWERS[1], nodes.versions()
    monkeypatch.setattr(nodes, "versions", lambda: {**versions, "torch": "9.9.9"})
    replacement = cluster.replace([place])
    with pytest.raises(ClusterError, match=r"other versions than the driver: torch .*, not 9\.9\.9"):
        replacement.read(BOUND_S)
    assert "was replaced" in lost_after(cluster, cluster.submit(place, pid)[0])[0].what
    monkeypatch.undo()
    cluster.replace([place]).read(BOUND_S)
    assert read(cluster, place, total) == 2.0


def test_no_process_is_left_of_a_cluster_that_closes_during_a_replacement(
    cluster: Cluster,
) -> None:
    """The last test of this cluster; one rank is stopped, another is starting."""
    children = set(psutil.Process().children(recursive=True))
    os.kill(read(cluster, PAIR[0], pid), signal.SIGSTOP)
    replacement = cluster.replace([ANSWERS[0]])
    cluster.close()
    _, alive = psutil.wait_procs(children | set(psutil.Process().children(recursive=True)), timeout=30)
    assert children and not [
        each for each in alive if re.search("ray|process_rank|fork_server", " ".join(each.cmdline()))
    ]
    with pytest.raises((ClusterError, RankLost)):
        replacement.read(BOUND_S)


CUT = """
import os, sys, time
sys.path.insert(0, {tests!r})
from test_replaced_ranks import hold_lock, pid, sleep
from rillflow.workers.backend import Place, Pool, RankLost
from rillflow.workers.start import ray_backend

if __name__ == "__main__":
    backend = ray_backend(120.0, {address!r}, start_s=120.0, heartbeat_s=2.0)
    backend.open([Pool(name="here", size=1), Pool(name="there", size=1)])
    (far,) = [place for place, node in backend.nodes.items() if node.address == "10.77.0.2"]
    (near,) = {{*backend.nodes}} - {{far}}
    print("pid", backend.read_all(backend.submit(far, pid), 60)[0], flush=True)
    print("busy", backend.read_all(backend.submit(near, hold_lock, 5.0), 100)[0], flush=True)
    (running,) = backend.submit(far, sleep, 600.0)
    input()
    began = time.monotonic()
    try:
        backend.read_all([running], 100)
    except RankLost as lost:
        print("lost", time.monotonic() - began, lost, flush=True)
    print("beside", backend.read_all(backend.submit(near, sleep, 0.0), 60)[0], flush=True)
    input()
    backend.close()
    print("closed", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_rank_whose_node_is_cut_off_is_seen_and_ends_itself(tmp_path: Path) -> None:
    """The link of its node stays down; only the rank itself can end its process."""
    program = CUT.format(tests=str(Path(__file__).parent), address=f"10.77.0.1:{PORT}")
    (tmp_path / "cut.py").write_text(program)
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with machines(tmp_path) as (first, other):
        ray_up(first, env=env)
        ray_up(other, first, env=env)
        with first.started("python", f"{SHARED}/cut.py", env=env, stdin=subprocess.PIPE) as driver:
            said = told(driver, "pid")
            rank = rank_on(other)
            assert said.split()[1] == str(number_within(rank.pid))
            assert "busy on rank 0 of pool" in told(driver, "busy"), "it is on the driver's machine: not lost"
            first.run("ip", "link", "set", "v2", "down")
            began = time.monotonic()
            answer(driver)
            said = told(driver, "lost")
            assert "its node cannot be reached" in said and time.monotonic() - began < 30.0
            assert "beside slept on rank 0 of pool" in told(driver, "beside")
            rank.wait(120.0)
            assert time.monotonic() - began > fence_s(2.0) / 2, "it was ended by something else"
            first.run("ip", "link", "set", "v2", "up")
            answer(driver)
            told(driver, "closed")
            assert driver.wait(BOUND_S) == 0


def told(driver: subprocess.Popen[str], word: str) -> str:
    """Return the driver's next line that begins with a word."""
    assert driver.stdout is not None
    read = []
    for line in driver.stdout:
        if line.startswith(word):
            return line
        read.append(line)
    raise AssertionError("".join(read))


def answer(driver: subprocess.Popen[str]) -> None:
    assert driver.stdin is not None
    driver.stdin.write("\n")
    driver.stdin.flush()


def rank_on(machine: Machine) -> psutil.Process:
    """Return the only process of a rank on a node."""
    own = Path(f"/proc/{machine.pid}/ns/net").readlink()
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            is_there = Path(f"/proc/{process.pid}/ns/net").readlink() == own
            if is_there and "".join(process.cmdline()).startswith("ray::RankActor"):
                found.append(process)
    (rank,) = found
    return rank
