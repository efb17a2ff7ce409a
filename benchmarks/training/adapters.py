"""LoRA against full training: the quickstart's GRPO after its warm start, run by the users' command.

    recipes/arithmetic/run.toml ─ warm start ─> base ─┬─ all weights ────────> accuracy, seconds per step,
       one per seed                                   ├─ adapter ────────────> bytes held, published, saved
                                                      └─ and base int8, 4bit ┘

    python benchmarks/training/adapters.py --seeds 0 1 2 --write benchmarks/results/adapters.md   # 20 minutes
    python benchmarks/training/adapters.py --seeds 0 1 2 --trained lora int8 4bit --threads 1
    python benchmarks/training/adapters.py --seeds --loads --write benchmarks/results/int8.md

- Accuracy: on the recipe's 500 held-out problems after its 90 steps.
- Weights held: bytes of the policy's module. All roles that use the module share them.
- Bytes published: the size of a publish to a sampler in another process.
- Training state: the part of a checkpoint that training needs to resume.

With --loads, a separate process reads a model of 150 million weights and reports its memory before, after
and at the peak.
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
from importlib.util import find_spec
from pathlib import Path
from statistics import median

SMALLEST = []
SLOW = ["--trained lora --threads 1"]  # trains the quickstart twice

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "arithmetic" / "run.toml"
COMMAND = "import sys; from rillflow.cli.main import main; sys.exit(main())"
RANK = 16
ADAPTED = f"policy.model.adapter={{ rank = {RANK} }}"
KINDS = {
    "all": ("all weights", ()),
    "lora": (f"LoRA, rank {RANK}", (ADAPTED,)),
    "int8": (f"LoRA, rank {RANK}, base int8", (ADAPTED, "policy.model.adapter.base=int8")),
    "4bit": (f"LoRA, rank {RANK}, base 4bit", (ADAPTED, "policy.model.adapter.base=4bit")),
}
LARGE = {"hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 16, "context": 64}
LOAD = """
import resource, sys, torch
from pathlib import Path
from rillflow.models.config import AdapterConfig, ModelConfig
from rillflow.models.language_model import load_model

def held():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20

path, dtype, base = sys.argv[1:]
config = ModelConfig(path=path, dtype=dtype, adapter=AdapterConfig(rank=16, base=base))
how = {"seed": 0, "device": torch.device("cpu"), "base": Path()}
load_model(config.model_copy(update={"path": path + "-small"}), **how)  # libraries are there from here on
before = held()
Path("/proc/self/clear_refs").write_text("5")  # the highest begins anew
model = load_model(config, **how)
highest = next(
    int(line.split()[1]) / 2**10
    for line in Path("/proc/self/status").read_text().splitlines()
    if line.startswith("VmHWM")
)
weights = sum(each.nbytes for each in model.module.parameters()) / 2**20
print(f"{weights:.0f} | {held() - before:.0f} | {highest - before:.0f}")
"""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Results of one run."""

    before: float
    """Accuracy before training."""
    accuracy: float
    """Accuracy at the last evaluation."""
    step_s: float
    """Median seconds of a step."""
    held: int
    """Bytes of the policy's weights in memory."""
    published: int
    """Bytes of the weights in a checkpoint."""
    state: int
    """Bytes of the training state in a checkpoint."""


def run(folder: Path, *settings: str) -> Path:
    """Run a recipe with the command and return its run directory."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-c", COMMAND, "run", str(RECIPE), "--dir", str(folder), "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return folder


def lines_of(path: Path) -> list[dict]:
    """Return the objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def trained(folder: Path) -> Trained:
    """Return the results of a run."""
    looks = [line["correct"] / line["count"] for line in lines_of(folder / "evaluations.jsonl")]
    steps = [line["metrics"]["run/step_seconds/mean"]["mean"] for line in lines_of(folder / "metrics.jsonl")]
    newest = max((folder / "checkpoints").glob("step-*"))

    def size(name: str) -> int:
        return sum(path.stat().st_size for path in (newest / name).glob("*.safetensors"))

    return Trained(
        before=looks[0],
        accuracy=looks[-1],
        step_s=median(steps[1:]),
        held=held(newest / "policy"),
        published=size("policy"),
        state=size("policy.optimizer"),
    )


