"""Chaos on real processes, in short form: see ``tests.chaos``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.chaos import INLINE, KINDS, Case

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@pytest.mark.slow
def test_crash_equivalence_of_a_run_whose_driver_is_killed(tmp_path: Path) -> None:
    """In one process; test_resume.py kills a driver every day, test_dead_sampler.py a rank."""
    case = Case(tmp_path, "ahead", 8, [INLINE])
    case.play(faults=1)
    assert "SIGKILL to driver" in case.told[0] and case.told[-1] == "the bits of an undisturbed run"


@needs_ray
@pytest.mark.slow
def test_crash_equivalence_of_a_run_whose_rank_is_killed(tmp_path: Path) -> None:
    Case(tmp_path, "ahead", 5).play(faults=1)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [2, 3])
def test_exactly_once_and_crash_equivalence_under_chaos(tmp_path: Path, kind: str, seed: int) -> None:
    Case(tmp_path, kind, seed).play(faults=3)
