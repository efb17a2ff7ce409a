"""Fused stages run: measured time against the schedule's, and the bits, bytes and memory of a real pair.

    python benchmarks/streaming/fused_run.py                                             # prints the page
    python benchmarks/streaming/fused_run.py --write benchmarks/results/fused_run.md

SLEEPING   stages of a toy model whose passes sleep, one gloo process a rank: both pipelines in turn by
           run_pipeline, then fused by run_fused. Sleeping needs no core, so ranks may outnumber cores.
REAL       an actor with a language-model head and a critic with a scalar head: gradients of both ways, bytes
           written by each process (/proc/self/io: messages between ranks), and bytes of saved tensors at
           most. Its passes compete for cores, so it is not timed.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "distributed")]
from meshes import Case, decoder  # noqa: E402
from processes import together  # noqa: E402

from rillflow.placement.mesh import Mesh  # noqa: E402
from rillflow.placement.pipeline import Pipeline  # noqa: E402
from rillflow.records.batch import Batch, row_ids  # noqa: E402
from rillflow.records.ragged import Ragged  # noqa: E402
from rillflow.records.row import RowId  # noqa: E402
from rillflow.sharding.mesh import rank_groups, require_processes  # noqa: E402
from rillflow.sharding.module import Parallel  # noqa: E402
from rillflow.sharding.packed_rows import lay_out  # noqa: E402
from rillflow.sharding.pipeline_runner import PipelinePass  # noqa: E402
from rillflow.workers.collectives import Ranks  # noqa: E402
from rillflow_parts.fusion.fused_pipeline import run_fused  # noqa: E402
from rillflow_parts.fusion.scheduling.problem import FusedProblem, FusedSchedule, lower_bound  # noqa: E402
from rillflow_parts.fusion.scheduling.solve import schedule  # noqa: E402
from rillflow_parts.fusion.scheduling.step import in_1f1b, step_plan  # noqa: E402
from tests.parts.fusion.scheduling.toys import even  # noqa: E402
from tests.parts.fusion.toy_stages import toy_pass  # noqa: E402

SMALLEST = []
SLOW = ["--setups 2 --unit-ms 2 --rounds 1 --budget 50 --pairs 1 --tokens 8"]  # 8 processes


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Two sleeping pipelines."""

    name: str
    """Where its numbers come from."""
    stages: tuple[int, int]
    """Stages of both models."""
    micro_batches: tuple[int, int]
    """Micro-batches of a replica of each."""
    forward: tuple[float, float]
    """Length of a forward pass of each, in units; a backward pass takes two."""
    memory: tuple[float, float] = (1.0, 1.0)
    """Memory of a micro-batch of each."""

    def problem(self, unit_s: float) -> FusedProblem:
        """The problem in seconds, with the memory that the larger pipeline needs alone."""
        one, other = (
            even(
                name, stages=stages, micro_batches=count, forward_s=unit_s * forward, activation_bytes=memory
            )
            for name, stages, count, forward, memory in zip(
                ("actor", "critic"), self.stages, self.micro_batches, self.forward, self.memory, strict=True
            )
        )
        cap = max(stages * memory for stages, memory in zip(self.stages, self.memory, strict=True))
        return FusedProblem(devices=max(self.stages), ascending=one, descending=other, memory_bytes=cap)


