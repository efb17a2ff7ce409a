"""What a file of this folder hands to the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rillflow.graph.handle import Handle
from rillflow.rollout.config import answering

if TYPE_CHECKING:
    from rillflow.algorithms.config import AlgorithmConfig
    from rillflow.graph.trace import Listener


class Data(StrEnum):
    """What one iteration is given."""

    PROMPTS = "prompts"
    """Prompts to sample answers for."""
    DEMONSTRATIONS = "demonstrations"
    """Prompts with the answer to learn."""
    PREFERENCES = "preferences"
    """Pairs of answers to one prompt, the better one first."""
    LABELLED = "labelled answers"
    """Single answers, each good or bad; beside each its prompt with another one's answer."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm as the rest of the system sees it.

    Example:
        Algorithm(config=GRPOConfig, step=step, data=Data.PROMPTS)
    """

    config: type[AlgorithmConfig]
    """The class of its settings."""
    step: Callable[..., Any]
    """One iteration: ``step(flow, data, config)`` returns the update's report, or a tuple of reports.

    Where there is something beside the data, it is the fourth argument.
    """
    data: Data
    """What the iteration is given."""
    beside: Callable[[Any], Data | None] = lambda _: None
    """What it is given beside the data, from its settings: as many rows, in an order of their own."""
    score: Callable[..., Any] | None = None
    """What held-out answers are judged by: ``score(flow, rows, config)`` returns their field ``rewards``."""
    brings: Mapping[str, type | str] = field(default_factory=dict)
    """Roles of its own by name: classes with endpoints (see ``assembly.role_factories.RoleSetting``), or
    ``"critic"``, ``"reference"`` for one more of a shipped kind."""
    _heard: dict[str, Listener] = field(default_factory=dict, repr=False, compare=False)

    def called(self, config: AlgorithmConfig) -> tuple[str, ...]:
        """The roles a step calls under these settings, in order; the trained one is the first."""
        return tuple(self.listened(config).heard)

    def answers(self, config: AlgorithmConfig) -> Mapping[str, Any] | None:
        """How a step has its data answered: ``samples`` and ``sampling``; None where not in one way."""
        calls = self.listened(config).calls.get("policy.generate", [])
        if len(calls) != 1 or calls[0][0][:1] != ["data"]:
            return None
        (_, *args), options = calls[0]
        return answering(args, options)

    def listened(self, config: AlgorithmConfig) -> Listener:
        """What a step calls under these settings, and with which options."""
        key = config.model_dump_json()
        if key not in self._heard:
            from rillflow.dataflow.flow import Flow
            from rillflow.graph.trace import Listener

            self._heard[key] = listener = Listener()
            data = [Handle("data")]
            data += [Handle("data beside")] if self.beside(config) is not None else []
            self.step(Flow(listener), data[0], config, *data[1:])
        return self._heard[key]
