"""Tail cut: whatever the lengths, a step trains the groups that are complete first, and every prompt once."""

from __future__ import annotations

from random import Random

import pytest

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.source import DataStream, GroupSampling
from rillflow.controller.tail_batching import TailBatching
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, concatenate
from rillflow.records.row import RowId
from rillflow.roles.sampler import Sampler
from rillflow.rollout.config import RolloutConfig
from rillflow.workers.backend import Pool
from rillflow.workers.endpoint import endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from tests.unit.controller.test_async_rollout import prompts, sampler


def length(prompt: int, sample: int) -> int:
    """Passes until the engine of these tests has ended a row; in the last one it draws two tokens."""
    return 1 + int(min(60, Random(str(RowId(0, prompt, sample))).paretovariate(0.8)))


class Steps:
    """Steps that are cut, on replicas of an engine whose rows' lengths are known."""

    def __init__(
        self,
        *,
        groups: int,
        steps: int,
        share: float,
        samples: int = 2,
        begun_samples: int = 2,
        replicas: int = 1,
        tp: int = 1,
        rows: int = 1000,
        drawn: int = 0,
        aside: Batch | None = None,
    ) -> None:
        backend, mesh = InlineBackend(), Mesh.of(dp=replicas, tp=tp)
        backend.open([Pool(name="main", size=replicas * tp, takes_device=False)])
        group = Group("sampler", endpoints_of(Sampler), mesh=mesh, pool="main", backend=backend, of="policy")
        config = RolloutConfig(max_rows=rows)
        group.start(lambda _: sampler(config))
        self.executor = GroupExecutor({"sampler": group}, backend)
        self.drawn, self.groups = drawn, groups
        self.cut = TailBatching(
            self.executor,
            DataStream(take=self._take, state=dict),
            how=GroupSampling(
                groups=groups * steps,
                samples=samples,
                sampling=None,
                replicas=mesh.groups("tp"),
                deadline_s=5,
            ),
            prompts=share,
            begun_samples=begun_samples,
            aside=aside,
        )

    def step(self, more: int = 0) -> Batch:
        """The rows of a step."""
        data = self.cut.more(more) if more else self.cut.take(1, self.groups)
        made = self.cut.rows(self.executor.groups["sampler"], "generate", [data], {})
        assert made is not None
        rows: Batch = made.read()
        assert list(dict.fromkeys(rows.ids[:, 1].tolist())) == data.ids[:, 1].tolist()
        return rows

    def _take(self, count: int) -> Batch:
        self.drawn += count
        return prompts(self.drawn - count, count)


def lengths(rows: Batch) -> list[int]:
    """The sampled tokens of each."""
    return [int(count) for count in rows.ragged("loss_mask").sums()]


def trained(steps: list[Batch]) -> list[RowId]:
    return [row for rows in steps for row in rows.row_ids()]


def test_every_prompt_is_trained_once_as_long_as_it_is_and_nothing_is_left() -> None:
    """Random sizes, shares, replicas and slots; some are interrupted, and go on from a checkpoint."""
    reordered = 0
    for seed in range(16):
        chance = Random(seed)
        how = {
            "groups": chance.randint(1, 5),
            "share": chance.choice([1.0, 1.25, 1.5, 3.0]),
            "replicas": chance.randint(1, 3),
            "rows": chance.choice([2, 6, 1000]),
        }
        steps, halt = chance.randint(1, 7), chance.randint(0, 7)
        scene, made = Steps(steps=steps, **how), []
        for done in range(steps):
            if done == halt:
                aside = [prompts(prompt, 1) for _, prompt in scene.cut.aside]
                given = concatenate(aside) if aside else None
                scene = Steps(steps=steps - done, drawn=scene.drawn, aside=given, **how)
            made.append(scene.step())
            assert scene.cut.opened().measured["tail/aside/mean"].value == len(scene.cut.aside)
        wanted = [RowId(0, prompt, sample) for prompt in range(steps * how["groups"]) for sample in (0, 1)]
        assert sorted(trained(made)) == wanted and scene.drawn == steps * how["groups"]
        assert not scene.cut.aside
        assert [count for rows in made for count in lengths(rows)] == [
            length(row.prompt, row.sample) + 1 for row in trained(made)
        ]
        reordered += trained(made) != wanted
    assert reordered > 5


@pytest.mark.parametrize(("replicas", "tp"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_a_step_trains_the_groups_that_are_complete_first_wherever_they_run(replicas: int, tp: int) -> None:
    scene = Steps(groups=4, steps=3, share=2.0, replicas=replicas, tp=tp)
    longest = {prompt: max(length(prompt, 0), length(prompt, 1)) for prompt in range(12)}
    first = sorted(sorted(range(8), key=lambda prompt: (longest[prompt], prompt))[:4])
    assert list(dict.fromkeys(row.prompt for row in scene.step().row_ids())) == first
    left = [prompt for prompt in range(8) if prompt not in first]
    assert [prompt for _, prompt in scene.cut.aside] == left
    assert scene.cut.opened().measured["tail/passes/sum"].value == max(longest[prompt] for prompt in first)
    assert scene.cut.opened().measured["tail/begun/sum"].value == 8
    second = scene.step()
    assert list(dict.fromkeys(row.prompt for row in second.row_ids())) == left
    assert scene.cut.opened().measured["tail/begun/sum"].value == 4
    assert scene.cut.opened().measured["tail/wasted_tokens/sum"].value == 0


def test_the_tokens_of_rows_that_nobody_trains_are_counted() -> None:
    scene = Steps(groups=4, steps=3, share=2.0)
    rows = scene.step()
    passes = int(scene.cut.opened().measured["tail/passes/sum"].value)
    known = [length(prompt, sample) for prompt in range(8) for sample in (0, 1)]
    begun = sum(passes if each > passes else each + 1 for each in known)
    assert scene.cut.opened().measured["tail/wasted_tokens/sum"].value == begun - sum(lengths(rows))


@pytest.mark.parametrize("replicas", [1, 2])
def test_of_more_samples_than_are_trained_those_that_end_first_are(replicas: int) -> None:
    scene = Steps(groups=4, steps=1, share=1.0, samples=2, begun_samples=5, replicas=replicas)
    found = scene.step().row_ids()
    for prompt in range(4):
        first = sorted(range(5), key=lambda sample: (length(prompt, sample), sample))[:2]
        assert [row.sample for row in found if row.prompt == prompt] == sorted(first)


def test_samples_that_are_taken_out_count_as_ended() -> None:
    advanced = sampler(RolloutConfig(max_rows=1000)).advance(prompts(0, 3), [], 100, 5, None, wanted=2)
    assert len(advanced.complete) == 3 and advanced.ended == 3 * 5


def test_a_step_that_asks_for_more_gets_other_groups() -> None:
    scene = Steps(groups=3, steps=4, share=1.5)
    first, more = scene.step(), scene.step(more=2)
    assert len(more) == 4 and not {*trained([first])} & {*trained([more])}
    assert scene.cut.opened().measured["tail/begun/sum"].value in (8, 7)
