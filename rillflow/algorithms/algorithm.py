"""What a file of this folder hands to the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rillflow.algorithms.config import AlgorithmConfig


class Data(StrEnum):
    """What one iteration is given."""

    PROMPTS = "prompts"
    """Prompts to sample answers for."""
    DEMONSTRATIONS = "demonstrations"
    """Prompts with the answer to learn."""
    PREFERENCES = "preferences"
    """Pairs of answers to one prompt, the better one first."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm as the rest of the system sees it.

    Example:
        Algorithm(config=GRPOConfig, step=step, data=Data.PROMPTS, roles=lambda config: ("policy", "reward"))
    """

    config: type[AlgorithmConfig]
    """The class of its settings."""
    step: Callable[..., Any]
    """One iteration: ``step(flow, data, config)`` returns the update's report, or a tuple of reports.

    Where there is something beside the data, it is the fourth argument.
    """
    data: Data
    """What the iteration is given."""
    roles: Callable[[Any], tuple[str, ...]]
    """The roles it calls, from its settings."""
    beside: Callable[[Any], Data | None] = lambda _: None
    """What it is given beside the data, from its settings: as many rows, in an order of their own."""
