"""Raised: which line of a person's own file an error comes from."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import rillflow

_PACKAGE = str(Path(rillflow.__file__).parent)


def own_line(error: BaseException) -> str:
    """The innermost line, called by one of ours, of a file that is neither ours nor installed; or nothing.

    Example:
        own_line(error) == "/home/me/own.py:31, in sharpen: return rewards / spread[0]"
    """
    frames = traceback.extract_tb(error.__traceback__)
    while frames and not frames[0].filename.startswith(_PACKAGE):
        del frames[0]
    return next((_shown(frame) for frame in reversed(frames) if _is_own(frame.filename)), "")


def innermost_line(error: BaseException) -> str:
    """A person's own line, or else the one that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return own_line(error) or (_shown(frames[-1]) if frames else "a line unknown")


def _shown(frame: traceback.FrameSummary) -> str:
    text = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}:{frame.lineno}, in {frame.name}{text}"


def _is_own(filename: str) -> bool:
    installed = (_PACKAGE, sysconfig.get_path("stdlib"), "<")
    return not filename.startswith(installed) and "site-packages" not in filename
