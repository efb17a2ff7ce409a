"""Ranks that die, are silent, or cannot be had; what leaves no process behind; what listens where."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

from rillflow.cluster.inline import InlineBackend
from rillflow.cluster.pool import Pool
from rillflow.cluster.ray import RayBackend
from rillflow.errors import ClusterError
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.row import RowId
from rillflow.workers.endpoint import endpoints_of
from rillflow.workers.group import Group

sys.path.insert(0, str(Path(__file__).parent))
from programs import Worker

BATCH = Batch(ids=row_ids([RowId(0, index, 0) for index in range(4)]), fields={"x": torch.arange(4.0)})


@pytest.fixture
def backend() -> Iterator[RayBackend]:
    made = RayBackend(30.0)
    made.open([Pool(name="main", size=2)])
    yield made
    made.close()


def group_on(backend: RayBackend | InlineBackend) -> Group:
    group = Group("worker", endpoints_of(Worker), mesh=Mesh.of(dp=2), pool="main", backend=backend)
    group.start(Worker)
    return group


def test_a_rank_that_dies_is_named(backend: RayBackend) -> None:
    with pytest.raises(ClusterError, match="rank 1 of pool 'main' has died"):
        group_on(backend).call("die", BATCH, rank=1).read(30)


@pytest.mark.parametrize("kind", ["inline", "ray"])
def test_a_silent_rank_is_named_with_whom_waits_for_it(kind: str, request: pytest.FixtureRequest) -> None:
    made: RayBackend | InlineBackend
    if kind == "ray":
        made = request.getfixturevalue("backend")
    else:
        made = InlineBackend()
        made.open([Pool(name="main", size=2)])
    group = group_on(made)
    slow = group.call("sleep", BATCH, seconds=4.0)
    last = group.call("double", slow)
    began = time.monotonic()
    with pytest.raises(ClusterError) as caught:
        last.read(1.0)
    assert time.monotonic() - began < 3
    for words in (
        "worker.sleep has not answered",
        "rank 0 of pool 'main'",
        "worker.double waits",
        "4 rows of x",
    ):
        assert words in str(caught.value)
    made.close()


def test_more_ranks_than_the_cluster_has(backend: RayBackend) -> None:
    more = RayBackend(30.0)
    with pytest.raises(
        ClusterError, match=r"pools \(huge 500\) take 500 CPUs, and the cluster has"
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


def test_everything_listens_on_the_loopback_device_and_asks_for_a_token(backend: RayBackend) -> None:
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


def test_closing_leaves_no_process_behind() -> None:
    import ray

    before = set(psutil.Process().children(recursive=True))
    made = RayBackend(30.0)
    made.open([Pool(name="main", size=2)])
    group_on(made).call("sleep", BATCH, seconds=600.0)
    children = set(psutil.Process().children(recursive=True)) - before
    assert children
    made.close()
    made.close()
    assert not ray.is_initialized(), "closing twice must not start anything"
    _, alive = psutil.wait_procs(children, timeout=60)  # daemons look for their raylet now and then
    assert not alive
