"""What training takes beside its layers: memory and seconds of gradient sums, pauses for checkpoints.

    python benchmarks/training/training_memory.py sums
    python benchmarks/training/training_memory.py sums --mib 256 --write results.md
    python benchmarks/training/training_memory.py steps --mib 256
    python benchmarks/training/training_memory.py saves --mib 2048

Peaks are those of the process (VmHWM, set back before each), above what it held before; seconds are medians.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from rillflow.controller.checkpoint import save_checkpoint
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.saving import Saving
from rillflow.sharding.mesh import EarlySums, Gradients, RankGroups
from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.loss import SupervisedLoss
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import BUCKET_BYTES, ProcessRanks

SMALLEST = ["saves --mib 16"]
SLOW = ["sums --mib 16", "steps --mib 16 --tokens 32 --rounds 1"]  # start ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/distributed"))
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--mib", type=int, default=256, help="of gradients, or of a checkpoint")
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch of steps")
    parser.add_argument("--rounds", type=int, default=5, help="of steps")
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
    yield f"`python benchmarks/training/training_memory.py sums --mib {mib}`, {_where()}; 2 ranks, gloo,"
    yield "float32."
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


def steps(arguments: argparse.Namespace) -> Iterator[str]:
    """Whole steps of two processes: without sums, with sums after the last backward pass, and begun in it."""
    from processes import together

    mib, rounds, tokens = arguments.mib, arguments.rounds, arguments.tokens
    command = f"steps --mib {mib} --tokens {tokens} --rounds {rounds}"
    yield f"`python benchmarks/training/training_memory.py {command}`, {_where()}; 2 ranks, gloo, float32,"
    yield "one thread each; medians of steps in turns, the first round left out, and the quartiles of"
    yield "their seconds."
    yield ""
    yield "| between the ranks | step | memory on top | as a share of the gradients | seconds |"
    yield "|---|---|---|---|---|"
    for network, rate in (("loopback", math.inf), ("1 Gbit/s, by sleeping", 125e6)):
        taken = together(2, _steps, mib, tokens, rate, rounds, deadline_s=600.0)[0]
        peaks = {way: statistics.median(peak for peak, _ in found) for way, found in taken.items()}
        for way, found in taken.items():
            top = (peaks[way] - peaks[NONE]) / 2**20
            low, middle, high = statistics.quantiles([second for _, second in found], n=4)
            second = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            yield f"| {network} | {way} | {top:.0f} MiB | {top / mib:.2f}x | {second} |"


def _steps(
    ranks: ProcessRanks, mib: int, tokens: int, rate: float, rounds: int
) -> dict[str, list[tuple[int, float]]]:
    """Peaks and seconds of a rank's steps, by way."""
    ranks = _Far(ranks.group, ranks.members, 600.0, rate)
    parallel = Parallel(_model(mib, tokens).module, RankGroups.whole(ranks))
    parallel.gradients = _Ways(groups=parallel.groups)
    config = TrainConfig(tokens_per_micro_batch=tokens)
    trainer = Trainer(parallel.module, config, total_steps=99, parallel=parallel)
    generator = torch.Generator().manual_seed(ranks.rank)
    rows = Batch(
        ids=row_ids([RowId(0, ranks.rank, 0)]),
        fields={
            "tokens": Ragged.from_rows([torch.randint(0, 60, (tokens,), generator=generator).tolist()]),
            "loss_mask": Ragged.from_rows([[False] + [True] * (tokens - 1)], torch.bool),
        },
    )
    taken: dict[str, list[tuple[int, float]]] = {NONE: [], AFTER: [], EARLY: []}
    for turn in range(rounds + 1):
        for way, found in taken.items():
            _Ways.way = way
            ranks.gather(torch.zeros(1))  # both begin together
            Path("/proc/self/clear_refs").write_text("5")
            began = time.perf_counter()
            trainer.update(rows, SupervisedLoss())
            seconds = time.perf_counter() - began
            if turn:
                found.append((_status("VmHWM"), seconds))
    return taken


NONE, AFTER, EARLY = "no sums", "sums after the backward pass", "sums begun in it"


class _Ways(Gradients):
    """Sums that begin in the backward pass, or after it, or none."""

    way = ""

    def early(self, weights: Mapping[str, nn.Parameter]) -> EarlySums | None:
        return super().early(weights) if _Ways.way == EARLY else None

    def complete(self, gradients: Mapping[str, Tensor], begun: EarlySums | None) -> None:
        if _Ways.way != NONE:
            super().complete(gradients, begun)


class _Far(ProcessRanks):
    """Two ranks whose sums are through no sooner than their bytes cross at so many a second."""

    def __init__(
        self, group: dist.ProcessGroup, members: Sequence[int], deadline_s: float, rate: float
    ) -> None:
        super().__init__(group, members, deadline_s)
        self._rate = rate

    def summing(self, tensors: Sequence[Tensor]) -> Iterator[Any]:
        size = sum(tensor.nbytes for tensor in tensors)
        each = size / self.size / -(-size // BUCKET_BYTES) / self._rate
        for work in super().summing(tensors):
            due = time.perf_counter() + each
            yield _Later(work, due)
            time.sleep(max(0.0, due - time.perf_counter()))


class _Later:
    """A collective that is not through before its time."""

    def __init__(self, work: dist.Work, due: float) -> None:
        self._work, self._due = work, due

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._due and self._work.is_completed()


def _model(mib: int, context: int) -> LanguageModel:
    """One of 8 layers whose weights take so many bytes."""
    hidden = 64 * round((mib * 2**20 / 4 / 8 / 13) ** 0.5 / 64)  # 12 to 13 hidden^2 a layer
    new = NewModel(hidden=hidden, layers=8, heads=hidden // 64, kv_heads=hidden // 64, context=context)
    return load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())


def saves(arguments: argparse.Namespace) -> Iterator[str]:
    """One rank saves a model and its optimiser: what training waits for, and until it is all on the disk."""
    import torch.distributed.checkpoint as dcp

    model = _model(arguments.mib // 3, 16)  # its moments take twice as much
    share = ModelShard.whole(model)
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
    yield f"`python benchmarks/training/training_memory.py saves --mib {arguments.mib}`, {_where()}; one"
    yield f"rank, {size / 2**20:,.0f} MiB of weights and moments, medians of {REPEATS}."
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
    "steps": steps,
    "saves": saves,
}

if __name__ == "__main__":
    main()
