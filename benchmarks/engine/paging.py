"""Memory bands of the KV cache: equal lengths, one long row among short ones, and a too small budget.

    python benchmarks/engine/paging.py
    python benchmarks/engine/paging.py --write benchmarks/results/paging.md

The comparison switches bands off by requiring more free positions than exist. Then all rows share one
rectangle that is as long as the longest row. The engines take turns; a figure is the median of the ratios by
round. The need is the bytes of all tokens. During a reallocation, the peak counts both the old and the new
memory.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from generation import make_module
from torch import nn

from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.native import cache_layout
from rillflow.rollout.native.cache import Cache, LayerShape
from rillflow.rollout.native.engine import NativeEngine
from rillflow.rollout.native.scheduler import Scheduler, Sequence

SMALLEST = []
SLOW = ["--rounds 1"]  # its rows have a thousand tokens

CONTEXT = 8192
POSITION_BYTES = 4 * 2 * 2 * 64 * 4
"""Bytes of a position: 4 layers of 2 heads, keys and values of 64 numbers of 4 bytes."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Rows with the lengths of their prompts and answers."""

    prompts: Rows[int]
    """Tokens of each prompt."""
    answers: Rows[int]
    """New tokens of each row."""

    @property
    def needed_bytes(self) -> int:
        """Bytes of all rows at once, when each is complete."""
        return POSITION_BYTES * (sum(self.prompts) + sum(self.answers))

    def add_to(self, engine: NativeEngine) -> None:
        """Add all rows with random tokens."""
        random = torch.Generator().manual_seed(len(self.prompts))
        for index, (size, new) in enumerate(zip(self.prompts, self.answers, strict=True)):
            tokens = torch.randint(0, 256, (size,), generator=random).tolist()
            engine.add(Rollout.start(RowId(0, index, 0), tokens), SamplingConfig(max_tokens=new))


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Cost and result of running a load."""

    seconds: float
    """CPU seconds, because wall-clock time is unreliable on a busy machine."""
    peak_bytes: int
    """Peak bytes of keys and values."""
    taken_back: int
    """Number of preempted rows."""
    rollouts: dict[RowId, Rollout]
    """Sampled rows."""


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    lines = _head(arguments)
    for part in (equal, long_row, preempted):
        found = part(arguments)
        print("\n".join(found), flush=True)
        lines += found
    if arguments.write:
        Path(arguments.write).write_text("\n".join(lines) + "\n")


def equal(arguments: argparse.Namespace) -> list[str]:
    """Compare bands with one rectangle for rows of equal and of different lengths."""
    module, lines = _module(), []
    loads = {
        "64 rows of 32 + 64": Load(prompts=[32] * 64, answers=[64] * 64),
        "64 rows of 32 + 224": Load(prompts=[32] * 64, answers=[224] * 64),
        "64 rows of 32 + 16 to 1,000, log-normal": Load(prompts=[32] * 64, answers=_log_normal(64)),
    }
    for name, load in loads.items():
        bands, one = NativeEngine(module, **_made(64)), NativeEngine(module, **_made(64))
        ratios, same, peaks = [], True, [0, 0]
        for index in range(arguments.rounds + 1):
            with _one_band():
                alone = ran(one, load)
            beside = ran(bands, load)
            same = same and _same(alone, beside)
            peaks = [beside.peak_bytes, alone.peak_bytes]
            if index:
                ratios.append(alone.seconds / beside.seconds)
        lines.append(
            f"| {name} | {statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} "
            f"| {peaks[0] / load.needed_bytes:.2f}x | {peaks[1] / load.needed_bytes:.2f}x "
            f"| {'the same' if same else 'other'} |"
        )
    return [
        "",
        "## Bands against one rectangle",
        "",
        "| rows | tokens/s, bands over one | rounds | peak over need, bands | one rectangle | bits |",
        "|---|---|---|---|---|---|",
        *lines,
    ]


def long_row(arguments: argparse.Namespace) -> list[str]:
    """Count the memory of one row of 8,192 tokens among 255 of 256, without running a model."""
    del arguments
    short, lines = [(32, 224)] * 255, []
    cases = {
        "all whole in the last step": [*short, (CONTEXT - 224, 224)],
        "the others come and go": [(32, CONTEXT - 32), *short * 10],
    }
    for name, rows in cases.items():
        need = POSITION_BYTES * (255 * 256 + CONTEXT)
        with _one_band():
            one = counted(rows) / need
        lines.append(f"| {name} | {need / 2**20:,.0f} MiB | {counted(rows) / need:.2f}x | {one:.1f}x |")
    return [
        "",
        "## One row of 8,192 tokens among 255 of 256",
        "",
        "Counted, with a layer of four that is there twice; nobody knows beforehand when a row ends.",
        "",
        "| rows | need | peak over need, bands | one rectangle |",
        "|---|---|---|---|",
        *lines,
    ]


def counted(rows: Rows[tuple[int, int]]) -> int:
    """Return the peak bytes of rows, given the tokens of their prompts and answers."""
    scheduler, shape = Scheduler(256), LayerShape(heads=1, key_size=1, value_size=1)
    cache = Cache(dict.fromkeys(range(4), shape), torch.device("cpu"), torch.float32)
    for index, (prompt, _) in enumerate(rows):
        tokens = [(index * 7919 + place) % 251 for place in range(prompt)]
        start = Rollout.start(RowId(0, index, 0), tokens)
        prefix = tuple(tokens[:-1])
        scheduler.add(Sequence(rollout=start, sampling=SamplingConfig(), prefix=prefix, limit=CONTEXT))
    while scheduler.has_work:
        step = scheduler.schedule()
        cache.arrange(step.buckets, step.copies)
        scheduler.leave(
            row for row in step.rows if step.clock - row.start_step + 2 >= sum(rows[row.rollout.row.prompt])
        )
    return cache.peak_bytes // sum(cache.position_bytes) * POSITION_BYTES


def preempted(arguments: argparse.Namespace) -> list[str]:
    """Run with a budget below the need: rows wait, and their prefixes are recomputed."""
    del arguments
    module, lines = _module(), []
    load = Load(prompts=[32] * 64, answers=[224] * 64)
    for deterministic, shares in ((False, (0.5, 0.25)), (True, (0.5, 0.4))):  # computes idle rows
        whole = ran(NativeEngine(module, **_made(64, deterministic=deterministic)), load)
        for share in shares:
            budget = share * load.needed_bytes / 2**30
            engine = NativeEngine(module, **_made(64, deterministic=deterministic, cache_gib=budget))
            found = ran(engine, load)
            assert found.peak_bytes <= budget * 2**30
            lines.append(
                f"| {'deterministic' if deterministic else 'ordinary'} | {share:.0%} "
                f"| {found.peak_bytes / load.needed_bytes:.0%} | {found.taken_back} "
                f"| {whole.seconds / found.seconds:.2f}x | {'the same' if _same(whole, found) else 'other'} |"
            )
    return [
        "",
        "## A budget for 64 rows of 32 + 224",
        "",
        "| mode | budget over need | peak over need | rows taken back | tokens/s over no budget | bits |",
        "|---|---|---|---|---|---|",
        *lines,
    ]


def ran(engine: NativeEngine, load: Load) -> Ran:
    """Run a load once and count preempted rows."""
    (worker,) = engine._workers
    requeue, taken_back = worker._scheduler.requeue, [0]

    def counting(rows: Rows[object]) -> None:
        taken_back[0] += len(rows)
        requeue(rows)  # type: ignore[arg-type]

    worker._scheduler.requeue = counting  # type: ignore[method-assign, assignment]
    rollouts = dict[RowId, Rollout]()
    begin = time.process_time()
    load.add_to(engine)
    while engine.has_work:
        rollouts |= {each.row: each for each in engine.step()}
    seconds = time.process_time() - begin
    worker._scheduler.requeue = requeue  # type: ignore[method-assign]
    return Ran(seconds=seconds, peak_bytes=engine.peak_bytes, taken_back=taken_back[0], rollouts=rollouts)


def _made(rows: int, **more: float) -> dict[str, object]:
    return {
        "config": RolloutConfig(max_rows=rows, max_tokens=CONTEXT, **more),
        "stop_tokens": frozenset(),
        "seed": 0,
        "context": CONTEXT,
        "workers": 1,
    }


@contextmanager
def _one_band(is_on: bool = True) -> Iterator[None]:
    """Allow a single band only, by making no further band worthwhile."""
    before = cache_layout.WORTH
    cache_layout.WORTH = sys.maxsize if is_on else before
    try:
        yield
    finally:
        cache_layout.WORTH = before


def _same(one: Ran, other: Ran) -> bool:
    return all(
        (row.tokens, row.logprobs) == (other.rollouts[name].tokens, other.rollouts[name].logprobs)
        for name, row in one.rollouts.items()
    )


def _log_normal(rows: int) -> list[int]:
    normal = torch.special.ndtri((torch.arange(rows, dtype=torch.float64) + 0.5) / rows)
    lengths = (120 * torch.exp(normal * 0.9)).round().clamp(16, 1000).long()
    found: list[int] = lengths[torch.randperm(rows, generator=torch.Generator().manual_seed(0))].tolist()
    return found


def _module() -> nn.Module:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        module: nn.Module = make_module("float32", Path(folder), context=CONTEXT)
    return module


def _head(arguments: argparse.Namespace) -> list[str]:
    return [
        "# Bands of memory, and a budget",
        "",
        "What is measured, and how: the head of `benchmarks/engine/paging.py`; the model is that of",
        "`benchmarks/engine/generation.py`, with a context of 8,192.",
        "",
        f"- command: `python {' '.join(sys.argv)}`",
        f"- machine: {os.cpu_count()} cores, {arguments.threads} thread, {platform.machine()}",
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        f"- rounds: {arguments.rounds}, after one to warm up",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="rounds after the first (7)")
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    parser.add_argument("--write", metavar="FILE", help="where the tables go, besides the screen")
    return parser.parse_args()


if __name__ == "__main__":
    main()
