"""DPO and its variants: a policy learns from pairs of answers, no reward (Rafailov et al., arXiv 2305.18290).

pairs ─┬─ reference.totals ─> reference_totals ─┐
       └────────────────────────────────────────┴─ update ─> publish

Kinds without a reference (simpo, orpo) load no model for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.formulas.preferences import PairLossConfig
from rillflow.tasks.preference import PREFERENCES

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class DPOConfig(AlgorithmConfig):
    """DPO's settings; ``prompts_per_step`` counts pairs."""

    name: Literal["dpo"]
    loss: PairLossConfig = PairLossConfig()


def step(flow: Flow, pairs: Batch, config: DPOConfig) -> Handle:
    """Run one iteration: raise the chosen answers' probability relative to the rejected ones'."""
    known = [flow.reference.totals(pairs)] if config.loss.has_reference else []
    report = flow.policy.update(pairs, *known, loss=config.loss, passes=config)
    flow.publish(flow.policy)
    return report


def score(flow: Flow, pairs: Batch, config: DPOConfig) -> Handle:
    """Return the implicit rewards of held-out answers."""
    given = [flow.policy.totals(pairs), pairs]
    if not config.loss.has_reference:
        return flow.compute(formulas.logprob_rewards, *given, into="rewards", config=config.loss)
    given.append(flow.reference.totals(pairs))
    return flow.compute(formulas.implicit_rewards, *given, into="rewards", config=config.loss)


ALGORITHM = Algorithm(config=DPOConfig, step=step, data=PREFERENCES, score=score)
