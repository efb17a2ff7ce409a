"""Top-k and DCT: the largest values of a gradient, with error feedback.

    tensor + error ─ largest values ─> positions, values as bfloat16 ─> payload
                   └ the others, and what rounding loses ─> error, which the next tensor is added to

TopK sends exactly k values, fewer if there are not k that differ from 0. Dct (arXiv 2010.08899) sends all
values from a threshold on. The threshold is the k-th largest value of the first tensor, and is computed again
after a lifespan: most steps need no selection, and the share that is sent varies. Tensors of few elements are
sent whole.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
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
from rillflow_links.config import FEW

_WHOLE, _SPARSE = 0, 1


class TopK:
    """The k largest values.

    Args:
        share: k over the number of elements.
        number: number of the codec in payloads.
    """

    def __init__(self, share: float, *, number: int = 4) -> None:
        self._share, self._number = share, number

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """See Codec. The state has the error, and for Dct the threshold and its age."""
        if tensor.numel() < FEW:
            body = bytes_of(tensor.detach().cpu().float())
            return Payload(codec=self._number, kind=_WHOLE, body=body).bytes_of(tensor)
        wanted = with_error(tensor, state)
        places = self._chosen(wanted, state)
        values = wanted[places].bfloat16()
        keep_error(wanted, places, values.float(), state)
        halves = np.frombuffer(bytes_of(values), np.uint8).reshape(-1, 2)
        body = packed([*positions_to_streams(places.numpy()), halves[:, 0], halves[:, 1]])
        return Payload(codec=self._number, kind=_SPARSE, body=body).bytes_of(tensor)

    def decode(self, payload: Tensor, into: Tensor, state: State) -> None:
        """See Codec."""
        del state
        given = read(payload, self._number, into)
        if given.kind == _WHOLE:
            values = floats(given.body, torch.float32)
            if values.numel() != into.numel():
                raise damaged(f"{values.numel():,} of {into.numel():,} values arrived")
            into.copy_(values.view(into.shape))
            return
        *streams, low, high = unpacked(given.body, POSITIONS + 2)
        if low.size != high.size:
            raise damaged("its values are not whole")
        values = floats(np.stack([low, high], 1).tobytes(), torch.bfloat16)
        scatter(positions_of_streams(*streams), values.float(), into)

    def _chosen(self, wanted: Tensor, state: State) -> Tensor:
        """Return the ascending positions [K] of the values that are sent."""
        del state
        places = largest(wanted, kept(self._share, wanted.numel()))
        return places[wanted[places] != 0].sort().values


class Dct(TopK):
    """All values from a threshold on.

    Args:
        share: share of the elements that are above the threshold when it is computed.
        lifespan: tensors between two computations of the threshold.
    """

    def __init__(self, share: float, lifespan: int) -> None:
        super().__init__(share, number=5)
        self._lifespan = lifespan

    def _chosen(self, wanted: Tensor, state: State) -> Tensor:
        age = int(state["age"]) if "age" in state else 0
        size = wanted.abs()
        if age % self._lifespan == 0:
            state["threshold"] = size[largest(wanted, kept(self._share, wanted.numel()))].amin()
        state["age"] = torch.tensor(age + 1)
        return ((size >= state["threshold"]) & (size > 0)).nonzero()[:, 0]


def kept(share: float, count: int) -> int:
    """Return k for a share of ``count`` elements, at least 1."""
    return max(1, round(share * count))


def largest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the largest values in size; among equals the choice is torch's own."""
    return values.abs().topk(count, sorted=False).indices


def with_error(tensor: Tensor, state: State) -> Tensor:
    """Return a flat float32 copy of a tensor plus the error of earlier ones."""
    wanted = tensor.detach().cpu().float().flatten().clone()
    return wanted.add_(state["error"]) if "error" in state else wanted


def keep_error(wanted: Tensor, places: Tensor, sent: Tensor, state: State) -> None:
    """Store what was not sent; changes ``wanted``."""
    wanted[places] -= sent
    state["error"] = wanted


def scatter(places: npt.NDArray[np.int64], values: Tensor, into: Tensor) -> None:
    """Overwrite a tensor with zeros, and with values at the given positions.

    Raises:
        WeightError: there are other numbers of positions and values, or positions beyond the end.
    """
    if len(places) != values.numel() or (len(places) and int(places[-1]) >= into.numel()):
        raise damaged("its positions do not fit its values, or the tensor")
    whole = torch.zeros(into.numel())
    whole[torch.from_numpy(places)] = values
    into.copy_(whole.view(into.shape))
