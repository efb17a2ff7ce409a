"""Ranks that die, hang or cannot be placed; processes left behind; addresses that listen."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

from rillflow.controller.cadence import Cadence
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import Flow
from rillflow.controller.interrupt import Interruption
from rillflow.controller.loop import Loop
from rillflow.controller.open_step import Phase
from rillflow.controller.source import DataStream, Source
from rillflow.errors import ClusterError
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.row import RowId
from rillflow.runs.progress import Progress
from rillflow.runs.run_directory import RunDirectory
from rillflow.workers.backend import Pool, RankDied
from rillflow.workers.endpoint import endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.pending import Pending
from rillflow.workers.processes import ProcessBackend
from rillflow.workers.start import ray_backend

if TYPE_CHECKING:
    from rillflow.workers.ray import RayBackend

    Cluster = RayBackend | ProcessBackend | InlineBackend

sys.path.insert(0, str(Path(__file__).parent))
from programs import Apart, Worker

BATCH = Batch(ids=row_ids([RowId(0, index, 0) for index in range(4)]), fields={"x": torch.arange(4.0)})


POOLS = [Pool(name=name, size=size) for name, size in (("start", 2), ("main", 2), ("slow", 1))]
SLOW_S = 60.0


@pytest.fixture(scope="module")
def elsewhere() -> set[psutil.Process]:
    """Return processes that earlier tests of this process have left, which belong to no cluster."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(scope="module", params=["inline", "process", "ray"])
def cluster(request: pytest.FixtureRequest, elsewhere: set[psutil.Process]) -> Iterator[Cluster]:
    """Yield a backend with pools; each test spoils its own pool."""
    if request.param == "process":
        made: Cluster = ProcessBackend(SLOW_S)
    else:
        made = ray_backend(SLOW_S) if request.param == "ray" else InlineBackend(SLOW_S)
    made.open(POOLS)
    yield made
    made.close()


@pytest.fixture
def in_processes(cluster: Cluster) -> RayBackend | ProcessBackend:
    if isinstance(cluster, InlineBackend):
        pytest.skip("threads do not die, and listen to nothing")
    return cluster


@pytest.fixture
def on_ray(in_processes: RayBackend | ProcessBackend) -> RayBackend:
    if isinstance(in_processes, ProcessBackend):
        pytest.skip("nothing of Ray is there")
    return in_processes


def worker(cluster: Cluster, role: str, pool: str, size: int) -> Group:
    group = Group(role, endpoints_of(Worker), mesh=Mesh.of(dp=size), pool=pool, backend=cluster)
    group.start(Worker)
    return group


def test_no_process_is_started_that_becomes_no_rank(on_ray: RayBackend) -> None:
    """Ray would also start one for every core, and each imports for a second."""
    assert on_ray._cluster.folder is not None
    started = list(on_ray._cluster.folder.glob("r/session_latest/logs/worker-*.out"))
    assert len(started) == sum(pool.size for pool in POOLS)


def test_bounded_wait_names_a_silent_rank_and_whom_waits_for_it(cluster: Cluster) -> None:
    group = worker(cluster, "silent", "main", 2)
    slow = group.call("sleep", BATCH, seconds=3.0)
    last = group.call("double", slow)
    with pytest.raises(ClusterError) as caught:
        last.read(1.0)
    for words in (
        "silent.sleep has not answered",
        "rank 0 of pool 'main'",
        "silent.double waits",
        "with 4 rows",
    ):
        assert words in str(caught.value)


def test_the_cause_of_a_failed_start_is_told_while_others_wait_in_a_collective(
    cluster: Cluster,
) -> None:
    """Otherwise rank 0 would wait for rank 1 until the deadline, and report the deadline."""
    group = Group("apart", endpoints_of(Apart), mesh=Mesh.of(dp=2), pool="start", backend=cluster)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"OSError.*making apart.*rank 1.*: no weights on the last rank"):
        group.start(Apart, SLOW_S)
    assert time.monotonic() - began < SLOW_S / 2


def test_whoever_fails_is_told_while_another_stage_still_works(cluster: Cluster, tmp_path: Path) -> None:
    """In a loop's step, the first stage works for long while the next one fails.

    On Ray, the failing rank dies, its neighbour's collective breaks, and a formula on another pool waits for
    both.
    """
    how, slow_s = ("raise", 3.0) if isinstance(cluster, InlineBackend) else ("die", 6.0)
    groups = {name: worker(cluster, name, name, size) for name, size in (("slow", 1), ("main", 2))}
    executor = GroupExecutor(groups, cluster)

    def step(flow: Flow, data: Batch, config: None) -> Pending:
        slow = flow.slow.sleep(data, seconds=slow_s)
        parted = flow.main.part(data, how=how, seconds=0.5)
        flow.slow.join(slow, parted)
        report: Pending = flow.slow.measure(slow)
        return report

    source = Source(executor, DataStream(take=lambda _: BATCH, state=dict))
    phase = Phase(
        name="parting", index=0, first=0, steps=1, rows=4, step=step, config=None,
        flow=Flow(executor), executor=executor,
        trained=("main",), source=source, beside=None, evaluated=False,
    )  # fmt: skip
    run = RunDirectory.open(tmp_path / "run", {})
    cadence = Cadence(
        evaluate_every=0, checkpoint_every=0, checkpoint_s=3600.0, keep_checkpoints=1, max_skipped=0
    )
    began = time.monotonic()
    with Progress(total_steps={"parting": 1}, quiet=True) as progress, Interruption() as interruption:
        loop = Loop(run, progress, cadence, None, interruption, 1, SLOW_S)
        with pytest.raises(ClusterError) as caught:
            loop.run_phase(phase, 0)
    assert time.monotonic() - began < slow_s
    run.close()
    if how == "die":
        assert caught.value.what == "rank 1 of pool 'main' has died"
        assert caught.value.__notes__ == ["in main.part on rank 1 of pool 'main'"]
    else:
        assert "ValueError in main.part on rank 1 of pool 'main'" in caught.value.what


