"""Rounded: every value with fewer bits, as bfloat16 or as an integer of a block's scale.

    cast   float32 ─ nearest ─> bfloat16
    int8   blocks of 256 values ─ divided by the block's largest / 127 ─> int8, and a float32 scale

Neither keeps an error: int8's is below 0.4% of the block's largest value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rillflow.sharding.codec import State
from rillflow_links.codecs.payload import Payload, bytes_of, floats, read
from rillflow_links.codecs.sparse import damaged

BLOCK = 256
"""Values that share a scale."""


class Cast:
    """Values as bfloat16."""

    number = 2

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """See Codec."""
        del state
        small = tensor.detach().cpu().to(torch.bfloat16).contiguous()
        return Payload(codec=self.number, kind=0, body=bytes_of(small)).bytes_of(tensor)

    def decode(self, payload: Tensor, into: Tensor, state: State) -> None:
        """See Codec."""
        del state
        small = floats(read(payload, self.number, into).body, torch.bfloat16)
        if small.numel() != into.numel():
            raise damaged(f"{small.numel():,} of {into.numel():,} values arrived")
        into.copy_(small.view(into.shape))


class Int8:
    """Values as 8-bit integers, with a scale for every block."""

    number = 3

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """See Codec."""
        del state
        flat = tensor.detach().cpu().float().flatten()
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1) / 127 if blocks.numel() else blocks.new_zeros(0)
        steps = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
        body = bytes_of(scales) + bytes_of(steps.flatten()[: flat.numel()])
        return Payload(codec=self.number, kind=0, body=body).bytes_of(tensor)

    def decode(self, payload: Tensor, into: Tensor, state: State) -> None:
        """See Codec."""
        del state
        body, count = read(payload, self.number, into).body, -(-into.numel() // BLOCK)
        if len(body) != 4 * count + into.numel():
            raise damaged(f"{len(body):,} bytes arrived for {into.numel():,} values")
        scales = floats(body[: 4 * count], torch.float32).repeat_interleave(BLOCK)[: into.numel()]
        into.copy_((scales * floats(body[4 * count :], torch.int8)).view(into.shape))
