"""Adapters: LoRA and its kin beside the linear layers of a frozen decoder, in PEFT's directory format.

    x ─┬─ linear, frozen: W x + b ────────────────┬─ + ─> y        LoRA     s = alpha / r     arXiv 2106.09685
       └─ down [r, in] ─> up [out, r] ─ times s ──┘                rsLoRA   s = alpha / √r    arXiv 2312.03732
                                                                   DoRA     below             arXiv 2402.09353

    DoRA: each output of the sum, its bias aside, times m / |row of W + s up down|, the length a constant

    recipe: adapter = {...} ─> attach: down random, up 0: the model says what it said     ┐
    directory ─ adapter_config.json ─> base, attach; adapter_model.safetensors ─> slices  ┘ base frozen

An adapted layer keeps its name and its weights theirs; the adapter stands beside it, as ``NAME_adapter``.
So what cuts, shards or samples a model finds the base as it knows it, and two small linear layers more.
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
from rillflow.models.config import AdapterConfig
from rillflow.models.int8 import Int8Linear, full_weight, int8_layers, keep_in_int8
from rillflow.models.locate import BASE, SETTINGS, WEIGHTS, AdapterSource
from rillflow.models.scalar_head import head_of, head_weights
from rillflow.models.unread import Read, Source, read_slice

ADAPTER = "_adapter"
"""What the name of an adapter has after its layer's."""
_PREFIX = "base_model.model."
_NAMES = {"down.weight": "lora_A.weight", "up.weight": "lora_B.weight", "length": "lora_magnitude_vector"}
"""What files call the parts."""


class Adapter(nn.Module):
    """What is learned beside one linear layer, on the meta device until it is read.

    Args:
        linear: the layer.
        config: size and kind.
        dtype: of its numbers.
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
        """What the layer found [..., out] for states [..., in], with the adapter's share."""
        share: Tensor = self.up(self.down(states)) * self.scale
        if self.length is None:
            return found + share
        with torch.no_grad():
            rows = torch.linalg.vector_norm(self.merged_weight(linear), dim=1)
        bias = 0 if linear.bias is None else linear.bias
        scaled: Tensor = (self.length / rows) * (found - bias + share) + bias
        return scaled

    def merged_weight(self, linear: nn.Linear) -> Tensor:
        """[out, in] the layer's weight with the product of the adapter's, before DoRA's lengths."""
        base = full_weight(linear, self.down.weight.dtype)
        whole: Tensor = base + self.scale * (self.up.weight @ self.down.weight)
        return whole


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter beside; its hooks see the layer alone."""

    beside: tuple[Adapter]
    """In a tuple, so that it is no part of the layer: its names stay apart from the layer's."""

    def __call__(self, states: Tensor) -> Tensor:
        found: Tensor = super().__call__(states)
        share: Tensor = self.beside[0](self, states, found)
        return share


class AdaptedInt8Linear(AdaptedLinear, Int8Linear):
    """The same beside a weight of 8 bits."""


_JOINED: dict[type[nn.Linear], type[AdaptedLinear]] = {
    nn.Linear: AdaptedLinear,
    Int8Linear: AdaptedInt8Linear,
}


def join(linear: nn.Linear, adapter: Adapter) -> None:
    """Let a layer's outputs have its adapter's share."""
    kind = type(linear)
    linear.__class__ = _JOINED.get(kind) or type(kind.__name__, (AdaptedLinear, kind), {})
    assert isinstance(linear, AdaptedLinear)
    linear.beside = (adapter,)


def adapted(module: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers that have an adapter, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, AdaptedLinear)}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return f"{ADAPTER}." in name


def attach(module: Any, config: AdapterConfig) -> None:
    """Freeze a decoder but for a scalar head, and put an adapter beside every layer that the config names.

    Of an int8 base all linear layers of the body are kept so, those without an adapter too.

    Raises:
        ModelError: the decoder has no such layer.
    """
    module.requires_grad_(False)
    body, head = module.base_model, module.get_output_embeddings()
    within = {part for part in body.modules() if type(part) is nn.Linear} - {head}
    inside = {name: part for name, part in module.named_modules() if part in within}
    chosen = {} if config.targets else inside
    for target in config.targets:
        named = {name: part for name, part in inside.items() if f".{name}".endswith(f".{target}")}
        if not named:
            ends = sorted({name.rpartition(".")[2] for name in inside})
            raise ModelError(
                f"the adapter's target {target!r} is no linear layer of the {type(module).__name__}",
                why=f"its body has {', '.join(ends) or 'none'}",
                fix=nearest(target, ends),
            )
        chosen |= named
    for part in inside.values() if config.base == "int8" else ():
        keep_in_int8(part)
    for name, part in chosen.items():
        owner, _, last = name.rpartition(".")
        adapter = Adapter(part, config, module.dtype)
        module.get_submodule(owner).register_module(f"{last}{ADAPTER}", adapter)
        join(part, adapter)
    if head is None:
        head_of(module).requires_grad_(True)


