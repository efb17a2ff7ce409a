"""Adapters: LoRA, rsLoRA and DoRA for the linear layers of a frozen decoder, in PEFT's directory format.

    x ─┬─ linear, frozen: W x + b ────────────────┬─ + ─> y        LoRA     s = alpha / r     arXiv 2106.09685
       └─ down [r, in] ─> up [out, r] ─ times s ──┘                rsLoRA   s = alpha / √r    arXiv 2312.03732
                                                                   DoRA     below             arXiv 2402.09353

    DoRA: each output without bias, times m / |row of W + s up down|; the norm is a constant in the gradient

    recipe: adapter = {...} ─> attach: down random, up 0: outputs are unchanged           ┐
    directory ─ adapter_config.json ─> base, attach; adapter_model.safetensors ─> slices  ┘ base frozen

An adapted layer and its weights keep their names; the adapter is a sibling module named ``NAME_adapter``. So
code that splits, shards or samples a model sees the usual base, and two more small linear layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rillflow.errors import ModelError, nearest
from rillflow.models.architecture import head_of, head_weights
from rillflow.models.config import AdapterConfig
from rillflow.models.lazy_weights import Read, Source, read_slice
from rillflow.models.peft_settings import BASE, SETTINGS, WEIGHTS, AdapterSource
from rillflow.models.quantised import (
    FORMS,
    QuantisedLinear,
    dequantised,
    full_weight,
    keep_quantised,
    quantised_layers,
)

ADAPTER = "_adapter"
"""Suffix of an adapter's name after the name of its layer."""
_PREFIX = "base_model.model."
_NAMES = {"down.weight": "lora_A.weight", "up.weight": "lora_B.weight", "length": "lora_magnitude_vector"}
"""Names of an adapter's tensors in files."""
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "experts")
"""Names that users of a mixture give to its experts' layers."""


class Adapter(nn.Module):
    """Trained parameters for one linear layer, on the meta device until they are loaded.

    Args:
        linear: the layer.
        config: size and kind.
        dtype: dtype of the parameters.
    """

    def __init__(self, linear: nn.Linear, config: AdapterConfig, dtype: torch.dtype) -> None:
        super().__init__()
        how: dict[str, Any] = {"bias": False, "device": "meta", "dtype": dtype}
        self.down = nn.Linear(linear.in_features, config.rank, **how)
        self.up = nn.Linear(config.rank, linear.out_features, **how)
        self.scale = config.alpha / (math.sqrt(config.rank) if config.kind == "rslora" else config.rank)
        self.length: nn.Parameter | None = None
        if config.kind == "dora":
            self.length = nn.Parameter(torch.empty(linear.out_features, device="meta", dtype=dtype))

    def forward(self, linear: nn.Linear, states: Tensor, found: Tensor) -> Tensor:
        """Return the layer's output ``found`` [..., out] for ``states`` [..., in], plus the adapter's."""
        share: Tensor = self.up(self.down(states)) * self.scale
        if self.length is None:
            return found + share
        with torch.no_grad():
            rows = torch.linalg.vector_norm(self.merged_weight(linear), dim=1)
        bias = 0 if linear.bias is None else linear.bias
        scaled: Tensor = (self.length / rows) * (found - bias + share) + bias
        return scaled

    def merged_weight(self, linear: nn.Linear) -> Tensor:
        """Return [out, in] the layer's weight plus the adapter's product, before DoRA's scaling."""
        base = full_weight(linear, self.down.weight.dtype)
        whole: Tensor = base + self.scale * (self.up.weight @ self.down.weight)
        return whole


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; the layer's hooks see only the layer's own output."""

    beside: tuple[Adapter]
    """The adapter, in a tuple so that it is not a submodule and its names stay apart from the layer's."""

    def __call__(self, states: Tensor) -> Tensor:
        found: Tensor = super().__call__(states)
        share: Tensor = self.beside[0](self, states, found)
        return share


class AdaptedQuantisedLinear(AdaptedLinear, QuantisedLinear):
    """A linear layer with a quantised weight and an adapter."""


_JOINED: dict[type[nn.Linear], type[AdaptedLinear]] = {
    nn.Linear: AdaptedLinear,
    QuantisedLinear: AdaptedQuantisedLinear,
}


