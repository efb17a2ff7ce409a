"""Recorded recipe: resolve the config that a run directory keeps, for commands and for a replay.

config.json of a run ─ settings, each given ─> defaults of later versions ─> Resolved
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rillflow.algorithms.algorithm import Algorithm
from rillflow.app.any_recipe import keys_of
from rillflow.app.defaults import RECORDED
from rillflow.app.plugin_sections import known_settings
from rillflow.app.plugins import KIND, other_kind
from rillflow.app.recipe import resolve
from rillflow.app.resolved import Resolved
from rillflow.app.sections import Recipe, recipe_class
from rillflow.app.standing import places_of
from rillflow.config.load import Override, apply_overrides
from rillflow.errors import ConfigError
from rillflow.runs import layout
from rillflow.runs.run_data import RunData

BESIDE_SETTINGS = ("data", "sources", layout.BASES)
"""Keys of a run directory's config in addition to the recipe's sections."""


def recipe_of(data: RunData, algorithms: Sequence[Algorithm] = ()) -> Resolved:
    """Return the recipe that a run directory keeps, with the folder of its file if the run recorded it.

    Raises:
        ConfigError: a plugin runs it, or it names an algorithm that is not given.
    """
    _require_known_algorithm(data, recipe_class(algorithms))
    base = data.starts[-1].get("base") if data.starts else None
    resolved = resolve_config(data.path, data.config, Path(str(base or "")), algorithms=algorithms)
    return resolved.changed(places_of(data.path, is_strict=False))


def resolve_config(
    run: Path,
    config: Mapping[str, Any],
    base: Path,
    *,
    overrides: Sequence[Override] = (),
    algorithms: Sequence[Algorithm] = (),
) -> Resolved:
    """Return the recipe of a run's config, in which every setting is given.

    Args:
        run: the run directory.
        config: its config, of the last start or of an earlier one.
        base: folder of the recipe's file.
        overrides: settings to change.
        algorithms: custom algorithms that the recipe may name.

    Raises:
        ConfigError: a plugin runs it, or the settings contradict each other.
    """
    if KIND in config:
        raise other_kind(run, config[KIND])
    kept = {name: value for name, value in config.items() if name not in BESIDE_SETTINGS}
    data = apply_overrides(known_settings(kept), overrides)
    given = dict.fromkeys(keys_of(data), layout.CONFIG)
    return resolve(recipe_class(algorithms), data, given=given, path=run, base=base, rules=RECORDED)


def _require_known_algorithm(data: RunData, kind: type[Recipe]) -> None:
    """Refuse a run of an own algorithm that this program does not bring, and name the one that does."""
    name, typed = data.setting("algorithm.name"), data.starts[-1].get("command") if data.starts else None
    if not isinstance(name, str) or name in kind.algorithms:
        return
    words = [str(each) for each in typed] if isinstance(typed, list) else []
    program = shlex.join(words[:2]) if words[:1] == ["python"] else "python PROGRAM.py"
    raise ConfigError(
        f"{data.path} was trained with the algorithm {name!r}",
        why="it is none of Rillflow's own: the program that started the run has brought it",
        fix=f"give the same command to that program: {program} evaluate {shlex.quote(str(data.path))}; it "
        "passes its words to rillflow.cli.main.main(words, algorithms=[...])",
    )
