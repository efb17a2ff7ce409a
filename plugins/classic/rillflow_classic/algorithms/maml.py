"""MAML: a policy that a gradient step adapts to a new task (Finn et al., arXiv 1703.03400, algorithm 3).

    theta_i = theta - a grad L_i(theta, D_i)            D_i: episodes of task i with the policy theta
    theta <- theta - b grad sum_i L_i(theta_i, D'_i)    D'_i: episodes of task i with the policy theta_i
    L = -E[min(rho A, clip(rho, 1 - c, 1 + c) A)],  rho = pi / mu

    rollouts of every actor ─ adapt ─ rollouts of every actor ─ meta update ─> new tasks, new weights

Every slot has a task of its own, which ``reset(seed)`` draws (see ``point_navigation``). First order takes
the derivative of theta_i by theta as 1. Second order takes that of the loss with its ratio, which also says
how theta changes the first episodes (Rothfuss et al., arXiv 1810.06784). No value function is learnt, because
it would not know the task: each task has a linear baseline of its own. Let a fragment hold whole episodes.
The control without adaptation is ``inner_lr`` = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from rillflow.errors import ConfigError
from rillflow.records.metrics import Mean, Metrics, merge_metrics
from rillflow_classic.algorithm import ClassicAlgorithm, LearnerInputs
from rillflow_classic.formulas import gae, linear_baseline
from rillflow_classic.fragment import Fragment
from rillflow_classic.networks.build import is_frames
from rillflow_classic.networks.task_policy import TaskPolicy
from rillflow_classic.on_policy import (
    Estimates,
    OnPolicyConfig,
    OnPolicyLearner,
    as_tensor,
    fragment_metrics,
    steps_of,
)
from rillflow_classic.operators.context import Operator, PlanContext
from rillflow_classic.operators.iterators import from_workers
from rillflow_classic.policy import Weights

Parameters = Mapping[str, Tensor]


class MamlConfig(OnPolicyConfig):
    """``[algorithm]`` of MAML."""

    lr: float = Field(3e-3, gt=0, description="Learning rate of Adam, in the meta update.")
    epochs: int = Field(1, gt=0, description="Optimiser steps of each meta update.")
    minibatches: Literal[1] = Field(1, description="A meta update takes all rows at once.")
    value_weight: Literal[0] = Field(0, description="No value function is learnt.")
    entropy_weight: float = Field(0.0, ge=0, description="Weight of the entropy.")
    inner_lr: float = Field(0.1, ge=0, description="Length of the step that adapts, a; 0 for none.")
    second_order: bool = Field(False, description="Whether the meta gradient goes through that step.")


@dataclass(frozen=True)
class TaskRows:
    """Valid rows of one task."""

    observations: Tensor
    """[B, ...]."""
    actions: Tensor
    """[B] or [B, A]."""
    columns: Tensor
    """[B, 3] acted log probabilities, advantages, returns."""


class MamlLearner(OnPolicyLearner):
    """The learner of MAML: an inner step for each task, and the outer step.

    Args:
        inputs: the settings are a ``MamlConfig``.
        slots_per_task: neighbouring slots that have the same task.

    Raises:
        ConfigError: the network has an LSTM, or observations are frames.
    """

    _settings: MamlConfig

    def __init__(self, inputs: LearnerInputs, slots_per_task: int = 1) -> None:
        super().__init__(inputs)
        if self.network.lstm_size or is_frames(inputs.observation_space):
            raise ConfigError(
                f"network.kind is {inputs.network.kind!r}, and observations are {inputs.observation_space}",
                why="the inner step has no recurrent state, and the baseline is linear in the observations",
                fix='set network.kind = "mlp", and use an environment whose observations are vectors',
            )
        self.policy = self.tasks = TaskPolicy(self.network, inputs.seed)
        """Acts, with other weights in each task while it is adapted."""
        self.policy.version = 0
        self._slots_per_task = slots_per_task

    def estimates(self, data: Fragment, starts: Tensor) -> Estimates:
        """Return GAE with a linear baseline of each task; a return ends where a limit cuts its episode."""
        settings, steps = self._settings, steps_of(data)
        steps["terminated"] = steps["terminated"] | steps["truncated"]
        returns = gae(values=torch.zeros(starts.shape), gamma=settings.gamma, lam=1.0, **steps)
        fields = (as_tensor(data.observations), starts, returns, steps["valid"])
        tasks = zip(*(torch.split(each, self._slots_per_task, 1) for each in fields), strict=True)
        values = torch.cat([linear_baseline(*task) for task in tasks], 1)
        advantages = gae(values=values, gamma=settings.gamma, lam=settings.lam, **steps)
        logprobs = as_tensor(data.outputs["logprobs"])
        return Estimates(logprobs=logprobs, advantages=advantages, returns=returns)

    def adapted(self, data: Fragment) -> list[Weights]:
        """Return the weights of every task after a step with its rows."""
        tasks = (self._adapt(rows) for rows in self._tasks(data))
        return [{name: value.detach().numpy() for name, value in each.items()} for each in tasks]

    def update(self, data: Any) -> Metrics:
        """Take a meta update.

        Args:
            data: pairs of fragments of the same slots, before and after the step that adapts.

        Raises:
            NotFiniteError: a gradient is not finite; the weights stay.
        """
        tasks = [each for pair in data for each in zip(*map(self._tasks, pair), strict=True)]
        totals, count = torch.zeros(3), self._settings.epochs
        for _ in range(count):
            self._gradient.zero_()
            for before, after in tasks:
                terms = self._terms(self._adapt(before), after) / len(tasks)
                loss = terms[0] - self._settings.entropy_weight * terms[1]
                loss.backward()  # type: ignore[no-untyped-call]
                totals[:2] += terms.detach()
            totals[2] += self._step()
        metrics = merge_metrics(acted(before, after, self.version) for before, after in data)
        self._count_update()
        named = zip(("loss", "entropy", "gradient_norm"), totals.tolist(), strict=True)
        return {**metrics, **{f"policy/{name}/mean": Mean(total=each, count=count) for name, each in named}}

    def _tasks(self, data: Fragment) -> list[TaskRows]:
        found = self._experience(data)
        fields = (found.observations, found.actions, found.columns, found.valid)
        tasks = zip(*(torch.split(each, self._slots_per_task, 1) for each in fields), strict=True)
        return [TaskRows(*(each[valid] for each in rows)) for *rows, valid in tasks]

    def _adapt(self, rows: TaskRows) -> Parameters:
        """Return the parameters after the inner step; they depend on the policy's."""
        settings, parameters = self._settings, dict(self.network.named_parameters())
        gradients = torch.autograd.grad(
            self._terms(parameters, rows)[0],
            list(parameters.values()),
            create_graph=settings.second_order,
            materialize_grads=True,
        )
        pairs = zip(parameters.items(), gradients, strict=True)
        return {name: value - settings.inner_lr * by for (name, value), by in pairs}

    def _terms(self, parameters: Parameters, rows: TaskRows) -> Tensor:
        """Return [2]: policy loss and entropy of the rows, means."""
        output = functional_call(self.network, dict(parameters), (rows.observations,))
        logprobs, entropies = self.network.distribution.evaluate(output.parameters, rows.actions)
        before, advantages, _ = rows.columns.unbind(1)
        ratios, clip = torch.exp(logprobs - before), self._settings.clip
        gains = torch.minimum(ratios * advantages, ratios.clamp(1 - clip, 1 + clip) * advantages)
        return torch.stack([-gains.mean(), entropies.mean()])


