"""Reward functions written to real files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from rillflow.rewards.function import FunctionPath, parse_function

Write = Callable[..., FunctionPath]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file ``rewards.py`` and name its function ``reward``."""

    def write(source: str, name: str = "reward") -> FunctionPath:
        (tmp_path / "rewards.py").write_text(textwrap.dedent(source))
        return parse_function(f"rewards.py:{name}", tmp_path)

    return write
