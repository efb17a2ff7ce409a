"""StandsOn: find the models that a run stands on, hold them while their runs train on, and record them.

    setting ─┬─ as in the run's config ─> its base: where it is now, with the same digest
             ├─ another name ──────────> the model with that digest there, which only moved
             └─ of a new run ──────────> of a run: its newest checkpoint, pinned and then read
                                                 └─> StandsOn: paths, names, bases ─> config.json

The unchanged command of a run thus takes the checkpoint that the run began from, also if the base has trained
on. A config keeps the name that the run began with; its bases say where the model is now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rillflow.app.resolved import Resolved
from rillflow.app.trained import named_model
from rillflow.config.user_paths import expanded
from rillflow.errors import ModelError, RunDirectoryError
from rillflow.models.locate import base_of, found_adapter
from rillflow.runs import layout
from rillflow.runs.bases import (
    SETTINGS,
    Base,
    as_json,
    base_at,
    bases_in,
    checkpoint_place,
    is_model,
    place_of,
    with_digest,
)
from rillflow.runs.json_lines import JSON, read_json
from rillflow.runs.pins import Pins

_ROLES: Mapping[str, tuple[str, ...]] = {
    "policy": ("policy",),
    "critic": ("critic", "reward_model", "policy"),
    "reward": ("reward_model",),
    "cost": ("reward_model",),
    "judge": ("judge",),
}
"""Roles of the model in a run that each setting may name; the first that the run trains counts."""


@dataclass(frozen=True, kw_only=True)
class StandsOn:
    """The models that a run stands on."""

    places: Mapping[str, str] = field(default_factory=dict)
    """Paths to read the models from, by setting; relative to the recipe, or absolute."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Paths that the config has, by setting."""
    bases: Mapping[str, Sequence[Base]] = field(default_factory=dict)
    """Name and digest of each model in a local directory, by key of ``SETTINGS``."""

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's config with the names and the bases."""
        named: dict[str, Any] = {**config}
        for setting, name in self.names.items():
            *above, last = setting.split(".")
            table = named
            for part in above:
                table[part] = {**table[part]}
                table = table[part]
            table[last] = name
        return {**named, layout.BASES: as_json(self.bases)} if self.bases else named

    def moved(self, run: Path) -> tuple[str, ...]:
        """Return the settings that may differ from a run's config: the places of models that only moved."""
        kept = _Kept.of(run)
        if not kept.bases:
            return (layout.BASES,)  # the run is of an older version, which recorded none
        equal = [
            key for key, chain in self.bases.items() if _digests(chain) == _digests(kept.bases.get(key, ()))
        ]
        return tuple(f"{layout.BASES}.{key}" for key in equal)


NOTHING_TO_STAND_ON = StandsOn()


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """The records of a run about its models."""

    run: Path
    """The run directory."""
    config: Mapping[str, Any]
    """Its config; empty for a new run."""
    bases: Mapping[str, Sequence[Base]]
    """Its bases."""

    @classmethod
    def of(cls, run: Path | None) -> _Kept:
        """Read what a run has recorded; None for a new run."""
        try:
            config: Any = {} if run is None else read_json(run / layout.CONFIG)
        except RunDirectoryError:
            config = {}
        return cls(run=run or Path(), config=config, bases=bases_in(config))

    def name(self, setting: str) -> str | None:
        """Return the path that the run began with."""
        return _value(self.config, setting)


def standing_of(resolved: Resolved, run: Path | None, pins: Pins | None = None) -> StandsOn:
    """Return the models that a run of a recipe stands on.

    Args:
        resolved: the recipe.
        run: directory of a run that has made a step, whose models are kept; None for a new run.
        pins: keeps checkpoints of runs that train on; None to write nothing.

    Raises:
        ModelError: a model that the run stands on is gone, or another one is in its place.
        RunDirectoryError: a run that the recipe names has no checkpoint, or no such model.
    """
    kept, data, base = _Kept.of(run), resolved.recipe.model_dump(), resolved.base
    places, names, bases = dict[str, str](), dict[str, str](), dict[str, Sequence[Base]]()
    for key, setting in SETTINGS.items():
        written = _value(data, setting)
        if written is None:
            continue
        place, name = _found(key, written, base, kept, pins)
        places[setting], names[setting] = place, name
        chain = _chain(key, place, base, kept, pins)
        if chain:
            bases[key] = chain
    return StandsOn(places=places, names=names, bases=bases)


