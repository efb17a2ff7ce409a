"""Files of examples/cluster: bash can parse the script, and the cluster's pods have what a run needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
SCRIPT = FOLDER / "slurm.sbatch"


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    cluster = yaml.safe_load((FOLDER / "raycluster.yaml").read_text("utf-8"))
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    found: dict[str, Any] = cluster["spec"]
    return found


def groups(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_the_slurm_script_is_bash() -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SCRIPT.read_text("utf-8"), re.M))
    assert options["ntasks-per-node"] == "1", "Ray starts one daemon a node"
    assert "exclusive" in options, "Ray would count cores that are another job's"


def test_every_pod_shares_the_runs_and_has_memory_for_the_store(spec: dict[str, Any]) -> None:
    images = set()
    for group in groups(spec):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/runs"]["persistentVolumeClaim"] == {"claimName": "rillflow-runs"}
        shared = mounts["/dev/shm"]["emptyDir"]
        memory = container["resources"]["limits"]["memory"]
        assert shared["medium"] == "Memory"
        # Ray's object store takes 30% of a pod's memory; with less shared memory it uses files.
        assert int(shared["sizeLimit"].removesuffix("Gi")) >= 0.3 * int(memory.removesuffix("Gi"))
        assert container["resources"]["limits"] == container["resources"]["requests"]
        images.add(container["image"])
    assert len(images) == 1, "versions are the same on every node"


def test_no_rank_is_on_the_head_and_all_workers_are_there_from_the_start(spec: dict[str, Any]) -> None:
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    for group in groups(spec):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]


def test_the_cluster_asks_for_a_token_and_has_the_tested_ray(spec: dict[str, Any]) -> None:
    assert spec["authOptions"] == {"mode": "token"}
    assert f"ray=={spec['rayVersion']}\n" in (ROOT / "constraints.txt").read_text("utf-8")
