"""Codecs: the bytes of a tensor on an edge between ranks or machines; plugins bring them.

    sender     tensor ── encode ──> payload: bytes [N] ── any transport ──> decode ──> tensor     receiver
                  └ state of the edge, kept by the sender        state of the edge, kept by the receiver ┘

    weights      trainer to sampler, on ranks of its own: one state for each bucket and receiver
    gradients    the sum over data-parallel ranks: one state for each parameter; checkpoints hold it
    activations  between two pipeline stages, forward and backward: a CutCodec, which is differentiable

``Plugin.codecs`` returns the ``EdgeCodecs`` of a recipe, which are sent to every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rillflow.errors import TrainingError
from rillflow.records.metrics import Mean, Metric
from rillflow.workers.collectives import Ranks

LINK = "link."
"""Prefix of a codec's entries in a training state: ``link.KEY/PARAMETER``, one row for each rank."""
State = dict[str, Tensor]
"""What one end of an edge keeps between two tensors; empty at the start, and changed in place."""


class Codec(Protocol):
    """Encodes and decodes the tensors of an edge, all of one shape and dtype for one state.

    An object has settings and no state of its own: ranks that are threads share it.
    """

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """Return the payload, bytes [N] on the host, and update the sender's state.

        Args:
            tensor: a tensor of any shape; it is not changed.
            state: the sender's state.
        """

    def decode(self, payload: Tensor, into: Tensor, state: State) -> None:
        """Write the decoded tensor over ``into``, and update the receiver's state.

        Args:
            payload: what ``encode`` returned.
            into: a tensor of the encoded shape and dtype. Between two calls with one state its values must
                stay, because a payload may hold only differences.
            state: the receiver's state.

        Raises:
            WeightError: the payload is damaged, of another codec or shape, or a difference to a tensor that
                the receiver does not hold; ``into`` and the state are unchanged.
        """


class CutCodec(Protocol):
    """Compresses the hidden states that cross a cut between two pipeline stages.

    Gradients go back through the same functions, so a stage sends only the gradients of what it received.
    Legend: U packed tokens, D hidden size.
    """

    def compress(self, state: Tensor, cut: int) -> tuple[Tensor, ...]:
        """Return what is sent: floating-point tensors, which have a gradient, and integers.

        Their shapes and dtypes depend on the shape and dtype of ``state`` alone.

        Args:
            state: hidden states [1, U, D], perhaps on the meta device.
            cut: index of the stage before the cut.
        """

    def expand(self, sent: tuple[Tensor, ...], width: int, cut: int) -> Tensor:
        """Return hidden states [1, U, D].

        Args:
            sent: what ``compress`` returned.
            width: D.
            cut: index of the stage before the cut.
        """


@dataclass(frozen=True, kw_only=True)
class EdgeCodecs:
    """The codecs of a run; None sends an edge's tensors as they are."""

    weights: Codec | None = None
    """Codec of published weights; exact, since digests are compared."""
    gradients: Codec | None = None
    """Codec of gradients that are summed over data-parallel ranks."""
    activations: CutCodec | None = None
    """Codec of hidden states between pipeline stages, in training and in scoring."""


class CodedSum:
    """Sums over ranks through a codec, with its state for each tensor.

    Every rank adds the same payloads in the order of ranks, its own among them, so all get the same bits.

    Args:
        codec: encodes this rank's tensors and decodes everyone's.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec, self._states = codec, dict[str, State]()
        self._sent_bytes, self._own_bytes = 0, 0

    def sum_(self, ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
        """Replace every tensor by the sum over all ranks of its decoded payloads, in place.

        Args:
            ranks: the ranks; all pass tensors of equal names and shapes, in the same order.
            tensors: tensors by name. If a rank has a number that is not finite, they are summed as they are:
                the step fails, and the states stay.
        """
        is_finite = torch.tensor([all(bool(each.isfinite().all()) for each in tensors.values())])
        if not bool(ranks.stack(is_finite).all()):
            ranks.sum_([*tensors.values()])
            return
        payloads = [
            self._codec.encode(each, self._states.setdefault(name, {})) for name, each in tensors.items()
        ]
        sizes = ranks.stack(torch.tensor([each.numel() for each in payloads]))  # [ranks, tensors]
        everyone = ranks.gather(torch.cat(payloads))
        for each in tensors.values():
            each.zero_()
        for rank in range(ranks.size):
            parts = torch.split(everyone[rank], sizes[rank].tolist())
            for payload, total in zip(parts, tensors.values(), strict=True):
                decoded = torch.zeros_like(total)
                self._codec.decode(payload, decoded, {})
                total += decoded
        self._sent_bytes = sum(each.numel() for each in payloads)
        self._own_bytes = sum(each.nbytes for each in tensors.values())

    def metrics(self) -> dict[str, Metric]:
        """Return the bytes of this rank's payloads in the last sum, and of its tensors."""
        return {
            "links/gradient_sent_bytes/mean": Mean(total=self._sent_bytes, count=1),
            "links/gradient_bytes/mean": Mean(total=self._own_bytes, count=1),
        }

    def state(self) -> dict[str, Tensor]:
        """Return the codec's states for a checkpoint, each [1, ...], by ``link.KEY/NAME``."""
        return {
            f"{LINK}{key}/{name}": each[None]
            for name, state in self._states.items()
            for key, each in state.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what ``state`` returned.

        Raises:
            TrainingError: it was saved with another number of data-parallel ranks.
        """
        self._states.clear()
        for name, each in tensors.items():
            if len(each) != 1:
                raise TrainingError(
                    f"the training state has {len(each)} rows of {name!r} for this rank",
                    why="a codec of gradients keeps a row for each data-parallel rank, and there were others",
                    fix="resume with the number of ranks that the run had",
                )
            key, _, parameter = name.removeprefix(LINK).partition("/")
            self._states.setdefault(parameter, {})[key] = each[0]
