"""SparseLoCo: the largest values of every chunk, with two bits each and error feedback (arXiv 2508.15706).

    tensor + error ─ chunks of 4,096 ─ k largest of each ─ sign, and one of two sizes ─> payload
                   └ what the receiver lacks ─> error

The sizes of a chunk are the means of its smaller and of its larger sent values, so quantising keeps each
chunk's sum of sizes. What quantising loses goes into the error too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rillflow.sharding.codec import State
from rillflow_links.codecs.payload import Payload, bytes_of, floats, read
from rillflow_links.codecs.sparse import (
    POSITIONS,
    damaged,
    packed,
    positions_of_streams,
    positions_to_streams,
    unpacked,
)
from rillflow_links.codecs.top_k import TopK, keep_error, kept, scatter, with_error
from rillflow_links.config import FEW

CHUNK = 4096
"""Elements from which the largest are chosen together."""


class SparseLoco:
    """The largest values of every chunk as signs and sizes.

    Args:
        share: share of the elements that are sent.
    """

    number = 6

    def __init__(self, share: float) -> None:
        self._share, self._small = share, TopK(share, number=self.number)

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """See Codec. The state has the error."""
        if tensor.numel() < FEW:
            return self._small.encode(tensor, state)
        wanted = with_error(tensor, state)
        chunks = torch.nn.functional.pad(wanted, (0, -wanted.numel() % CHUNK)).view(-1, CHUNK)
        count = kept(self._share, min(CHUNK, wanted.numel()))
        chosen = chunks.abs().topk(count, dim=1).indices.sort(1).values
        values = chunks.gather(1, chosen)
        size = values.abs()
        is_large = size > size.mean(1, keepdim=True)
        sizes = torch.stack([masked_mean(size, ~is_large), masked_mean(size, is_large)], 1)
        sent = sizes.gather(1, is_large.long()) * values.sign()
        places = (chosen + torch.arange(len(chunks))[:, None] * CHUNK).flatten()
        there = (places < wanted.numel()) & (values.flatten() != 0)
        places = places[there]
        keep_error(wanted, places, sent.flatten()[there], state)
        codes = torch.stack([is_large.flatten()[there], (values < 0).flatten()[there]], 1)
        streams = [np.packbits(codes.numpy()), np.frombuffer(bytes_of(sizes), np.uint8)]
        body = packed([*positions_to_streams(places.numpy()), *streams])
        return Payload(codec=self.number, kind=1, body=body).bytes_of(tensor)

    def decode(self, payload: Tensor, into: Tensor, state: State) -> None:
        """See Codec."""
        if into.numel() < FEW:
            self._small.decode(payload, into, state)
            return
        *streams, codes, packed_sizes = unpacked(read(payload, self.number, into).body, POSITIONS + 2)
        places = positions_of_streams(*streams)
        sizes = floats(packed_sizes.tobytes(), torch.float32)
        if codes.size != -(-2 * len(places) // 8) or sizes.numel() != 2 * -(-into.numel() // CHUNK):
            raise damaged("its values do not fit its positions")
        if len(places) and int(places[-1]) >= into.numel():
            raise damaged("its positions exceed the tensor")
        bits = torch.from_numpy(np.unpackbits(codes, count=2 * len(places)).reshape(-1, 2)).long()
        size = sizes[2 * torch.from_numpy(places // CHUNK) + bits[:, 0]]
        scatter(places, size * (1 - 2 * bits[:, 1]), into)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return [B] the mean of the masked values of every row; 0 without one."""
    return (values * mask).sum(1) / mask.sum(1).clamp_min(1)
