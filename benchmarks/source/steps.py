"""Step times of two versions of this package, measured in turn, and a bitwise comparison of results.

    commit BEFORE ── separate checkout ───┐
                                          ├─ rillflow run, same recipe and settings, in turn ─> metrics.jsonl
    this tree ────────────────────────────┘     seconds of every step but the first ─> ratio of medians
                                                weights, metrics ─> equal or not

    python benchmarks/source/steps.py --before a3f53ca --rounds 6 --write benchmarks/results/steps.md

Both versions run with this Python, each with its own recipes. A round has one run of each; the order
alternates. The ratio is of medians over all rounds. The range of the ratios of single rounds shows the noise
of the machine. The bit comparison covers the weights of every role in the last checkpoint, and every metric
of every step except times and memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SMALLEST = []
SLOW = ["--before HEAD --rounds 1 --only 'GRPO, inline'"]  # runs a worktree of another commit

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from rillflow.cli.main import main; sys.exit(main())"
TIMES = "run/step_seconds/mean"
NOT_COMPARED = ("seconds", "_s/", "bytes", "memory", "run/")
"""Parts of the names of metrics that describe the machine."""
PAIR = ("placement.pools={ main = 1, answers = 1 }", 'placement.roles={ sampler = "answers" }')
SMALL = ("run.threads=1", "evaluate.every=0", "policy.warmup_steps=1", "warm_start.warmup_steps=1")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "GRPO, inline": ("recipes/arithmetic/run.toml", ("warm_start.steps=2", "algorithm.steps=10")),
    "PPO, inline": ("recipes/ppo/run.toml", ("warm_start.steps=2", "algorithm.steps=16")),
    "GRPO, two ranks on Ray": (
        "recipes/arithmetic/run.toml",
        ("warm_start.steps=2", "algorithm.steps=8", "placement.pools={ main = 2 }"),
    ),
    "GSPO, inline": ("recipes/gspo/run.toml", ("warm_start.steps=2", "algorithm.steps=12")),
    "Safe RLHF with ptx, inline": (
        "recipes/safe_rlhf/run.toml",
        ("warm_start.steps=2", "algorithm.steps=8", "algorithm.pretrain_weight=0.1"),
    ),
    "DPO, inline": ("recipes/dpo/run.toml", ("warm_start.steps=2", "algorithm.steps=20")),
    "GRPO, one version ahead": (
        "recipes/arithmetic/run.toml",
        ("warm_start.steps=2", "algorithm.steps=8", 'schedule={mode="ahead",freshness=1}', *PAIR),
    ),
}


def ran(tree: Path, case: str, folder: Path) -> list[float]:
    """Run a case from a tree; return the seconds of every step of the algorithm but its first."""
    recipe, settings = CASES[case]
    words = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-c", COMMAND, "run", recipe, "--dir", str(folder), *words]
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    algorithm = [line for line in lines if line["phase"] == lines[-1]["phase"]]
    return [line["metrics"][TIMES]["mean"] for line in algorithm[1:]]


def bits(folder: Path) -> str:
    """Return a digest of a run's last weights and of its metrics, without those of the machine."""
    found = hashlib.sha256()
    for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
        said = json.loads(line)
        kept = {
            name: value
            for name, value in said["metrics"].items()
            if not any(part in name for part in NOT_COMPARED)
        }
        found.update(json.dumps([said["phase"], said["step"], kept], sort_keys=True).encode())
    last = max((folder / "checkpoints").glob("step-*"))
    for file in sorted(last.glob("*/*.safetensors")):
        found.update(f"{file.relative_to(last)}".encode() + file.read_bytes())
    return found.hexdigest()[:12]


def row(case: str, trees: dict[str, Path], rounds: int, folder: Path) -> str:
    """Return one row of the table."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in trees}
    digests: dict[str, set[str]] = {name: set() for name in trees}
    for number in range(rounds):
        for name in sorted(trees, reverse=bool(number % 2)):
            run = folder / f"{case} {name} {number}"
            seconds[name].append(ran(trees[name], case, run))
            digests[name].add(bits(run))
    before, after = (median(chain.from_iterable(seconds[name])) for name in ("before", "now"))
    ratios = sorted(
        median(now) / median(then) for then, now in zip(seconds["before"], seconds["now"], strict=True)
    )
    steps = sum(map(len, seconds["now"]))
    return (
        f"| {case} | {steps} | {before:.3f} | {after:.3f} | {after / before:.2f} "
        f"| {ratios[0]:.2f} to {ratios[-1]:.2f} | {' '.join(sorted(digests['before']))} "
        f"| {' '.join(sorted(digests['now']))} |"
    )


def main() -> None:
    """Time every case; print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default="a3f53ca", metavar="COMMIT", help="what is compared with")
    parser.add_argument("--rounds", type=int, default=6, help="runs of each version and case")
    parser.add_argument("--only", choices=[*CASES], help="one of the cases")
    parser.add_argument("--write", type=Path, help="the page to write; printed if left out")
    given = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run([*git, "worktree", "add", "--detach", "--quiet", before, given.before], check=True)
        try:
            trees = {"before": before, "now": ROOT}
            cases = [given.only] if given.only else [*CASES]
            table = [row(case, trees, given.rounds, Path(folder)) for case in cases]
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", before], check=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray"))
    page = [
        "# Seconds of a step, before and now",
        "",
        measured_at.line(),
        "",
        f"`python benchmarks/source/steps.py --before {given.before} --rounds {given.rounds}`, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, "
        f"Python {platform.python_version()}, {versions}; cases and settings are at the head of the script.",
        "",
        "| case | steps each | before, s | now, s | now / before | of single rounds | bits before | now |",
        "|---|---|---|---|---|---|---|---|",
        *table,
        "",
    ]
    if given.write:
        given.write.write_text("\n".join(page), "utf-8")
    else:
        sys.stdout.write("\n".join(page))


if __name__ == "__main__":
    main()
