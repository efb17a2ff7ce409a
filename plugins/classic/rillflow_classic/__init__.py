"""Classic reinforcement learning on Rillflow's dataflow: actors, streams, operators, algorithms.

Importing this package imports no torch: ``load`` is loaded at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rillflow_classic.loading import load
    from rillflow_classic.trained_policy import TrainedPolicy

__all__ = ["TrainedPolicy", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rillflow_classic import loading

    return vars(loading)[name]


def __dir__() -> list[str]:
    return list(__all__)
