"""Adapter: how a plugin names the class that plays environments of another library. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class EnvironmentAdapter:
    """A class with ``reset`` and ``step`` for the environments of a library, by the scheme of their sources.

    Example:
        EnvironmentAdapter(file=Path(__file__).with_name("gym.py"), name="Gym", argument="id", module="gym",
                           package="gym", example="gym:Sokoban")
    """

    file: Path
    """File of the class; a child process loads it by its path."""
    name: str
    """Name of the class."""
    argument: str
    """Argument of the class that gets what follows the scheme."""
    module: str
    """Module that the file imports, and that must be there."""
    package: str
    """Package that has the module, as pip names it."""
    example: str
    """A source, for errors."""
    has_rows: bool = False
    """Whether environments have a data set: the file has a function ``rows`` that lists it."""
    names_module: bool = False
    """Whether the source names an installed module, which each node must have."""
