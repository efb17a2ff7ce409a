"""PEFT's settings: read an adapter_config.json whole, or refuse it by the setting that Rillflow lacks.

    read       rank, scale, kind, layers, base
    no effect  settings of training, and versions: the weights are what they made
    the rest   refused unless it is null, false or empty, so a setting of a later PEFT is refused too

If PEFT chooses the layers by a pattern, by exclusion or by number, the weights name them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rillflow.errors import ModelError
from rillflow.models.config import BASES, AdapterConfig
from rillflow.models.directory_checks import FILE_BYTES, check_file, weight_headers

SETTINGS = "adapter_config.json"
"""The file that marks a directory as an adapter."""
BASE = "rillflow_base"
"""Setting in that file for the base's format in training, if it is not full; PEFT does not read it."""
WEIGHTS = "adapter_model.safetensors"
"""The file of the adapter's weights."""
MOST_RANK = 2**14
"""Maximum rank of an adapter."""
_READ = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "use_dora", BASE)
_LAYERS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
_WITHOUT_EFFECT = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "qalora_group_size",
    "eva_config",
    "runtime_config",
)
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "modules_to_save": (["score"],),
    "bias": ("none",),
}
"""Values of other settings with which the adapter is plain, besides null, false and empty."""
_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_A\.weight")
_OTHER_WEIGHTS = "it trains weights besides the adapter's two matrices of a layer"
_WHY = {
    "peft_type": "it is another method",
    "init_lora_weights": "PEFT takes the first adapter out of the base's weights, so it needs another base",
    "revision": "its base is one revision of a model, and the base's name does not say which",
    "rank_pattern": "its layers have different ranks",
    "alpha_pattern": "its layers have different scales",
    "bias": _OTHER_WEIGHTS,
    "lora_bias": _OTHER_WEIGHTS,
    "modules_to_save": _OTHER_WEIGHTS,
    "trainable_token_indices": _OTHER_WEIGHTS,
    "target_parameters": "it adapts weights that are no linear layers, such as stacked experts",
    "layer_replication": "it repeats layers of its base",
    "alora_invocation_tokens": "it is active only after these tokens",
    "fan_in_fan_out": "its base has transposed weights",
    "use_rslora": "with use_dora, PEFT divides by the square root of the rank",
}


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """Source of an adapter."""

    base: str
    """Directory or hub name of the base model."""
    config: AdapterConfig
    """Size and kind of the adapter."""
    directory: Path | None = None
    """Directory of its weights; None for a new adapter."""


def read_adapter(directory: Path) -> AdapterSource:
    """Return the adapter of a directory with an adapter_config.json.

    Raises:
        ModelError: the settings cannot be read, or one is not supported.
    """
    path = directory / SETTINGS
    try:
        check_file(path, FILE_BYTES[SETTINGS])
        said = json.loads(path.read_bytes())
        base, rank, alpha = said["base_model_name_or_path"], said["r"], said["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read", why=f"{type(error).__name__}: {error}") from error
    if (name := _unsupported(said)) is not None:
        raise ModelError(
            f"{path} has {name} = {said.get(name)!r}"[:300],
            why=f"{_WHY.get(name, 'Rillflow does not know the setting')}; Rillflow supports LoRA, rsLoRA and "
            f"DoRA, with one rank for all layers, on a base that is {', '.join(BASES[:-1])} or {BASES[-1]}",
            fix="merge it into its base with PEFT, and name the merged model",
        )
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MOST_RANK:
        raise ModelError(f"{path} has r = {str(rank)[:40]}", why=f"a rank must be from 1 to {MOST_RANK:,}")
    kind: Any = "dora" if said.get("use_dora") else "rslora" if said.get("use_rslora") else "lora"
    config = AdapterConfig(
        rank=rank, alpha=alpha, kind=kind, targets=_targets(said, directory), base=said.get(BASE, "full")
    )
    return AdapterSource(base=base, config=config, directory=directory)


def _unsupported(said: Mapping[str, Any]) -> str | None:
    """Return the first setting that would make another adapter than the one that is read, or None."""
    if said.get("peft_type") != "LORA":
        return "peft_type"
    if not said["base_model_name_or_path"]:
        return "base_model_name_or_path"
    if said.get(BASE, "full") not in BASES:
        return BASE
    if said.get("use_dora") and said.get("use_rslora"):
        return "use_rslora"
    others = said.keys() - {*_READ, *_LAYERS, *_WITHOUT_EFFECT}
    return next((name for name in sorted(others) if not _is_plain(name, said[name])), None)


def _is_plain(name: str, value: object) -> bool:
    """Return whether a setting's value leaves the adapter as its weights are."""
    return value is None or value is False or value in ([], {}) or value in _PLAIN.get(name, ())


def _targets(said: Mapping[str, Any], directory: Path) -> tuple[str, ...]:
    """Return the names of the adapted layers; none for all linear layers of the body.

    Raises:
        ModelError: the weights must name them, and cannot be read.
    """
    targets = said.get("target_modules") or ()
    is_pattern = isinstance(targets, str) and targets != "all-linear"
    if not is_pattern and not any(said.get(name) for name in _LAYERS[1:]):
        return () if targets == "all-linear" else tuple(sorted(targets))
    names = [found[1] for name in weight_headers(directory) if (found := _MATRIX.fullmatch(name))]
    return tuple(sorted(names))
