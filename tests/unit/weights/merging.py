"""Pipeline stages that come together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def merged_stages(stages: Mapping[str, Sequence[int]], before: int, after: int) -> dict[str, tuple[int, ...]]:
    """The stages weights lie on once ``before`` stages have come together in ``after``."""
    return {name: tuple(sorted({at * after // before for at in found})) for name, found in stages.items()}
