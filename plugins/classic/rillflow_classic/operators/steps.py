"""Steps: the operators of classic reinforcement learning over iterators.

rollouts ─ select, join ─> train_one_step ─> report_metrics
compute_gradients, on the source worker ─> average_gradients ─> apply_gradients
store_to_replay                            replay
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rillflow.errors import GraphError, RecordError
from rillflow.records.metrics import Mean, Metrics, merge_metrics
from rillflow_classic.algorithm import System
from rillflow_classic.fragment import Fragment, joined
from rillflow_classic.operators.context import NotReady, Operator, PlanContext
from rillflow_classic.operators.iterators import LocalIterator, collect, from_workers
from rillflow_classic.policy import GradientLearner
from rillflow_classic.worker_set import WorkerSet

Rollout = Fragment | Mapping[str, Fragment]
"""What an actor returns: a fragment, or one of each policy."""


@dataclass(frozen=True, kw_only=True)
class WorkerGradients:
    """Gradients that a worker computed."""

    gradients: list[Tensor]
    """Gradient of every parameter."""
    metrics: Metrics
    """Of the fragment and of its loss."""
    version: int
    """Version of the weights that acted and that have these gradients."""


def join(rollouts: Sequence[Any]) -> Rollout:
    """Return rollouts of several actors side by side, by policy if they have several."""
    if isinstance(rollouts[0], Fragment):
        return joined(rollouts)
    return {name: joined([each[name] for each in rollouts]) for name in rollouts[0]}


def select(policy: str) -> Operator:
    """Take the fragment of one policy."""

    def taken(rollout: Mapping[str, Fragment]) -> Fragment:
        if policy not in rollout:
            raise RecordError(
                f"there is no fragment of policy {policy!r}",
                why=f"the actors returned fragments of {', '.join(sorted(rollout))}",
                fix="name one of these policies in the plan",
            )
        return rollout[policy]

    return Operator(label=f"select {policy}", begin=lambda _: taken)


def train_one_step(system: System, policy: str = "", *, publish_every: int = 1) -> Operator:
    """Update a learner with an item, and return the metrics.

    Args:
        system: where the learner is.
        policy: its name; without one, the only learner.
        publish_every: updates between new weights for the actors.
    """
    learner = system.learners[policy] if policy else system.learner

    def train(item: Any) -> Metrics:
        metrics = learner.update(item)
        if learner.version % publish_every == 0:
            system.publish(learner)
        return metrics

    return Operator(label=f"train {policy}".strip(), begin=lambda _: train)


def compute_gradients(policy: str = "policy") -> Operator:
    """Compute gradients on the actor that sampled, with its own learner; for a ParallelIterator.

    The learner has the weights of the actor's policy, which ``Actor.load`` replaces.
    """

    def begin(context: PlanContext) -> Callable[[Fragment], WorkerGradients]:
        learner = context.worker.learners[policy]

        def compute(fragment: Fragment) -> WorkerGradients:
            gradients, metrics = learner.gradients(fragment)
            return WorkerGradients(gradients=gradients, metrics=metrics, version=int(fragment.versions.min()))

        return compute

    return Operator(label="compute_gradients", begin=begin)


def average_gradients(items: Sequence[WorkerGradients]) -> WorkerGradients:
    """Return the mean of several workers' gradients: their sum divided by their number.

    So the step does not depend on the number of workers (the operator of RLlib Flow's code returns the sum).
    """
    columns = zip(*(each.gradients for each in items), strict=True)
    return WorkerGradients(
        gradients=[sum(column[1:], column[0]) / len(items) for column in columns],
        metrics=merge_metrics(each.metrics for each in items),
        version=min(each.version for each in items),
    )


def apply_gradients(
    learner: GradientLearner, *, update_all: WorkerSet[Any] | None = None, policy: str = "policy"
) -> Operator:
    """Take a step with a worker's gradients, send new weights, and return the metrics.

    Args:
        learner: the learner of this process.
        update_all: workers that all get the weights; None: only the item's source gets them.
        policy: name of the policy in the actors.
    """

    def begin(context: PlanContext) -> Callable[[WorkerGradients], Metrics]:
        def apply(item: WorkerGradients) -> Metrics:
            lag = learner.version - item.version
            learner.apply(item.gradients)
            load = ("load", learner.version, learner.weights(), policy)
            if update_all is not None:
                context.sent(update_all.call_all(*load))
            elif context.source is not None:
                context.sent([context.source.call(*load)])
            else:
                raise GraphError(
                    "apply_gradients has no source that could get the weights",
                    why="its items are joined from several workers, or made in this process",
                    fix="give update_all=workers, or apply the items of a gather directly",
                )
            return {**item.metrics, "actor/lag/mean": Mean(total=float(lag), count=1.0)}

        return apply

    return Operator(label="apply_gradients" + " to all" * (update_all is not None), begin=begin)


def store_to_replay(buffers: WorkerSet[Any], seed: int = 0) -> Operator:
    """Add items to the replay buffer of a random worker; return the items."""

    def begin(context: PlanContext) -> Callable[[Any], Any]:
        generator = random.Random(seed)

        def store(item: Any) -> Any:
            context.sent([buffers.call(generator.randrange(buffers.size), "add", item)])
            return item

        return store

    return Operator(label="store_to_replay", begin=begin)


def replay(buffers: WorkerSet[Any], batch_size: int, *, starts: int = 0, num_async: int = 4) -> LocalIterator:
    """Return batches of the replay buffers of several workers as they come.

    Args:
        buffers: the workers.
        batch_size: transitions of a batch.
        starts: transitions that a buffer holds before it gives a batch; at least a batch.
        num_async: calls in flight at each worker.
    """
    return from_workers(buffers, _draw, batch_size, max(batch_size, starts)).gather_async(num_async)


def _draw(buffer: Any, batch_size: int, least: int) -> Any:
    """Return a batch of a buffer that holds enough transitions."""
    if not buffer.is_ready(least):
        return NotReady(why=(f"a replay buffer has {buffer.num_transitions} of {least} transitions",))
    return buffer.sample(batch_size)


def report_metrics(every: int = 1) -> Operator:
    """Join the metrics of ``every`` items and those that operators recorded to one item; for ``combine``."""
    return collect(
        f"report_metrics {every}",
        every,
        lambda context, held: merge_metrics([*held, context.take_metrics()]),
    )
