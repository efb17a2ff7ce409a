"""Engines: check that the engine that ``rollout.engine`` names can run the recipe and its model.

rollout.engine ─ engine_class ─> Engine, its capabilities ─ engine_notes, attention_notes ─> refused, or notes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.algorithms.config import OnlineConfig, SampledConfig
from rillflow.app.engine_sources import engine_source
from rillflow.errors import ConfigError
from rillflow.rollout.config import NATIVE
from rillflow.rollout.engine import Capability

if TYPE_CHECKING:
    from rillflow.app.facts import RecipeFacts


def _loosened(config: SampledConfig, engine: str) -> str:
    """Describe which guarantees of the native engine another engine does not give."""
    made_up = "the loss uses no sampled probabilities"
    if isinstance(config, OnlineConfig):
        correction = config.loss.correction
        weighed = {
            "none": "nothing corrects the difference",
            "tis": "truncated importance weights correct the difference up to their bounds",
        }
        made_up = weighed.get(correction, "importance weights correct the difference")
        made_up += f" (algorithm.loss.correction is {correction})"
    return (
        f"rollout.engine {engine} computes different log probabilities than the trainer: {made_up}. "
        f"The ratio must be 1 in the mean (gap_tolerance {config.gap_tolerance:g}), not at every token. "
        "A row depends on its batch, and a resumed run is equal up to rounding, not bit for bit"
    )


def engine_notes(facts: RecipeFacts) -> list[str]:
    """Refuse an engine that lacks a capability the recipe needs; return notes on any other.

    Raises:
        ConfigError: it cannot be imported, is not an engine, or lacks a capability that a setting needs.
    """
    recipe, rollout, writer = facts.recipe, facts.recipe.rollout, facts.resolved.writer
    look = engine_source(rollout.engine).look
    notes = [*look(facts)] if look is not None else []
    if rollout.engine != NATIVE and isinstance(recipe.algorithm, SampledConfig):
        notes.append(_loosened(recipe.algorithm, rollout.engine))
    can = facts.engine.can
    called = {stage.endpoint for graph in facts.resolved.graphs for stage in graph.stages}
    for capability, is_needed, because in (
        (Capability.GREEDY, "greedy" in called, f"{recipe.algorithm.name} calls policy.greedy"),
        (Capability.GREEDY, recipe.evaluate.temperature == 0, "evaluate.temperature is 0"),
        (Capability.CUT, rollout.is_cut, "rollout sets top_k, top_p or min_p"),
        (Capability.PENALTIES, rollout.is_penalised, "rollout sets a penalty"),
        (Capability.BUDGET, rollout.cache_gib is not None, "rollout.cache_gib is set"),
        (Capability.STOP, bool(rollout.stop), "rollout.stop is set"),
        (Capability.SHARED, recipe.placement.generate_tp > 1, "placement.rollout_parallel.tp is above 1"),
        (Capability.FIXED, rollout.deterministic, "rollout.deterministic is true"),
        *((need.capability, True, need.because) for need in recipe.schedule.needs()),
        (Capability.ROWS, writer is not None, f"{writer} writes the rows"),
        (Capability.ADAPTERS, facts.adapter is not None, "policy.model has an adapter"),
        (Capability.ROUTES, rollout.replay_routing, "rollout.replay_routing is true"),
    ):
        if is_needed and capability not in can:
            raise ConfigError(
                f"rollout.engine is {rollout.engine!r}, which cannot {capability}",
                why=because,
                fix=f"change this setting or engine; it can {', '.join(sorted(can)) or 'do none of these'}",
            )
    return notes


def attention_notes(facts: RecipeFacts) -> list[str]:
    """Return notes on a model that trains with its own attention; empty for any other.

    Raises:
        ConfigError: the recipe shards such a model, or samples it with the native engine.
        ModelError: the model cannot be trained with either attention.
    """
    from rillflow.sharding.module import own_attention_is_whole

    recipe, tried = facts.recipe, facts.outline
    if tried.own is None:
        return []
    name = type(tried.module).__name__
    if not recipe.placement.mesh_of(facts.resolved.trained_role).is_plain:
        raise ConfigError(*own_attention_is_whole(name))
    answers = not recipe.chosen.data.answers or recipe.evaluate.problems > 0
    if facts.resolved.has_policy and answers and recipe.rollout.engine == NATIVE:
        raise ConfigError(
            f"{name} trains with its own attention, and the native engine cannot sample it",
            why=tried.own,
            fix='set rollout.engine = "vllm" (docs/design/vllm.md), if vLLM supports this model',
        )
    return [
        f"{name} trains with its own attention, padded: {tried.own}. Rows are sorted by length, "
        "policy.tokens_per_micro_batch counts padding, and every row computes its shared prefix again"
    ]
