"""Whole runs of a recipe in a folder, and readers of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved


def loaded(recipe: Path, run: str, *settings: str) -> Resolved:
    return load_recipe(recipe, [f"run.dir={json.dumps(str(recipe.parent / run))}", *settings])


def ran(recipe: Path, run: str, *settings: str) -> Path:
    chosen = loaded(recipe, run, *settings)
    return Path(launch(chosen, quiet=True).run)


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def numbers(run: Path) -> list[dict[str, Any]]:
    """Return every step's metrics without times."""
    found = [line["metrics"] for line in lines(run, "metrics.jsonl")]
    return [{k: v for k, v in metrics.items() if k != "run/step_seconds/mean"} for metrics in found]
