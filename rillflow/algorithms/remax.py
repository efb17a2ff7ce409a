"""ReMax: the baseline is the reward of the answer decoded greedily (Li et al., arXiv 2310.10505).

prompts ─┬─ greedy ──> answers  ─ score ─> greedy rewards ─┐
         └─ generate ─> rollouts ─ score ─> rewards ─ over_greedy ─> advantages ─┐
                           └──────────────────────────────────────────────────── update ─> publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.config import OnlineConfig
from rillflow.algorithms.grpo import roles
from rillflow.algorithms.steps import charge, improve, look_back, price_missing_end

if TYPE_CHECKING:
    from rillflow.dataflow.flow import Flow
    from rillflow.records.batch import Batch
    from rillflow.records.metrics import Metrics


class ReMaxConfig(OnlineConfig):
    """ReMax's settings."""

    name: Literal["remax"]


def step(flow: Flow, prompts: Batch, config: ReMaxConfig) -> Metrics:
    """One iteration: sample, score, prefer what beat the likeliest answer."""
    likeliest = flow.policy.greedy(prompts)
    greedy = price_missing_end(flow, flow.reward.score(likeliest), likeliest, config)
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    known = look_back(flow, rollouts, config)
    rewards = charge(flow, rewards, known, config)
    advantages = flow.compute(formulas.over_greedy, rewards, into="advantages", greedy=greedy)
    return improve(flow, [*known, advantages], config)


ALGORITHM = Algorithm(config=ReMaxConfig, step=step, data=Data.PROMPTS, roles=roles)