def test_a_death_seen_by_whoever_needs_the_result_is_named(
    in_processes: RayBackend | ProcessBackend,
) -> None:
    """The rank died in the test before; calls to it, and calls that wait for their results, report that."""
    gone = Group("gone", endpoints_of(Worker), mesh=Mesh.of(dp=2), pool="main", backend=in_processes)
    here = worker(in_processes, "here", "slow", 1)
    with pytest.raises(ClusterError, match="rank 1 of pool 'main' has died") as caught:
        gone.start(Worker)
    assert caught.value.__notes__ == ["in making gone on rank 1 of pool 'main'"]
    lost = gone.call("double", BATCH)
    executor = GroupExecutor({"here": here}, in_processes)
    for waiting in (here.call("double", lost), executor.filter(lost, "y")):
        with pytest.raises(ClusterError, match="rank 1 of pool 'main' has died") as caught:
            waiting.read(30)
        assert isinstance(caught.value, RankDied) and caught.value.pool == "main"
        assert caught.value.__notes__ == ["in gone.double on rank 1 of pool 'main'"]
    with pytest.raises(ClusterError, match="rank 1 of pool 'main' has died"):  # its part alone
        executor.apply(len, lost.own(1), place=here.places[0]).read(30)


KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: RankProcess
\tpid: 2919
\tip: 10.0.0.7
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail:
 some common causes include: (1) the process was killed by the OOM killer of the node"""
NODE_DIED = """The actor died unexpectedly before finishing this task.
\tpid: 2919
\tip: 10.0.0.7
The actor died because its node has died. Node Id: 8bd7
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""


def test_what_is_known_of_a_loss_is_told(on_ray: RayBackend) -> None:
    """A killed process, a dead node and a lost connection give different errors."""
    from ray import exceptions as faults

    from rillflow.workers.ray_losses import loss

    what, why, fix = loss(faults.RayActorError(error_msg=KILLED))
    assert what == "has died" and "process 2919 on node 10.0.0.7" in why and "killed for memory" in fix
    what, why, fix = loss(faults.RayActorError(error_msg=NODE_DIED))
    assert what == "has died" and "its node 10.0.0.7 has left the cluster" in why and "memory" not in fix
    what, why, fix = loss(faults.ActorUnavailableError("The actor is unavailable", None))
    assert what == "cannot be reached" and "network" in fix
    assert "ran out of memory" in loss(faults.OutOfMemoryError("Task was killed"))[0]


def test_more_ranks_than_the_cluster_has(on_ray: RayBackend) -> None:
    more = ray_backend(30.0)
    with pytest.raises(
        ClusterError, match=r"pools \(huge 500\) need 500 CPUs, but the cluster has"
    ) as caught:
        more.open([Pool(name="huge", size=500)])
    assert "are missing" in caught.value.why


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([], "there is no pool"),
        ([Pool(name="a", size=1), Pool(name="a", size=2)], "2 pools are called 'a'"),
        ([Pool(name="a", size=0)], "pool 'a' has size 0"),
    ],
)
def test_pools_that_cannot_be(pools: list[Pool], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        InlineBackend().open(pools)


def test_everything_listens_on_the_loopback_device_and_asks_for_a_token(on_ray: RayBackend) -> None:
    import os

    import ray

    assert os.environ["RAY_AUTH_MODE"] == "token"
    ours = {process.pid for process in (psutil.Process(), *psutil.Process().children(recursive=True))}
    heard = [
        each.laddr.ip
        for each in psutil.net_connections("inet")
        if each.status == psutil.CONN_LISTEN and each.pid in ours
    ]
    assert heard, "the scan has to see Ray's own ports, or it proves nothing"
    assert {ip.removeprefix("::ffff:") for ip in heard} == {"127.0.0.1"}
    assert ray.nodes()[0]["NodeManagerAddress"] == "127.0.0.1"


def test_closing_leaves_no_process_behind(on_ray: RayBackend, elsewhere: set[psutil.Process]) -> None:
    """The last test of this cluster."""
    import ray

    children = set(psutil.Process().children(recursive=True)) - elsewhere
    worker(on_ray, "asleep", "slow", 1).call("sleep", BATCH, seconds=600.0)
    folder = on_ray._cluster.folder
    assert folder is not None and folder.exists()
    on_ray.close()
    on_ray.close()
    assert not ray.is_initialized(), "closing twice must not start anything"
    _, alive = psutil.wait_procs(children, timeout=30)
    assert children and not alive
    assert not folder.exists()


DRIVER = """
import time
from rillflow.workers.backend import Pool
from rillflow.workers.start import ray_backend

backend = ray_backend(60.0)
backend.open([Pool(name="main", size=1)])
print(backend._cluster.folder, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_is_left_when_the_driver_is_killed() -> None:
    """Ray's own helpers wait a minute for a dead head."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        folder = Path(driver.stdout.readline().strip())
        family = psutil.Process(driver.pid).children(recursive=True)
        assert folder.is_dir() and any("RankActor" in " ".join(each.cmdline()) for each in family)
    finally:
        driver.kill()
        driver.communicate()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert not folder.exists()
