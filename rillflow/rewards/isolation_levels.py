"""Levels: how strongly a machine isolates a model's text from its scorer. Standard library only."""

from __future__ import annotations

from enum import StrEnum


class Level(StrEnum):
    """Isolation that this machine provides, strongest first."""

    FULL = "full"
    """A sandbox, with separate users for the function and for programs."""
    SHARED_USER = "shared-user"
    """A sandbox in which function, programs and driver share one user."""
    NONE = "none"
    """No sandbox."""


SENTENCES = {
    Level.FULL: "function and programs run in a sandbox, each row in its own processes, as other users "
    "than the driver",
    Level.SHARED_USER: "function and programs run in a sandbox, each row in its own processes, but as "
    "the driver's user: only root may run them as other users",
    Level.NONE: "no sandbox: code that the function runs can set its own reward and has the user's rights",
}
"""Each level in words."""
