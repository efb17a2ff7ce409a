"""Dense: a tensor's bytes as they are; the codec that every other one is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.sharding.codec import State


class DenseBytes:
    """A tensor's own bytes."""

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """See Codec."""
        del state
        return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).clone()

    def decode(self, payload: Tensor, into: Tensor, state: State) -> None:
        """See Codec."""
        del state
        if payload.numel() != into.nbytes:
            raise WeightError(
                f"a payload has {payload.numel():,} bytes",
                why=f"the tensor {list(into.shape)} of {into.dtype} has {into.nbytes:,}",
                fix="use the same codec and layout on both ends",
            )
        into.copy_(payload.view(into.dtype).view(into.shape))
