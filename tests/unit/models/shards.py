"""A rank's weights, cut from a whole decoder."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from rillflow.models.sampling_shard import local_bounds
from rillflow.models.tensor_plan import Style


def local_weights(
    module: PreTrainedModel, plan: Mapping[str, Style], rank: int, size: int
) -> dict[str, Tensor]:
    """Return a whole decoder's parameters as one of ``size`` ranks holds them; slices are copies."""
    found = {}
    bounds = local_bounds(module, plan, rank, size) if size > 1 else {}
    for name, parameter in module.named_parameters():
        whole = parameter.detach()
        own = bounds.get(name, tuple((0, length) for length in whole.shape))
        piece = whole[tuple(slice(*interval) for interval in own)]
        found[name] = whole if piece.shape == whole.shape else piece.clone()
    return found
