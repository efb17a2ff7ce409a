"""The learning rate schedule, step by step."""

from __future__ import annotations

import pytest

from rillflow.training.config import OptimizerConfig
from rillflow.training.optimizer import lr_factor


def factors(total: int, **settings: object) -> list[float]:
    config = OptimizerConfig(**settings)
    return [lr_factor(step, total, config) for step in range(total)]


def test_constant_with_warm_up() -> None:
    assert factors(5, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert factors(2) == [1.0, 1.0]


def test_linear_ends_at_the_final_share() -> None:
    assert factors(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert factors(6, schedule="linear", warmup_steps=2, final_lr=0.5) == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]


def test_cosine_is_flat_at_both_ends() -> None:
    found = factors(100, schedule="cosine", final_lr=0.1)
    assert found[0] == 1.0
    assert found[50] == pytest.approx(0.55)
    assert found == sorted(found, reverse=True)
    assert found[0] - found[1] < 0.001 and found[98] - found[99] < 0.001


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_after_the_end_and_in_a_short_run_it_stays_defined(schedule: str) -> None:
    config = OptimizerConfig(schedule=schedule, final_lr=0.2, warmup_steps=10)
    assert lr_factor(3, 5, config) == 0.4
    assert lr_factor(500, 20, config) == (1.0 if schedule == "constant" else pytest.approx(0.2))
    assert 0 < lr_factor(12, 5, config) <= 1