def places_of(run: Path, *, is_strict: bool = True) -> dict[str, str]:
    """Return the places where the models that a run has recorded are now, by setting.

    Raises:
        ModelError: ``is_strict``, and a model is gone, or another one is in its place.
    """
    places = dict[str, str]()
    for key, chain in bases_of_run(run).items():
        try:
            places[SETTINGS[key]] = str(place_of(chain[0], run, key))
        except ModelError:
            if is_strict:
                raise
    return places


def bases_of_run(run: Path) -> Mapping[str, Sequence[Base]]:
    """Return the bases that a run has recorded, without those of unknown settings."""
    return {key: chain for key, chain in _Kept.of(run).bases.items() if key in SETTINGS and chain}


def kept_bases(config: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return the bases alone of a run's config."""
    return {layout.BASES: config[layout.BASES]} if layout.BASES in config else {}


def former_runs(run: Path) -> list[Path]:
    """Return the run directories that a run's recorded bases were in."""
    places = (checkpoint_place(Path(each.path)) for chain in bases_of_run(run).values() for each in chain)
    return [place.run for place in places if place is not None]


def _found(key: str, written: str, base: Path, kept: _Kept, pins: Pins | None) -> tuple[str, str]:
    """Return the path to read a setting's model from, and the path that the config has."""
    setting, chain = SETTINGS[key], kept.bases.get(key, ())
    name = kept.name(setting)
    source = base / expanded(written)
    hold = partial(_hold, pins, f"{key} 0")
    if name is None:
        newest = named_model(written, base, *_ROLES[key], hold=hold) or written
        return newest, newest
    is_same = written == name or _is_in(name, written)
    if is_same and not chain:  # an older version recorded no digest
        return name, name
    if is_same:
        place = place_of(chain[0], kept.run, key)
        return name if _is_at(base / name, place) else str(place), name
    if chain:
        there = with_digest(source, chain[0].digest) if layout.is_run_directory(source) else source
        if there is not None and is_model(there, chain[0].digest):
            return str(there.absolute()), name
    other = named_model(written, base, *_ROLES[key]) or written  # the comparison of configs refuses it
    return other, other


def _hold(pins: Pins | None, use: str, run: Path, step: int) -> bool:
    return pins is None or pins.hold(run.resolve(), use, step)


def _is_in(name: str, written: str) -> bool:
    """Return whether a recorded path is that of a checkpoint of the written run."""
    parts = Path(name).parts
    return parts[-3:-2] == (layout.CHECKPOINTS,) and Path(*parts[:-3]) == Path(written)


def _is_at(path: Path, place: Path) -> bool:
    return path.is_dir() and path.resolve() == place.resolve()


def _chain(key: str, place: str, base: Path, kept: _Kept, pins: Pins | None) -> list[Base]:
    """Return the bases of a setting: its model, and for an adapter the adapter's base; pin each of them.

    Raises:
        ModelError: an adapter's base is gone.
    """
    source = base / expanded(place)
    if not source.is_dir() or layout.is_run_directory(source):
        return []
    links, before = [source.resolve()], kept.bases.get(key, ())
    if found_adapter(str(source), None) is not None:
        own = Path(base_of(str(source.resolve())))
        links += [own] if own.is_dir() else []
    chain = []
    for index, link in enumerate(links):
        at = checkpoint_place(link)
        if at is not None and not _hold(pins, f"{key} {index}", at.run, at.step):
            raise RunDirectoryError(
                f"{link.parent} was removed while this run started",
                why="its run trains on, and keeps its newest checkpoints and those that other runs stand on",
                fix="run the same command again, or name a checkpoint that is there",
            )
        chain.append(base_at(link, before[index].digest if index < len(before) else ""))
    return chain


def _digests(chain: Sequence[Base]) -> list[str]:
    return [each.digest for each in chain]


def _value(data: Mapping[str, JSON], setting: str) -> str | None:
    """Return the text at a dotted key of a config; None if it is missing."""
    found: Any = data
    for part in setting.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else None
