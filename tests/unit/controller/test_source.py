"""Source: rows in order, in chunks or from a checkpoint; versions go to the sampler before the next step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import StageResult
from rillflow.controller.source import DataStream, Source
from rillflow.controller.step_executor import StepExecutor
from rillflow.controller.weight_sync import PackedWeights, WeightSync
from rillflow.formulas import seeing
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch
from rillflow.workers.backend import Pool
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.pending import Pending
from rillflow.workers.transfer import BROADCAST, DP, SPLIT_ALL
from tests.unit.controller.test_async_rollout import prompts

CALLS: list[str] = []
"""Calls of the ranks, in order."""


class Answers:
    """A sampler that answers a prompt with its number."""

    def __init__(self) -> None:
        self._later: list[Batch] = []

    @endpoint(SPLIT_ALL, reads=("tokens",), writes=("tokens", "number"))
    def generate(self, rows: Batch, samples: int = 1) -> Batch:
        CALLS.append("generate")
        return answered(rows)

    @endpoint(SPLIT_ALL, reads=("tokens",), writes=("tokens", "number"))
    def first_part(self, *parts: Batch, samples: int = 1, sampling: None = None) -> Batch:
        self._later = [answered(each) for each in parts]
        return self.next_part()

    @endpoint(SPLIT_ALL, writes=("tokens", "number"))
    def next_part(self) -> Batch:
        CALLS.append("part")
        return self._later.pop(0)


class Scores:
    """A role that scores."""

    @endpoint(DP, reads=("number",), writes=("rewards",))
    def score(self, rows: Batch) -> Batch:
        CALLS.append(f"score {len(rows)}")
        return rows.only().with_fields(rewards=2 * rows.dense("number"))

    @endpoint(BROADCAST)
    def publish(self) -> int:
        return 7


@seeing("row")
def negated(rewards: torch.Tensor) -> torch.Tensor:
    CALLS.append(f"formula {len(rewards)}")
    return -rewards


class Sync:
    """A transfer of versions that only counts."""

    def __init__(self, executor: GroupExecutor) -> None:
        self._executor = executor
        self.published, self.installed = list[Pending](), list[PackedWeights]()

    def __call__(self, published: Pending) -> Pending:
        self.published.append(published)
        return published

    def take(self) -> list[PackedWeights]:
        return [PackedWeights(digests=each, buckets=()) for each in self.published]

    def install(self, parcel: PackedWeights) -> list[Pending]:
        self.installed.append(parcel)
        return [parcel.digests]


def answered(rows: Batch) -> Batch:
    return rows.with_fields(number=rows.ids[:, 1].double())


@pytest.fixture
def executor() -> Iterator[GroupExecutor]:
    backend = InlineBackend()
    backend.open([Pool(name="main", size=1)])
    how = {"mesh": Mesh.of(dp=1), "pool": "main", "backend": backend, "of": "policy"}
    made = {
        "sampler": Group("sampler", endpoints_of(Answers), **how),
        "policy": Group("policy", endpoints_of(Scores), **how),
    }
    made["sampler"].start(lambda _: Answers())
    made["policy"].start(lambda _: Scores())
    CALLS.clear()
    yield GroupExecutor(made, backend)
    backend.close()


def stream() -> DataStream:
    return DataStream(take=lambda count: prompts(0, count), state=lambda: {"drawn": 4})


def rewards(executor: GroupExecutor, source: Source, step: int = 1) -> Sequence[Pending]:
    """The rows of a step of four prompts and their negated rewards."""
    steps = StepExecutor(executor, source)
    rows = steps.call("policy", "generate", [source.take(step, 4)], {"samples": 1})
    scores = steps.call("policy", "score", [rows], {})
    return rows, steps.compute(negated, [scores], "rewards", {})


@pytest.mark.parametrize(
    ("chunks", "calls"),
    [
        (1, ["generate", "score 4", "formula 4"]),
        (2, ["part", "part", "score 2", "formula 2", "score 2", "formula 2"]),
    ],
)
def test_stages_run_chunk_by_chunk_and_give_the_same_rows(
    executor: GroupExecutor, chunks: int, calls: list[str]
) -> None:
    rows, negative = rewards(executor, Source(executor, stream(), chunks=chunks))
    found: Batch = negative.read()
    assert found.dense("rewards").tolist() == [0, -2, -4, -6]
    assert rows.read().ids.tolist() == found.ids.tolist() and len(rows.read()) == 4
    assert calls == CALLS


def test_batches_with_different_numbers_of_chunks_are_computed_whole(executor: GroupExecutor) -> None:
    steps = StepExecutor(executor, Source(executor, stream(), chunks=3))
    scores = list[Pending]()
    for size in (4, 2):  # the second batch has a chunk for each of its two rows
        rows = steps.call("policy", "generate", [prompts(0, size)], {"samples": 1})
        scores.append(steps.call("policy", "score", [rows], {}))
    assert [each.read().dense("rewards").tolist() for each in scores] == [[0, 2, 4, 6], [0, 2]]


def test_rows_of_a_checkpoint_are_not_sampled_again(executor: GroupExecutor, tmp_path: Path) -> None:
    source = Source(executor, stream())
    rows, scored = rewards(executor, source)
    assert source.position() == {"drawn": 4}
    (tmp_path / "ahead").mkdir()
    stages = [
        StageResult(stage=f"policy.{name}", result=result)
        for name, result in (("generate", rows), ("score", scored))
    ]
    for each in source.save_sampled(stages, str(tmp_path / "ahead" / "step-000001")):
        each.wait()
    files = sorted((tmp_path / "ahead").iterdir())
    assert [file.name for file in files] == ["step-000001-000.safetensors"]
    CALLS.clear()
    again = Source(executor, stream(), kept=lambda step: files if step == 1 else ())
    (kept, negative), (fresh, _) = rewards(executor, again), rewards(executor, again, step=2)
    assert kept.read().ids.tolist() == rows.read().ids.tolist() == fresh.read().ids.tolist()
    assert negative.read().dense("rewards").tolist() == [0, -2, -4, -6]
    assert CALLS == ["score 4", "formula 4", "generate", "score 4", "formula 4"]


def test_a_version_reaches_the_sampler_between_two_steps(executor: GroupExecutor) -> None:
    sync = Sync(executor)
    source = Source(executor, stream(), sync=cast(WeightSync, sync))
    version = StepExecutor(executor, source).call("policy", "publish", [], {})
    drawn = source.opened()
    assert version.read() == 7 and not drawn.arriving and not sync.installed
    source.deliver(drawn.parcels[0])
    assert sync.installed == [drawn.parcels[0]]
    assert list(source.opened().arriving) == [version] and not source.opened().arriving
