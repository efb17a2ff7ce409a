"""LoRA against training all weights: the quickstart's GRPO from its warm start, by the command users run.

    recipes/arithmetic/run.toml ─ warm start ─> base ─┬─ all weights ─> accuracy, seconds of a step,
       one for every seed                             └─ adapter ─────> bytes published and kept

    python benchmarks/adapters.py --seeds 0 1 2 --write benchmarks/results/adapters.md    # 15 minutes

Accuracy is of the recipe's 500 held-out problems after its 90 steps. Bytes published: what a sampler
elsewhere would be sent. Training state: what a checkpoint keeps to go on from.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "arithmetic" / "run.toml"
COMMAND = "import sys; from rillflow.cli.main import main; sys.exit(main())"
RANK = 16
ADAPTED = (f"policy.model.adapter={{ rank = {RANK} }}",)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run came to."""

    before: float
    """Accuracy of the base."""
    accuracy: float
    """Of the last evaluation."""
    step_s: float
    """The median step."""
    published: int
    """Bytes of the weights of a checkpoint."""
    state: int
    """Bytes of its training state."""


def run(folder: Path, *settings: str) -> Path:
    """One run by the command; its directory."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-c", COMMAND, "run", str(RECIPE), "--dir", str(folder), "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return folder


def lines_of(path: Path) -> list[dict]:
    """A run's file of a JSON object a line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def trained(folder: Path) -> Trained:
    """What is to be said of a run."""
    looks = [line["correct"] / line["count"] for line in lines_of(folder / "evaluations.jsonl")]
    steps = [line["metrics"]["run/step_seconds/mean"]["mean"] for line in lines_of(folder / "metrics.jsonl")]
    newest = max((folder / "checkpoints").glob("step-*"))

    def size(name: str) -> int:
        return sum(path.stat().st_size for path in (newest / name).glob("*.safetensors"))

    return Trained(
        before=looks[0],
        accuracy=looks[-1],
        step_s=median(steps[1:]),
        published=size("policy"),
        state=size("policy.optimizer"),
    )


def main() -> None:
    """Run every seed; print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of base and training")
    parser.add_argument("--lr", type=float, default=3e-3, help="the adapter's learning rate (3e-3)")
    parser.add_argument("--write", type=Path, help="the page to write; printed if left out")
    given = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as name:
        for seed in given.seeds:
            folder = Path(name) / str(seed)
            short = ("algorithm.steps=1", "policy.warmup_steps=0", "run.checkpoint_every=1000")
            run(folder / "base", f"run.seed={seed}", *short)
            base = min((folder / "base" / "checkpoints").glob("step-*")) / "policy"
            how = (
                f"run.seed={seed}",
                "warm_start=none",
                "policy.model.new=none",
                f"policy.model.path={base}",
            )
            for what, settings in {
                "all weights": (),
                f"LoRA, rank {RANK}": (*ADAPTED, f"policy.lr={given.lr}"),
            }.items():
                found = trained(run(folder / what, *how, *settings))
                table.append(
                    f"| {seed} | {what} | {found.before:.3f} | {found.accuracy:.3f} | {found.step_s:.2f} "
                    f"| {found.published:,} | {found.state:,} |"
                )
                print(table[-1], file=sys.stderr, flush=True)
    seeds = " ".join(map(str, given.seeds))
    page = [
        "# LoRA against training all weights",
        "",
        f"`python benchmarks/adapters.py --seeds {seeds} --lr {given.lr:g}`, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}, torch {version('torch')}; "
        "the setting is at the head of the script.",
        "",
        "| seed | trained | accuracy before | after | a step, s | bytes published | of training state |",
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
