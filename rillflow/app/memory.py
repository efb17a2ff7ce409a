"""Memory: estimate a rank's memory from the model's sizes and the longest row.

    ModelSizes, longest row ─┬─ estimate ─> Peak of the policy ──> check; require_memory refuses a run
                             └─ optimiser_bytes, answering ─┐
    rillflow_parts/memory: counts on fake tensors ──────────┴─> Peak of every role ─> require_room

Memory of libraries is not included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rillflow.algorithms.config import SampledConfig
from rillflow.app.engine_sources import engine_source
from rillflow.app.machine import cuda_capability
from rillflow.app.model_files import ModelSizes
from rillflow.app.resolved import Resolved
from rillflow.app.sections import Recipe
from rillflow.errors import ConfigError
from rillflow.formulas.config import MOST_LOGITS
from rillflow.models.config import AdapterConfig
from rillflow.placement.activations import NARROW, kept_numbers
from rillflow.rollout.config import VLLM
from rillflow.rollout.native.cache_layout import ALIGNMENT
from rillflow.runs.formatting import size
from rillflow.workers.config import SAMPLER

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_BASE_BYTES = {"int8": 1.0, "4bit": 0.5625}
"""Bytes of a number in a quantised base; a 4-bit one has a float32 scale for 64 numbers."""
_FLOAT32_BYTES = 4
_SAMPLED_LOGITS = 3
"""Copies of a running row's logits while its token is sampled."""
VLLM_PLACES = {"cpu": 128, "cuda": 16}
"""Tokens of a block of vLLM's KV cache, by device type."""
_NAMED, _MOST_NAMED = 3, 5
"""Number of settings that an error suggests; the second if fewer do not make the run fit."""
_FEW_TOKENS, _SMALL_CACHE_GIB = 2048, 4
"""Values that the error suggests for ``policy.tokens_per_micro_batch`` and ``rollout.cache_gib``."""

Parts = Mapping[str, int]
"""Bytes by purpose."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak memory of one role on a rank.

    Example:
        Peak(role="policy", pool="main", kept={"weights": 400}, phases={"trains": {"gradients": 400}})
    """

    role: str
    """Name of the role."""
    pool: str
    """Pool of the role."""
    kept: Parts
    """Bytes held from step to step."""
    phases: Mapping[str, Parts]
    """Additional bytes while the role works, by phase: trains, scores, answers."""
    saved: int = 0
    """Bytes of the copies that a checkpoint is written from, while work goes on."""

    @property
    def working(self) -> int:
        """Most additional bytes of a phase."""
        return max((sum(parts.values()) for parts in self.phases.values()), default=0)

    @property
    def total(self) -> int:
        """Most bytes at one time, without a checkpoint's copies."""
        return sum(self.kept.values()) + self.working

    @property
    def text(self) -> str:
        """The peak in one line. Example: ``weights 6.0 MiB kept; training adds ...; at most 20.0 MiB``."""
        words = {"trains": "training", "answers": "sampling"}
        adds = [f"{words[phase]} adds {told(parts)}" for phase, parts in self.phases.items() if parts]
        return "; ".join([f"{told(self.kept)} kept", *adds, f"at most {size(self.total)}"])


def told(parts: Parts) -> str:
    """Return the parts as text. Example: ``weights 6.0 MiB + optimiser 12.0 MiB``."""
    return " + ".join(f"{name} {size(amount)}" for name, amount in parts.items() if amount) or size(0)