SETUPS = (
    Setup(name="half of instance 2", stages=(4, 2), micro_batches=(4, 2), forward=(5, 4), memory=(1.95, 2)),
    Setup(name="half of instance 5", stages=(4, 4), micro_batches=(4, 4), forward=(5, 2), memory=(1.95, 1)),
    Setup(name="instance 2", stages=(8, 4), micro_batches=(8, 4), forward=(5, 4), memory=(1.95, 2)),
    Setup(name="instance 5", stages=(8, 8), micro_batches=(8, 8), forward=(5, 2), memory=(1.95, 1)),
    Setup(name="equal models", stages=(4, 4), micro_batches=(8, 8), forward=(5, 5)),
    Setup(name="small critic", stages=(4, 2), micro_batches=(8, 4), forward=(6, 2)),
    Setup(name="instance 1", stages=(8, 4), micro_batches=(16, 8), forward=(5, 4), memory=(1.95, 2)),
    Setup(name="instance 4", stages=(8, 8), micro_batches=(16, 16), forward=(5, 2), memory=(1.95, 1)),
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A real actor and critic on the same ranks."""

    actor: Case
    critic: Case
    micro_batches: tuple[int, int]
    """Micro-batches of a replica of each."""


_SMALL = Case(kind="qwen3", dtype="float32", layers=8)
PAIRS = (
    Pair(
        actor=replace(_SMALL, pp=2),
        critic=replace(_SMALL, pp=2, scalar=True),
        micro_batches=(4, 4),
    ),
    Pair(
        actor=replace(_SMALL, pp=4),
        critic=replace(_SMALL, pp=2, dp=2, scalar=True),
        micro_batches=(8, 4),
    ),
    Pair(
        actor=replace(_SMALL, pp=4),
        critic=replace(_SMALL, pp=4, scalar=True),
        micro_batches=(8, 8),
    ),
)


def in_turn(both: Sequence[PipelinePass], between: Callable[[], None]) -> None:
    """Run both pipelines one after the other."""
    for given in both:
        given.run_alone()
        between()


def slept(ranks: Ranks, setup: Setup, plan: FusedSchedule, unit_s: float, rounds: int) -> list[Any]:
    """Start and end of every round on this rank: in turn, then fused."""
    both = [
        toy_pass(
            ranks,
            setup.stages[index],
            setup.micro_batches[index],
            is_descending=index == 1,
            pause=lambda is_backward, forward=setup.forward[index]: time.sleep(
                unit_s * forward * (1 + is_backward)
            ),
        )
        for index in range(2)
    ]
    found: list[Any] = []
    for one in range(rounds + 1):  # the first round connects the ranks
        for run in (partial(in_turn, both, dist.barrier), partial(run_fused, both[0], both[1], plan)):
            dist.barrier()
            start = time.perf_counter()
            run()
            if one:
                found.append((start, time.perf_counter()))
    return found


def sleeping_row(setup: Setup, unit_s: float, rounds: int, budget: int) -> str:
    """The row of a setup."""
    problem = setup.problem(unit_s)
    plan = schedule(problem, budget=budget)
    turns_s = sum(map(in_1f1b, problem.pipelines))
    by_rank = together(problem.devices, slept, setup, plan, unit_s, rounds, deadline_s=600.0)
    spans = [
        max(end for _, end in each) - min(begin for begin, _ in each) for each in zip(*by_rank, strict=True)
    ]
    turns, fused = median(spans[::2]), median(spans[1::2])
    wanted, got = plan.latency_s / turns_s, fused / turns
    stages, counts = (" + ".join(map(str, each)) for each in (setup.stages, setup.micro_batches))
    passes = " + ".join(f"{1e3 * unit_s * each:.0f}" for each in setup.forward)
    least = lower_bound(problem)
    return (
        f"| {setup.name} | {problem.devices} | {stages} | {counts} | {passes} | {turns_s:.2f} | "
        f"{turns:.2f} | {least:.2f} | {plan.latency_s:.2f} | {fused:.2f} | {wanted:.3f} | {got:.3f} | "
        f"{got / wanted - 1:+.1%} |"
    )


class Kept:
    """Bytes of tensors that are saved for backward passes on this rank, each storage once."""

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()
        self._bytes = self._peak = 0

    def taken_peak(self) -> int:
        """Return the largest number of bytes since the last call."""
        peak, self._peak = self._peak, self._bytes
        return peak

    def add(self, tensor: Tensor) -> Held:
        """Count a tensor as long as the result lives."""
        held, storage = Held(tensor), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        self._held[place] += 1
        self._bytes += size * (self._held[place] == 1)
        self._peak = max(self._peak, self._bytes)
        weakref.finalize(held, self._drop, place, size)
        return held

    def _drop(self, place: int, size: int) -> None:
        self._held[place] -= 1
        self._bytes -= size * (self._held[place] == 0)


class Held:
    """A saved tensor, to see when it is dropped."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Watched(nn.Module):
    """A stage whose saved tensors are counted, without its parameters."""

    def __init__(self, part: nn.Module, kept: Kept) -> None:
        super().__init__()
        self.part, self.kept = part, kept

    def forward(self, *arguments: Any) -> Any:
        weights = {each.untyped_storage().data_ptr() for each in self.part.parameters()}

        def keep(tensor: Tensor) -> Held:
            is_weight = tensor.untyped_storage().data_ptr() in weights
            return Held(tensor) if is_weight else self.kept.add(tensor)

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
            return self.part(*arguments)


def real_pass(
    case: Case, count: int, tokens: int, ranks: Ranks, kept: Kept, *, is_descending: bool
) -> PipelinePass:
    """A model's micro-batches of two rows on this rank."""
    mesh = Mesh.of(dp=case.dp, pp=case.pp, tp=1)
    groups = rank_groups(mesh.turned("pp") if is_descending else mesh, ranks)
    parallel = Parallel(decoder(case), groups)
    draw = torch.Generator().manual_seed(groups.dp.rank)
    readings = []
    for _ in range(count):
        texts = torch.randint(0, 60, (2, tokens), generator=draw).tolist()
        mask = Ragged.from_rows([[False] + [True] * (tokens - 1)] * 2, torch.bool)
        fields = {"tokens": Ragged.from_rows(texts), "loss_mask": mask}
        part = Batch(ids=row_ids([RowId(0, 0, 0), RowId(0, 0, 1)]), fields=fields)
        readings.append(lay_out(part, parallel.device, back=1))
    return PipelinePass(
        ranks=require_processes(groups.pp),
        module=parallel.module,
        part=Watched(parallel.part, kept),
        readings=readings,
        finish=lambda number, output: output.square().sum() * (1 + number) / 64,
        after=lambda: None,
        is_descending=is_descending,
    )


def written_bytes() -> int:
    """Bytes that this process has written to files and sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def gradients(given: PipelinePass) -> dict[str, Tensor]:
    """Take the gradients and clear them."""
    weights = dict(given.part.named_parameters())
    found = {name: each.grad for name, each in weights.items() if each.grad is not None}
    for parameter in given.part.parameters():
        parameter.grad = None
    return found


def computed(ranks: Ranks, pair: Pair, tokens: int) -> dict[str, Any]:
    """Both ways on this rank: bits, bytes written, peaks of saved bytes."""
    kept, cases = Kept(), (pair.actor, pair.critic)
    both = [
        real_pass(case, count, tokens, ranks, kept, is_descending=index == 1)
        for index, (case, count) in enumerate(zip(cases, pair.micro_batches, strict=True))
    ]
    in_turn(both, dist.barrier)  # connects the ranks
    for given in both:
        gradients(given)
    kept.taken_peak()
    peaks: list[int] = []
    begun = written_bytes()
    in_turn(both, lambda: peaks.append(kept.taken_peak()))
    turns_bytes = written_bytes() - begun
    expected = list(map(gradients, both))
    plan = step_plan(*pipelines(ranks, pair, both, peaks))
    dist.barrier()
    begun = written_bytes()
    run_fused(both[0], both[1], plan.schedule)
    fused_bytes = written_bytes() - begun
    found = list(map(gradients, both))
    return {
        "equal": [
            one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
            for one, two in zip(expected, found, strict=True)
        ],
        "tensors": sum(map(len, found)),
        "bytes": (turns_bytes, fused_bytes),
        "peaks": (max(peaks), kept.taken_peak()),
    }


def pipelines(
    ranks: Ranks, pair: Pair, both: Sequence[PipelinePass], peaks: Sequence[int]
) -> tuple[Pipeline, Pipeline]:
    """The two pipelines, with a micro-batch's saved bytes from the peaks of both alone."""
    own = []
    for index, (given, peak) in enumerate(zip(both, peaks, strict=True)):
        place, size = given.ranks.rank, given.ranks.size
        own.append(peak / min(place + 1 if index else size - place, len(given.readings)))
    most = ranks.stack(torch.tensor(own)).amax(0).tolist()
    one, other = (
        even(name, stages=given.ranks.size, micro_batches=count, forward_s=forward, activation_bytes=size)
        for name, given, count, forward, size in zip(
            ("actor", "critic"), both, pair.micro_batches, (1.0, 0.8), most, strict=True
        )
    )
    return one, other


def real_rows(pair: Pair, tokens: int) -> list[str]:
    """The rows of a pair, one a rank."""
    size = pair.actor.dp * pair.actor.pp
    meshes = " + ".join(f"pp {each.pp} x dp {each.dp}" for each in (pair.actor, pair.critic))
    return [
        f"| {meshes if not rank else ''} | {rank} | {found['tensors']} | "
        f"{'yes' if all(found['equal']) else 'NO'} | {found['bytes'][0] / 1e3:.1f} | "
        f"{found['bytes'][1] / 1e3:.1f} | {found['peaks'][0] / 1e3:.0f} | {found['peaks'][1] / 1e3:.0f} |"
        for rank, found in enumerate(together(size, computed, pair, tokens))
    ]


def page(arguments: argparse.Namespace) -> str:
    """Measure everything, and return the page."""
    unit_s, cores = arguments.unit_ms / 1e3, len(os.sched_getaffinity(0))
    words = f"--unit-ms {arguments.unit_ms:g} --rounds {arguments.rounds}"
    command = f"python benchmarks/streaming/fused_run.py {words}"
    load = os.getloadavg()[0]
    rows = [sleeping_row(SETUPS[n], unit_s, arguments.rounds, arguments.budget) for n in arguments.setups]
    real = [row for number in arguments.pairs for row in real_rows(PAIRS[number], arguments.tokens)]
    return "\n".join(
        [
            "# Fused stages on real ranks",
            "",
            measured_at.line(),
            "",
            f"{cores} cores, PyTorch {torch.__version__}, Python {platform.python_version()}, "
            f"load {load:.1f} at the start. Command: `{command}`",
            "",
            "## Sleeping stages",
            "",
            "Each rank is a process, and its passes sleep; so the table measures the order of the passes and",
            "the messages, not computation. `in turn` is one 1F1B pipeline after the other. Times are",
            f"seconds: the median of {arguments.rounds} rounds from the first start to the last end. The",
            "predicted times have no sending and no Python.",
            "",
            "| setup | ranks | stages | micro-batches | forward, ms | in turn, predicted | in turn | "
            "fused, bound | fused, predicted | fused | fused / in turn, predicted | fused / in turn | "
            "off by |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "## A real actor and critic",
            "",
            f"Two decoders of 8 layers, float32; micro-batches of 2 rows of {arguments.tokens} tokens. Bytes",
            "written are those of the process during both updates, messages and their headers. Saved bytes",
            "are the largest number at once of tensors kept for backward passes, without weights.",
            "",
            "| actor + critic | rank | gradients | equal bits | kB written, in turn | kB written, fused | "
            "kB saved, in turn | kB saved, fused |",
            "|---|---|---|---|---|---|---|---|",
            *real,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--setups", type=int, nargs="*", default=list(range(len(SETUPS))))
    parser.add_argument("--unit-ms", type=float, default=8.0, help="length of a unit of the forward passes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=3000, help="schedules timed for each setup")
    parser.add_argument("--pairs", type=int, nargs="*", default=list(range(len(PAIRS))))
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a row of the real pair")
    parser.add_argument("--write", type=Path, help="file for the page")
    arguments = parser.parse_args()
    text = page(arguments)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
