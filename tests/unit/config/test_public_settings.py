"""Types, defaults and bounds of all settings that users write match the committed file.

A change of a default changes users' runs. After an intended change, write the files anew:

    python -m tests.unit.config.test_public_settings
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import BaseModel

import rillflow
from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.sections import recipe_class

KINDS: dict[str, tuple[type[BaseModel], ...]] = {
    "recipe": (recipe_class(), *(ALGORITHMS[name].config for name in sorted(ALGORITHMS))),
}
"""Settings of each file, by its readers."""
HERE = Path(__file__).parent
WORDS = ("description", "title", "$defs")
"""Parts of a schema without effect."""


def settings(kinds: Iterable[type[BaseModel]]) -> list[str]:
    """Return every setting of the models and of those inside them, with type, default and bounds."""
    found: dict[str, dict[str, object]] = {}
    for kind in kinds:
        schema = kind.model_json_schema()
        for name, one in {**schema.get("$defs", {}), kind.__name__: schema}.items():
            required = set(one.get("required", ()))
            for key, value in one.get("properties", {}).items():
                rest = {word: each for word, each in value.items() if word not in WORDS}
                found[f"{name}.{key}"] = {**rest, **({"required": True} if key in required else {})}
    return [f"{name} {json.dumps(found[name], sort_keys=True)}" for name in sorted(found)]


@pytest.mark.parametrize("reader", KINDS)
def test_settings_are_as_committed(reader: str) -> None:
    committed = (HERE / f"settings_{reader}.txt").read_text().splitlines()
    assert settings(KINDS[reader]) == committed, (
        "if on purpose: python -m tests.unit.config.test_public_settings"
    )


def test_arguments_of_the_python_calls_are_as_documented() -> None:
    given = inspect.signature(rillflow.train).parameters
    assert [name for name, each in given.items() if each.kind is not each.KEYWORD_ONLY] == ["recipe"]
    assert {name: each.default for name, each in given.items() if name != "recipe"} == {
        **dict.fromkeys(("prompts", "reward", "settings", "dir"), None),
        **dict.fromkeys(("callbacks", "algorithms"), ()),
        **dict.fromkeys(("fresh", "quiet"), False),
    }


def test_a_changed_bound_is_seen() -> None:
    class Before(BaseModel):
        inner: int = 1

    class After(BaseModel):
        inner: int = 2

    assert settings([Before]) == ['Before.inner {"default": 1, "type": "integer"}']
    assert settings([After]) == ['After.inner {"default": 2, "type": "integer"}']


if __name__ == "__main__":
    for reader, kinds in KINDS.items():
        (HERE / f"settings_{reader}.txt").write_text("\n".join(settings(kinds)) + "\n")
