"""Reward functions in real files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from rillflow.rewards.function import FunctionPath, parse_function

Write = Callable[..., FunctionPath]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes ``rewards.py`` and returns the path of its function ``reward``."""

    def write(source: str, name: str = "reward") -> FunctionPath:
        (tmp_path / "rewards.py").write_text(textwrap.dedent(source))
        return parse_function(f"rewards.py:{name}", tmp_path)

    return write
