"""The quickstart on one node and on two, by one changed setting: equal bits, and startup times.

    python benchmarks/ranks/two_nodes.py --write benchmarks/results/two_nodes.md

Nodes are network namespaces of this machine, each with its own Ray daemons. They share only the kernel, the
CPU and one folder (``tests/distributed/machines.py``). Startup times are meaningful; times between nodes are
not.

SETTING   recipes/arithmetic/run.toml, run.threads = 1, a few steps
          dp 2 on one pool, or the sampler on its own pool
ONE       a cluster that the run starts itself, with all ranks
TWO       placement.address: Ray runs on both nodes, one core each
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

SMALLEST = []
SLOW = ["--only 'dp 2'"]  # starts Ray in network namespaces

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "tests" / "distributed"
STEPS = ("warm_start.steps=4", "warm_start.warmup_steps=1", "algorithm.steps=2", "policy.warmup_steps=1")
SMALL = ("run.threads=1", "evaluate.problems=20", "evaluate.every=0", *STEPS)
SHAPES = {
    "dp 2": ("placement.pools={ main = 2 }",),
    "sampler on a rank of its own": (
        "placement.pools={ main = 1, answers = 1 }",
        'placement.roles={ sampler = "answers" }',
    ),
}
TIMES = "run/step_seconds/mean"


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Results of a run."""

    metrics: str
    """Digest of every step's metrics, without times."""
    weights: str
    """Digest of the last checkpoint's weights."""
    nodes: int
    """Number of nodes with a rank."""
    start_s: float
    """Seconds from the command to the beginning of the first step."""
    all_s: float
    """Seconds from the command to its end."""


def ran(node: Any, folder: Path, name: str, settings: tuple[str, ...]) -> Ran:
    """Run the quickstart's recipe from this node."""
    from machines import SHARED

    words = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    command = ["rillflow", "run", f"{SHARED}/run.toml", "--dir", f"{SHARED}/{name}", *words]
    began, metrics = time.monotonic(), folder / name / "metrics.jsonl"
    process = node.started(*command)
    while process.poll() is None and not (metrics.exists() and metrics.read_text("utf-8").endswith("\n")):
        time.sleep(0.02)
    first_s = time.monotonic() - began
    said, _ = process.communicate()
    assert process.returncode == 0, said
    lines: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    step_s = lines[0]["metrics"][TIMES]["mean"]
    steps = [{key: value for key, value in line["metrics"].items() if key != TIMES} for line in lines]
    weights = max((folder / name / "checkpoints").glob("step-*")) / "policy" / "model.safetensors"
    started = json.loads((folder / name / "environment.json").read_text("utf-8"))["starts"][0]
    return Ran(
        metrics=digest(json.dumps(steps).encode()),
        weights=digest(weights.read_bytes()),
        nodes=len({each["address"] for each in started["nodes"].values()}) or 1,
        start_s=first_s - step_s,
        all_s=time.monotonic() - began,
    )


def digest(content: bytes) -> str:
    """Return the first digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]


def rows(folder: Path, shapes: list[str]) -> list[str]:
    """Return a line of the table for every shape and number of nodes."""
    from machines import PORT, machines, start_ray

    found = []
    with machines(folder, shared=["4g", "4g"]) as (first, second):
        began = time.monotonic()
        ups = [start_ray(first), start_ray(second, first)]
        assert [each.wait() for each in ups] == [0, 0]
        up_s = time.monotonic() - began
        for shape in shapes:
            one = ran(first, folder, f"{shape} one", SHAPES[shape])
            address = f"placement.address=10.77.0.1:{PORT}"
            two = ran(first, folder, f"{shape} two", (*SHAPES[shape], address))
            for each in (one, two):
                same = (
                    ""
                    if each is one
                    else "yes"
                    if (one.weights, one.metrics) == (two.weights, two.metrics)
                    else "NO"
                )
                times = f"{each.start_s:.1f} | {each.all_s:.1f}"
                found.append(
                    f"| {shape} | {each.nodes} | {each.weights} | {each.metrics} | {same} | {times} |"
                )
    return [*found, "", f"`ray start` on both nodes: {up_s:.1f} s together."]


def main() -> None:
    """Run every shape on one node and on two; print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="the page to write; printed if left out")
    parser.add_argument("--only", choices=[*SHAPES], help="one of the shapes")
    given = parser.parse_args()
    sys.path.insert(0, str(HARNESS))
    from machines import why_not

    if why_not():
        raise SystemExit(f"no namespaces can be made here: {why_not()}")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "recipes" / "arithmetic" / "run.toml", folder)
        table = rows(Path(folder), [given.only] if given.only else [*SHAPES])
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray"))
    page = [
        "# The quickstart on two nodes",
        "",
        f"`python benchmarks/ranks/two_nodes.py --write benchmarks/results/two_nodes.md`, "
        f"{os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}, {versions}; the setting is at "
        "the head of the script.",
        "",
        "Same: weights and every metric but times are, bit for bit, those of one node. Start-up: from the",
        "command to the first step, most of it importing; on one node the run starts Ray, on two Ray is up.",
        "",
        "| ranks | nodes | weights | metrics | same | start-up, s | all, s |",
        "|---|---|---|---|---|---|---|",
        *table,
        "",
    ]
    if given.write:
        given.write.write_text("\n".join(page), "utf-8")
    else:
        sys.stdout.write("\n".join(page))


if __name__ == "__main__":
    main()
