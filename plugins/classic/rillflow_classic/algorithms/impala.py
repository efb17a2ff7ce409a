"""IMPALA: actors that never wait for the learner, and V-trace (Espeholt et al., arXiv 1802.01561).

    v(t) = V(t) + rho(t) delta(t) + gamma c(t) (v(t + 1) - V(t + 1)),   rho, c = min(clip, pi / mu)
    L = -E[rho (r + gamma v(t + 1) - V) log pi] + w 0.5 E[(V - v)^2] - h E[entropy]

    rollouts  fragments as they come ─> batches ─> queue
    learn     queue ─> update ─> weights for all actors, at every k-th update

It is A2C with the returns and advantages of V-trace. For fragments of the learner's own policy, pi = mu, and
the gradient is that of A2C with n-step returns. The queue and ``num_async`` bound the age of a fragment;
``actor/lag/mean`` is its age in updates.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pydantic import Field
from torch import Tensor

from rillflow.records.metrics import Mean, Metrics
from rillflow_classic.algorithm import ClassicAlgorithm, System
from rillflow_classic.algorithms.a2c import A2CConfig
from rillflow_classic.formulas import v_trace
from rillflow_classic.fragment import Fragment
from rillflow_classic.on_policy import Estimates, OnPolicyLearner, as_tensor, steps_of
from rillflow_classic.operators.iterators import concurrently, queue
from rillflow_classic.operators.steps import join, report_metrics, train_one_step

ROUNDING = 1e-4
"""Distance from a clip below which a weight does not count as clipped."""


class ImpalaConfig(A2CConfig):
    """``[algorithm]`` of IMPALA."""

    clip_rho: float = Field(1.0, gt=0, description="Largest importance weight of an error.")
    clip_c: float = Field(1.0, gt=0, description="Largest importance weight of the errors that follow.")
    num_async: int = Field(2, ge=1, description="Calls in flight at each actor.")
    batch: int = Field(1, ge=1, description="Fragments of an update.")
    queued: int = Field(2, ge=1, description="Batches that wait for the learner; then no more are taken.")
    publish_every: int = Field(1, ge=1, description="Updates between new weights for the actors.")
    updates: int = Field(10, ge=1, description="Updates of one step of the run.")


class ImpalaLearner(OnPolicyLearner):
    """The learner of A2C with the estimates of V-trace."""

    _settings: ImpalaConfig

    def estimates(self, data: Fragment, starts: Tensor) -> Estimates:
        """Return V-trace's advantages and targets, with the present network's values and probabilities."""
        settings, steps = self._settings, steps_of(data)
        state = None if data.state is None else as_tensor(data.state)
        output = self.network.unroll(as_tensor(data.observations), state, starts)
        actions, acted = as_tensor(data.actions), as_tensor(data.outputs["logprobs"])
        parameters = output.parameters[: acted.numel()]  # without the bootstrap's
        logprobs = self.network.distribution.evaluate(parameters, actions.flatten(0, 1))[0].view(acted.shape)
        corrected = v_trace(
            logprobs,
            acted,
            values=output.values.view(starts.shape),
            gamma=settings.gamma,
            lam=settings.lam,
            clip_rho=settings.clip_rho,
            clip_c=settings.clip_c,
            **steps,
        )
        log_ratios = (logprobs - acted)[steps["valid"]]
        ratios = torch.exp(log_ratios)
        clipped = (ratios > settings.clip_rho + ROUNDING).sum()
        sums = {"approximate_kl/mean": (ratios - 1 - log_ratios).sum(), "clipped/share": clipped}
        return Estimates(
            logprobs=logprobs,
            advantages=corrected.advantages,
            returns=corrected.targets,
            weights=corrected.weights,
            metrics={f"policy/{k}": Mean(total=float(v), count=len(ratios)) for k, v in sums.items()},
        )


def plan(system: System, settings: ImpalaConfig) -> Iterator[Metrics]:
    """Return the dataflow: rollouts and learning, concurrently."""
    enqueue, batches = queue(settings.queued)
    rollouts = system.rollouts("async", num_async=settings.num_async)
    train = train_one_step(system, publish_every=settings.publish_every)
    flows = [
        rollouts.batch(settings.batch).for_each(join).for_each(enqueue),
        batches.for_each(train).combine(report_metrics(settings.updates)),
    ]
    return concurrently(flows, "async", output_indexes=[1])  # type: ignore[return-value]


ALGORITHM = ClassicAlgorithm(
    name="impala", config=ImpalaConfig, learner=ImpalaLearner, plan=plan, sums_gradients=True
)
