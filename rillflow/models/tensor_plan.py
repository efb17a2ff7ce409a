"""Tensor plan: which weights of a decoder tensor parallelism cuts, and along which dim.

    config.base_model_tp_plan, _tp_plan     "layers.*.self_attn.q_proj": "colwise"
              │ expanded over the module
              v
    {"model.layers.0.self_attn.q_proj": COLUMNS, ...} ─ weight_parts ─> {"...q_proj.weight": Split(0), ...}

COLUMNS     a linear layer's outputs are shared out: weight and bias are cut along dim 0
ROWS        its inputs are shared out, its outputs added up: the weight is cut along dim 1, the bias is whole
            (and an int8 weight's scales, which are of its rows)
GATHERED    COLUMNS, and every rank gets all outputs: the language model's head, fused projections
SPLIT_ROWS  ROWS of inputs that every rank has whole: what follows a GATHERED layer
LOOKED_UP   an embedding whose tokens are shared out (dim 0), its outputs added up
SUMMED      whole on every rank, which uses it on its own heads alone: its gradients are added up

The plan is the model's own. The input embedding is cut only where it is tied to a head that is cut: the two
are one weight. Releases of transformers differ in whether the plan names it; that entry changes nothing here.
A module without an entry is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from torch import nn
from transformers import PreTrainedModel

from rillflow.errors import ModelError
from rillflow.models.adapters import ADAPTER, AdaptedInt8Linear, AdaptedLinear, adapted
from rillflow.models.int8 import Int8Linear
from rillflow.placement.mesh import divisors
from rillflow.placement.sbp import Broadcast, Part, Split


class Style(StrEnum):
    """What tensor parallelism does with one module."""

    COLUMNS = "colwise"
    ROWS = "rowwise"
    GATHERED = "colwise_gather_output"
    SPLIT_ROWS = "rowwise_split_input"
    LOOKED_UP = "embedding_rowwise"
    SUMMED = "replicated_with_grad_allreduce"


_NAMES = {style.value: style for style in Style} | {"colwise_rep": Style.GATHERED}
"""Styles as transformers calls them, today and before."""
_LINEAR = (nn.Linear, AdaptedLinear, Int8Linear, AdaptedInt8Linear)
_DIMS = {Style.COLUMNS: 0, Style.GATHERED: 0, Style.LOOKED_UP: 0, Style.ROWS: 1, Style.SPLIT_ROWS: 1}
"""The dim along which a style cuts a weight; a bias is cut where it is the outputs that are shared out."""


def tensor_plan(module: PreTrainedModel) -> dict[str, Style]:
    """The style of every module that tensor parallelism cuts, by its name.

    Raises:
        ModelError: the model has no plan, or one with a style that Rillflow does not know.
    """
    body = module.base_model_prefix
    written = {f"{body}.{name}": style for name, style in (module.config.base_model_tp_plan or {}).items()}
    if not written:
        raise ModelError(
            f"{type(module).__name__} has no tensor-parallel plan",
            why="transformers says of each architecture how its weights may be cut, and of this one nothing",
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
                why=f"Rillflow cuts plain linear layers by {', '.join(repr(name) for name in _NAMES)} alone",
                fix="leave tp at 1; dp and pp work with every decoder",
            )
        if known is not None:
            found |= dict.fromkeys(names, known)
    return found | _tied(module, found) | _beside(module, found)


def weight_parts(plan: dict[str, Style], module: nn.Module) -> dict[str, Part]:
    """How tensor parallelism lays every parameter, by name; tied ones under their first name."""
    found: dict[str, Part] = {}
    for name, _ in module.named_parameters():
        owner, _, kind = name.rpartition(".")
        dim = _DIMS.get(plan[owner]) if owner in plan else None
        found[name] = Broadcast() if dim is None or (dim and kind != "weight") else Split(dim)
    return found


def require_heads(module: PreTrainedModel, tp: int) -> None:
    """Refuse a tensor-parallel size that attention heads cannot be shared out over.

    Raises:
        ModelError: query or key/value heads do not divide by ``tp``; it shows the division.
    """
    config = module.config.get_text_config()
    counts = {"attention": config.num_attention_heads, "key/value": config.num_key_value_heads}
    for kind, heads in counts.items():
        if heads % tp:
            raise ModelError(
                f"tp is {tp} and the model has {heads} {kind} heads",
                why=f"every rank has as many heads; {heads} / {tp} leaves {heads % tp}",
                fix=f"choose tp among {', '.join(map(str, divisors(*counts.values())))}",
            )


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names a pattern stands for; its star is a layer's number."""
    shape = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name in names if shape.fullmatch(name)]


def _beside(module: nn.Module, plan: dict[str, Style]) -> dict[str, Style]:
    """Of an adapter the half whose outputs, or inputs, are its layer's; the other half is whole."""
    found: dict[str, Style] = {}
    for name, layer in adapted(module).items():
        if layer.beside[0].length is not None:
            raise ModelError(
                "the adapter is DoRA's, and tp is above 1",
                why="the length of a layer's row is of all its inputs, and a rank has some of them",
                fix='kind = "lora" or "rslora", or fsdp in the place of tp',
            )
        style = plan.get(name)
        if style in (Style.COLUMNS, Style.GATHERED):
            found[f"{name}{ADAPTER}.up"] = style
        elif style is not None:
            found[f"{name}{ADAPTER}.down"] = style
    return found


def _tied(module: PreTrainedModel, plan: dict[str, Style]) -> dict[str, Style]:
    """The input embedding, where it is the weight of a head that is cut."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    names = {id(part): name for name, part in module.named_modules()}
    if head is None or head.weight is not embedding.weight or names[id(head)] not in plan:
        return {}
    return {names[id(embedding)]: Style.LOOKED_UP}
