"""Gather: whole weights on the first rank, one after the other and never all at once.

    for name, tensor in gathered(weights, layout, tensors, ranks):    every rank runs the loop;
        write(name, tensor)                                           the first one alone enters it

For what wants a whole model in a file, such as a Hugging Face directory. No rank needs room for more than a
bucket, and for the largest weight where that is more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rillflow.cluster.ranks import Ranks
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement
from rillflow.weights.crossing import DEADLINE_S, Crossing, keep, own, require_shapes
from rillflow.weights.layout import Layout, Weights
from rillflow.weights.plan import MOST_BYTES, reshard_plan


def gathered(
    weights: Weights,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    most_bytes: int = MOST_BYTES,
    deadline_s: float = DEADLINE_S,
) -> Iterator[tuple[str, Tensor]]:
    """Every weight with its whole value on the first rank, and nothing on the others.

    All ranks have to come to the end of it. Weights of different pipeline stages take turns.

    Args:
        weights: with the type they are to have.
        layout: where they lie.
        tensors: what this rank holds; they are only read.
        ranks: all ranks of the layout.
        most_bytes: what a bucket holds.
        deadline_s: how long a rank waits for the others, per bucket.

    Raises:
        WeightError: a tensor is missing or of another shape.
        ClusterError: a rank died or did not come in time.
    """
    first = Placement(Mesh.of(dp=1))
    plan = reshard_plan(weights, layout, dict.fromkeys(weights, first))
    require_shapes(tensors, plan, layout, ranks.rank)
    crossing = Crossing(plan, ranks, most_bytes=most_bytes, deadline_s=deadline_s)
    device = next((own(tensor).device for tensor in tensors.values()), torch.device("cpu"))
    found: dict[str, Tensor] = {}
    for place, bucket in enumerate(crossing.buckets):
        if ranks.rank == 0:
            for part in bucket.parts:
                weight = weights[part.name]
                if part.name not in found:
                    found[part.name] = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        crossing.pack(place, tensors)
        crossing.exchange(place, found)
        for part in bucket.parts:
            if part.is_last and ranks.rank == 0:
                keep(plan, part.name, 0, tensors, found)
                yield part.name, found.pop(part.name)
    crossing.close()