def acted(before: Fragment, after: Fragment, version: int) -> Metrics:
    """Return what two fragments say about acting: the returns after the step, and those before it."""
    first, then = (fragment_metrics(each, version) for each in (before, after))
    steps = merge_metrics({"actor/steps/sum": each["actor/steps/sum"]} for each in (first, then))
    return {**then, **steps, "episode/return_before/mean": first["episode/return/mean"]}


def plan(system: Any, settings: MamlConfig) -> Iterable[Metrics]:
    """Return the dataflow: rollouts with the meta policy, adaptation, rollouts, meta update, new tasks."""
    del settings
    learner = system.learner

    def update(rounds: list[list[Fragment]]) -> Metrics:
        after = {each.actor: each for each in rounds[1]}
        pairs = [(each, after[each.actor]) for each in rounds[0] if each.actor in after]
        metrics: Metrics = learner.update(pairs)
        system.publish(learner)
        system.ask_actors("reset", learner.version)
        return metrics

    rollouts = from_workers(system.actors, "sample").batch_across_workers()
    meta_update = Operator(label="meta_update", begin=lambda _: update)
    return rollouts.for_each(adapt(system)).batch(2).for_each(meta_update)


def adapt(system: Any) -> Operator:
    """Give each task its own weights after every second round, those of a step with its fragment."""

    def begin(context: PlanContext) -> Callable[[list[Fragment]], list[Fragment]]:
        is_first = cycle((True, False))

        def give(rollouts: list[Fragment]) -> list[Fragment]:
            for each in rollouts if next(is_first) else ():
                send_tasks(system, context, each.actor, system.learner.adapted(each))
            return rollouts

        return give

    return Operator(label="adapt", begin=begin)


def send_tasks(system: Any, context: PlanContext, actor: int, weights: Sequence[Weights]) -> None:
    """Send weights for each task to an actor."""
    context.sent([system.actors.call(actor, partial(load_tasks, system.learner.version, weights))])


def load_tasks(version: int, weights: Sequence[Weights], actor: Any) -> None:
    """Load weights for each task into an actor's policies."""
    for policy in actor.policies.values():
        policy.load_tasks(version, weights)


ALGORITHM = ClassicAlgorithm(
    name="maml",
    config=MamlConfig,
    learner=MamlLearner,
    plan=plan,
    calls_actors=True,
    remark="the policy acts as it is before it adapts to a task; adapting needs the plan of a run",
)