def join(linear: nn.Linear, adapter: Adapter) -> None:
    """Add the adapter's output to the layer's."""
    kind = type(linear)
    linear.__class__ = _JOINED.get(kind) or type(kind.__name__, (AdaptedLinear, kind), {})
    assert isinstance(linear, AdaptedLinear)
    linear.beside = (adapter,)


def adapted(module: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers that have an adapter, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, AdaptedLinear)}


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return f"{ADAPTER}." in name


def attach(module: Any, config: AdapterConfig) -> None:
    """Freeze a decoder except a scalar head, and add an adapter to every layer that the config names.

    Without targets these are the linear layers of the body; a target may also name the vocabulary head. With
    a quantised base, all linear layers of the body are quantised, also those without an adapter.

    Adapters are added in the order of the module's layers, whatever the order of the targets: the order of
    ``named_parameters`` decides the last bit of sums over parameters, such as the global gradient norm.

    Raises:
        ModelError: the decoder has no such layer, or one that cannot be quantised.
    """
    module.requires_grad_(False)
    body, head = module.base_model, module.get_output_embeddings()
    within = {part for part in body.modules() if type(part) is nn.Linear} - {head}
    inside = {name: part for name, part in module.named_modules() if part in within}
    heads = {name: part for name, part in module.named_modules() if part is head and type(part) is nn.Linear}
    chosen = set() if config.targets else set(inside)
    for target in config.targets:
        named = {name for name in inside | heads if f".{name}".endswith(f".{target}")}
        if not named:
            ends = sorted({name.rpartition(".")[2] for name in inside})
            if target.rpartition(".")[2] in _OF_EXPERTS and (stacked := _stacked(module)):
                raise ModelError(
                    f"the adapter's target {target!r} is not a linear layer of the {type(module).__name__}",
                    why=f"all experts of a layer share one weight, {stacked}, and adapters stand beside "
                    "linear layers",
                    fix=f"adapt {', '.join(ends)}, or train without an adapter",
                )
            raise ModelError(
                f"the adapter's target {target!r} is not a linear layer of the {type(module).__name__}",
                why=f"the linear layers of its body are {', '.join(ends) or 'none'}",
                fix=nearest(target, ends),
            )
        chosen |= named
    for name, part in inside.items() if config.base != "full" else ():
        keep_quantised(part, FORMS[config.base], name)
    for name in (name for name in inside | heads if name in chosen):  # in the module's order
        part = module.get_submodule(name)
        owner, _, last = name.rpartition(".")
        adapter = Adapter(part, config, module.dtype)
        module.get_submodule(owner).register_module(f"{last}{ADAPTER}", adapter)
        join(part, adapter)
    if head is None:
        head_of(module).requires_grad_(True)


def _stacked(module: nn.Module) -> str:
    """Return the name of the first weight that all experts of a layer share; empty in a dense decoder."""
    return next((name for name, each in module.named_parameters() if each.dim() == 3), "")


def file_name(name: str) -> str:
    """Return the name in files of an adapter's parameter, or of a trained head's."""
    layer, beside, kind = name.partition(f"{ADAPTER}.")
    return f"{_PREFIX}{layer}.{_NAMES[kind]}" if beside else f"{_PREFIX}{name}"


def trained_beside(module: Any) -> dict[str, Tensor]:
    """Return the trained parameters of a frozen module, without copies: its adapters, and a scalar head."""
    head = frozenset[str]() if module.get_output_embeddings() is not None else head_weights(module)
    return {
        name: each.detach() for name, each in module.named_parameters() if is_adapter(name) or name in head
    }


def adapter_weights(module: Any, base: Source, adapter: AdapterSource, seed: int) -> Source:
    """Return the weights of a decoder and its adapters; the adapters are read from a directory, or new.

    New adapters: ``down`` uniform as in PEFT, ``up`` 0, ``length`` the norms of the layer's rows.

    Raises:
        ModelError: the directory has no such file, or adapters of another shape or layer.
    """
    shapes = {name: tensor.shape for name, tensor in trained_beside(module).items() if is_adapter(name)}
    directory = adapter.directory
    held = _held(directory, module) if directory is not None else {}

    def source() -> Iterator[tuple[str, Read]]:
        rows, whole = dict[str, Tensor](), dict[str, Tensor]()
        for name, read in base():
            layer, _, kind = name.rpartition(".")
            if not held and kind in ("weight", "scale") and f"{layer}{ADAPTER}.length" in shapes:
                found = read(())
                if kind == "scale":
                    found = dequantised(whole.pop(layer), found, torch.float32)
                rows[layer] = torch.linalg.vector_norm(found.float(), dim=1)
                if not found.is_floating_point():
                    whole[layer] = found
            yield name, held.get(name, read)
        for name, shape in shapes.items():
            layer, _, kind = name.partition(f"{ADAPTER}.")
            if name in held:
                yield name, held[name]
            elif kind == "length":
                yield name, rows[layer].__getitem__
            else:
                yield name, drawn(name, kind, shape, seed).__getitem__

    return source


