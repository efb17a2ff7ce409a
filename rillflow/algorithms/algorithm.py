"""Algorithm: the record that each file of this package gives to the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rillflow.graph.handle import Handle
from rillflow.tasks.kinds import PROMPTS, DataKind

if TYPE_CHECKING:
    from rillflow.algorithms.config import AlgorithmConfig
    from rillflow.graph.trace import Listener


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm: its step, its settings and what it needs.

    Example:
        Algorithm(config=GRPOConfig, step=step)
    """

    config: type[AlgorithmConfig]
    """Class of its settings."""
    step: Callable[..., Any]
    """One iteration: ``step(flow, data, config)`` returns the update's report, or a tuple of reports.

    A second batch, if there is one, is the fourth argument.
    """
    data: DataKind = PROMPTS
    """Kind of data of an iteration."""
    beside: Callable[[Any], DataKind | None] = lambda _: None
    """Kind of data of the second batch, from the settings; it has as many rows, in its own order."""
    score: Callable[..., Any] | None = None
    """Scorer of held-out answers: ``score(flow, rows, config)`` returns their field ``rewards``."""
    brings: Mapping[str, type | str] = field(default_factory=dict)
    """Roles that it adds, by name: classes with endpoints (see ``roles.setting.RoleSetting``), or
    ``"critic"`` or ``"reference"`` for one more of a shipped kind.
    """

    def listened(self, config: AlgorithmConfig) -> Listener:
        """Return the calls of a step under these settings, with their options."""
        from rillflow.controller.flow import Flow
        from rillflow.graph.trace import Listener

        listener, data = Listener(), [Handle("data")]
        data += [Handle("data beside")] if self.beside(config) is not None else []
        self.step(Flow(listener), data[0], config, *data[1:])
        return listener
