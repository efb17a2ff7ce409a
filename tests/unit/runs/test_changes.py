"""Undoing the changes of a start gives the config before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rillflow.runs.changes import changes, undone
from rillflow.runs.json_lines import encode

NAMES = st.sampled_from(["policy", "lr", "pools", "main", "stop"])
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(0, 1), st.text("ab", max_size=2))
CONFIGS = st.dictionaries(
    NAMES,
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
        max_leaves=6,
    ),
    min_size=1,
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(old=CONFIGS, new=CONFIGS)
def test_undone_inverts_changes(tmp_path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_bytes(encode(old))
    assert undone(new, changes(tmp_path, new)) == old
