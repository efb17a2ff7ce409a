"""KTO: a policy learns from single answers, each good or bad (Ethayarajh et al., arXiv 2402.01306).

answers, and prompts with other answers ─┬─ reference.totals ─> reference_totals ─┐
                                         └────────────────────────────────────────┴─ update ─> publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.formulas.preferences import PairLossConfig
from rillflow.formulas.unpaired import UnpairedLossConfig
from rillflow.tasks.labelled import LABELLED

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class KTOConfig(AlgorithmConfig):
    """KTO's settings; ``prompts_per_step`` counts answers."""

    name: Literal["kto"]
    loss: UnpairedLossConfig = UnpairedLossConfig()


def step(flow: Flow, answers: Batch, config: KTOConfig) -> Handle:
    """Run one iteration: raise good answers above the policy's overall drift, push bad answers below."""
    known = flow.reference.totals(answers)
    report = flow.policy.update(answers, known, loss=config.loss, passes=config)
    flow.publish(flow.policy)
    return report


def score(flow: Flow, answers: Batch, config: KTOConfig) -> Handle:
    """Return the implicit rewards of held-out answers."""
    given = [flow.policy.totals(answers), answers, flow.reference.totals(answers)]
    same = PairLossConfig(beta=config.loss.beta)
    return flow.compute(formulas.implicit_rewards, *given, into="rewards", config=same)


ALGORITHM = Algorithm(config=KTOConfig, step=step, data=LABELLED, score=score)
