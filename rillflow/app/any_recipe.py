"""Any recipe: what recipes of language models and recipes of plugins share.

run.toml + --set ─┬─ origins ────────────────────────────────────────────────> AnyRecipe ─┬─ directory, tags
                  └─ validate ─> settings with [run] ─ with_directory ───────────────────┘└─ setting_lines
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from rillflow.config.load import Override, apply_overrides
from rillflow.config.problems import shown
from rillflow.config.schema import Data, Section

RECIPE_FILE = "run.toml"
"""Usual file name of a recipe; its run is then named after the folder."""
DEFAULT = "default"
"""Origin shown for a setting that is not given."""
AUTO = "auto"
"""Value of a setting that leaves the choice to Rillflow; the origin ``auto: REASON`` shows the choice."""
S = TypeVar("S", bound=Section)


class DirectoryConfig(Section):
    """Directory, seed and restarts of a run; a kind of recipe and plugins add their own settings."""

    dir: str | None = Field(
        None,
        min_length=1,
        description="The run directory, relative to the working directory; runs/NAME if left out.",
    )
    tags: tuple[str, ...] = Field((), description="Words by which you find the run; trackers receive them.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of every random number of the run.")
    threads: int = Field(0, ge=0, description="CPU threads; 0 leaves the choice to torch.")
    keep_checkpoints: int = Field(
        2, gt=0, description="Newest checkpoints to keep; the one with the best held-out result is kept too."
    )
    restarts: int = Field(
        3,
        ge=0,
        description="Restarts of all ranks from the newest checkpoint after a rank died, in a row without a "
        "new checkpoint; 0 ends the run.",
    )


@dataclass(frozen=True, kw_only=True)
class AnyRecipe:
    """A checked recipe and the origin of its settings."""

    recipe: Any
    """The checked settings; their section ``run`` is a ``DirectoryConfig`` with a directory."""
    path: Path
    """The recipe's file."""
    base: Path
    """Folder of the file; paths in the recipe are relative to it."""
    given: Mapping[str, str]
    """Origin of each given setting, by dotted key: see ``origins``."""

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.recipe.run.dir)

    @property
    def tags(self) -> Sequence[str]:
        """The setting ``run.tags``."""
        return tuple(self.recipe.run.tags)

    @property
    def threads(self) -> int:
        """The setting ``run.threads``."""
        return int(self.recipe.run.threads)

    def setting_lines(self, *, every: bool = True, unread: Sequence[str] = ()) -> list[str]:
        """Return the resolved settings that something reads, each with its origin.

        Args:
            every: whether to return the defaults too; otherwise the last line counts them.
            unread: settings and sections that have no effect; they are left out unless they are given.
        """
        data: Any = self.recipe.model_dump(exclude_none=True)
        lines, left_out = [], 0
        for dotted, value in leaves(data):
            origin = self.given.get(dotted, DEFAULT)
            is_unread = any(dotted == prefix or dotted.startswith(f"{prefix}.") for prefix in unread)
            if is_unread and (origin == DEFAULT or origin.startswith(f"{AUTO}: ")):
                continue
            if origin == DEFAULT and not every:
                left_out += 1
            else:
                origin += ", and nothing reads it" if is_unread else ""
                lines.append(f"{dotted} = {shown(value)}  ({origin})")
        return lines if every else [*lines, f"and {left_out} more have their defaults; --all shows them"]


def with_directory(recipe: S, path: Path) -> S:
    """Return the settings with a run directory: the given one, else one named after the recipe's file."""
    run: DirectoryConfig = recipe.run  # type: ignore[attr-defined]
    if run.dir is not None:
        return recipe
    return recipe.model_copy(
        update={"run": run.model_copy(update={"dir": str(Path("runs") / run_name(path))})}
    )


def origins(path: Path, data: Data, overrides: Sequence[Override]) -> dict[str, str]:
    """Return the origin of each given setting, by dotted key: the file's name or ``--set``."""
    over = {*keys_of(apply_overrides({}, overrides))}
    return {key: "--set" if key in over else path.name for key in keys_of(apply_overrides(data, overrides))}


def keys_of(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values in nested tables, and those of empty tables."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def run_name(path: Path) -> str:
    """Return the name of a recipe's run: its folder, or the file if it is not ``run.toml``."""
    folder = path.absolute().parent.name
    return folder if path.name == RECIPE_FILE and folder else path.stem


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key of each value in nested tables, and the value."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
