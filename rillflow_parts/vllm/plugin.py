"""Plugin: bring the rollout engine ``vllm``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rillflow.app.plugins import EngineSource, Plugin

if TYPE_CHECKING:
    from rillflow.app.facts import RecipeFacts


def look(facts: RecipeFacts) -> Sequence[str]:
    """Check that vLLM is there and can run the recipe."""
    from rillflow_parts.vllm.release import vllm_notes

    return vllm_notes(facts)


PLUGIN = Plugin(
    engines={
        "vllm": EngineSource(
            path="rillflow_parts.vllm.engine:VllmEngine",
            options="rillflow_parts.vllm.engine:options",
            reads=("rollout.server",),
            holds_cache=False,
            look=look,
        )
    }
)
