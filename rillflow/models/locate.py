"""Locate: find a model before anything heavy is imported.

path ─> a directory under the recipe's folder | a name on the hub | an error with the paths tried
           └─ an adapter's, in PEFT's format ─> its base model
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from rillflow.config.user_paths import expanded
from rillflow.errors import ModelError
from rillflow.models.config import BASES, AdapterConfig
from rillflow.models.directory_checks import FILE_BYTES, check_file
from rillflow.runs.bases import recorded_base

SETTINGS = "adapter_config.json"
"""The file that marks a directory as an adapter."""
BASE = "rillflow_base"
"""Setting in that file for the base's format in training, if it is not full; PEFT does not read it."""
WEIGHTS = "adapter_model.safetensors"
"""The file of the adapter's weights."""
MOST_RANK = 2**14
"""Maximum rank of an adapter."""
_REFUSED = (
    "bias",
    "alpha_pattern",
    "rank_pattern",
    "modules_to_save",
    "layers_to_transform",
    "fan_in_fan_out",
)
_PLAIN: tuple[Any, ...] = (None, "none", False, [], {}, ["score"])
"""Values with which PEFT's settings of ``_REFUSED`` leave an adapter plain."""


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """Source of an adapter."""

    base: str
    """Directory or hub name of the base model."""
    config: AdapterConfig
    """Size and kind of the adapter."""
    directory: Path | None = None
    """Directory of its weights; None for a new adapter."""


_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def locate(path: str, base: Path) -> str:
    """Return the directory ``path`` under ``base``, or ``path`` itself if it can be a hub name.

    Raises:
        ModelError: it is a file, a missing directory, or the hub cannot be reached.
    """
    local = base / expanded(path)
    if local.is_dir():
        return str(local.resolve())
    if local.exists():
        raise ModelError(
            f"the model {path!r} is a file",
            why=f"a model is a directory with config.json and weights; {local.resolve()} is not one",
            fix="name the directory",
        )
    beside = "/" in path and local.parent.is_dir()
    if beside or not _HUB_NAME.fullmatch(path):
        raise ModelError(
            f"the model {path!r} is not there",
            why=f"there is no directory {local.resolve()}",
            fix="correct the path, which is relative to the recipe, or write a hub name as owner/name",
        )
    from huggingface_hub import try_to_load_from_cache  # a directory needs no hub library

    if not isinstance(try_to_load_from_cache(path, "config.json"), str):
        _require_hub(path, local)
    return path


def _require_hub(path: str, local: Path) -> None:
    """Resolve the hub's address first: without it, the library would retry for half a minute."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if getproxies():
        return
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise ModelError(
            f"the model {path!r} is not there",
            why=f"there is no directory {local.resolve()}; a hub name needs {host}: {error.strerror}",
            fix="correct the path, or connect to the network",
        ) from None


def found_adapter(source: str, wanted: AdapterConfig | None) -> AdapterSource | None:
    """Return a directory's adapter, or a new one for the directory's model; None for neither.

    Raises:
        ModelError: the settings cannot be read or are not supported; or the directory has an adapter and
            another one is wanted.
    """
    path = Path(source) / SETTINGS
    if not path.exists():
        return None if wanted is None else AdapterSource(base=source, config=wanted)
    try:
        check_file(path, FILE_BYTES[SETTINGS])
        said = json.loads(path.read_bytes())
        base, rank, alpha = said["base_model_name_or_path"], said["r"], said["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read", why=f"{type(error).__name__}: {error}") from error
    is_lora = said.get("peft_type") == "LORA" and bool(base)
    odd = [] if is_lora else ["peft_type" if base else "base_model_name_or_path"]
    odd += [name for name in _REFUSED if said.get(name) not in _PLAIN]
    odd += [BASE] if said.get(BASE, "full") not in BASES else []
    if odd:
        raise ModelError(
            f"{path} has {odd[0]} = {said.get(odd[0])!r}",
            why="Rillflow supports LoRA, rsLoRA and DoRA, with one rank for all layers, on a base that is "
            f"{', '.join(BASES[:-1])} or {BASES[-1]}",
            fix="merge it into its base with PEFT, and name the merged model",
        )
    if wanted is not None:
        raise ModelError(
            f"the model {source} is an adapter, and the recipe adds another one",
            why="a run trains one adapter, and this directory already has it",
            fix=f"leave adapter out, or name its base: {base}",
        )
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MOST_RANK:
        raise ModelError(f"{path} has r = {str(rank)[:40]}", why=f"a rank must be from 1 to {MOST_RANK:,}")
    kind: Any = "dora" if said.get("use_dora") else "rslora" if said.get("use_rslora") else "lora"
    targets = said.get("target_modules") or ()
    targets = () if targets == "all-linear" else (targets,) if isinstance(targets, str) else sorted(targets)
    kept = said.get(BASE, "full")
    config = AdapterConfig(rank=rank, alpha=alpha, kind=kind, targets=tuple(targets), base=kept)
    return AdapterSource(base=base, config=config, directory=Path(source))


def base_of(source: str) -> str:
    """Return the result of ``locate``, or the base's directory or hub name if an adapter is there.

    An adapter of a run has the base that the run recorded, wherever it is now.

    Raises:
        ModelError: the base is gone, another model is in its place, or a file is missing.
    """
    adapter = found_adapter(source, None)
    if adapter is None:
        return source
    recorded = recorded_base(Path(source), Path(source) / adapter.base)
    base = locate(adapter.base, Path(source)) if recorded is None else str(recorded)
    if not (Path(source) / WEIGHTS).exists() or base == str(Path(source).resolve()):
        lacks = f"has no {WEIGHTS}" if base != str(Path(source).resolve()) else "names itself as its base"
        raise ModelError(
            f"the adapter {source} {lacks}",
            why=f"an adapter has {SETTINGS} and {WEIGHTS}, and a base model in another directory",
            fix="fetch the missing file, or name the model itself",
        )
    return base
