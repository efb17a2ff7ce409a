"""The training loop on simulated ranks: stops on request, evaluations and the checkpoints that they cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rillflow.controller.checkpoint import Checkpoint, latest_checkpoint
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.weight_sync import WeightSync
from rillflow.errors import ClusterError, Interrupted, RewardError, Signalled
from rillflow.records.batch import Batch, load_batch
from rillflow.records.metrics import Metric
from rillflow.runs import layout
from rillflow.runs.reader import Evaluation, read_evaluations
from rillflow.workers.backend import Place, RankDied, Replacement
from tests.simulation.disk import FakeDisk
from tests.simulation.roles import Policy
from tests.simulation.timeline import Timeline
from tests.simulation.world import Scenario, World, order_of_prompts, step

IN_ORDER = Scenario(steps=6, checkpoint_every=0, evaluate_every=0)
AHEAD = replace(IN_ORDER, freshness=1)
READY_FIRST = replace(IN_ORDER, freshness=2, is_ready_first=True, replicas=2)
Judge = Callable[["JudgedWorld", int], Sequence[Evaluation]]


class JudgedWorld(World):
    """A world whose evaluations are given: a function of the world and the number of earlier ones."""

    judge: Judge
    judged = 0

    def _evaluated(self, executor: GroupExecutor) -> Sequence[Evaluation]:
        super()._evaluated(executor)
        self.judged += 1
        return self.judge(self.judged - 1)


class CrowdedWorld(World):
    """A world without room for new processes."""

    def _restart(
        self, executor: GroupExecutor, sync: WeightSync, ranks: Sequence[int]
    ) -> Iterator[Replacement]:
        yield self.backend.replace([executor.groups["sampler"].places[rank] for rank in ranks])
        raise ClusterError("no node has room", why="the simulation has none", fix="")


def unmeasurable(scores: Batch) -> dict[str, Metric]:
    raise RewardError(f"{len(scores)} scores have no mean")


class UnmeasurableWorld(World):
    """A world whose metrics of rewards cannot be computed."""

    def _roles(self, kept: Checkpoint | None) -> tuple[GroupExecutor, WeightSync]:
        executor, sync = super()._roles(kept)
        reward = executor.groups["reward"]
        reward.endpoints = {
            name: replace(each, measures=unmeasurable) for name, each in reward.endpoints.items()
        }
        return executor, sync


def world(scenario: Scenario, folder: Path, judge: Judge | None = None) -> JudgedWorld:
    made = JudgedWorld(scenario, FakeDisk(folder), Timeline(Random(0), {}, ""))
    made.judge = (judge or (lambda *_: [Evaluation(count=2, mean_reward=0.0)])).__get__(made)
    return made


def _kill_sampler(worlds: Sequence[World], timeline: Timeline) -> None:
    worlds[0].backend.kill(Place("answers", 0))


def newest(folder: Path) -> Checkpoint | None:
    return latest_checkpoint(folder / "run" / layout.CHECKPOINTS)


@pytest.mark.parametrize("scenario", [IN_ORDER, AHEAD, READY_FIRST], ids=["in order", "ahead", "ready first"])
def test_a_run_that_is_to_end_after_a_step_ends_there_with_a_checkpoint(
    tmp_path: Path, scenario: Scenario
) -> None:
    run = world(scenario, tmp_path)
    run.interruption.last = 3
    with pytest.raises(Interrupted, match="stopped after step 3, as requested"):
        run.run()
    kept = newest(tmp_path)
    assert kept is not None and kept.step == 3
    world(scenario, tmp_path).run()
    kept = newest(tmp_path)
    assert kept is not None and kept.step == 6


@pytest.mark.parametrize("step", [0, 2])
def test_a_request_while_no_step_is_open_ends_the_run_before_another_step_begins(
    tmp_path: Path, step: int
) -> None:
    def judge(run: JudgedWorld, number: int) -> Sequence[Evaluation]:
        run.interruption.requested |= 2 * number == step
        return [Evaluation(count=2, mean_reward=0.5)]

    where = f"after step {step}" if step else "before the first step"
    with pytest.raises(Interrupted, match=f"stopped {where}, as requested"):
        world(replace(IN_ORDER, evaluate_every=2), tmp_path, judge).run()
    kept = newest(tmp_path)
    assert (kept.step if kept else 0) == step


def test_an_evaluation_that_outlives_the_time_for_a_stop_is_abandoned_and_named(tmp_path: Path) -> None:
    def judge(run: JudgedWorld, number: int) -> Sequence[Evaluation]:
        if number == 1:
            run.interruption.requested = run.interruption.is_over = True
            raise Signalled
        return [Evaluation(count=2, mean_reward=0.5)]

    with pytest.raises(Interrupted, match="stopped after step 2") as stopped:
        world(replace(IN_ORDER, evaluate_every=2), tmp_path, judge).run()
    assert stopped.value.why.startswith("the evaluation after step 2 did not end within")
    kept = newest(tmp_path)
    assert kept is not None and kept.step == 2


def test_rows_that_were_sampled_for_later_steps_survive_an_abandoned_evaluation(tmp_path: Path) -> None:
    def judge(run: JudgedWorld, number: int) -> Sequence[Evaluation]:
        if number == 1:
            run.interruption.requested = run.interruption.is_over = True
            raise Signalled
        return [Evaluation(count=2, mean_reward=0.5)]

    with pytest.raises(Interrupted, match="stopped after step 2"):
        world(replace(AHEAD, evaluate_every=2), tmp_path, judge).run()
    kept = newest(tmp_path)
    assert kept is not None and kept.step == 2 and kept.sampled(3)


def test_graded_results_stay_graded_if_all_later_rewards_are_right_or_wrong(tmp_path: Path) -> None:
    def judge(run: JudgedWorld, number: int) -> Sequence[Evaluation]:
        return [Evaluation(count=2, mean_reward=0.5, is_accuracy=number > 0)]

    world(replace(IN_ORDER, evaluate_every=2), tmp_path, judge).run()
    assert [each.is_accuracy for each in read_evaluations(tmp_path / "run")] == 4 * [False]


@pytest.mark.parametrize(("name", "kept"), [("", [2, 6]), ("other", [6])])
def test_only_a_better_result_on_held_out_rows_causes_a_checkpoint(
    tmp_path: Path, name: str, kept: list[int]
) -> None:
    def judge(run: JudgedWorld, number: int) -> Sequence[Evaluation]:
        return [Evaluation(count=2, mean_reward=(0.5, 0.7, 0.6, 0.4)[number], set=name)]

    world(replace(IN_ORDER, evaluate_every=2), tmp_path, judge).run()
    assert layout.kept_steps(tmp_path / "run" / layout.CHECKPOINTS) == kept


def test_a_sampler_that_dies_is_replaced_and_no_other_rank_starts_again(tmp_path: Path) -> None:
    events = Timeline(Random(0), {}, "")
    (tmp_path / "whole").mkdir()
    World(READY_FIRST, FakeDisk(tmp_path / "whole"), events).run()
    for event in range(events.number // 4, events.number // 2, 40):
        folder = tmp_path / str(event)
        folder.mkdir()
        worlds = list[World]()
        kill = partial(_kill_sampler, worlds)
        worlds.append(World(READY_FIRST, FakeDisk(folder), Timeline(Random(0), {event: kill}, "")))
        worlds[0].run()
        assert worlds[0].attempts == 1


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_run_goes_on_with_another_number_of_replicas(tmp_path: Path, replicas: int) -> None:
    run = world(READY_FIRST, tmp_path)
    run.interruption.last = 3
    with pytest.raises(Interrupted):
        run.run()
    again = world(replace(READY_FIRST, replicas=replicas), tmp_path)
    again.run()
    assert again.resumed_after == 3
    assert any(f"the sampler had 2 replicas and has {replicas}" in line for line in again.said)
    kept = newest(tmp_path)
    assert kept is not None and kept.step == 6


class CollectingWorld(World):
    """A world whose steps also collect their rollouts."""

    @staticmethod
    def algorithm(flow: Any, prompts: Batch, config: Scenario) -> Any:
        report = step(flow, prompts, config)
        flow.collect("seen", flow.policy.generate(prompts, samples=1))
        return report


@pytest.mark.parametrize("freshness", [0, 1])
def test_a_checkpoint_keeps_the_rows_that_steps_collected(tmp_path: Path, freshness: int) -> None:
    scenario = replace(IN_ORDER, freshness=freshness)
    CollectingWorld(scenario, FakeDisk(tmp_path), Timeline(Random(0), {}, "")).run()
    kept = newest(tmp_path)
    assert kept is not None
    groups = [row.group for row in load_batch(kept.collected["seen"]).row_ids()]
    assert groups == order_of_prompts(scenario.steps * scenario.groups)


def test_a_run_goes_on_without_a_sampler_that_cannot_be_replaced(tmp_path: Path) -> None:
    worlds = list[World]()
    events = Timeline(Random(0), {200: partial(_kill_sampler, worlds)}, "")
    worlds.append(CrowdedWorld(READY_FIRST, FakeDisk(tmp_path), events))
    worlds[0].run()
    assert worlds[0].attempts == 1
    assert any("the run goes on with 1 of 2 such replicas" in text for text in worlds[0].said)


def test_a_step_whose_update_runs_when_the_sampler_dies_is_saved(tmp_path: Path) -> None:
    events, worlds = Timeline(Random(0), {}, ""), list[World]()
    (tmp_path / "whole").mkdir()
    World(IN_ORDER, FakeDisk(tmp_path / "whole"), events).run()
    begins = next(line for line in events.trace if line.endswith("main-0 begins policy.update"))
    events = Timeline(Random(0), {int(begins.split()[0]): partial(_kill_sampler, worlds)}, "")
    (tmp_path / "cut").mkdir()
    worlds.append(World(IN_ORDER, FakeDisk(tmp_path / "cut"), events))
    with pytest.raises(RankDied):
        worlds[0].run()
    kept = newest(tmp_path / "cut")
    assert kept is not None and (kept.step, kept.state["version"]) == (1, 1)


def test_a_checkpoint_that_is_written_slowly_is_complete_before_the_next_one_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, complete = list[Path](), list[list[int]]()

    def written(role: Policy, folder: Path, *, wait: bool) -> Mapping[str, Any] | None:
        asks.append(folder)
        return role._files[folder] if wait or asks.count(folder) > 2 else None

    class WatchedWorld(World):
        @staticmethod
        def algorithm(flow: Any, prompts: Batch, config: Scenario) -> Any:
            complete.append(layout.kept_steps(tmp_path / "run" / layout.CHECKPOINTS))
            return step(flow, prompts, config)

    monkeypatch.setattr(Policy, "written", written)
    scenario = replace(AHEAD, steps=16, checkpoint_every=8)
    WatchedWorld(scenario, FakeDisk(tmp_path), Timeline(Random(0), {}, "")).run()
    assert complete[-1] == [8]


def test_an_error_in_the_metrics_of_rows_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="4 scores have no mean"):
        UnmeasurableWorld(AHEAD, FakeDisk(tmp_path), Timeline(Random(0), {}, "")).run()
