"""The actor of a rank sets its process up, passes each call on, and raises the error of a call as it is."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest

from rillflow.runs.busy_machine import SPINS

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

ACTOR = """
import json, os, torch
from rillflow.workers.backend import Place
from rillflow.workers.nodes import Seating
from rillflow.workers.ray_actor import RankActor

actor = RankActor([], {"OF_THE_DRIVER": "here"})
from rillflow.workers.ray_messages import packed, unpacked
from rillflow.workers.joined_rank import join
seating = Seating(
    place=Place("main", 0), pool_size=1, index=0, size=1, host="127.0.0.1", port=0, backend="gloo",
    neighbours=10**6, ahead_s=0.0, deadline_s=20.0, collective_s=20.0, target=None,
)
actor.ask(packed((join, (seating,))).body)
def found(work):
    try:
        return unpacked(actor.run(packed((work, (), 1, 0)).body))
    except BaseException as error:
        return repr(error)
results = [found(lambda site: str(site.place)), found(lambda _: 1 // 0)]
print(json.dumps([dict(os.environ), torch.get_num_threads(), results]))
"""


def test_a_rank_on_ray_shares_its_node_and_raises_what_a_call_raised() -> None:
    decided = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    kept = {name: value for name, value in os.environ.items() if name not in decided}
    run = subprocess.run(
        [sys.executable, "-c", ACTOR], env=kept | {"OMP_NUM_THREADS": "7"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    variables, threads, results = json.loads(run.stdout)
    assert variables["OF_THE_DRIVER"] == "here"
    assert variables["GOMP_SPINCOUNT"] == SPINS, "its threads wait briefly"
    assert variables["OMP_NUM_THREADS"] == "1" and threads == 1, "a million ranks share the node's cores"
    assert variables["GLOO_SOCKET_IFNAME"] in [name for _, name in socket.if_nameindex()]
    assert results == ["rank 0 of pool 'main'", "ZeroDivisionError('integer division or modulo by zero')"]


def test_the_methods_of_the_actor_are_those_of_its_rank() -> None:
    from rillflow.workers.ray_actor import RankActor
    from rillflow.workers.ray_rank import RankProcess

    def methods(of: type) -> dict[str, list[str]]:
        """Return the parameters of every public method; Ray adds one of its own, whose name begins with _."""
        public = {name: each for name, each in inspect.getmembers(of, inspect.isfunction) if name[0] != "_"}
        return {
            name: [word for word in inspect.signature(each).parameters if word[0] != "_"]
            for name, each in public.items()
        }

    of_rank = methods(RankProcess)
    assert methods(RankActor) == {name: of_rank[name] for name in ("ask", "run", "seat", "time")}
