"""Raised: find the line of the user's own file that caused an error."""

from __future__ import annotations

import sysconfig
import traceback
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import rillflow

_PACKAGE = str(Path(rillflow.__file__).parent)
PLUGIN_GROUP = "rillflow.plugins"
"""Group of the entry points of plugins."""


def own_line(error: BaseException) -> str:
    """Return the innermost line of a user's file below a call from this package, or an empty string.

    Files of this package, of plugins, of the standard library and of installed packages are not the user's.

    Example:
        own_line(error) == "/home/me/own.py:31, in sharpen: return rewards / spread[0]"
    """
    frames = traceback.extract_tb(error.__traceback__)
    while frames and not frames[0].filename.startswith(_PACKAGE):
        del frames[0]
    return next((_shown(frame) for frame in reversed(frames) if _is_own(frame.filename)), "")


def innermost_line(error: BaseException) -> str:
    """Return the user's own line, or else the line that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return own_line(error) or (_shown(frames[-1]) if frames else "an unknown line")


def _shown(frame: traceback.FrameSummary) -> str:
    text = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}:{frame.lineno}, in {frame.name}{text}"


def _is_own(filename: str) -> bool:
    installed = (_PACKAGE, *_plugin_folders(), sysconfig.get_path("stdlib"), "<")
    return not filename.startswith(installed) and "site-packages" not in filename


@cache
def _plugin_folders() -> tuple[str, ...]:
    """Return the folders of installed plugins, also of those that are installed from a clone."""
    packages = {point.module.partition(".")[0] for point in entry_points(group=PLUGIN_GROUP)}
    found = [find_spec(package) for package in packages]
    return tuple(str(Path(spec.origin).parent) for spec in found if spec and spec.origin)
