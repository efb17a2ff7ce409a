"""Settings that the engine ``service`` contradicts, and those that it brings."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.app.recipe import load_recipe
from rillflow.errors import ConfigError
from rillflow_service.config import ServiceConfig
from rillflow_service.plugin import needs

NEW = {"hidden": 16, "layers": 1, "heads": 2, "context": 16, "alphabet": "0123456789+-="}
RECIPE: dict[str, Any] = {
    "policy": {"model": {"new": NEW}},
    "algorithm": {"name": "grpo", "steps": 1, "prompts_per_step": 4, "samples_per_prompt": 2},
    "rollout": {"max_tokens": 4},
    "placement": {"pools": {"main": 2}},
}
GATHERING = 'schedule={ mode = "gathering", gather_rows = 4 }'


def test_rows_of_programs_cannot_gather() -> None:
    assert list(needs(load_recipe(RECIPE, [GATHERING]))) == []
    with pytest.raises(ConfigError, match=r'schedule\.mode is "gathering", and rollout\.engine is "service"'):
        load_recipe(RECIPE, [GATHERING, "rollout.engine=service"])


def test_a_recipe_has_the_settings_of_the_engine() -> None:
    recipe: Any = load_recipe(RECIPE, ["rollout.service.check_share=1.0"]).recipe
    assert recipe.rollout.service == ServiceConfig(check_share=1.0)
    with pytest.raises(ConfigError, match=r"rollout\.service\.check_share is 2"):
        load_recipe(RECIPE, ["rollout.service.check_share=2"])
