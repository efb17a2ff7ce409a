"""The settings of ``[links]`` change only on purpose."""

from __future__ import annotations

from pathlib import Path

from rillflow_links.config import LinksConfig
from tests.unit.config.test_public_settings import settings

COMMITTED = Path(__file__).parent / "settings.txt"


def test_settings_are_as_committed() -> None:
    assert settings([LinksConfig]) == COMMITTED.read_text().splitlines(), (
        "if on purpose: python -m plugins.links.tests.test_public_settings"
    )


if __name__ == "__main__":
    COMMITTED.write_text("\n".join(settings([LinksConfig])) + "\n")
