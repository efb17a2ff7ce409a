"""Memory: estimate what a run will hold from the model's sizes and its longest row.

    NewModel ─────────────────────┐
    directory: headers and config ┴─> ModelSizes ─ recipe, longest row ─> MemoryEstimate ─> require_memory

Memory of libraries comes on top. ``peaks`` counts activations exactly, and uses the same KV cache estimate.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rillflow.algorithms.config import SampledConfig
from rillflow.app.recipe import Recipe
from rillflow.errors import ConfigError, ModelError
from rillflow.formulas.config import MOST_LOGITS
from rillflow.models.config import AdapterConfig, NewModel
from rillflow.models.directory_checks import weight_headers
from rillflow.rollout.config import VLLM
from rillflow.rollout.native.cache_layout import ALIGNMENT
from rillflow.runs.formatting import size
from rillflow.workers.config import SAMPLER

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_FLOAT32_BYTES = 4
_EXPERTS = ".experts."
"""Part of the names of routed experts' weights in a file."""
_LAYER = re.compile(r"\.\d+\.")
"""Pattern in the names of a layer's weights."""
_NAMES = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "num_layers"),
    ("num_attention_heads", "n_head", "num_heads"),
    ("vocab_size",),
    ("max_position_embeddings", "n_positions"),
)
"""Config keys of hidden size, layers, heads, vocabulary and context, which differ by model type."""
_INNER = ("intermediate_size", "n_inner")
_HIDDEN_STATES, _INNER_STATES, _OUTSIDE_STATES = 8.5, 4, 7
"""Hidden and inner states per token that training keeps in a layer, and hidden states outside the layers."""
_NARROW = 0.65
"""Bytes of these states in bfloat16, as a share of float32; some stay float32."""
SAMPLED_LOGITS = 3
"""Copies of a running row's logits while its token is sampled."""
VLLM_PLACES = {"cpu": 128, "cuda": 16}
"""Tokens of a block of vLLM's KV cache, by device type."""
_NAMED, _MOST_NAMED = 3, 5
"""Number of settings that an error suggests; the second if fewer do not make the run fit."""
_FEW_TOKENS, _SMALL_CACHE_GIB = 2048, 4
"""Values that the error suggests for ``policy.tokens_per_micro_batch`` and ``rollout.cache_gib``."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder that determine its memory."""

    parameters: int
    """Number of parameters."""
    layers: int
    """Number of decoder layers."""
    heads: int
    """Attention heads of a layer."""
    kv_heads: int
    """Key and value heads of a layer."""
    kv_width: int
    """Numbers in one token's keys in one layer; its values have as many."""
    vocabulary: int
    """Vocabulary size."""
    context: int
    """Longest row in tokens."""
    experts: int = 0
    """Parameters of routed experts, if the model's files show them."""
    hidden: int = 0
    """Width of the hidden state."""
    inner: int = 0
    """Width of the feed-forward layer's inner state."""
    linear: int = 0
    """Parameters of the layers' other matrices, if the files show them; an int8 base has them in 8 bits."""


def sizes_of_new(new: NewModel) -> ModelSizes:
    """Return the sizes of a new model, counted as a tied Qwen2; other architectures differ little."""
    vocabulary = len(set(new.alphabet)) + 1
    kv_width = new.hidden // new.heads * new.kv_heads
    inner = new.intermediate
    matrices = 2 * new.hidden**2 + 2 * new.hidden * kv_width + 3 * new.hidden * inner
    layer = matrices + 3 * new.hidden + 2 * kv_width
    return ModelSizes(
        parameters=vocabulary * new.hidden + new.layers * layer + new.hidden,
        layers=new.layers,
        heads=new.heads,
        kv_heads=new.kv_heads,
        kv_width=kv_width,
        vocabulary=vocabulary,
        context=new.context,
        hidden=new.hidden,
        inner=inner,
        linear=new.layers * matrices,
    )


