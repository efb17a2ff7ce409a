"""A recipe is resolved once: from the file to the first step, nobody asks for its phases or roles again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import rillflow.app.build  # noqa: F401  counting would slow its imports
from rillflow.algorithms.algorithm import Algorithm
from rillflow.app.launch import launch
from rillflow.app.phases import phase_plans
from rillflow.app.recipe import load_recipe
from rillflow.app.role_table import roles_of, table_of

ONCE = (phase_plans, Algorithm.listened, roles_of, table_of)
SUMS: dict[str, Any] = {
    "run": {"threads": 1},
    "task": {"digits": 1, "operators": "+", "size": 40, "held_out": 4},
    "policy": {"model": {"new": {"hidden": 16, "layers": 1, "heads": 2, "context": 16}}},
    "rollout": {"max_tokens": 4},
    "algorithm": {"name": "grpo", "steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of ``ONCE`` in this thread."""
    names: dict[CodeType, str] = {each.__code__: each.__qualname__ for each in ONCE}
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in names:
            calls[names[frame.f_code]] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    ("more", "phases"),
    [
        pytest.param({}, 1, id="in order"),
        pytest.param({"warm_start": {"steps": 1, "prompts_per_step": 2}}, 2, id="after a warm start"),
    ],
)
def test_phases_and_roles_are_found_once(tmp_path: Path, more: dict[str, Any], phases: int) -> None:
    with counted() as calls:
        loaded = load_recipe({**SUMS, **more}, {"run.dir": str(tmp_path / "run")})
        launch(loaded, quiet=True)
    assert calls == {
        "phase_plans": 1,
        "Algorithm.listened": phases,
        "roles_of": 1,
        "table_of": 1,
    }
    assert [phase.name for phase in loaded.phases] == ["warm_start", "grpo"][-phases:]