def file_name(name: str) -> str:
    """What files call a parameter of an adapter, or of a head that is trained beside."""
    layer, beside, kind = name.partition(f"{ADAPTER}.")
    return f"{_PREFIX}{layer}.{_NAMES[kind]}" if beside else f"{_PREFIX}{name}"


def trained_beside(module: Any) -> dict[str, Tensor]:
    """What is trained of a frozen module: its adapters, and a scalar head; not copies."""
    head = frozenset[str]() if module.get_output_embeddings() is not None else head_weights(module)
    return {
        name: each.detach() for name, each in module.named_parameters() if is_adapter(name) or name in head
    }


def adapter_weights(module: Any, base: Source, adapter: AdapterSource, seed: int) -> Source:
    """The weights of a decoder and of its adapters: those of a directory, or new ones.

    New ones: ``down`` uniform as PEFT draws it, ``up`` 0, ``length`` the rows' of the layer.

    Raises:
        ModelError: the directory has no such file, or adapters of another shape or layer.
    """
    shapes = {name: tensor.shape for name, tensor in trained_beside(module).items() if is_adapter(name)}
    directory = adapter.directory
    held = _held(directory, module) if directory is not None else {}

    def source() -> Iterator[tuple[str, Read]]:
        rows: dict[str, Tensor] = {}
        for name, read in base():
            layer, _, kind = name.rpartition(".")
            if not held and kind in ("weight", "scale") and f"{layer}{ADAPTER}.length" in shapes:
                found = read(()).float()
                rows[layer] = (
                    torch.linalg.vector_norm(found, dim=1) if kind == "weight" else rows[layer] * found[:, 0]
                )
            yield name, held.get(name, read)
        for name, shape in shapes.items():
            layer, _, kind = name.partition(f"{ADAPTER}.")
            if name in held:
                yield name, held[name]
            elif kind == "length":
                yield name, rows[layer].__getitem__
            else:
                yield name, _drawn(name, kind, shape, seed).__getitem__

    return source


def _drawn(name: str, kind: str, shape: torch.Size, seed: int) -> Tensor:
    if kind == "up.weight":
        return torch.zeros(shape)
    key = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:7])
    return (2 * torch.rand(shape, generator=torch.Generator().manual_seed(key)) - 1) / math.sqrt(shape[1])


def _held(directory: Path, module: Any) -> dict[str, Read]:
    """How what a directory has of a module's adapters, and of its head, is read."""
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
            why="it was trained beside another model, or is not whole",
            fix=f"name the base it was trained with in its {SETTINGS}",
        )
    for name, shape in shapes.items():
        if shape != wanted[name][1]:
            raise ModelError(
                f"{name} of the adapter {directory} has the shape {shape}",
                why=f"beside this base it is {wanted[name][1]}",
                fix=f"name the base it was trained with in its {SETTINGS}",
            )
    return {wanted[name][0]: partial(read_slice, str(path), name) for name in shapes}


def write_adapter_settings(adapter: AdapterSource, module: Any, directory: Path) -> None:
    """Write what PEFT reads beside the weights.

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
    """Make plain layers, adapted or not, of those that are kept in int8.

    Args:
        module: whose layers they are.
        dtype: what their weights become.
        weights: what to take in the place of what the whole numbers stand for, by name.
    """
    for name, linear in int8_layers(module).items():
        whole = full_weight(linear, dtype) if weights is None else weights[f"{name}.weight"].to(dtype)
        linear.weight = nn.Parameter(whole, requires_grad=False)
        del linear.scale
        linear.__class__ = AdaptedLinear if isinstance(linear, AdaptedLinear) else nn.Linear  # type: ignore[assignment]


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Put every adapter into its layer's weight, and away; of an int8 base call ``restore`` first."""
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
