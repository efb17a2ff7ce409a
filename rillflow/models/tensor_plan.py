"""Tensor plan: the weights of a decoder that tensor parallelism splits, and along which dim.

    config.base_model_tp_plan, _tp_plan     "layers.*.self_attn.q_proj": "colwise"
              │ expanded over the module
              v
    {"model.layers.0.self_attn.q_proj": COLUMNS, ...} ─ weight_parts ─> {"...q_proj.weight": Split(0), ...}

COLUMNS     outputs of a linear layer are split: weight and bias are split along dim 0
ROWS        inputs are split and outputs summed: the weight is split along dim 1; the bias is replicated
            (and a quantised weight's scales too, unless they belong to blocks of inputs)
GATHERED    COLUMNS, and every rank gets all outputs: the language model's head, fused projections
SPLIT_ROWS  ROWS with inputs that every rank has whole: the layer after a GATHERED one
LOOKED_UP   an embedding whose tokens are split (dim 0), its outputs summed
SUMMED      replicated, but every rank uses it on its own heads only: its gradients are summed

The plan is the model's own. The input embedding is split only if it is tied to a head that is split: the two
are one weight. Releases of transformers differ in whether the plan names it; that entry changes nothing here.
A module without an entry is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from torch import nn
from transformers import PreTrainedModel

from rillflow.errors import ModelError
from rillflow.models.adapters import ADAPTER, AdaptedLinear, AdaptedQuantisedLinear, adapted
from rillflow.models.quantised import QuantisedLinear
from rillflow.placement.mesh import divisors
from rillflow.placement.sbp import Broadcast, Part, Split


class Style(StrEnum):
    """Treatment of one module by tensor parallelism."""

    COLUMNS = "colwise"
    ROWS = "rowwise"
    GATHERED = "colwise_gather_output"
    SPLIT_ROWS = "rowwise_split_input"
    LOOKED_UP = "embedding_rowwise"
    SUMMED = "replicated_with_grad_allreduce"


_NAMES = {style.value: style for style in Style} | {"colwise_rep": Style.GATHERED}
"""Styles by transformers' present and earlier names."""
_LINEAR = (nn.Linear, AdaptedLinear, QuantisedLinear, AdaptedQuantisedLinear)
DIMS = {Style.COLUMNS: 0, Style.GATHERED: 0, Style.LOOKED_UP: 0, Style.ROWS: 1, Style.SPLIT_ROWS: 1}
"""Dim along which a style splits a weight; a bias is split only if the outputs are."""


def tensor_plan(module: PreTrainedModel) -> dict[str, Style]:
    """Return the style of every module that tensor parallelism splits, by name.

    Raises:
        ModelError: the model has no plan, or one with an unknown style.
    """
    body = module.base_model_prefix
    written = {f"{body}.{name}": style for name, style in (module.config.base_model_tp_plan or {}).items()}
    if not written:
        raise ModelError(
            f"{type(module).__name__} has no tensor-parallel plan",
            why="transformers has such a plan for some model types, but not for this one",
            fix="leave tp at 1; dp and pp work with every decoder",
        )
    written |= dict(type(module)._tp_plan or {})
    parts = dict(module.named_modules())
    found: dict[str, Style] = {}
    for pattern, style in written.items():
        known = _NAMES.get(style)
        names = _matching(pattern, parts)
        if known is Style.LOOKED_UP:
            names = [name for name in names if parts[name] is not module.get_input_embeddings()]
        fits = known is Style.SUMMED or all(type(parts[name]) in _LINEAR for name in names)
        if names and (known is None or known is Style.LOOKED_UP or not fits):
            raise ModelError(
                f"the tensor-parallel plan of {type(module).__name__} has {pattern!r}: {style!r}",
                why=f"Rillflow splits only linear layers, by {', '.join(repr(name) for name in _NAMES)}",
                fix="leave tp at 1; dp and pp work with every decoder",
            )
        if known is not None:
            found |= dict.fromkeys(names, known)
    return found | _tied(module, found) | _beside(module, found)


def weight_parts(plan: dict[str, Style], module: nn.Module) -> dict[str, Part]:
    """Return the placement of every parameter in tensor parallelism, by name; tied ones by their first."""
    found: dict[str, Part] = {}
    for name, _ in module.named_parameters():
        owner, _, kind = name.rpartition(".")
        dim = DIMS.get(plan[owner]) if owner in plan else None
        part = module.get_submodule(owner)
        follows = kind == "weight" or (
            isinstance(part, QuantisedLinear) and part.has_blocks and kind == "scale"
        )
        found[name] = Broadcast() if dim is None or (dim and not follows) else Split(dim)
    return found


def require_heads(module: PreTrainedModel, tp: int) -> None:
    """Refuse a tensor-parallel size that does not divide the attention heads.

    Raises:
        ModelError: query or key/value heads do not divide by ``tp``; it shows the division.
    """
    config = module.config.get_text_config()
    counts = {"attention": config.num_attention_heads, "key/value": config.num_key_value_heads}
    for kind, heads in counts.items():
        if heads % tp:
            raise ModelError(
                f"tp is {tp} and the model has {heads} {kind} heads",
                why=f"every rank needs the same number of heads; {heads} / {tp} leaves {heads % tp}",
                fix=f"choose tp among {', '.join(map(str, divisors(*counts.values())))}",
            )


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that match a pattern; its star is a layer's number."""
    shape = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name in names if shape.fullmatch(name)]


def _beside(module: nn.Module, plan: dict[str, Style]) -> dict[str, Style]:
    """Return the styles of adapters: the half at a layer's split outputs or inputs is split too."""
    found: dict[str, Style] = {}
    for name, layer in adapted(module).items():
        if layer.beside[0].length is not None:
            raise ModelError(
                "the adapter's kind is dora, and tp is above 1",
                why="DoRA needs the norm of whole weight rows, and a rank holds only parts of rows",
                fix='set kind = "lora" or "rslora", or use fsdp instead of tp',
            )
        style = plan.get(name)
        if style in (Style.COLUMNS, Style.GATHERED):
            found[f"{name}{ADAPTER}.up"] = style
        elif style is not None:
            found[f"{name}{ADAPTER}.down"] = style
    return found


def _tied(module: PreTrainedModel, plan: dict[str, Style]) -> dict[str, Style]:
    """Return the style of the input embedding if it shares its weight with a head that is split."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    names = {id(part): name for name, part in module.named_modules()}
    if head is None or head.weight is not embedding.weight or names[id(head)] not in plan:
        return {}
    return {names[id(embedding)]: Style.LOOKED_UP}