def sizes_of_directory(directory: Path) -> ModelSizes | None:
    """Return the sizes of a Hugging Face directory, from its config and the headers of its weights.

    Returns:
        None if the config names its sizes in an unusual way.

    Raises:
        ModelError: the config or a header cannot be read.
    """
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
        found = [_first(config, names) for names in _NAMES]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"the model {directory} cannot be read", why=str(error)) from error
    shapes = {name: header.shape for name, header in weight_headers(directory).items()}
    if not all(found):
        return None
    hidden, layers, heads, vocabulary, context = found
    kv_heads = _first(config, ("num_key_value_heads",)) or heads
    head = _first(config, ("head_dim",)) or hidden // heads
    experts = sum(math.prod(shape) for name, shape in shapes.items() if _EXPERTS in name)
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and _EXPERTS not in name}
    return ModelSizes(
        parameters=sum(map(math.prod, shapes.values())),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        kv_width=kv_heads * head,
        vocabulary=vocabulary,
        context=context,
        experts=experts,
        hidden=hidden,
        inner=_first(config, _INNER) or 4 * hidden,
        linear=sum(math.prod(shape) for name, shape in matrices.items() if _LAYER.search(name)),
    )


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the size under the first of these names that the config has; 0 if it has none."""
    return next((config[name] for name in names if name in config and isinstance(config[name], int)), 0)


def rows_at_once(recipe: Recipe) -> int:
    """Return how many rows have keys and values at once: every slot of fixed shapes, or the running rows."""
    if recipe.rollout.deterministic:
        return recipe.rollout.max_rows
    judged = min(recipe.evaluate.problems, recipe.task.held_out)
    config = recipe.algorithm
    rows = math.prod(config.begun) if isinstance(config, SampledConfig) else config.rows_per_step
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
    on_gpu, tp = recipe.run.device.startswith("cuda"), placement.generate_tp
    if recipe.rollout.engine == VLLM:
        block = VLLM_PLACES["cuda" if on_gpu else "cpu"]
        places = recipe.rollout.max_rows * -(-sizes.context // block) * block + block
        item, tp = _ITEM_BYTES[recipe.policy.model.dtype], 1
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
    on_gpu = recipe.run.device.startswith("cuda")
    return _ITEM_BYTES[recipe.policy.model.dtype] if on_gpu else _FLOAT32_BYTES


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
            why=f"keys and values of one row of {tokens:,} tokens (the longest prompt's {prompt:,}, and "
            f"rollout.max_tokens = {recipe.rollout.max_tokens:,}) take {size(row)} on a rank",
            fix="raise it, or lower rollout.max_tokens",
        )


def rank_lines(recipe: Recipe, sizes: ModelSizes, longest: int) -> list[str]:
    """Return the memory of section ``policy``'s model on one rank, by phase; empty if a rank holds it whole.

    An estimate: weights that tensor parallelism replicates (norms, an untied embedding) count as sharded.
    """
    placement, item = recipe.placement, _ITEM_BYTES[recipe.policy.model.dtype]
    mesh, tp = placement.mesh_of(recipe.trained_role), placement.generate_tp
    answering = placement.pools[placement.pool_of(SAMPLER)] if placement.samples_apart else mesh.ranks
    if holds_whole(recipe):
        return []
    whole, away = _weights(recipe, sizes), sizes.experts - sizes.experts // mesh.ep
    parts = mesh.pp * mesh.tp * mesh.fsdp
    rows, cache = rows_a_rank(recipe), cache_bytes(recipe, sizes, longest)
    held = (sizes.parameters - away) // parts
    trained = (whole - away * item) // parts
    state = _optimiser(recipe, held)
    apart = f" - {size(away * item)} of other ranks' experts" if away else ""
    share = size(trained)
    lines = [
        f"{recipe.trained_role} in training, {mesh}: weights {size(whole)}{apart} / {parts} = {share} a "
        f"rank, gradients {share}, optimiser {size(state)}, and activations"
    ]
    if not recipe.has_policy:
        return lines
    received = f"{size(max(0, whole // tp - trained))} of them received at the switch"
    if placement.samples_apart:
        received = "received at every publish"
    return [
        *lines,
        f"policy in generation, tp {tp}: weights {size(whole)} / {tp} = {size(whole // tp)} a rank, "
        f"{received}; KV cache {size(cache)}; {answering // tp} replicas of {rows} rows",
    ]


def _weights(recipe: Recipe, sizes: ModelSizes) -> int:
    """Return the bytes of the policy's weights."""
    item, adapter = _ITEM_BYTES[recipe.policy.model.dtype], recipe.policy.model.adapter
    narrow = sizes.linear if adapter is not None and adapter.base == "int8" else 0
    return sizes.parameters * item - narrow * (item - 1)


