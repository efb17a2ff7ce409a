"""Handle: a stage's result inside a step. A step passes it on and never reads its value.

In a trace, the handle is a Symbol; on ranks, a Pending. Reading a value from it raises an error with a fix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from rillflow.errors import GraphError

Formula = Callable[..., Any]
"""Function of fields; its parameters without a default name the fields."""
Options = Mapping[str, Any]
"""Arguments by name."""


class Handle:
    """Future result of a stage.

    Args:
        stage: name of the stage, used in errors.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def _looked_at(self, what: str) -> GraphError:
        return GraphError(
            f"the step asks the result of {self.stage} for {what}",
            why="results are handles: the controller passes them on, and only ranks have what they stand for",
            fix="let a formula decide: flow.compute for a field, flow.number for a number, flow.filter",
        )

    def __bool__(self) -> NoReturn:
        raise self._looked_at("its truth")

    def __float__(self) -> NoReturn:
        raise self._looked_at("its number")

    def __int__(self) -> NoReturn:
        raise self._looked_at("its number")

    def __len__(self) -> NoReturn:
        raise self._looked_at("its length")

    def __getitem__(self, _: Any) -> NoReturn:
        raise self._looked_at("a part of it")

    def _reckon(self, _: Any) -> NoReturn:
        raise self._looked_at("its number, to reckon with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _reckon
    __lt__ = __le__ = __gt__ = __ge__ = _reckon

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # names that Python itself looks up
                raise AttributeError(name)
            raise self._looked_at(f"{name!r}")


def reports_of(returned: Any) -> tuple[Any, ...]:
    """Return a step's reports as a tuple, for one report or a tuple of several.

    Raises:
        GraphError: the step returned something else.
    """
    reports = returned if isinstance(returned, tuple) else (returned,)
    for each in reports:
        if not isinstance(each, Handle):
            raise GraphError(
                f"the step returned {each!r:.60}",
                why="a step returns the report of its update, or a tuple of reports: a run's metrics",
                fix="report = flow.policy.update(...), and at its end: return report",
            )
    return reports
