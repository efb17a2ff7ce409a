"""Paths of users: ``~`` in a recipe, and the home folder, which the user of a container may lack."""

from __future__ import annotations

from pathlib import Path

from rillflow.errors import ConfigError


def home() -> Path | None:
    """Return the user's home folder; None if HOME is not set and the user has no entry in /etc/passwd."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def expanded(path: str) -> Path:
    """Return a path with the home folder in the place of a leading ``~`` or ``~USER``.

    Raises:
        ConfigError: there is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0].removeprefix("~")
        here = "HOME is not set, and this user has no entry in /etc/passwd"
        raise ConfigError(
            f"the path is {path[:80]!r}",
            why=f"this machine has no user {user!r}" if user else here,
            fix="write the whole path, or set HOME",
        ) from None
