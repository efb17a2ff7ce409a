"""Plan: the runs of a sweep, each with its settings, its recipe and its directory.

sweep.toml ─ cases x grid x seeds ─> SweepRun(case, seed, settings, directory), each recipe checked
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.app.plugin_recipe import PluginRecipe
from rillflow.app.recipe import open_recipe
from rillflow.app.resolved import Resolved
from rillflow.config.load import read_toml, validate
from rillflow.config.problems import shown
from rillflow.config.toml_text import inline_text
from rillflow.errors import ConfigError, RillflowError
from rillflow.runs.environment import usable_cores
from rillflow_parts.sweeps.config import SweepConfig

if TYPE_CHECKING:
    from rillflow.algorithms.algorithm import Algorithm

MOST_RUNS = 1000
"""Largest number of runs of a sweep; a larger one is taken for a typing error."""

_UNSAFE = re.compile(r"[^\w.=,+\-]+")
_OWN = ("run.seed", "run.dir")
"""Settings that the sweep itself makes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepRun:
    """One run of a sweep."""

    case: str
    """Name of its case."""
    seed: int
    """Its seed."""
    settings: Mapping[str, Any]
    """Settings of its case, by dotted key."""
    words: tuple[str, ...]
    """Words of ``rillflow run``, after the command."""
    recipe: Resolved | PluginRecipe
    """Its checked recipe."""
    path: Path
    """Its run directory."""

    @property
    def name(self) -> str:
        """Name in messages. Example: ``lr=1e-05 seed 0``."""
        return f"{self.case} seed {self.seed}"

    @property
    def log(self) -> Path:
        """File for what it prints."""
        return self.path.with_name(f"{self.path.name}.log")


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """All runs of a sweep."""

    config: SweepConfig
    """Settings of the sweep."""
    name: str
    """Name of the sweep."""
    path: Path
    """Directory of the sweep."""
    runs: tuple[SweepRun, ...]
    """Its runs, seed by seed, so that every case has a result early."""


def load_sweep(file: Path, algorithms: Sequence[Algorithm] = ()) -> SweepPlan:
    """Read a sweep's file, and check the recipe of every case.

    Raises:
        ConfigError: the file or a case's recipe cannot be run; the message names the case.
    """
    config = validate(SweepConfig, read_toml(file), str(file))
    name = file.absolute().parent.name if file.name == "sweep.toml" else file.stem
    path = Path(config.dir or Path("runs") / "sweeps" / name)
    seeds = tuple(range(config.seeds)) if isinstance(config.seeds, int) else config.seeds
    cases = _cases(config)
    _require_possible(file, config, seeds, len(cases))
    runs = [
        _run(file, config, name, path, case, settings, seed, algorithms)
        for seed in seeds
        for case, settings in cases.items()
    ]
    return SweepPlan(config=config, name=name, path=path, runs=tuple(runs))


def _cases(config: SweepConfig) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of each case by its name."""
    names, found = _short(config.grid), dict[str, Mapping[str, Any]]()
    for case, own in (config.cases or {"": {}}).items():
        for values in itertools.product(*config.grid.values()):
            chosen = dict(zip(config.grid, values, strict=True))
            parts = [case] if case else []
            parts += [f"{names[key]}={_value(value)}" for key, value in chosen.items()]
            name = _UNSAFE.sub("_", ",".join(parts))[:150] or "recipe"
            while name in found:
                name += "+"
            found[name] = {**own, **chosen}
    return found


def _short(keys: Mapping[str, object]) -> Mapping[str, str]:
    """Return the shortest end of each dotted key that no other key has."""
    short = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[place:]) for place in range(len(parts) - 1, -1, -1)]
        others = [f".{other}" for other in keys if other != key]
        short[key] = next((end for end in ends if not any(each.endswith(f".{end}") for each in others)), key)
    return short


def _value(value: object) -> str:
    return value if isinstance(value, str) else inline_text(value)


def _require_possible(file: Path, config: SweepConfig, seeds: Sequence[int], cases: int) -> None:
    own = {key for table in (config.set, config.grid, *config.cases.values()) for key in table} & {*_OWN}
    if own:
        raise ConfigError(
            f"{file} sets {min(own)}",
            why="the sweep gives each run its seed and its directory",
            fix="write seeds = [...], and dir = ... for the directory of the sweep",
        )
    if not seeds or len(set(seeds)) < len(seeds) or not cases:
        raise ConfigError(
            f"{file} has the seeds {shown(seeds)} and {cases} cases",
            why="each case runs once with each seed",
            fix="give different seeds, and no empty list in [grid]",
        )
    if len(seeds) * cases > MOST_RUNS:
        raise ConfigError(
            f"{file} has {cases:,} cases and {len(seeds):,} seeds: {len(seeds) * cases:,} runs",
            why=f"a sweep runs every combination, at most {MOST_RUNS:,}",
            fix="use fewer values",
        )


def _run(
    file: Path,
    config: SweepConfig,
    name: str,
    path: Path,
    case: str,
    settings: Mapping[str, Any],
    seed: int,
    algorithms: Sequence[Algorithm],
) -> SweepRun:
    source, place = file.parent / config.recipe, path / case / f"seed-{seed}"
    given = {**config.set, **settings, "run.seed": seed}
    try:
        recipe = open_recipe(source, {**given, "run.dir": str(place)}, algorithms)
    except RillflowError as error:
        raise type(error)(f"the case {case}: {error.what}", why=error.why, fix=error.fix) from None
    more: dict[str, Any] = {"run.tags": [*recipe.tags, name]}
    if not recipe.threads:
        more["run.threads"] = config.threads or max(1, int(usable_cores() / config.at_once))
    words = [f"--set={key}={inline_text(value, key)}" for key, value in {**given, **more}.items()]
    recipe = open_recipe(source, {**given, **more, "run.dir": str(place)}, algorithms)
    return SweepRun(
        case=case,
        seed=seed,
        settings=settings,
        words=("run", str(source), "--dir", str(place), *words),
        recipe=recipe,
        path=place,
    )
