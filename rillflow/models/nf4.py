"""NF4: 4-bit weights by bitsandbytes, whose kernels run on processors and on CUDA devices.

    rows [N, in] ─ by blocks of 64 ─> two numbers a byte [N, in / 2], the largest of each block [N, in / 64]

The data type of QLoRA (arXiv 2305.14314, section 3): 16 values, the quantiles of a normal distribution.
Scales stay float32; they are not quantised again.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rillflow.errors import ModelError, install_package

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 64
"""Numbers that share a scale."""
_KIND = "nf4"
_NOISY = "bitsandbytes.backends.cpu.ops"
"""Logger that warns of a missing package, whose only operation is not used here."""


def require_library() -> None:
    """Refuse a 4-bit base where bitsandbytes is missing.

    Raises:
        ModelError: it is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            'policy.model.adapter.base is "4bit", and bitsandbytes is not installed',
            why="its kernels quantise and dequantise the weights",
            fix=f'{install_package("quant")}, or set base = "int8"',
        )


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes [N, in / 2] and scales [N, in / 64] of rows [N, in]; ``in`` is a multiple of 64."""
    import torch

    found, scales = _operations().quantize_4bit(rows.contiguous(), BLOCK, _KIND, torch.uint8)
    return found.view(len(rows), -1), scales.view(len(rows), -1)


def dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [N, in] the rows that bytes [N, in / 2] and scales [N, in / 64] represent."""
    shape = [len(weight), 2 * weight.shape[1]]
    found: Tensor = _operations().dequantize_4bit(
        weight.reshape(-1, 1), scale.reshape(-1).contiguous(), BLOCK, _KIND, shape, dtype
    )
    return found


def _operations() -> Any:
    """Return bitsandbytes' operations, which its import registers."""
    import torch

    if "bitsandbytes" not in sys.modules:
        logging.getLogger(_NOISY).setLevel(logging.ERROR)
        import bitsandbytes  # noqa: F401

    return torch.ops.bitsandbytes
