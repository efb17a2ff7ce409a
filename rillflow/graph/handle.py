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
            f"the step reads {what} of the result of {self.stage}",
            why="results are handles: the controller only passes them on, and the ranks hold the values",
            fix="use a formula: flow.compute for a field, flow.number for a number, flow.filter for rows",
        )

    def __bool__(self) -> NoReturn:
        raise self._looked_at("the truth value")

    def __float__(self) -> NoReturn:
        raise self._looked_at("the number")

    def __int__(self) -> NoReturn:
        raise self._looked_at("the number")

    def __len__(self) -> NoReturn:
        raise self._looked_at("the length")

    def __getitem__(self, _: Any) -> NoReturn:
        raise self._looked_at("an item")

    def _reckon(self, _: Any) -> NoReturn:
        raise self._looked_at("the number")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _reckon
    __lt__ = __le__ = __gt__ = __ge__ = _reckon

    # Type checkers must not see it: they would accept any attribute of a handle.
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
                why="a step must return the report of its update, or a tuple of reports",
                fix="write report = flow.policy.update(...), and end the step with: return report",
            )
    return reports
