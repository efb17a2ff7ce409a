"""Gathering: in whatever order ranks answer, a step has its rows, and no rank scores while rows run on it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from rillflow.controller import replicas
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.gathering import Gathering, GatherRule
from rillflow.controller.replicas import SamplerReplica
from rillflow.controller.source import DataStream, GroupSampling
from rillflow.controller.streamed_stages import SharedRanks, before_updates, streamed_stages
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.roles.sampler import Sampler
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Capability
from rillflow.workers.backend import Pool, RankDied, Site
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.transfer import SPLIT_DP
from tests.unit.controller.test_async_rollout import SAMPLES, Shuffled, Tailed, Weights, prompts

CALLS: Mapping[str, Any] = {
    "policy.generate": [(["data"], {"samples": SAMPLES})],
    "scorer.score": [(["policy.generate"], {})],
    "late.score": [(["controller's"], {})],
}


@pytest.fixture(autouse=True)
def _short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides how long a call is."""
    monkeypatch.setattr(replicas, "MOST_PASSES", 4)


class Cached(Tailed):
    """The engine of known lengths, whose cache is the tokens that it has read."""

    can: ClassVar = frozenset({Capability.ROWS, Capability.CACHE})
    moved: ClassVar[list[RowId]] = []

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        if rollout.cache is not None:
            assert rollout.cache[:, 0].tolist() == list(rollout.tokens[:-1])
            self.moved.append(rollout.row)
        super().add(replace(rollout, cache=None), sampling)

    def detach(self, row: RowId) -> Rollout:
        found = self.abort(row)
        read = torch.tensor(found.tokens[:-1])[:, None]
        return replace(found, cache=read if len(read) else None)


@dataclass
class Scorer:
    """Scores rows by their lengths, and notes which rows it got."""

    site: Site
    calls: list[list[int]] = field(default_factory=list)
    share: ClassVar = SimpleNamespace(parallel=SimpleNamespace(copy_alone=nullcontext))
    """Its share of the model: nothing to communicate."""

    @endpoint(SPLIT_DP, reads=("tokens",), writes=("scores",), alone=True)
    def score(self, rollouts: Batch) -> Batch:
        """The number of tokens; no row may run on this rank meanwhile."""
        assert not self.site.objects["sampler"].engine.has_work
        self.calls.append(rollouts.ids[:, 1].tolist())
        lengths: Tensor = rollouts.ragged("tokens").lengths
        return Batch(ids=rollouts.ids, fields={"scores": lengths.float()})


