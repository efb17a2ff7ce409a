"""Contradictions: the record of settings that are valid one by one but do not fit together."""

from __future__ import annotations

from dataclasses import dataclass

from rillflow.errors import ConfigError


@dataclass(frozen=True)
class Contradiction:
    """A setting that cannot be as it is beside the others.

    Example:
        Contradiction("algorithm.minibatches is 33", why="a step has 32 rows", fix="set it to at most 32")
    """

    what: str
    """The setting by its dotted key, its value, and the values that it contradicts."""
    why: str
    """Reason."""
    fix: str
    """What to change."""

    @property
    def setting(self) -> str:
        """Dotted key of the setting, or of the section of several."""
        return self.what.partition(" ")[0]

    @property
    def error(self) -> ConfigError:
        """The error that refuses the recipe."""
        return ConfigError(self.what, why=self.why, fix=self.fix)

    @classmethod
    def of(cls, error: ConfigError) -> Contradiction:
        """Return the contradiction that an error about one section states."""
        return cls(error.what, why=error.why, fix=error.fix)
