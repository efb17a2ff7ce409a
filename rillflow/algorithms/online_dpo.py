"""Online DPO: learn from pairs of the policy's own answers (RLHF Workflow: arXiv 2405.07863).

prompts ─ generate ─> rollouts ─ score ─> rewards ─ pair_places ─> where paired ─ totals ─> pairs
                                    all pairs so far <─ collect ──────────────────────────────┘
                                           └─ update ─> publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AnchoredConfig
from rillflow.algorithms.steps import missing_end_penalised, publish
from rillflow.formulas.config import Selector
from rillflow.formulas.preferences import PairLossConfig

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class OnlineDPOConfig(AnchoredConfig):
    """Online DPO's settings."""

    name: Literal["online_dpo"]
    samples_per_prompt: int = Field(
        8, ge=2, description="Completions sampled for each prompt: the sample group, at least two for a pair."
    )
    selector: Selector = Field(
        "max_min", description="Rule that selects the two rows of a pair from a sample group."
    )
    length_price: float = Field(
        0.0,
        ge=0,
        description="Length penalty per sampled token, subtracted from a row's reward before rows are "
        "compared.",
    )
    data: Literal["all", "fresh"] = Field(
        "all", description="Pairs to train on: all pairs of the phase so far, or the pairs of this step."
    )
    loss: PairLossConfig = PairLossConfig()

    @property
    def oldest(self) -> int | None:
        """See UpdateConfig; pairs of earlier iterations may have any age."""
        return None if self.data == "all" else super().oldest


def step(flow: Flow, prompts: Batch, config: OnlineDPOConfig) -> Handle:
    """Run one iteration: sample and score groups, learn from their pairs and from earlier pairs."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    scores = missing_end_penalised(flow, flow.reward.score(rollouts), rollouts, config)
    if config.truncated == "mask":
        scores = flow.compute(formulas.whole_scores, scores, rollouts, into="valid")
    how = {"selector": config.selector, "length_price": config.length_price, "seed": flow.seed}
    placed = flow.compute(formulas.pair_places, rollouts, scores, into="pair_place", **how)
    flow.number(formulas.paired_groups, placed)
    barren = flow.recall("barren", 0.0)
    flow.remember(
        "barren", flow.number(formulas.iterations_without_pairs, placed, so_far=barren, steps=config.steps)
    )
    placed = flow.compute(formulas.is_preferred, placed, into="preferred")
    placed = flow.compute(formulas.is_paired, placed, into="paired")
    pairs = trained_pairs(flow, flow.filter(placed, "paired"), config)
    report = flow.policy.update(pairs, loss=config.loss, passes=config)
    publish(flow, config, is_held=config.loss.has_reference)
    return report


def trained_pairs(flow: Flow, pairs: Handle, config: OnlineDPOConfig) -> Handle:
    """Return the pairs that an iteration learns from; a loss with a reference gets its totals.

    The totals of a fixed reference are computed once, when the pairs are collected.
    """
    stays = config.reference == "first"
    if stays:
        pairs = with_totals(flow, pairs, config)
    if config.data == "all":
        pairs = flow.collect("pairs", pairs)
    return pairs if stays else with_totals(flow, pairs, config)


def with_totals(flow: Flow, pairs: Handle, config: OnlineDPOConfig) -> Handle:
    """Return the pairs with the reference's totals."""
    if not config.loss.has_reference:
        return pairs
    if config.reference == "previous":
        totals = flow.policy.totals(pairs)
        return flow.compute(formulas.previous_totals, pairs, totals, into="reference_totals")
    totals = flow.reference.totals(pairs)
    return flow.compute(formulas.kept_totals, pairs, totals, into="reference_totals")


ALGORITHM = Algorithm(config=OnlineDPOConfig, step=step)
