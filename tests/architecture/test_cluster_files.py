"""Files of examples/cluster and the Dockerfile: the script's behaviour; pods and image are complete."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import tomllib
from contextlib import suppress
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


STAND_INS = {
    "scontrol": """#!/bin/bash
echo "scontrol $*" >> "$CALLS"
[ "$1" = show ] && printf 'node-1\\nnode-2\\n'
exit 0
""",
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && export NODE=${1#*=}; shift; done
exec "$@"
""",
    "hostname": "#!/bin/bash\necho 10.0.0.${NODE#node-} 192.168.0.1\n",
    "ip": '#!/bin/bash\necho "2: $6    inet 10.9.0.${NODE#node-}/24 brd 10.9.0.255 scope global $6"\n',
    "ray": """#!/bin/bash
echo "ray $*" >> "$CALLS"
[ "$1" = status ] && grep '^ray start' "$CALLS" | sed 's/.*/ 1 node_x/'
[ "$1" = start ] && exec sleep 60
exit 0
""",
    "rillflow": """#!/bin/bash
echo "rillflow $*" >> "$CALLS"
trap 'sleep 0.3; echo stopped >> "$CALLS"; exit 143' TERM
touch "$READY"
[ -n "$CODE" ] && exit "$CODE"
while true; do sleep 0.05; done
""",
}
"""Slurm's, Ray's and Rillflow's commands, as far as the script uses them."""


def submitted(folder: Path, sent: signal.Signals | None, **more: str) -> tuple[int, list[str]]:
    """Run the script, send it a signal once the run is there, and return its code and its commands."""
    (bin_ := folder / "bin").mkdir()
    for name, text in STAND_INS.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    calls, ready = folder / "calls", folder / "ready"
    job = {"SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_ID": "1234567", "CALLS": str(calls), "CODE": ""}
    job |= {"READY": str(ready), "PATH": f"{bin_}:{os.environ['PATH']}", **more}
    script = subprocess.Popen(["bash", str(SCRIPT), "run.toml"], env=job, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < until:
            time.sleep(0.02)
        if sent is not None:
            script.send_signal(sent)
        code = script.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
    return code, calls.read_text().splitlines()


def test_a_job_at_its_time_limit_stops_with_a_checkpoint_and_is_queued_again(tmp_path: Path) -> None:
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SCRIPT.read_text("utf-8"), re.M))
    kind, _, seconds = options["signal"].partition("@")
    code, calls = submitted(tmp_path, signal.SIGUSR1)
    (typed,) = (line for line in calls if line.startswith("rillflow"))
    stop_s = re.search(r"run\.stop_s=(\d+)", typed)
    assert kind == "B:USR1" and "requeue" in options
    assert stop_s is not None and int(stop_s[1]) <= int(seconds) - 60, "a checkpoint has to be written too"
    assert code == 143 and calls[-2:] == ["stopped", "scontrol requeue 1234567"]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (None, 1), (None, 0)])
def test_a_cancelled_failed_or_finished_job_is_not_queued_again(
    tmp_path: Path, sent: signal.Signals | None, code: int
) -> None:
    found, calls = submitted(tmp_path, sent, CODE="" if sent else str(code))
    assert found == code and not any("requeue" in line for line in calls)


def test_a_network_interface_may_be_chosen(tmp_path: Path) -> None:
    _, calls = submitted(tmp_path, None, CODE="0", INTERFACE="ib0")
    starts = [line for line in calls if line.startswith("ray start")]
    assert sorted(re.findall(r"--node-ip-address=(\S+)", " ".join(starts))) == ["10.9.0.1", "10.9.0.2"]
    assert any("placement.address=10.9.0.1:" in line for line in calls)


def test_the_image_copies_what_is_there_and_installs_the_torch_and_extras_of_the_package() -> None:
    text, ignored = ((ROOT / name).read_text("utf-8") for name in ("Dockerfile", ".dockerignore"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for word in line.split()]
    kept = re.findall(r"^!(\S+)$", ignored, re.M)
    assert copied and set(copied) <= set(kept), "the build would not see these files"
    assert all((ROOT / name).exists() for name in kept)
    (torch,) = re.findall(r'"(torch[^"]*)"', text)
    assert torch in project["dependencies"]
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.M)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert re.search(r"^USER (?!root)", text, re.M)