def estimate(resolved: Resolved, sizes: ModelSizes, longest: int) -> Peak:
    """Estimate a rank's memory for section ``policy``'s model and its reference.

    Weights that tensor parallelism replicates (norms, an untied embedding) count as sharded, and activations
    as those of a whole model.

    Args:
        resolved: the run's recipe.
        sizes: the model's sizes.
        longest: tokens of the longest row, prompt and answer.
    """
    recipe, role, model = resolved.recipe, resolved.trained_role, resolved.recipe.policy.model
    placement = recipe.placement
    mesh, whole = placement.mesh_of(role), weight_bytes(recipe, sizes)
    parts, away = mesh.pp * mesh.tp * mesh.fsdp, sizes.experts - sizes.experts // mesh.ep
    weights = (whole - away * _ITEM_BYTES[model.dtype]) // parts
    kept, training = {"weights": weights}, dict[str, int]()
    if model.adapter is None:  # an adapter's own parameters are few compared with the base
        kept["optimiser"] = optimiser_bytes(recipe, (sizes.parameters - away) // parts)
        training["gradients"] = weights
        if "reference" in resolved.called:
            kept["reference"] = weights
    phases: dict[str, Parts] = {"trains": training | _activations(recipe, sizes, longest)}
    if resolved.has_policy and not placement.samples_apart:
        sampler, crossing = answering(resolved, sizes, longest), whole // placement.generate_tp - weights
        kept |= sampler.kept
        phases["answers"] = {**sampler.phases["answers"], "weights that cross": max(0, crossing)}
    return Peak(role=role, pool=placement.pool_of(role), kept=kept, phases=phases)


def answering(resolved: Resolved, sizes: ModelSizes, longest: int) -> Peak:
    """Return what a rank that samples holds besides the weights that it shares with the trainer.

    vLLM has weights of its own, which a device keeps only while it samples. On a CPU it does not tie a head
    to the embedding.
    """
    recipe = resolved.recipe
    cache, on_gpu = cache_bytes(recipe, sizes, longest), _on_gpu(recipe)
    is_vllm = recipe.rollout.engine == VLLM
    working = {
        "KV cache": cache if engine_source(recipe.rollout.engine).holds_cache else 0,
        "logits": _SAMPLED_LOGITS * rows_a_rank(recipe) * sizes.vocabulary * _FLOAT32_BYTES,
    }
    kept = dict[str, int]()
    if is_vllm:
        untied = 0 if on_gpu or not sizes.is_tied else sizes.vocabulary * sizes.hidden
        weights = (sizes.parameters + untied) * _ITEM_BYTES[recipe.policy.model.dtype]
        weights //= recipe.placement.generate_tp
        (working if on_gpu else kept).update({"vLLM's weights": weights, "vLLM's KV cache": cache})
    pool = recipe.placement.pool_of(SAMPLER)
    return Peak(role=SAMPLER, pool=pool, kept=kept, phases={"answers": working})


def _activations(recipe: Recipe, sizes: ModelSizes, longest: int) -> dict[str, int]:
    """Estimate the activations that a backward pass needs, fitted to the counts of ``peaks``."""
    config, policy = recipe.algorithm, recipe.policy
    every = -(-config.rows_per_step // config.minibatches) * longest
    tokens = max(longest, min(policy.tokens_per_micro_batch, every))
    numbers = kept_numbers(
        hidden=sizes.hidden,
        inner=sizes.inner,
        kv_width=sizes.kv_width,
        layers=sizes.layers,
        recomputes=policy.gradient_checkpointing,
    )
    narrow = NARROW if policy.model.dtype == "bfloat16" else 1.0
    logits = min(tokens * sizes.vocabulary, MOST_LOGITS)
    return {
        "activations": int(tokens * numbers * _FLOAT32_BYTES * narrow),
        "logits": 2 * logits * _FLOAT32_BYTES,
    }


def rows_at_once(recipe: Recipe) -> int:
    """Return how many rows have keys and values at once: every slot of fixed shapes, or the running rows."""
    if recipe.rollout.deterministic:
        return recipe.rollout.max_rows
    judged = min(recipe.evaluate.problems, recipe.task.held_out)
    config = recipe.algorithm
    rows = (
        math.prod(recipe.schedule.begun(config))
        if isinstance(config, SampledConfig)
        else config.rows_per_step
    )
    return min(recipe.rollout.max_rows, max(rows, judged))


def cache_bytes(recipe: Recipe, sizes: ModelSizes, longest: int) -> int:
    """Return the most bytes of keys and values on one rank that samples.

    The native engine holds the running rows, each as long as the longest. vLLM holds ``rollout.max_rows``
    rows of the model's whole context. Both respect ``rollout.cache_gib``.

    Args:
        recipe: the run's recipe.
        sizes: the policy's sizes.
        longest: tokens of the longest row, prompt and answer.
    """
    placement, allowed = recipe.placement, recipe.rollout.cache_gib
    on_gpu, tp = _on_gpu(recipe), placement.generate_tp
    if recipe.rollout.engine == VLLM:
        block = VLLM_PLACES["cuda" if on_gpu else "cpu"]
        places = recipe.rollout.max_rows * -(-sizes.context // block) * block + block
        item = _ITEM_BYTES[recipe.policy.model.dtype]
    else:
        places = rows_a_rank(recipe) * -(-min(longest, sizes.context) // ALIGNMENT) * ALIGNMENT
        item = _cache_item(recipe)
    found = 2 * places * sizes.layers * sizes.kv_width * item // tp
    return found if allowed is None else min(found, int(allowed * 2**30))


def rows_a_rank(recipe: Recipe) -> int:
    """Return the rows that run at once on a rank that samples."""
    placement = recipe.placement
    ranks = placement.pools[placement.pool_of(SAMPLER)]
    return -(-rows_at_once(recipe) * placement.generate_tp // ranks)


def _cache_item(recipe: Recipe) -> int:
    """Return the bytes of one number in the KV cache; the native engine uses float32 on a CPU."""
    return _ITEM_BYTES[recipe.policy.model.dtype] if _on_gpu(recipe) else _FLOAT32_BYTES


def _on_gpu(recipe: Recipe) -> bool:
    return cuda_capability(recipe.run.device) is not None


def require_row(recipe: Recipe, sizes: ModelSizes, prompt: int) -> None:
    """Refuse a recipe whose longest row does not fit into ``rollout.cache_gib``.

    Args:
        recipe: the run's recipe.
        sizes: the model's sizes.
        prompt: tokens of the longest prompt.

    Raises:
        ConfigError: the row does not fit.
    """
    allowed, tp = recipe.rollout.cache_gib, recipe.placement.generate_tp
    tokens = min(prompt + recipe.rollout.max_tokens, sizes.context)
    row = 2 * tokens * sizes.layers * sizes.kv_width * _cache_item(recipe) // tp
    if allowed is not None and row > allowed * 2**30:
        raise ConfigError(
            f"rollout.cache_gib is {allowed:g}, which is {size(int(allowed * 2**30))}",
            why=f"the KV cache of one row of {tokens:,} tokens (the longest prompt's {prompt:,}, and "
            f"rollout.max_tokens = {recipe.rollout.max_tokens:,}) takes {size(row)} on a rank",
            fix="raise rollout.cache_gib, or lower rollout.max_tokens",
        )


def weight_bytes(recipe: Recipe, sizes: ModelSizes) -> int:
    """Return the bytes of the policy's weights."""
    item, adapter = _ITEM_BYTES[recipe.policy.model.dtype], recipe.policy.model.adapter
    if adapter is None or adapter.base == "full":
        return sizes.parameters * item
    return (sizes.parameters - sizes.linear) * item + int(sizes.linear * _BASE_BYTES[adapter.base])


def optimiser_bytes(recipe: Recipe, numbers: int) -> int:
    """Return the bytes of AdamW's two moments, and of float32 masters if weights are narrower.

    Args:
        recipe: the run's recipe.
        numbers: trained parameters.
    """
    moment = _ITEM_BYTES[recipe.policy.optimizer_dtype or "float32"]
    master = _FLOAT32_BYTES if recipe.policy.model.dtype != "float32" else 0
    return numbers * (2 * moment + master)


def holds_whole(resolved: Resolved) -> bool:
    """Return whether a rank holds the whole model, and samples with the weights it trains."""
    placement = resolved.recipe.placement
    is_plain = placement.mesh_of(resolved.trained_role).is_plain and placement.generate_tp == 1
    return is_plain and not placement.samples_apart


def memory_lines(resolved: Resolved, sizes: ModelSizes, longest: int) -> list[str]:
    """Return the estimated memory of a rank, and of a rank that only samples."""
    recipe, placement, tp = resolved.recipe, resolved.recipe.placement, resolved.recipe.placement.generate_tp
    told = estimate(resolved, sizes, longest).text
    if holds_whole(resolved):
        return [f"memory: {told}"]
    mesh = placement.mesh_of(resolved.trained_role)
    lines, ranks = [f"memory of a rank, {resolved.trained_role} on {mesh}: {told}"], mesh.ranks
    if placement.samples_apart:
        sampler, ranks = answering(resolved, sizes, longest), placement.pools[placement.pool_of(SAMPLER)]
        kept = {"weights": weight_bytes(recipe, sizes) // tp, **sampler.kept}
        lines.append(f"memory of a rank that samples: {replace(sampler, kept=kept).text}")
    if resolved.has_policy:
        lines.append(f"generation, tp {tp}: {ranks // tp} replicas of {rows_a_rank(recipe)} rows")
    return lines


def require_memory(resolved: Resolved, sizes: ModelSizes, longest: int, there: int, what: str) -> None:
    """Refuse a run whose ranks do not fit into memory, and name the settings that help most.

    Args:
        resolved: the run's recipe; its ranks hold the whole model.
        sizes: the model's sizes.
        longest: tokens of the longest row, prompt and answer.
        there: bytes that a rank may fill.
        what: name of the memory, for the error. Example: ``"this machine"``.

    Raises:
        ConfigError: the estimate exceeds ``there``.
    """
    found = estimate(resolved, sizes, longest)
    if found.total <= there:
        return
    helps: list[tuple[str, int]] = []
    now = resolved
    while len(helps) < _NAMED or (helps[-1][1] > there and len(helps) < _MOST_NAMED):
        changed = {
            text: now.changed(values) for text, values in _smaller(now).items() if text not in dict(helps)
        }
        amounts = {text: estimate(other, sizes, longest).total for text, other in changed.items()}
        best = min(amounts, key=lambda text: amounts[text], default=None)
        if best is None or amounts[best] >= estimate(now, sizes, longest).total:
            break
        helps.append((best, amounts[best]))
        now = changed[best]
    said = ", then ".join(f"{text} (at most {size(amount)})" for text, amount in helps)
    last = (
        "" if estimate(now, sizes, longest).total <= there else "choose a smaller model or more ranks, and "
    )
    raise ConfigError(
        f"a rank needs {size(found.total)}, and {what} has {size(there)}",
        why=found.text,
        fix=f"{last}set {said}"
        if said
        else "choose a smaller model, or shard it over ranks (placement.train_parallel)",
    )


def _smaller(resolved: Resolved) -> dict[str, dict[str, Any]]:
    """Return settings that save memory, as text, each with the values to change."""
    policy, model, rollout = resolved.recipe.policy, resolved.recipe.policy.model, resolved.recipe.rollout
    smaller = dict[str, dict[str, Any]]()
    if model.dtype == "float32":
        smaller['policy.model.dtype = "bfloat16"'] = {"policy.model.dtype": "bfloat16"}
    if not policy.gradient_checkpointing:
        smaller["policy.gradient_checkpointing = true"] = {"policy.gradient_checkpointing": True}
    if model.adapter is None and model.path is not None:
        adapter = AdapterConfig()
        smaller[f"policy.model.adapter.rank = {adapter.rank}"] = {"policy.model.adapter": adapter}
    if model.adapter is not None and model.adapter.base != "4bit":
        narrower = "int8" if model.adapter.base == "full" else "4bit"
        smaller[f'policy.model.adapter.base = "{narrower}"'] = {"policy.model.adapter.base": narrower}
    if policy.tokens_per_micro_batch > _FEW_TOKENS:
        setting = "policy.tokens_per_micro_batch"
        smaller[f"{setting} = {_FEW_TOKENS}"] = {setting: _FEW_TOKENS}
    if resolved.has_policy and (rollout.cache_gib is None or rollout.cache_gib > _SMALL_CACHE_GIB):
        smaller[f"rollout.cache_gib = {_SMALL_CACHE_GIB}"] = {"rollout.cache_gib": _SMALL_CACHE_GIB}
    return smaller


def rank_bytes(peaks: list[Peak], pool: str) -> int:
    """Return the peak bytes of a rank: all that its roles keep, and the most that one role takes at work."""
    there = [peak for peak in peaks if peak.pool == pool]
    return sum(sum(peak.kept.values()) for peak in there) + max((peak.working for peak in there), default=0)


def saved_bytes(peaks: list[Peak], pool: str) -> int:
    """Return the bytes of the copies that a checkpoint is written from, on a rank of a pool."""
    return sum(peak.saved for peak in peaks if peak.pool == pool)


def peak_lines(peaks: list[Peak]) -> list[str]:
    """Return a line for each pool's rank, each role and each of its phases."""
    lines = []
    for pool in dict.fromkeys(peak.pool for peak in peaks):
        saved = saved_bytes(peaks, pool)
        most = f"at most {size(rank_bytes(peaks, pool))}, without libraries"
        more = f"; up to {size(saved)} more while a checkpoint is written" if saved else ""
        lines.append(f"a rank of pool {pool}: {most}{more}")
        for peak in peaks:
            if peak.pool == pool:
                lines.append(f"  {peak.role} keeps {told(peak.kept)}")
                lines += [f"  {peak.role} {phase}: {told(parts)}" for phase, parts in peak.phases.items()]
    return lines


def require_room(peaks: list[Peak], ranks: Mapping[str, int], free: int) -> None:
    """Refuse ranks that do not fit into the memory that they share.

    Args:
        peaks: peaks of all roles.
        ranks: number of each pool's ranks in that memory.
        free: bytes that are free in it.

    Raises:
        ConfigError: they do not fit; the error names the largest phase and a fix.
    """
    needed = {
        pool: count * (rank_bytes(peaks, pool) + saved_bytes(peaks, pool)) for pool, count in ranks.items()
    }
    if sum(needed.values()) <= free:
        return
    pool = max(needed, key=lambda name: needed[name])
    there = [peak for peak in peaks if peak.pool == pool]
    most = max(there, key=lambda peak: peak.working)
    phase = max(most.phases, key=lambda name: sum(most.phases[name].values()))
    kept = sum(sum(peak.kept.values()) + peak.saved for peak in there)
    every = " + ".join(f"{ranks[name]} of pool {name} {size(needed[name])}" for name in ranks)
    raise ConfigError(
        f"the ranks need up to {size(sum(needed.values()))}, and {size(free)} are free",
        why=f"{every}; a rank of pool {pool} keeps {size(kept)}, and adds {told(most.phases[phase])} while "
        f"the {most.role} {phase}",
        fix=_FIXES["kept" if kept > most.working else phase],
    )


_FIXES = {
    "kept": "shard the model over more ranks (fsdp, ep, tp or pp in placement.train_parallel), choose a "
    "smaller one, or lower rollout.max_rows if the engine is vLLM",
    "trains": "lower policy.tokens_per_micro_batch, set policy.gradient_checkpointing = true, or shard the "
    "model over more ranks",
    "scores": "lower policy.tokens_per_micro_batch, or shard the model over more ranks",
    "answers": "lower rollout.max_rows, or shard the model over more ranks in placement.rollout_parallel",
}
"""Fixes, by what takes the most memory."""