def held(directory: Path) -> int:
    """Return the bytes of a model's parameters after loading."""
    import torch

    from rillflow.models.config import ModelConfig
    from rillflow.models.language_model import load_model

    how = {"seed": 0, "device": torch.device("cpu"), "base": Path()}
    model = load_model(ModelConfig(path=str(directory)), **how)
    return sum(each.nbytes for each in model.module.parameters())


def loads() -> list[str]:
    """Measure the memory for reading a larger base, by dtype and base precision; return lines of the page."""
    import torch

    from rillflow.models.config import ModelConfig, NewModel
    from rillflow.models.language_model import load_model, save_model

    lines = [
        f"Reading a base of {LARGE['layers']} layers of {LARGE['hidden']} (float32 on the disk):",
        "",
        "| type | base | weights, MiB | taken, MiB | at the highest, MiB |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "base"
        for new, where in ((NewModel(**LARGE), path), (NewModel(), path.with_name("base-small"))):
            how = {"seed": 0, "device": torch.device("cpu"), "base": Path()}
            save_model(load_model(ModelConfig(new=new), **how), where)
        for dtype in ("float32", "bfloat16"):
            for base in ("full", "int8", *(["4bit"] if find_spec("bitsandbytes") else [])):
                command = [sys.executable, "-c", LOAD, str(path), dtype, base]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr)
                lines.append(f"| {dtype} | {base} | {done.stdout.strip()} |")
    return [*lines, ""]


def rows(given: argparse.Namespace) -> list[str]:
    """Train from the base of every seed and return a table line for each run."""
    table = []
    with tempfile.TemporaryDirectory() as name:
        for seed in given.seeds:
            folder = Path(name) / str(seed)
            short = (
                f"run.threads={given.threads}",
                "algorithm.steps=1",
                "policy.warmup_steps=0",
                "run.checkpoint_every=1000",
            )
            run(folder / "base", f"run.seed={seed}", *short)
            base = min((folder / "base" / "checkpoints").glob("step-*")) / "policy"
            how = (
                f"run.seed={seed}",
                f"run.threads={given.threads}",
                "warm_start=none",
                "policy.model.new=none",
                f"policy.model.path={base}",
            )
            for what, settings in (KINDS[kind] for kind in given.trained):
                settings = (*settings, f"policy.lr={given.lr}") if settings else ()
                found = trained(run(folder / what, *how, *settings))
                table.append(
                    f"| {seed} | {what} | {found.before:.3f} | {found.accuracy:.3f} | {found.step_s:.2f} "
                    f"| {found.held:,} | {found.published:,} | {found.state:,} |"
                )
                print(table[-1], file=sys.stderr, flush=True)
    return table


def main() -> None:
    """Run every seed; print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="of base and training")
    parser.add_argument("--lr", type=float, default=3e-3, help="the adapter's learning rate (3e-3)")
    parser.add_argument("--trained", choices=KINDS, nargs="+", default=[*KINDS][:3], help="what (not 4bit)")
    parser.add_argument("--threads", type=int, default=0, help="of torch (its choice)")
    parser.add_argument("--loads", action="store_true", help="measure what reading a base takes, too")
    parser.add_argument("--write", type=Path, help="the page to write; printed if left out")
    given = parser.parse_args()
    table = rows(given)
    words = " ".join(map(str, ("--seeds", *given.seeds)))
    words += f" --lr {given.lr:g} --trained {' '.join(given.trained)}" if table else ""
    words += f" --threads {given.threads}" if given.threads else ""
    words += " --loads" if given.loads else ""
    learned = [
        "| seed | trained | accuracy before | after | a step, s | bytes of weights held | published "
        "| of training state |",
        "|---|---|---|---|---|---|---|---|",
        *table,
        "",
    ]
    page = [
        f"# {' against '.join(KINDS[kind][0] for kind in given.trained) if table else 'Reading a base'}",
        "",
        f"`python benchmarks/training/adapters.py {words}`, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}, torch {version('torch')}; "
        "the setting is at the head of the script.",
        "",
        *(learned if table else ()),
        *(loads() if given.loads else ()),
    ]
    if given.write:
        given.write.write_text("\n".join(page), "utf-8")
    else:
        sys.stdout.write("\n".join(page))


if __name__ == "__main__":
    main()