class Steps:
    """Steps on replicas of an engine whose rows' lengths are known."""

    def __init__(
        self,
        seed: int,
        *,
        groups: int,
        ranks: int,
        tp: int,
        rows: int,
        kept: int,
        with_caches: bool = True,
        most_rows: int = 40,
        copy: int = 1,
        backend: InlineBackend | None = None,
    ) -> None:
        self.drawn, self.groups = 0, groups
        self.backend = backend = backend or Shuffled(Random(seed))
        backend.open([Pool(name="main", size=ranks * tp, takes_device=False)])
        mesh, dp = Mesh.of(dp=ranks, tp=tp), Mesh.of(dp=ranks * tp)
        copies = Mesh.of(dp=ranks * tp // copy, tp=copy)
        how: dict[str, Any] = {"pool": "main", "backend": backend}
        self.made = made = {
            "policy": Group("policy", {}, mesh=dp, **how),
            "sampler": Group("sampler", endpoints_of(Sampler), mesh=mesh, of="policy", **how),
            "scorer": Group("scorer", endpoints_of(Scorer), mesh=copies, **how),
        }
        config = RolloutConfig(max_rows=most_rows)
        model = SimpleNamespace(tokenizer=SimpleNamespace(stop_tokens=frozenset()), context=64)
        more: dict[str, Any] = {"model": model, "rollout": config, "seed": 0, "engine": Cached}
        made["sampler"].start(lambda _: Sampler(cast(Any, Weights()), **more))
        made["scorer"].start(Scorer)
        self.executor = executor = GroupExecutor(made, backend)
        shared = SharedRanks(pool="main", copies={"scorer": copy}, busy=set())
        workers = streamed_stages(
            before_updates(CALLS, executor), executor, changing=(), most=2, step_rows=8, shared=shared
        )
        self.source = Gathering(
            executor,
            DataStream(take=self._take, state=dict),
            how=GroupSampling(
                groups=99, samples=SAMPLES, sampling=None, replicas=mesh.groups("tp"), deadline_s=5
            ),
            rule=GatherRule(rows=rows, replicas=kept, with_caches=with_caches),
            step_groups=groups,
            most_rows=most_rows,
            streamed=workers,
            shared=shared,
        )

    def step(self) -> Batch:
        """The rows of a step, with their scores."""
        data = self.source.take(1, self.groups)
        made = self.source.rows(self.executor.groups["sampler"], "generate", [data], {})
        assert made is not None
        scores = self.source.streamed("scorer.score", [made])
        assert scores is not None and self.source.streamed("scorer.other", [made]) is None
        self.worked = {each.stage: each.work.worked for each in (made, scores)}
        return cast(Batch, made.read()).join(cast(Batch, scores.read()))

    def _take(self, count: int) -> Batch:
        self.drawn += count
        return prompts(self.drawn - count, count)


def length(row: RowId) -> int:
    """Tokens of a row, as Tailed makes it: it ends with the first token beyond a number of its own."""
    return 2 + int(1 + min(60, Random(str(row)).paretovariate(0.8)))


def test_a_step_has_all_of_its_rows_in_order_whatever_moves() -> None:
    """Random replicas, ranks of a replica, thresholds, slots and speeds."""
    moved = 0
    Cached.moved.clear()
    for seed in range(60):
        chance = Random(seed)
        ranks, with_caches = chance.randint(2, 4), chance.random() < 0.7
        scene = Steps(
            seed,
            groups=chance.randint(1, 9),
            ranks=ranks,
            tp=chance.randint(1, 2),
            rows=chance.randint(2, 12),
            kept=chance.randint(1, ranks - 1),
            with_caches=with_caches,
            most_rows=chance.choice([2, 6, 40]),
        )
        for step in range(3):
            rows = scene.step()
            first = step * scene.groups
            wanted = [
                RowId(0, prompt, sample)
                for prompt in range(first, first + scene.groups)
                for sample in range(SAMPLES)
            ]
            assert rows.row_ids() == wanted
            assert rows.ragged("tokens").lengths.tolist() == [length(row) for row in wanted]
            assert rows.dense("scores").tolist() == [length(row) for row in wanted]
            assert not scene.source._flight.groups and not scene.source._flight.table.left
            measured = scene.source.opened().measured
            moved += int(measured["gather/rows/sum"].value) if "gather/rows/sum" in measured else 0
    assert moved > 100 and len(Cached.moved) > 50


def test_all_ranks_that_hold_a_copy_of_a_model_score_the_same_rows() -> None:
    scene = Steps(0, groups=5, ranks=2, tp=2, rows=1, kept=1, copy=2)
    rows = scene.step()
    assert rows.dense("scores").tolist() == rows.ragged("tokens").lengths.tolist()
    one, its_second, other, its_last = (
        cast(Scorer, scene.backend._sites[place].objects["scorer"]).calls
        for place in scene.made["scorer"].places
    )
    assert one == its_second and other == its_last
    assert sorted(prompt for call in one + other for prompt in call) == rows.ids[:, 1].tolist()


def test_the_ranks_that_give_up_their_rows_score_before_the_last_row_ends() -> None:
    """The kept replica has one row of 61 tokens or so; the others score what has ended before that."""
    early = 0
    for seed in range(20):
        scene = Steps(seed, groups=8, ranks=4, tp=1, rows=6, kept=1)
        scene.step()
        scorers = [scene.backend._sites[place].objects["scorer"] for place in scene.made["scorer"].places]
        counts = [sum(map(len, each.calls)) for each in scorers]
        assert sum(counts) == 8 * SAMPLES
        early += max(counts) > 8
    assert early > 0


def test_a_stage_reports_the_work_of_its_own_ranks() -> None:
    """The first replica samples the only group of a step; either rank may score it."""
    scene = Steps(0, groups=1, ranks=2, tp=1, rows=1, kept=1)
    calls = {
        place: cast(Scorer, scene.backend._sites[place].objects["scorer"]).calls
        for place in scene.made["scorer"].places
    }
    for _ in range(2):  # a step reports no work of earlier steps
        scene.step()
        worked = {stage: {each.place for each in facts} for stage, facts in scene.worked.items()}
        scored = {place for place, rows in calls.items() if rows}
        assert worked == {"policy.generate": {*scene.made["sampler"].places[:1]}, "scorer.score": scored}
        for rows in calls.values():
            rows.clear()


def test_a_replica_that_dies_while_its_rows_move_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are lost: the error names the rank, and the run begins the step again from a checkpoint."""
    scene = Steps(0, groups=8, ranks=2, tp=1, rows=12, kept=1, backend=InlineBackend())
    release, dead = SamplerReplica.release, []

    def dies(replica: SamplerReplica, *given: Any, **how: Any) -> Any:
        dead.append(replica.places[0])
        scene.backend.kill(replica.places[0])
        return release(replica, *given, **how)

    monkeypatch.setattr(SamplerReplica, "release", dies)
    with pytest.raises(RankDied) as died:
        for _ in range(50):
            scene.step()
    assert died.value.place == dead[0]
    scene.backend.close()
