"""The check at every formula's door: flat tensors that belong together have one shape."""

from __future__ import annotations

from torch import Tensor

from rillflow.errors import FormulaError


def same_length(formula: str, **tensors: Tensor) -> None:
    """Refuse tensors that are not one-dimensional and of one length.

    Raises:
        FormulaError: it names the formula, the tensor and the shapes.
    """
    first = next(iter(tensors))
    expected = tensors[first].shape
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.shape != expected:
            raise FormulaError(
                f"{formula}: {name} has shape {list(tensor.shape)} and {first} has {list(expected)}",
                why="both are flat, with one entry for the same thing",
            )
