"""Runs on several nodes: real Ray and real networks; the nodes share only the folder of runs.

The everyday tests of single rules are in tests/unit/workers/test_nodes.py and test_start.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
from machines import PORT, SHARED, Machine, machines, number_within, ray_up, stop_ray, why_not
from small_recipe import RECIPE, REWARD

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

ADDRESS = f"10.77.0.1:{PORT}"
DP = "placement.pools={ main = 2 }"
APART = ("placement.pools={ main = 1, answers = 1 }", 'placement.roles={ sampler = "answers" }')
SHORT = ("warm_start=none", "evaluate=none", "algorithm.steps=1")
TIMES = {"run/step_seconds/mean"}
FOLDER = Path(__file__).parents[2]


class Cluster:
    """A running head, nodes that may join it, and the folder that all of them see."""

    def __init__(self, folder: Path, nodes: list[Machine]) -> None:
        self.folder, self.head, self.others = folder, nodes[0], nodes[1:]

    def join(self, node: Machine, **how: Any) -> None:
        """Start Ray on a node."""
        ray_up(node, None if node is self.head else self.head, **how)

    def words(self, name: str, *settings: str, address: str = ADDRESS) -> list[str]:
        """Return the command of a run, on the cluster if an address is given."""
        given = (*settings, f"placement.address={address}") if address else settings
        words = ["rillflow", "run", f"{SHARED}/run.toml", "--dir", f"{SHARED}/{name}"]
        return [*words, *(word for setting in given for word in ("--set", setting))]

    def refused(self, name: str, *settings: str, on: Machine | None = None, **how: Any) -> str:
        """Return the error of a run that ends before its first step."""
        env = how.pop("env", None)
        words = self.words(name, *SHORT, *(settings or (DP,)), **how)
        said = (on or self.head).run(*words, env=env, code=2)
        return said[said.index("error: ") :]

    def lines(self, name: str, file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / file).read_text("utf-8").splitlines()]

    def numbers(self, name: str) -> list[dict[str, Any]]:
        """Return every step's metrics without times."""
        found = [line["metrics"] for line in self.lines(name, "metrics.jsonl")]
        return [{key: value for key, value in each.items() if key not in TIMES} for each in found]

    def nodes_of(self, name: str) -> dict[str, Any]:
        """Return the nodes of the ranks in a run's last start."""
        starts = json.loads((self.folder / name / "environment.json").read_text("utf-8"))["starts"]
        found: dict[str, Any] = starts[-1]["nodes"]
        return found

    def assert_same(self, one: str, other: str) -> None:
        """Check that two runs have the same numbers and bit-identical final weights."""
        assert self.numbers(one) == self.numbers(other)
        first, second = (
            load_file(max((self.folder / run / "checkpoints").glob("step-*")) / "policy/model.safetensors")
            for run in (one, other)
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a head of one core, and nodes that each test joins itself."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "run.toml").write_text(RECIPE.replace("NAME", "grpo"))
    (folder / "reward.py").write_text(REWARD)
    with machines(folder, count=5, shared=["1g", "1g", "1g", "64m"]) as nodes:
        made = Cluster(folder, nodes)
        made.join(made.head)
        yield made


@pytest.fixture
def two(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with a second node, which leaves after the test."""
    cluster.join(cluster.others[0])
    yield cluster
    stop_ray(cluster.others[0])


def test_two_nodes_have_the_bits_of_one_by_one_changed_line(two: Cluster) -> None:
    for name, settings in (("dp", (DP,)), ("apart", APART)):
        two.head.run(*two.words(f"{name}_one", *settings, address=""))
        two.head.run(*two.words(f"{name}_two", *settings))
        assert {each["address"] for each in two.nodes_of(f"{name}_two").values()} == {
            "10.77.0.1",
            "10.77.0.2",
        }
        assert two.nodes_of(f"{name}_one") == {}
        two.assert_same(f"{name}_one", f"{name}_two")
    assert [two.nodes_of("dp_two")[f"main {rank}"]["address"] for rank in (0, 1)] == [
        "10.77.0.1",
        "10.77.0.2",
    ]


def test_tensor_parallel_ranks_on_two_nodes_are_refused_unless_told_to(two: Cluster) -> None:
    tp = (DP, "placement.train_parallel={ main = { tp = 2 } }")
    said = two.refused("tp", *tp)
    assert "the tp of policy crosses nodes: ranks 0, 1 of pool 'main' are on 10.77.0.1, 10.77.0.2" in said
    two.head.run(*two.words("tp_two", *SHORT, *tp, "placement.tp_across_nodes=true"))
    two.head.run(*two.words("tp_one", *SHORT, *tp, address=""))
    two.assert_same("tp_one", "tp_two")


def test_a_node_that_leaves_is_named_and_the_same_command_goes_on(cluster: Cluster) -> None:
    node = cluster.others[0]
    cluster.join(node)
    often = cluster.words("left", DP, "warm_start=none", "algorithm.steps=30", "run.checkpoint_every=1")
    run = cluster.head.started(*often)
    while not (cluster.folder / "left" / "checkpoints" / "step-000002").exists():
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    stop_ray(node)
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 1 and "rank 1 of pool 'main' on node 10.77.0.2" in said, said
    assert "all ranks start again from step" in said and "nodes that have left: 10.77.0.2" in said, said
    cluster.join(cluster.others[1])
    cluster.head.run(*often)
    stop_ray(cluster.others[1])
    steps = [line["step"] for line in cluster.lines("left", "metrics.jsonl")]
    assert steps == list(range(1, 31))
    assert cluster.nodes_of("left")["main 1"]["address"] == "10.77.0.3"


def test_spans_of_a_node_whose_clock_is_an_hour_off_are_told_in_the_drivers_time(
    cluster: Cluster, tmp_path: Path
) -> None:
    shim = cluster.folder / "clock.so"
    build = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(shim),
        str(Path(__file__).with_name("clock.c")),
        "-ldl",
    ]
    try:
        subprocess.run(build, check=True, capture_output=True)
    except OSError as error:
        pytest.skip(f"no C compiler: {error}")
    node = cluster.others[0]
    cluster.join(node, env={"LD_PRELOAD": f"{SHARED}/clock.so", "AHEAD_S": "3600"})
    began = time.monotonic()
    said = cluster.head.run(*cluster.words("clock", *APART, *SHORT))
    took_s = time.monotonic() - began
    stop_ray(node)
    assert "the clock of node 10.77.0.2 is 1 h 00 min ahead of this machine's" in " ".join(said.split())
    off = [each["ahead_s"] for each in cluster.nodes_of("clock").values()]
    assert sorted(off) == [0.0, pytest.approx(3600.0, abs=0.05)]
    spans = {span["stage"]: span for span in cluster.lines("clock", "spans.jsonl")}
    assert all(0 <= span["start_s"] < took_s for span in spans.values())
    answered, updated = spans["policy.generate"], spans["policy.update"]
    assert answered["start_s"] + answered["duration_s"] <= updated["start_s"] + 0.05


def test_ranks_that_cannot_reach_each_other_are_named(cluster: Cluster) -> None:
    """Both reach the head, and so does Ray; only the link between them is down."""
    first, second = cluster.others[:2]
    for node in (first, second):
        cluster.join(node)
    second.run("ip", "route", "add", "blackhole", first.address)
    said = cluster.refused("blocked", "placement.pools={ main = 3 }", "placement.roles={}")
    for node in (first, second):
        stop_ray(node)
    second.run("ip", "route", "del", "blackhole", first.address)
    assert said


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("10.77.0.99:6379", "the cluster at 10.77.0.99:6379 cannot be joined"),
        ("10.77.0.1:7777", "Connection refused"),
    ],
)
def test_a_head_that_is_not_there_is_said_at_once(cluster: Cluster, address: str, said: str) -> None:
    assert said in cluster.refused("nobody", address=address)


def test_a_driver_is_on_a_node_of_the_cluster(cluster: Cluster) -> None:
    said = cluster.refused("outside", on=cluster.others[3])
    assert "Ray is not running on this machine" in said and f"ray start --address={ADDRESS}" in said


def test_a_cluster_wants_its_token(cluster: Cluster) -> None:
    said = cluster.refused("stranger", env={"RAY_AUTH_TOKEN": "f" * 32})
    assert "token is missing or incorrect" in said and "RAY_AUTH_MODE=token" in said


def test_what_is_missing_is_told_by_node(two: Cluster) -> None:
    said = two.refused("many", "placement.pools={ main = 5 }")
    assert "the pools (main 5) need 5 CPUs, but the cluster has 2" in said
    assert "node 10.77.0.1: 1 CPUs, 0 GPUs; node 10.77.0.2: 1 CPUs, 0 GPUs" in said
    said = two.refused("no_gpu", DP, "run.device=cuda")
    assert "the pools (main 2) need 2 GPUs, but the cluster has 0" in said


def test_a_full_cluster_says_what_it_waits_for(two: Cluster) -> None:
    busy = two.head.started(*two.words("busy", DP, "warm_start=none", "algorithm.steps=1000"))
    while not (two.folder / "busy" / "metrics.jsonl").exists():
        assert busy.poll() is None, busy.communicate()[0]
        time.sleep(0.05)
    words = two.words("full", *SHORT, DP, "placement.start_s=12")
    said = " ".join(two.head.run(*words, code=2).split())
    for each in psutil.Process(busy.pid).children():  # nsenter passes no signal on
        each.terminate()
    busy.communicate(timeout=120)
    assert "pool 'main' waits for 2 free CPUs in the cluster, at most" in said
    assert "free now: node 10.77.0.1: 0 CPUs, 0 GPUs; node 10.77.0.2: 0 CPUs, 0 GPUs" in said
    assert "error: pool 'main' has waited 12 s for 2 free CPUs in the cluster" in said
    assert "bundle_group" not in said


def test_a_node_of_other_versions_is_refused_with_each(cluster: Cluster) -> None:
    node = cluster.others[0]
    node.run("bash", "-ec", f"mkdir -p /tmp/o/torch-9.9.9.dist-info; cp -r {FOLDER}/rillflow /tmp/o/")
    node.run("bash", "-ec", "printf 'Name: torch\nVersion: 9.9.9\n' > /tmp/o/torch-9.9.9.dist-info/METADATA")
    node.run("bash", "-ec", "echo '# one line more' >> /tmp/o/rillflow/errors.py")
    cluster.join(node, env={"PYTHONPATH": "/tmp/o"})
    said = cluster.refused("old")
    stop_ray(node)
    assert "node 10.77.0.2 has other versions than the driver: rillflow 0.1.0 (" in said
    assert "torch 9.9.9, not 2." in said


def test_a_node_without_rillflow_is_named(cluster: Cluster) -> None:
    node = cluster.others[1]
    node.run("bash", "-ec", "mkdir -p /tmp/o; echo 'import not_there' > /tmp/o/rillflow.py")
    cluster.join(node, env={"PYTHONPATH": "/tmp/o"})
    said = cluster.refused("bare")
    stop_ray(node)
    assert "could not be started on node 10.77.0.3" in said and "No module named 'not_there'" in said


def test_shared_memory_that_is_too_small_is_refused(cluster: Cluster) -> None:
    node = cluster.others[2]
    cluster.join(node)
    said = cluster.refused("small")
    stop_ray(node)
    assert "/dev/shm of node 10.77.0.4 has 64.0 MiB, but Ray's object store needs 95.4 MiB" in said


def test_a_run_directory_that_a_node_cannot_write_or_does_not_see_is_refused(cluster: Cluster) -> None:
    node = cluster.others[3]
    cluster.join(node)
    node.run("mount", "-o", "remount,bind,ro", str(SHARED))
    said = cluster.refused("locked")
    assert "on node 10.77.0.5: cannot write /mnt/locked: Read-only file system" in said
    node.run("umount", str(SHARED))
    said = cluster.refused("unseen")
    assert "node 10.77.0.5 has other files than this machine: it cannot read /mnt/reward.py" in said
    stop_ray(node)


BARE = {"RAY_AUTH_MODE": "", "RAY_AUTH_TOKEN": ""}
"""A shell before any command of the page."""
IN_SMALL = " ".join(f"--set {setting}" for setting in SHORT)


def test_the_pages_commands_bring_up_two_machines(tmp_path: Path) -> None:
    page = (FOLDER / "docs" / "cluster.md").read_text("utf-8").replace("10.0.0.1", "10.77.0.1")
    blocks = [
        re.sub(r"^\$ ", "", block, flags=re.M) for block in re.findall(r"```console\n(.*?)```", page, re.S)
    ]
    on_first, on_other, run = blocks[1:4]
    assert "ray start --head" in on_first and "ray start --address" in on_other and "rillflow run" in run
    (tmp_path / "run.toml").write_text(RECIPE.replace("NAME", "grpo"))
    (tmp_path / "reward.py").write_text(REWARD)
    with machines(tmp_path, shared=["9g", "9g"]) as (first, other):
        first.run("bash", "-ec", f"{on_first}\ncp ~/.ray/auth_token {SHARED}", env=BARE)
        other.run("bash", "-ec", f"mkdir ~/.ray\ncp {SHARED}/auth_token ~/.ray\n{on_other}", env=BARE)
        typed = f"cd {SHARED}\nexport RAY_AUTH_MODE=token\n{run.strip()} {IN_SMALL}"
        first.run("bash", "-ec", typed, env=BARE)
    assert len(Cluster(tmp_path, [first, other]).nodes_of("runs/two")) == 2


STAND_INS = {
    "scontrol": "#!/bin/bash\nprintf 'node-1\\nnode-2\\n'\n",
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && node=${1#*=}; shift; done
[[ $node == node-1 ]] && exec "$@"
exec nsenter -t OTHER -n -m -u "$@"
""",
}
"""Slurm's commands, as far as the script uses them; the second node is entered with nsenter."""


def test_the_slurm_script_runs_on_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE.replace("NAME", "grpo"))
    (tmp_path / "reward.py").write_text(REWARD)
    script = (FOLDER / "examples" / "cluster" / "slurm.sbatch").read_text("utf-8")
    (tmp_path / "slurm.sbatch").write_text(script)
    with machines(tmp_path) as (first, other):
        (tmp_path / "bin").mkdir()
        for name, text in STAND_INS.items():
            (tmp_path / "bin" / name).write_text(text.replace("OTHER", str(number_within(other.pid))))
            (tmp_path / "bin" / name).chmod(0o755)
        job = {"SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_ID": "1234567", **BARE}
        job["RAY_START_OPTIONS"] = "--num-cpus=1 --object-store-memory=100000000"
        typed = f"bash slurm.sbatch run.toml --dir run --set '{DP}' {IN_SMALL}"
        first.run("bash", "-ec", f"PATH={SHARED}/bin:$PATH; cd {SHARED}; {typed}", env=job)
        left = first.run("bash", "-c", "ps -e -o args= | grep -c '[r]aylet/raylet' || true")
    assert {each["address"] for each in Cluster(tmp_path, [first, other]).nodes_of("run").values()} == {
        "10.77.0.1",
        "10.77.0.2",
    }
    assert left.strip() == "0", "the job ends with its cluster"
