"""What training takes beside its layers: memory of gradient sums, pauses for checkpoints.

    python benchmarks/training_memory.py sums
    python benchmarks/training_memory.py sums --mib 256 --write results.md
    python benchmarks/training_memory.py saves --mib 2048

Peaks are those of the process (VmHWM, set back before each), above what it held before; seconds are medians.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rillflow.cluster.ranks import ProcessRanks
from rillflow.dataflow.checkpoint import save_checkpoint
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model
from rillflow.roles.saving import Saving
from rillflow.roles.share import Share
from rillflow.training.config import TrainConfig
from rillflow.training.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/distributed"))
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--mib", type=int, default=256, help="of gradients, or of a checkpoint")
    parser.add_argument("--folder", help="where checkpoints are written; the system's for temporary files")
    parser.add_argument("--write", help="a file for the table")
    arguments = parser.parse_args()
    lines = list(PARTS[arguments.what](arguments))
    print("\n".join(lines))
    if arguments.write:
        Path(arguments.write).write_text("\n".join(lines) + "\n")


def sums(arguments: argparse.Namespace) -> Iterator[str]:
    """Two processes joined by gloo add up their gradients: Rillflow's, and what one writes by hand."""
    from processes import together

    mib = arguments.mib
    yield f"`python benchmarks/training_memory.py sums --mib {mib}`, {_where()}; 2 ranks, gloo, float32."
    yield ""
    yield "| sum of gradients | memory on top | as a share of the gradients | seconds |"
    yield "|---|---|---|---|"
    for name in SUMS:
        peak, seconds = together(2, _summed, name, mib)[0]
        yield f"| {name} | {peak / 2**20:.0f} MiB | {peak / 2**20 / mib:.2f}x | {seconds:.2f} |"


def _summed(ranks: ProcessRanks, name: str, mib: int) -> tuple[int, float]:
    gradients = [torch.ones(2**20 // 4 * 16) for _ in range(mib // 16)]
    return _measured(lambda: SUMS[name](ranks, gradients))


def _by_hand(ranks: ProcessRanks, gradients: Sequence[Tensor], most: int) -> None:
    """Flat copies of at most so many gradients, each summed by torch's own all_reduce."""
    for start in range(0, len(gradients), most):
        some = gradients[start : start + most]
        flat = torch.cat([each.view(-1) for each in some])
        dist.all_reduce(flat, group=ranks.group)
        for each, part in zip(some, flat.split([each.numel() for each in some]), strict=True):
            each.copy_(part.view_as(each))


SUMS: dict[str, Callable[[ProcessRanks, Sequence[Tensor]], None]] = {
    "Rillflow, in the order of ranks, by buckets": lambda ranks, given: ranks.sum_(given),
    "torch all_reduce of one flat copy": lambda ranks, given: _by_hand(ranks, given, len(given)),
    "torch all_reduce of flat copies of 64 MiB": lambda ranks, given: _by_hand(ranks, given, 4),
}


def saves(arguments: argparse.Namespace) -> Iterator[str]:
    """One rank saves a model and its optimiser: what training waits for, and until it is all on the disk."""
    import torch.distributed.checkpoint as dcp

    hidden = 64 * round((arguments.mib * 2**20 / 12 / 8 / 13) ** 0.5 / 64)  # 8 layers of 12 to 13 hidden^2
    new = NewModel(hidden=hidden, layers=8, heads=hidden // 64, kv_heads=hidden // 64, context=16)
    model = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())
    share = Share.whole(model)
    trainer = Trainer(model.module, TrainConfig(), total_steps=1, parallel=share.parallel)
    state = _stepped(trainer, model.module)
    everything = dict(model.module.state_dict()) | state

    def rillflow(folder: Path) -> float:
        began = time.perf_counter()
        saving = Saving(share, folder / "policy", folder / "policy.optimizer", state)
        pause = time.perf_counter() - began
        files = saving.written(wait=True)
        save_checkpoint(folder.parent, 1, lambda draft: _moved(folder, draft, files), {}, 1)
        return pause

    def at_once(folder: Path) -> float:
        began = time.perf_counter()
        save_file({name: tensor.clone() for name, tensor in everything.items()}, folder / "all")
        with (folder / "all").open("rb") as file:
            os.fsync(file.fileno())
            hashlib.file_digest(file, "sha256")
        return time.perf_counter() - began

    def of_torch(folder: Path) -> float:
        began = time.perf_counter()
        saving: Any = dcp.async_save(everything, checkpoint_id=folder / "dcp", no_dist=True)
        pause = time.perf_counter() - began
        saving.result()
        return pause

    size = sum(tensor.nbytes for tensor in everything.values())
    yield f"`python benchmarks/training_memory.py saves --mib {arguments.mib}`, {_where()}; one rank,"
    yield f"{size / 2**20:,.0f} MiB of weights and moments, medians of {REPEATS}."
    yield ""
    yield "| checkpoint | training waits | until all of it is on the disk |"
    yield "|---|---|---|"
    ways = {
        "Rillflow: copied, then written and hashed by a thread": rillflow,
        "torch.distributed.checkpoint.async_save, no hashes": of_torch,
        "safetensors' save_file, fsync, SHA-256": at_once,
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():  # in turns
            with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
                began = time.perf_counter()
                (folder := Path(root) / "begun").mkdir()
                pause = way(folder)
                taken[name].append((pause, time.perf_counter() - began))
    for name, found in taken.items():
        pause, total = (statistics.median(column) for column in zip(*found, strict=True))
        yield f"| {name} | {pause:.2f} s | {total:.2f} s |"


def _stepped(trainer: Trainer, module: torch.nn.Module) -> dict[str, Tensor]:
    """The training state after a step."""
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight)
    trainer.optimizer.step()
    trainer.optimizer.discard()
    return trainer.optimizer.state()


def _moved(folder: Path, draft: Path, files: dict[str, Any] | None) -> dict[str, Any]:
    for part in folder.iterdir():
        part.rename(draft / part.name)
    return files or {}


def _measured(act: Callable[[], object]) -> tuple[int, float]:
    """The most memory above the present, and the median seconds."""
    seconds, most = [], 0
    for _ in range(REPEATS):
        Path("/proc/self/clear_refs").write_text("5")
        before, began = _status("VmRSS"), time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
        most = max(most, _status("VmHWM") - before)
    return most, statistics.median(seconds)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def _where() -> str:
    return f"{os.cpu_count()} cores, torch {torch.__version__}"


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "sums": sums,
    "saves": saves,
}

if __name__ == "__main__":
    main()
