"""A2C: synchronous advantage actor-critic (Mnih et al., arXiv 1602.01783, without the asynchrony).

    L = -E[A log pi] + w 0.5 E[(V - R)^2] - h E[entropy]

It is PPO with one epoch and one minibatch: the policy that learns is the one that acted. So rho = 1, nothing
is clipped, and the gradient of rho A is that of A log pi.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow_classic.algorithm import ClassicAlgorithm
from rillflow_classic.algorithms.ppo import plan
from rillflow_classic.on_policy import OnPolicyConfig, OnPolicyLearner
from rillflow_classic.workers.buffer_worker import fresh_values


class A2CConfig(OnPolicyConfig):
    """``[algorithm]`` of A2C."""

    lr: float = Field(7e-4, gt=0, description="Learning rate of Adam.")
    lam: float = Field(1.0, ge=0, le=1, description="Lambda of the advantage estimates; 1: n-step returns.")
    epochs: Literal[1] = Field(1, description="One pass: the policy that learns is the one that acted.")
    minibatches: Literal[1] = Field(1, description="One optimiser step for each fragment.")
    normalise_advantages: bool = Field(
        False, description="Whether advantages of an update get mean 0 and deviation 1."
    )


ALGORITHM = ClassicAlgorithm(
    name="a2c",
    config=A2CConfig,
    learner=OnPolicyLearner,
    plan=plan,
    sums_gradients=True,
    reanalyse=fresh_values,
)
