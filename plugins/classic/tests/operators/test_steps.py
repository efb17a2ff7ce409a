"""The operators of reinforcement learning, and A3C, which is a plan of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from rillflow.errors import GraphError, RecordError
from rillflow.records.metrics import Mean, Sum
from rillflow.workers.backend import Backend, Pool
from rillflow.workers.inline import InlineBackend
from rillflow_classic.algorithm import LearnerInputs
from rillflow_classic.algorithms.a3c import A3CConfig, plan
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.fragment import Fragment
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.on_policy import OnPolicyLearner
from rillflow_classic.operators.context import PlanContext
from rillflow_classic.operators.iterators import concurrently, from_items, from_workers
from rillflow_classic.operators.steps import (
    WorkerGradients,
    apply_gradients,
    average_gradients,
    join,
    replay,
    report_metrics,
    select,
    store_to_replay,
)
from rillflow_classic.system import CallSystem
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor

CARTPOLE = EnvironmentSettings(id="CartPole-v1")


def fragment(first: float, slots: int = 2, steps: int = 3, actor: int = 0) -> Fragment:
    """Return a fragment whose rewards count up from ``first``; its second row only resets."""
    rewards = np.arange(first, first + steps * slots, dtype=np.float32).reshape(steps, slots)
    valid = np.ones((steps, slots), np.bool_)
    valid[1] = False
    return Fragment(
        observations=np.zeros((steps + 1, slots, 4), np.float32),
        actions=np.zeros((steps, slots), np.int64),
        rewards=rewards,
        terminated=np.zeros((steps, slots), np.bool_),
        truncated=np.zeros((steps, slots), np.bool_),
        valid=valid,
        outputs={"values": 2 * rewards},
        versions=np.zeros(steps, np.int64),
        actor=actor,
    )


def test_select_takes_the_fragment_of_a_policy_or_names_those_that_there_are() -> None:
    both = {"left": fragment(0), "right": fragment(9)}
    assert list(from_items([both]).for_each(select("right"))) == [both["right"]]
    with pytest.raises(RecordError, match="no fragment of policy 'centre'") as caught:
        list(from_items([both]).for_each(select("centre")))
    assert "left, right" in caught.value.why


def test_rollouts_are_joined_side_by_side_policy_by_policy() -> None:
    joined = join([{"left": fragment(0), "right": fragment(1)}, {"left": fragment(2), "right": fragment(3)}])
    assert isinstance(joined, Mapping)
    assert [joined[name].rewards[0].tolist() for name in ("left", "right")] == [[0, 1, 2, 3], [1, 2, 3, 4]]


def gradients(*values: float, version: int = 0) -> WorkerGradients:
    metrics = {"policy/loss/mean": Mean(total=values[0], count=1)}
    return WorkerGradients(
        gradients=[torch.tensor(each) for each in values], metrics=metrics, version=version
    )


def test_average_gradients_divides_by_their_number() -> None:
    found = average_gradients([gradients(1.0, 10.0, version=3), gradients(3.0, 20.0, version=2)])
    assert [each.item() for each in found.gradients] == [2.0, 15.0]
    assert found.version == 2 and found.metrics["policy/loss/mean"].value == 2.0


class SumLearner:
    """Adds gradients up."""

    def __init__(self) -> None:
        self.version, self.total = 0, 0.0

    def apply(self, found: list[torch.Tensor]) -> None:
        self.total += float(found[0])
        self.version += 1

    def weights(self) -> dict[str, Any]:
        return {"total": np.array(self.total)}


class Loaded:
    """A worker that remembers what it loaded."""

    def __init__(self, index: int) -> None:
        self.index, self.loaded = index, [0]

    def sample(self) -> WorkerGradients:
        return gradients(1.0, version=self.loaded[-1])

    def load(self, version: int, weights: Any, policy: str) -> None:
        assert float(weights["total"]) == version and policy == "policy"
        self.loaded.append(version)

    def history(self) -> list[int]:
        return self.loaded


@contextmanager
def opened(count: int, make: Callable[[int], Any]) -> Iterator[WorkerSet[Any]]:
    backend: Backend = InlineBackend()
    backend.open([Pool(name="actors", size=count), Pool(name="beside", size=1)])
    try:
        yield WorkerSet(backend, "actors", make)
    finally:
        backend.close()


def histories(workers: WorkerSet[Any]) -> list[list[int]]:
    return [each.read() for each in workers.call_all("history")]


def test_apply_gradients_sends_weights_to_the_source_or_to_all() -> None:
    with opened(2, Loaded) as workers:
        items = iter(from_workers(workers, "sample").gather_sync().for_each(apply_gradients(SumLearner())))  # type: ignore[arg-type]
        lags = [next(items)["actor/lag/mean"].value for _ in range(5)]
        assert histories(workers) == [[0, 1, 3, 5], [0, 2, 4]]
        assert lags == [0, 1, 1, 1, 1]
    with opened(2, Loaded) as workers:
        flow = from_workers(workers, "sample").batch_across_workers().for_each(average_gradients)
        list(islice(flow.for_each(apply_gradients(SumLearner(), update_all=workers)), 3))  # type: ignore[arg-type]
        assert histories(workers) == [[0, 1, 2, 3]] * 2
        without = flow.for_each(apply_gradients(SumLearner()))  # type: ignore[arg-type]
        with pytest.raises(GraphError, match="no source that could get the weights"):
            next(iter(without))


def test_an_error_of_a_load_that_nobody_reads_ends_the_plan() -> None:
    with opened(1, Loaded) as workers:
        learner: Any = SumLearner()
        learner.weights = lambda: {"total": np.array(-1.0)}
        flow = from_workers(workers, "sample").gather_sync().for_each(apply_gradients(learner))
        with pytest.raises(AssertionError):
            list(islice(flow, 50))


class ListBuffer:
    """A replay buffer that draws its newest items."""

    def __init__(self, index: int = 0) -> None:
        self.index, self.items = index, list[int]()

    @property
    def num_transitions(self) -> int:
        return len(self.items)

    def is_ready(self, starts: int) -> bool:
        return len(self.items) >= starts

    def add(self, item: int) -> None:
        self.items.append(item)

    def sample(self, batch_size: int) -> tuple[int, list[int]]:
        return self.index, self.items[-batch_size:]

    def content(self) -> list[int]:
        return self.items


@pytest.mark.parametrize("mode", ["round_robin", "async"])
def test_replay_begins_when_the_buffer_is_filled(mode: str) -> None:
    with opened(1, ListBuffer) as buffers:
        store = from_items(range(50)).for_each(store_to_replay(buffers))
        drawn = concurrently([store, replay(buffers, 2, starts=5)], mode, output_indexes=[1])
        index, first = next(iter(drawn))
    assert index == 0 and len(first) == 2 and first[-1] >= 4, "the newest of at least 5 items"


def test_replay_of_workers_stores_at_random_and_draws_as_they_come() -> None:
    with opened(2, ListBuffer) as buffers:
        store = from_items(range(200)).for_each(store_to_replay(buffers))
        plan = concurrently([store, replay(buffers, 3, starts=20)], "round_robin", output_indexes=[1])
        drawn = list[Any]()
        for item in islice(plan, 5000):  # a worker whose thread starts late answers after many of the other's
            drawn.append(item)
            if len(drawn) >= 20 and {index for index, _ in drawn} == {0, 1}:
                break
        kept = [each.read() for each in buffers.call_all("content")]
    assert all(len(items) == 3 for _, items in drawn) and {index for index, _ in drawn} == {0, 1}
    assert sorted([*kept[0], *kept[1]]) == list(range(len(kept[0]) + len(kept[1])))
    assert min(map(len, kept)) >= 20


def test_report_metrics_joins_items_and_what_operators_recorded() -> None:
    metrics = [{"actor/steps/sum": Sum(value=float(each))} for each in range(6)]
    context = PlanContext()
    items = from_items(metrics).combine(report_metrics(3)).run(context)
    assert next(items) == {"actor/steps/sum": Sum(value=3.0)}
    context.record({"actor/lost/sum": Sum(value=1.0)})
    assert next(items) == {"actor/steps/sum": Sum(value=12.0), "actor/lost/sum": Sum(value=1.0)}


def inputs(seed: int = 3) -> LearnerInputs:
    environment = make_environment(CARTPOLE, 1)
    settings = A3CConfig(lr=3e-3)
    return LearnerInputs(
        observation_space=environment.observation_space,
        action_space=environment.action_space,
        network=NetworkConfig(hidden=(32,)),
        settings=settings,
        seed=seed,
    )


def make_actor(steps: int, index: int) -> Actor:
    learner = OnPolicyLearner(inputs(seed=index))
    ring, policies = [make_environment(CARTPOLE, 4, seed=index)], {"policy": learner.policy}
    return Actor(ring, policies, steps, index=index, seed=index, learners={"policy": learner})


def test_a_gradient_of_a3c_is_that_of_the_controllers_learner_for_the_same_fragment() -> None:
    with opened(1, partial(make_actor, 16)) as actors:
        learner = OnPolicyLearner(inputs())
        system = CallSystem(actors, {"policy": learner})
        system.reset(5)
        metrics = next(iter(plan(system, A3CConfig())))
    twin, actor = OnPolicyLearner(inputs()), make_actor(16, 0)
    actor.reset(5)
    actor.load(0, twin.weights(), "policy")
    expected, said = twin.gradients(actor.sample())  # type: ignore[arg-type]
    assert said["policy/loss/mean"] == metrics["policy/loss/mean"] and expected
    twin.apply(expected)
    for name, value in twin.weights().items():
        np.testing.assert_array_equal(learner.weights()[name], value)


@pytest.mark.slow
def test_a3c_learns_to_balance_a_pole() -> None:
    """The mean return of the last episodes is at least 150; a random policy has about 22."""
    with opened(2, partial(make_actor, 32)) as actors:
        system = CallSystem(actors, {"policy": OnPolicyLearner(inputs())})
        system.reset(0)
        steps = plan(system, A3CConfig(report_every=50))
        returns = [metrics["episode/return/mean"].value for metrics in islice(steps, 30)]
    assert max(returns[-5:]) >= 150, returns