def drawn(name: str, kind: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the first weights of an adapter's ``down`` or ``up``; they depend only on seed and name."""
    if kind == "up.weight":
        return torch.zeros(shape, dtype=torch.float32)
    key = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:7])
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(key), dtype=torch.float32)
    return (2 * numbers - 1) / math.sqrt(shape[1])


def _held(directory: Path, module: Any) -> dict[str, Read]:
    """Return readers of a directory's adapter weights, and of its head's, by name in the module."""
    path = directory / WEIGHTS
    wanted = {file_name(name): (name, list(tensor.shape)) for name, tensor in trained_beside(module).items()}
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the adapter {directory} cannot be read", why=str(error)) from error
    missing = {name for name, (inside, _) in wanted.items() if is_adapter(inside)} - set(shapes)
    for name in sorted(missing | set(shapes) - set(wanted)):
        raise ModelError(
            f"the adapter {directory} {'lacks' if name in missing else 'has'} {name}",
            why="it was trained on another base model, or is incomplete",
            fix=f"name its own base model in its {SETTINGS}",
        )
    for name, shape in shapes.items():
        if shape != wanted[name][1]:
            raise ModelError(
                f"{name} of the adapter {directory} has the shape {shape}",
                why=f"for this base model it must be {wanted[name][1]}",
                fix=f"name its own base model in its {SETTINGS}",
            )
    return {wanted[name][0]: partial(read_slice, str(path), name) for name in shapes}


def write_adapter_settings(adapter: AdapterSource, module: Any, directory: Path) -> None:
    """Write the adapter_config.json that PEFT reads next to the weights.

    Raises:
        OSError: the disk fails.
    """
    config, is_scalar = adapter.config, module.get_output_embeddings() is None
    heads = {name.partition(".")[0] for name in head_weights(module)} if is_scalar else set()
    said: Mapping[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_scalar else "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*config.targets] or sorted({name.rpartition(".")[2] for name in adapted(module)}),
        "modules_to_save": sorted(heads) or None,
        "use_rslora": config.kind == "rslora",
        "use_dora": config.kind == "dora",
        "inference_mode": True,
    }
    if config.base != "full":
        said = {**said, BASE: config.base}
    (directory / SETTINGS).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def restore(module: nn.Module, dtype: torch.dtype, weights: Mapping[str, Tensor] | None = None) -> None:
    """Turn quantised layers, adapted or not, back into plain layers.

    Args:
        module: the module with these layers.
        dtype: dtype of their new weights.
        weights: weights to use by name; None to dequantise the present ones.
    """
    for name, linear in quantised_layers(module).items():
        whole = full_weight(linear, dtype) if weights is None else weights[f"{name}.weight"].to(dtype)
        linear.weight = nn.Parameter(whole, requires_grad=False)
        del linear.scale
        linear.__class__ = AdaptedLinear if isinstance(linear, AdaptedLinear) else nn.Linear  # type: ignore[assignment]


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Merge every adapter into its layer's weight and remove it; first ``restore`` a quantised base.

    Raises:
        ModelError: the head is adapted, and its weight is also the embedding's.
    """
    head = module.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, AdaptedLinear) and head.weight is module.get_input_embeddings().weight:  # type: ignore[operator]
        raise ModelError(
            "the adapter of the head cannot be merged",
            why="the head's weight is also the embedding's, which the adapter does not change",
            fix="keep the adapter as it is, or train it with train_unembed = False",
        )
    for name, linear in adapted(module).items():
        adapter = linear.beside[0]
        whole = adapter.merged_weight(linear)
        if adapter.length is not None:
            whole *= (adapter.length / torch.linalg.vector_norm(whole, dim=1))[:, None]
        linear.weight.copy_(whole)
        del linear.beside
        linear.__class__ = nn.Linear  # type: ignore[assignment]
        owner, _, last = name.rpartition(".")
        delattr(module.get_submodule(owner), f"{last}{ADAPTER}")
