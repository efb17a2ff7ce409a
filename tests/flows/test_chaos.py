"""Chaos on real processes, the short forms: see ``tests.chaos``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.chaos import KINDS, Case

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)


def test_crash_equivalence_of_a_run_whose_rank_is_killed(tmp_path: Path) -> None:
    Case(tmp_path, "ahead", 5).play(faults=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [2, 3])
def test_exactly_once_and_crash_equivalence_under_chaos(tmp_path: Path, kind: str, seed: int) -> None:
    Case(tmp_path, kind, seed).play(faults=3)
