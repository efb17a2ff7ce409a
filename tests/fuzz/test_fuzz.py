"""A short round of the fuzzer; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the door is the extra `service`")

from tests.fuzz.__main__ import fuzzed

LONGEST_S, MORE_BYTES = 10.0, 2**30
"""Limits on a machine that runs other tests; before bodies were counted, the delay was 19 to 85 s."""


@pytest.mark.parametrize("seconds", [3.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_polite_client_is_answered_beside_hostile_ones(tmp_path: Path, seconds: float) -> None:
    found = fuzzed("door", tmp_path, seed=7, seconds=seconds)
    assert found.attacks > 0
    assert found.beside_s < LONGEST_S + 20 * found.alone_s, str(found)
    assert found.peak_bytes - found.idle_bytes < MORE_BYTES, str(found)
    assert found.ended_s < LONGEST_S + 20 * found.alone_s, str(found)
