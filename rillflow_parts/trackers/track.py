"""Track: send a run directory to trackers, as the run itself does while it runs.

RUN/config.json ─ run.trackers, or a name and settings ─> a process each ─> what was not sent before
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rillflow.config.load import apply_overrides, parse_override, validate
from rillflow.config.schema import Section
from rillflow.errors import ConfigError
from rillflow.runs import layout
from rillflow.runs.observers import End
from rillflow.runs.reader import read_config, read_starts, require_run
from rillflow_parts.trackers.checks import require_tracker
from rillflow_parts.trackers.config import TrackersConfig
from rillflow_parts.trackers.process import export, position_of


class _Kept(Section):
    """The section ``run`` of a recipe, with its trackers alone."""

    trackers: TrackersConfig = TrackersConfig()


def track(run: Path, name: str | None, settings: Sequence[str], say: Callable[[str], None]) -> bool:
    """Send what a run's trackers do not have; return whether they have everything.

    Args:
        run: the run directory.
        name: the tracker; None for those of the run's recipe.
        settings: its settings as ``KEY=VALUE``, over those of the recipe.
        say: receives one line about each tracker, and what it says.

    Raises:
        RillflowError: there is no such run or tracker, or a package is missing.
    """
    require_run(run)
    base, named = _base(run), _named(run, name, settings)
    if not named:
        raise ConfigError(
            f"{run} names no tracker",
            why="its recipe has no [run.trackers]",
            fix=f"name one: rillflow track {run} wandb --set project=NAME",
        )
    for one, config in named.items():
        require_tracker(one, config, base)
    has_all = True
    for one, config in named.items():
        before = position_of(run, one, config).step
        has_all &= export(run, one, config, base, _state(run), say)
        last = position_of(run, one, config).step
        say(
            f"tracker {one}: it has the steps up to {max(last, 0)}"
            + (", as before" if last == before else "")
        )
    return has_all


def _named(run: Path, name: str | None, settings: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    kept: Any = (read_config(run).get("run") or {}).get("trackers") or {}  # type: ignore[union-attr]
    if name is None and settings:
        raise ConfigError(
            "--set is given without a tracker", why="it changes a setting of one tracker", fix="name it"
        )
    if name is not None:
        words = [parse_override(f"{name}.{text}") for text in settings]
        kept = apply_overrides({name: kept.get(name) or {}}, words)
    return validate(_Kept, {"trackers": kept}, f"the trackers of {run}").trackers.named


def _base(run: Path) -> Path:
    starts = read_starts(run)
    return Path(str(starts[-1].get("base", "."))) if starts else Path()


def _state(run: Path) -> End:
    return "finished" if (run / layout.FINISHED).is_file() else "stopped"
