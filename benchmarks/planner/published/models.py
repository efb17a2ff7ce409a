"""The models of published steps: sizes from the config.json that their makers publish, in ``configs``.

Of Qwen3.5-35B-A3B a quarter of the layers attend to all tokens, with heads of 256: here all layers do, with
heads of 64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rillflow_planner.model_config import read_shape
from rillflow_planner.model_shape import ModelShape

FOLDER = Path(__file__).parent / "configs"
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    file.parent.name: json.loads(file.read_text("utf-8")) for file in sorted(FOLDER.glob("*/config.json"))
}


def shape(name: str, *, is_scalar: bool = False) -> ModelShape:
    """The shape of a published model."""
    return replace(read_shape(CONFIGS[name], name), is_scalar=is_scalar)
