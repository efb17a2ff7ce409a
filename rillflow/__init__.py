"""RL post-training of language models written as one dataflow.

    recipe.toml -> config -> algorithm -> flow -> run directory -> view, resume

Importing this package imports neither torch nor any engine: a subpackage is imported by its own name, and
``train`` and ``open_run`` are loaded at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rillflow.app.python import StepResult, train
    from rillflow.app.run import Run, open_run

__version__ = "0.1.0"
__all__ = ["Run", "StepResult", "open_run", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rillflow.app import python, run

    return {**vars(run), **vars(python)}[name]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
