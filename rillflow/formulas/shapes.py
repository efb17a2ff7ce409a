"""Shapes: checks at the start of every formula, of matching tensors and known options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from rillflow.errors import FormulaError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.ragged import Ragged


def known(formula: str, kind: Any, **options: str) -> None:
    """Refuse an option that is not in a ``Literal``.

    Raises:
        FormulaError: it names the formula, the option and the nearest one that is known.
    """
    for name, value in options.items():
        if value not in get_args(kind):
            raise FormulaError(f"{formula}: {name} is {value!r}", fix=nearest(value, get_args(kind)))


def same_length(formula: str, **tensors: Tensor) -> None:
    """Refuse tensors that are not one-dimensional, or differ in length.

    Raises:
        FormulaError: it names the formula, the tensor and the shapes.
    """
    first = next(iter(tensors))
    expected = tensors[first].shape
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.shape != expected:
            raise FormulaError(
                f"{formula}: {name} has shape {list(tensor.shape)} and {first} has {list(expected)}",
                why="both must be one-dimensional with the same number of entries",
            )


def aligned(formula: str, **fields: Tensor | Ragged) -> None:
    """Refuse ragged fields with other row lengths than the first one's, and dense ones that are not [B].

    Raises:
        FormulaError: it names the formula, the field and the first row that differs.
    """
    from rillflow.records.ragged import Ragged

    ragged = {name: field.lengths for name, field in fields.items() if isinstance(field, Ragged)}
    flat: dict[str, Any] = {**fields, **ragged}
    same_length(formula, **flat)
    first, expected = next(iter(ragged.items()))
    for name, lengths in ragged.items():
        if not lengths.equal(expected):
            row = int((lengths != expected).nonzero()[0])
            raise FormulaError(
                f"{formula}: row {row} has {int(lengths[row])} entries of {name} "
                f"and {int(expected[row])} of {first}",
                why="both need one entry per token of a row",
            )