def _optimiser(recipe: Recipe, numbers: int) -> int:
    """Return the bytes of AdamW's two moments, and of float32 master weights if weights are narrower."""
    moment = _ITEM_BYTES[recipe.policy.optimizer_dtype or "float32"]
    master = _FLOAT32_BYTES if recipe.policy.model.dtype != "float32" else 0
    return numbers * (2 * moment + master)


def holds_whole(recipe: Recipe) -> bool:
    """Return whether a rank holds the whole model, and samples with the weights it trains."""
    placement = recipe.placement
    is_plain = placement.mesh_of(recipe.trained_role).is_plain and placement.generate_tp == 1
    return is_plain and not placement.samples_apart


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on a rank that holds the whole model, by purpose."""

    kept: Mapping[str, int]
    """Bytes held from step to step."""
    training: Mapping[str, int]
    """Additional bytes during an update."""
    sampling: Mapping[str, int]
    """Additional bytes while rows are sampled."""

    @property
    def total(self) -> int:
        """Most bytes at one time."""
        return sum(self.kept.values()) + max(sum(self.training.values()), sum(self.sampling.values()))

    @property
    def text(self) -> str:
        """Estimate in one line. Example: ``weights 6.0 MiB kept; training adds ...; at most 20.0 MiB``."""
        parts = [f"{_terms(self.kept)} kept"]
        parts += [f"training adds {_terms(self.training)}"] if self.training else []
        parts += [f"sampling adds {_terms(self.sampling)}"] if self.sampling else []
        return f"{'; '.join(parts)}; at most {size(self.total)}"


def _terms(parts: Mapping[str, int]) -> str:
    return " + ".join(f"{what} {size(amount)}" for what, amount in parts.items())


def estimate(recipe: Recipe, sizes: ModelSizes, longest: int) -> MemoryEstimate:
    """Estimate the memory of the section ``policy``'s model and its reference.

    Args:
        recipe: the run's recipe.
        sizes: the model's sizes.
        longest: tokens of the longest row, prompt and answer.
    """
    weights, is_frozen = _weights(recipe, sizes), recipe.policy.model.adapter is not None
    is_copied = recipe.has_policy and recipe.rollout.engine == VLLM
    kept, training, sampling = {"weights": weights}, dict[str, int](), dict[str, int]()
    if not is_frozen:  # an adapter's own parameters are few compared with the base
        kept["optimiser"] = _optimiser(recipe, sizes.parameters)
        training["gradients"] = weights
    if "reference" in recipe.roles and not is_frozen:
        kept["reference"] = weights
    training |= _activations(recipe, sizes, longest)
    if is_copied:
        kept["vLLM's weights"] = sizes.parameters * _ITEM_BYTES[recipe.policy.model.dtype]
        kept["vLLM's KV cache"] = cache_bytes(recipe, sizes, longest)
    elif recipe.has_policy:
        sampling["KV cache"] = cache_bytes(recipe, sizes, longest)
        sampling["logits"] = SAMPLED_LOGITS * rows_a_rank(recipe) * sizes.vocabulary * _FLOAT32_BYTES
    return MemoryEstimate(kept=kept, training=training, sampling=sampling)


def _activations(recipe: Recipe, sizes: ModelSizes, longest: int) -> dict[str, int]:
    """Estimate the activations that a backward pass needs, fitted to the counts of ``peaks``."""
    config, policy = recipe.algorithm, recipe.policy
    every = -(-config.rows_per_step // config.minibatches) * longest
    tokens = max(longest, min(policy.tokens_per_micro_batch, every))
    layer = _HIDDEN_STATES * sizes.hidden + _INNER_STATES * sizes.inner + 2 * sizes.kv_width
    beside, layers = _OUTSIDE_STATES * sizes.hidden, sizes.layers
    numbers = beside + (layer + layers * sizes.hidden if policy.gradient_checkpointing else layer * layers)
    narrow = _NARROW if policy.model.dtype == "bfloat16" else 1.0
    logits = min(tokens * sizes.vocabulary, MOST_LOGITS)
    return {
        "activations": int(tokens * numbers * _FLOAT32_BYTES * narrow),
        "logits": 2 * logits * _FLOAT32_BYTES,
    }


def require_memory(recipe: Recipe, sizes: ModelSizes, longest: int, there: int, what: str) -> None:
    """Refuse a run whose ranks do not fit into memory, and name the settings that help most.

    Args:
        recipe: the run's recipe; its ranks hold the whole model.
        sizes: the model's sizes.
        longest: tokens of the longest row, prompt and answer.
        there: bytes that a rank may fill.
        what: name of the memory, for the error. Example: ``"this machine"``.

    Raises:
        ConfigError: the estimate exceeds ``there``.
    """
    found = estimate(recipe, sizes, longest)
    if found.total <= there:
        return
    helps: list[tuple[str, int]] = []
    now = recipe
    while len(helps) < _NAMED or (helps[-1][1] > there and len(helps) < _MOST_NAMED):
        changed = {text: other for text, other in _smaller(now) if text not in dict(helps)}
        amounts = {text: estimate(other, sizes, longest).total for text, other in changed.items()}
        best = min(amounts, key=lambda text: amounts[text], default=None)
        if best is None or amounts[best] >= estimate(now, sizes, longest).total:
            break
        helps.append((best, amounts[best]))
        now = changed[best]
    told = ", then ".join(f"{text} (at most {size(amount)})" for text, amount in helps)
    last = "" if estimate(now, sizes, longest).total <= there else "a smaller model or more ranks; "
    raise ConfigError(
        f"a rank takes {size(found.total)}, and {what} has {size(there)}",
        why=found.text,
        fix=f"{last}set {told}"
        if told
        else "choose a smaller model, or cut it over ranks (placement.train_parallel)",
    )


def _smaller(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """Return settings that save memory, as text, each with the recipe that changes only that setting."""
    policy, model, rollout = recipe.policy, recipe.policy.model, recipe.rollout
    found: list[tuple[str, Recipe]] = []

    def try_policy(text: str, **update: object) -> None:
        found.append((text, recipe.model_copy(update={"policy": policy.model_copy(update=update)})))

    if model.dtype == "float32":
        narrow = model.model_copy(update={"dtype": "bfloat16"})
        try_policy('policy.model.dtype = "bfloat16"', model=narrow)
    if not policy.gradient_checkpointing:
        try_policy("policy.gradient_checkpointing = true", gradient_checkpointing=True)
    if model.adapter is None and model.path is not None:
        light = model.model_copy(update={"adapter": AdapterConfig()})
        try_policy(f"policy.model.adapter.rank = {AdapterConfig().rank}", model=light)
    if model.adapter is not None and model.adapter.base == "full":
        light = model.model_copy(update={"adapter": model.adapter.model_copy(update={"base": "int8"})})
        try_policy('policy.model.adapter.base = "int8"', model=light)
    if policy.tokens_per_micro_batch > _FEW_TOKENS:
        try_policy(f"policy.tokens_per_micro_batch = {_FEW_TOKENS}", tokens_per_micro_batch=_FEW_TOKENS)
    if recipe.has_policy and (rollout.cache_gib is None or rollout.cache_gib > _SMALL_CACHE_GIB):
        capped = rollout.model_copy(update={"cache_gib": _SMALL_CACHE_GIB})
        found.append(
            (f"rollout.cache_gib = {_SMALL_CACHE_GIB}", recipe.model_copy(update={"rollout": capped}))
        )
    return found
