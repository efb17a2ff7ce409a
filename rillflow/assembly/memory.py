"""Memory: what a run will hold, from the model's sizes alone.

    NewModel ─────────────────────┐
    directory: headers and config ┴─> ModelSizes ─ with the recipe ─> bytes of every part

An estimate to decide by before launch: activations and the libraries' own memory come on top.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rillflow.algorithms.config import SampledConfig
from rillflow.assembly.recipe import Recipe
from rillflow.cluster.config import SAMPLER
from rillflow.errors import ConfigError, ModelError
from rillflow.models.config import NewModel
from rillflow.observe.wording import size
from rillflow.rollout.config import VLLM

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_FLOAT32_BYTES = 4
_EXPERTS = ".experts."
"""What the names of routed experts' weights have in a file."""
_LAYER = re.compile(r"\.\d+\.")
"""What the names of a layer's weights have."""
_NAMES = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "num_layers"),
    ("num_attention_heads", "n_head", "num_heads"),
    ("vocab_size",),
    ("max_position_embeddings", "n_positions"),
)
"""What model types call hidden size, layers, heads, vocabulary and context."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder that decide how much memory it takes."""

    parameters: int
    """Numbers to train."""
    layers: int
    """Decoder layers."""
    heads: int
    """Attention heads of a layer."""
    kv_heads: int
    """Heads of keys and values."""
    kv_width: int
    """Numbers of one token's keys in one layer; its values are as many."""
    vocabulary: int
    """Tokens it knows."""
    context: int
    """Longest row in tokens."""
    experts: int = 0
    """Numbers of a mixture's routed experts, where its files say so."""
    linear: int = 0
    """Numbers of its layers' other matrices, where its files say so; an int8 base keeps those in 8 bits."""


def sizes_of_new(new: NewModel) -> ModelSizes:
    """The sizes of a model still to be made, counted as a tied Qwen2; others differ little."""
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
        linear=new.layers * matrices,
    )


def sizes_of_directory(directory: Path) -> ModelSizes | None:
    """The sizes of a Hugging Face directory, from its config and the headers of its weights.

    Returns:
        None where the config names its sizes in an unusual way.

    Raises:
        ModelError: the config or a header cannot be read.
    """
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
        found = [_first(config, names) for names in _NAMES]
        files = sorted(directory.glob("*.safetensors"))
        shapes = {name: shape for file in files for name, shape in _shapes_in(file)}
    except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise ModelError(f"the model {directory} cannot be read", why=str(error)) from error
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
        linear=sum(math.prod(shape) for name, shape in matrices.items() if _LAYER.search(name)),
    )


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """The size under the first of these names that the config has; 0 where it has none."""
    return next((config[name] for name in names if name in config and isinstance(config[name], int)), 0)


def _shapes_in(file: Path) -> list[tuple[str, list[int]]]:
    """Of the weights of a file, by name."""
    with safe_open(file, framework="np") as weights:
        return [(name, weights.get_slice(name).get_shape()) for name in weights.keys()]  # noqa: SIM118


def rows_at_once(recipe: Recipe) -> int:
    """Rows whose keys and values are held together: every slot of fixed shapes, else those that can run."""
    if recipe.rollout.deterministic:
        return recipe.rollout.max_rows
    judged = min(recipe.evaluate.problems, recipe.task.held_out)
    config = recipe.algorithm
    rows = math.prod(config.begun) if isinstance(config, SampledConfig) else config.rows_per_step
    return min(recipe.rollout.max_rows, max(rows, judged))


def require_row(recipe: Recipe, sizes: ModelSizes, prompt: int) -> None:
    """Show that the longest row finds room in what keys and values may take.

    Args:
        recipe: the run's.
        sizes: of the model.
        prompt: tokens of the longest prompt.

    Raises:
        ConfigError: it does not.
    """
    allowed, tp = recipe.rollout.cache_gib, recipe.placement.generate_tp
    tokens = min(prompt + recipe.rollout.max_tokens, sizes.context)
    on_gpu = recipe.run.device.startswith("cuda")
    item = _ITEM_BYTES[recipe.policy.model.dtype] if on_gpu else _FLOAT32_BYTES
    row = 2 * tokens * sizes.layers * sizes.kv_width * item // tp
    if allowed is not None and row > allowed * 2**30:
        raise ConfigError(
            f"rollout.cache_gib is {allowed:g}, which is {size(int(allowed * 2**30))}",
            why=f"keys and values of one row of {tokens:,} tokens (the longest prompt's {prompt:,}, and "
            f"rollout.max_tokens = {recipe.rollout.max_tokens:,}) take {size(row)} on a rank",
            fix="raise it, or lower rollout.max_tokens",
        )


def rank_lines(recipe: Recipe, sizes: ModelSizes) -> list[str]:
    """What the model of section ``policy`` takes on one rank, by phase; empty where a rank holds it whole.

    Weights that tensor parallelism leaves whole (norms, an embedding that is not tied) count as if they
    were cut: an estimate.
    """
    placement, item = recipe.placement, _ITEM_BYTES[recipe.policy.model.dtype]
    mesh, tp = placement.mesh_of(recipe.trained_role), placement.generate_tp
    answering = placement.pools[placement.pool_of(SAMPLER)] if placement.samples_apart else mesh.ranks
    if mesh.is_plain and tp == 1 and not placement.samples_apart:
        return []
    whole, away = _weights(recipe, sizes), sizes.experts - sizes.experts // mesh.ep
    parts = mesh.pp * mesh.tp * mesh.fsdp
    rows = -(-rows_at_once(recipe) * tp // answering)
    cache = 2 * rows * sizes.context * sizes.layers * sizes.kv_width * item // tp
    held = (sizes.parameters - away) // parts
    trained = (whole - away * item) // parts
    state = (2 if item == _FLOAT32_BYTES else 3) * held * _FLOAT32_BYTES
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
    """Bytes of the policy's weights."""
    item, adapter = _ITEM_BYTES[recipe.policy.model.dtype], recipe.policy.model.adapter
    narrow = sizes.linear if adapter is not None and adapter.base == "int8" else 0
    return sizes.parameters * item - narrow * (item - 1)


def estimate(recipe: Recipe, sizes: ModelSizes) -> Mapping[str, int]:
    """Bytes by what they are for."""
    item = _ITEM_BYTES[recipe.policy.model.dtype]
    weights, full = _weights(recipe, sizes), sizes.parameters * item
    is_copied, is_frozen = recipe.rollout.engine == VLLM, recipe.policy.model.adapter is not None
    rows = recipe.rollout.max_rows if is_copied else rows_at_once(recipe)
    parts = {"weights": weights}
    if not is_frozen:  # an adapter's own are small beside the base
        parts |= {"gradients": weights, "optimiser": 2 * sizes.parameters * _FLOAT32_BYTES}
    if recipe.has_policy:
        parts["KV cache"] = 2 * rows * sizes.context * sizes.layers * sizes.kv_width * item
        parts["logits"] = 2 * recipe.policy.tokens_per_micro_batch * sizes.vocabulary * _FLOAT32_BYTES
    if recipe.has_policy and is_copied:
        parts["vLLM's weights"] = full
    if "reference" in recipe.roles and not is_frozen:
        parts["reference"] = weights
    return parts
