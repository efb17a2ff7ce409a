"""Pictures: one frame [H, W, 3] of bytes from whatever an environment renders.

None ─> no picture                  bool, floats up to 1 ── x 255 ─┐
list of frames ─> the last one      16 bits ── / 257 ──────────────┼─> uint8 ─┬─ [H, W], [H, W, 1] ─> gray
array, PIL image, tensor ─────────> other numbers ── cut to 0 ... 255 ────────┼─ [H, W, 4] ─> without alpha
                                                                              └─ [3, H, W] ─> channels last
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rillflow_classic.fragment import Array

COLOURS = (1, 2, 3, 4)
"""Numbers of channels: gray and colours, each with or without alpha."""
_BYTE, _WORD = 255, 2**16 - 1


def picture_of(rendered: Any) -> Array | None:
    """Return what ``render`` returned as a frame [H, W, 3] uint8; None if it returned no picture.

    Raises:
        TypeError: the values are no numbers, as text for a terminal.
        ValueError: the shape is none of a picture.
    """
    if isinstance(rendered, list | tuple) and rendered and not isinstance(rendered[-1], list):
        rendered = rendered[-1]
    if rendered is None or (isinstance(rendered, list | tuple) and not rendered):
        return None
    array = np.asarray(rendered)
    while array.ndim > 3 and len(array):
        array = array[-1]  # several frames
    if array.dtype.kind not in "biuf":
        raise TypeError(f"render returned {type(rendered).__name__} of {array.dtype}, which is no picture")
    if array.ndim == 3 and array.shape[2] not in COLOURS and array.shape[0] in COLOURS:
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in COLOURS or not array.size:
        raise ValueError(f"render returned an array {list(np.shape(rendered))}, which is no picture")
    colours = array[:, :, :3] if array.shape[2] > 2 else array[:, :, :1].repeat(3, axis=2)
    return np.ascontiguousarray(_bytes(colours))


def _bytes(array: Array) -> Array:
    """Return an array of brightness as bytes."""
    if array.dtype == np.uint8:
        return array
    values = np.nan_to_num(array.astype(np.float64), posinf=_WORD)
    if array.dtype.kind == "b" or (array.dtype.kind == "f" and values.max() <= 1):
        values = values * _BYTE
    elif _BYTE < values.max() <= _WORD and array.dtype.itemsize == 2:
        values = values * (_BYTE / _WORD)
    found: Array = values.clip(0, _BYTE).astype(np.uint8)
    return found
